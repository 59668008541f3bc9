"""The C face of the simulated host: a libnvidia-ml.so.1 for programs of any language, and the server behind it."""
