"""The fleet operator: decides for GPUPartitionPlans which node gets which wish, and when.

Here so far is its pure core: `decide` in `deciding` takes plans, partitions, nodes and the time as values and gives
what is to be written. docs/rollout.md says what it decides. What will live here beside it: the kopf shell, caches,
writes, evictions. It has no host access and imports no agent; it uses `migd.mig` and `migd.plans` only.
"""
