"""Changes how NVIDIA GPUs are partitioned (MIG), on a running machine, without breaking anything.

mig: what fits on a GPU. plans: what is wished. nvml: the hardware. sim: simulated hardware. agent: the node
transaction. cli: the command line. Imports point from the last to the first, never back.
"""
