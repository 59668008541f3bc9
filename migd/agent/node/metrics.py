"""What the agent counts, for Prometheus: in a registry of its own, so that several agents fit into one process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from migd.plans.conditions import PHASES, Phase
from migd.plans.partitions import LastTransition, PartitionStatus

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_STEP_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One agent's figures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._phases = Gauge("migd_agent_gpus", "GPUs of this node by phase.", ["phase"], registry=self.registry)
        self._transitions = Counter(
            "migd_agent_transitions", "Changes of a GPU that ended, by how.", ["result"], registry=self.registry
        )
        self._steps = Histogram(
            "migd_agent_step_seconds",
            "How long steps of a change took.",
            ["step"],
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._in_state = Gauge(
            "migd_agent_state_seconds",
            "For how long the node has been closed, or its GPU clients paused; 0 when it is not.",
            ["state"],
            registry=self.registry,
        )
        self._in_all = Counter(
            "migd_agent_states_seconds",
            "For how long the node was closed, or its GPU clients paused, in all.",
            ["state"],
            registry=self.registry,
        )
        self._looks = Histogram("migd_agent_look_seconds", "How long it took to read the GPUs.", registry=self.registry)
        self._nvml_errors = Counter(
            "migd_agent_nvml_errors", "Calls to NVML that failed, by reason.", ["reason"], registry=self.registry
        )
        self._api_errors = Counter(
            "migd_agent_api_errors",
            "Requests to the API server that failed, by kind.",
            ["kind"],
            registry=self.registry,
        )
        self._api_trouble = Gauge(
            "migd_agent_api_trouble", "1 while the last report to the API server has failed.", registry=self.registry
        )
        self._lease = Gauge("migd_agent_lease_held", "1 while this node's lease is ours.", registry=self.registry)
        self._success = Gauge(
            "migd_agent_last_success_timestamp_seconds",
            "When a turn last ended with nothing wrong, as Unix time.",
            registry=self.registry,
        )
        self._turns = Counter("migd_agent_turns", "Looks with a decision.", registry=self.registry)
        self._since: dict[str, float] = {}
        self._counted: Mapping[Phase, int] = {}
        for state in ("closed", "paused"):
            self._in_state.labels(state).set(0)
            self._in_all.labels(state)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self.registry)

    def turn(self, phases: Mapping[str, Phase | None]) -> None:
        """A decision was made; the phase of each GPU, by name."""
        self._turns.inc()
        every = list(phases.values())
        counted = {phase: every.count(phase) for phase in PHASES}
        for phase, number in counted.items():
            if number != self._counted.get(phase):
                self._phases.labels(phase).set(number)
        self._counted = counted

    def succeeded(self, now: datetime) -> None:
        """A turn ended with nothing wrong."""
        self._success.set(now.timestamp())

    def looked(self, seconds: float) -> None:
        """The GPUs were read."""
        self._looks.observe(seconds)

    def nvml_error(self, reason: str) -> None:
        """A call to NVML failed; reason: of the API's list."""
        self._nvml_errors.labels(reason).inc()

    def api_error(self, kind: str) -> None:
        """A request failed; kind: the error's class."""
        self._api_errors.labels(kind).inc()

    def api_trouble(self, is_so: bool) -> None:
        """Whether the last report failed."""
        self._api_trouble.set(int(is_so))

    def lease(self, held: bool) -> None:
        """The lease was gained or lost."""
        self._lease.set(int(held))

    def state(self, state: str, is_so: bool, now_s: float) -> None:
        """The node is closed or paused now, or is not; to be called at every turn."""
        since = self._since.get(state)
        lasted_s = 0.0 if since is None else now_s - since
        if is_so:
            self._since.setdefault(state, now_s)
            self._in_state.labels(state).set(lasted_s)
        else:
            self._since.pop(state, None)
            self._in_state.labels(state).set(0)
            self._in_all.labels(state).inc(lasted_s)

    def told(self, before: PartitionStatus, after: PartitionStatus) -> None:
        """A status follows another: count the steps and the change that ended in between."""
        old, new = before.last_transition, after.last_transition
        if new is None:
            return
        known = old if old is not None and old.id == new.id and old.started_at == new.started_at else None
        for step in new.steps[len(_finished(known)) :]:
            if step.milliseconds is not None:
                self._steps.labels(step.name).observe(step.milliseconds / 1000)
        if new.result is not None and (known is None or known.result is None):
            self._transitions.labels(new.result).inc()


def _finished(transition: LastTransition | None) -> tuple[object, ...]:
    return tuple(step for step in transition.steps if step.milliseconds is not None) if transition else ()
