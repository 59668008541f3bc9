"""What the rows about rights are tried on: three nodes, their GPUs and pods, and who asks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from controlplane.api import Answer, Api
from controlplane.processes import until
from controlplane.running import ControlPlane
from integration.deploy_rows import (
    CLIENT,
    EVENTS,
    EVICTED,
    LEASES,
    PAUSED,
    PODS,
    SERIES,
    TURN,
    Row,
    event,
    eviction,
    label,
    lease,
)
from integration.deployed import EVERYTHING, Deployed, owed
from integration.texts import PARTITIONS, PLANS, condition, desired, gpu_name, partition, plan

_WITHIN_S = 30.0
_BOUND_ONLY = "the token is not bound to a pod"


@dataclass(frozen=True, slots=True)
class Stage:
    """names: what `<word>` in a row stands for. who: the API server as each of them sees it."""

    deployed: Deployed
    names: Mapping[str, str]
    who: Mapping[str, Api]

    @classmethod
    def set_up(cls, plane: ControlPlane) -> Self:
        """Make it all, and wait until every right is given and every policy is in force."""
        deployed = Deployed(plane)
        deployed.apply()
        mark = uuid.uuid4().hex[:8]
        names = {word: f"{word}-{mark}" for word in ("open", "closed", "other", "new", "plan", "bare", "event")}
        names |= {word: gpu_name() for word in ("gpu", "wished gpu", "other gpu", "new gpu")}
        names["agent pod"] = names["open"]
        _nodes(deployed, names, mark)
        _objects(deployed, names)
        pods = deployed.plugin(f"plugin-{mark}", {"stage": mark})
        names |= {"plugin": pods[names["open"]], "other plugin": pods[names["other"]]}
        who = {
            "agent": plane.as_token(deployed.token("migd-agent", names["open"], names["open"])),
            "shut": plane.as_token(deployed.token("migd-agent", names["closed"], names["closed"])),
            "operator": plane.as_token(deployed.token("migd-operator", f"operator-{mark}", names["other"])),
        }
        stage = cls(deployed, names, who)
        unbound = {name: deployed.unbound(f"migd-{name}") for name in ("agent", "operator")}
        for row in UNBOUND:
            answers: list[Answer] = []

            def refused(row: Row = row, answers: list[Answer] = answers) -> bool:
                answers.append(row.ask(unbound[row.who], deployed.admin, dict(names)))
                return answers[-1].code == 403 and row.says in answers[-1].message

            assert until(refused, _WITHIN_S), f"not in force, {row.says}: {answers[-1].code} {answers[-1].message}"
        return stage

    def ask(self, row: Row) -> Answer:
        """What the API server answers to a row."""
        return row.ask(self.who[row.who], self.deployed.admin, dict(self.names))


def _nodes(deployed: Deployed, names: dict[str, str], mark: str) -> None:
    mixed = {"pool": "a", "stage": mark, f"{CLIENT}device-plugin": "true", f"{CLIENT}nvsm": "false"}
    deployed.node(names["open"], {**mixed, f"{CLIENT}mig-manager": "true"}, {"kept": "x"})
    deployed.node(names["other"], mixed, {})
    taken = {f"{CLIENT}mig-manager": "false", f"{CLIENT}dcgm": PAUSED, f"{CLIENT}nvsm": PAUSED}
    notes = {"migd.dev/hold": "x", "migd.dev/taken-over": "true", **owed(dcgm="true")}
    state = {"nvidia.com/mig.config.state": "success"}
    deployed.node(names["closed"], {**mixed, **taken, **state}, notes, closed=True)
    deployed.admin.patch(f"/api/v1/nodes/{names['closed']}", {"spec": {"unschedulable": True}}).object()
    names |= {f"{word} uid": deployed.uid_of(names[word]) for word in ("open", "other")}


def _objects(deployed: Deployed, names: dict[str, str]) -> None:
    admin = deployed.admin
    admin.create(PLANS, plan(names["plan"], nodeSelector={"matchLabels": {"nobody": "x"}})).object()
    for word, node in (("gpu", "open"), ("other gpu", "other"), ("wished gpu", "open")):
        admin.create(PARTITIONS, partition(names[word], names[node])).object()
    retry = {"metadata": {"annotations": {"migd.dev/retry": "now"}}}
    for word in ("gpu", "other gpu"):
        admin.patch(f"{PARTITIONS}/{names[word]}", retry).object()
    wished = f"{PARTITIONS}/{names['wished gpu']}"
    admin.patch(wished, {"spec": {"desired": desired(), "assignment": {**TURN, "id": "ffffffff"}}}).object()
    said = {"status": {"conditions": [condition("Assigned"), condition("AgentAlive")], "evictions": [EVICTED]}}
    admin.patch(f"{wished}/status", said).object()
    for name in (names["closed"], "migd-operator"):
        admin.create(LEASES, lease(name))  # the operator's may be there already
    admin.create(EVENTS, event(names["event"])).object()
    bare = {"nodeName": names["open"], "containers": [{"name": "c", "image": "i"}], "tolerations": EVERYTHING}
    made = admin.create(PODS, {"metadata": {"name": names["bare"]}, "spec": bare}).object()
    names["bare uid"] = made["metadata"]["uid"]


def _unbound(who: str, policy: str, method: str, path: str, body: object = None) -> Row:
    says = f"ValidatingAdmissionPolicy 'migd-{policy}' with binding 'migd-{policy}' denied request: {_BOUND_ONLY}"
    return Row(f"writes unbound, {policy}", who, method, path, body, says)


UNBOUND = [
    _unbound("agent", "agent-nodes", "PATCH", "/api/v1/nodes/<open>", label("migd.dev/state", "ready")),
    _unbound("agent", "agent-partitions", "PATCH", f"{PARTITIONS}/<gpu>/status", {"status": {"phase": "Ready"}}),
    _unbound("agent", "agent-leases", "POST", LEASES, lease("<open>")),
    _unbound("agent", "agent-pods", "DELETE", f"{PODS}/<plugin>"),
    _unbound("agent", "agent-events", "PATCH", f"{EVENTS}/<event>", SERIES),
    _unbound("operator", "operator-nodes", "PATCH", "/api/v1/nodes/<open>", label("migd.dev/state", "unknown")),
    _unbound("operator", "operator-partitions", "PATCH", f"{PARTITIONS}/<gpu>", label("migd.dev/plan", "x")),
    _unbound("operator", "operator-plans", "PATCH", f"{PLANS}/<plan>/status", {"status": {"observedGeneration": 1}}),
    _unbound("operator", "operator-pods", "POST", f"{PODS}/<bare>/eviction", eviction("<bare uid>")),
    _unbound("operator", "operator-leases", "POST", LEASES, lease("migd-operator")),
    _unbound("operator", "operator-events", "PATCH", f"{EVENTS}/<event>", SERIES),
]
"""A row for each policy: the same request with a token that belongs to no pod."""
