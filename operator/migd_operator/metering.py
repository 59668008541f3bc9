"""What the operator measures, in a Prometheus registry of its own."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from migd.kube.errors import KubeError
from migd.plans.conditions import PHASES, PlanConditionType
from migd.plans.statuses import PlanStatus
from migd_operator.assembling import Look
from migd_operator.deciding import Decision

NODE_STATES: Final = ("ready", "changing", "blocked", "failed", "unknown", "none")
_STATE: Final = "migd.dev/state"
_BUCKETS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Meters:
    """The metrics; docs/operator.md says what each means."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._plans = self._gauge("migd_plans", "Plans by condition.", "condition", "status")
        self._gpus = self._gauge("migd_gpus", "GPUs by phase.", "phase")
        self._nodes = self._gauge("migd_nodes", "Nodes with GPUs by the label migd.dev/state.", "state")
        self._decisions = Histogram(
            "migd_decide_seconds",
            "How long a decision for the whole fleet took.",
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self._errors = Counter(
            "migd_api_errors", "Requests to the API server that failed.", ["error", "code"], registry=self.registry
        )
        self._evictions = Counter(
            "migd_evictions", "Calls for the eviction of a pod, by answer.", ["answer"], registry=self.registry
        )
        self._leader = self._gauge("migd_leader", "1 while this process holds the operator's lease.")
        self._age = self._gauge("migd_watch_age_seconds", "Since the API server was heard last, by kind.", "kind")

    def _gauge(self, name: str, said: str, *labels: str) -> Gauge:
        return Gauge(name, said, labels, registry=self.registry)

    def decided(self, look: Look, decision: Decision, took_s: float) -> None:
        """A decision was made for this fleet; its statuses are counted as they will be."""
        self._decisions.observe(took_s)
        statuses: dict[str, PlanStatus | None] = {name: plan.value.status for name, plan in look.plans.items()}
        statuses |= dict(decision.statuses)
        said = Tally((c.type, c.status) for status in statuses.values() if status for c in status.conditions)
        for kind in get_args(PlanConditionType):
            for status in ("True", "False"):
                self._plans.labels(kind, status).set(said[kind, status])
        phases = Tally(p.status.phase or "Pending" for p in look.fleet.partitions)
        for phase in PHASES:
            self._gpus.labels(phase).set(phases[phase])
        inhabited = {p.spec.node_name for p in look.fleet.partitions}
        states = Tally(look.nodes[n].value.labels.get(_STATE, "none") for n in inhabited if n in look.nodes)
        for state in NODE_STATES:
            self._nodes.labels(state).set(states[state])

    def failed(self, error: KubeError) -> None:
        """A request failed."""
        self._errors.labels(type(error).__name__.removesuffix("Error"), str(error.code)).inc()

    def evicted(self, answer: str) -> None:
        """An eviction was asked for, and answered so."""
        self._evictions.labels(answer).inc()

    def page(self, leader: bool, ages_s: dict[str, float]) -> bytes:
        """All of it in the text format."""
        self._leader.set(leader)
        for kind, age_s in ages_s.items():
            self._age.labels(kind).set(age_s)
        return generate_latest(self.registry)
