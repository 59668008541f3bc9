"""The fleet operator: will watch GPUPartitionPlans and give each node its turn.

What will live here: the kopf shell, the fleet reconcile (plans, partitions, nodes to assignments, previews and
conditions), evictions, rollout, conflicts between plans. It has no host access and imports no agent; it uses
`migd.mig` and `migd.plans` only. Nothing of it is built yet.
"""
