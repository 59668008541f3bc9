"""What a cluster behind the port must do: tests/sim runs it simulated, tests/integration on a real API server."""
