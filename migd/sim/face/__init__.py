"""The pynvml face of the simulated machine: the functions, argument shapes and errors of the real module."""
