"""The kubelet of this node: which pod holds which device."""
