"""The agent of a cluster's node: what it sees, what it decides, what it tells. Pure but for `running`."""
