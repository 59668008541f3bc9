"""The API server: caches that follow it, a queue of keys, writes that only write what differs, leases and events.

`ports` is what the agent and the operator see. All of it works through a `Transport`; `connecting` is the real one, and
the only module that imports the `kubernetes` package; `migd.sim.cluster.server` the simulated one. What decides is
pure, and takes the time as an argument; what waits uses the running loop's clock. No module here imports another room
but `migd.plans` and `migd.mig`.
"""
