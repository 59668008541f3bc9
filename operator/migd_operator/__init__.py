"""The fleet operator: decides for GPUPartitionPlans which node gets which wish, and when.

Its pure core is `decide` in `deciding`: plans, partitions, nodes and the time as values, and what is to be written as
the answer (docs/rollout.md). `reconciling` runs it on a cluster port, `program` makes a process of that, with kopf as
its shell (docs/operator.md). It has no host access and imports no agent.
"""
