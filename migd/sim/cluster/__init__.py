"""A simulated API server: its objects, what it refuses, its faults, and the loop with virtual time that it runs on."""
