"""A real control plane on one machine: built from Go modules, started on loopback, stopped without a trace."""
