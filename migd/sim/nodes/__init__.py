"""Simulated nodes of a cluster and who acts on them: kubelet, controllers, NVIDIA's programs, workloads, strangers."""
