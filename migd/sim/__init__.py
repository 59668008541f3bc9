"""Simulated GPUs that refuse what hardware refuses: the fake NVML, its machine, its faults."""
