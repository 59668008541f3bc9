"""What one GPU can be cut into, and how to get there. Pure: no I/O, no clock, no randomness.

Here live profiles, placements, boards (what one GPU offers), geometries, fitting, and the least-disruption
transition. Everything is built from what a GPU reports; no model is known by name.
"""
