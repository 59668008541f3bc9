"""What a demo tells of a fleet in virtual time, looked up in its objects, and printed as kubectl would."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, NoReturn

from columns import age, found, get, table
from fleet import Fleet

from migd.kube.nodes import TAINT
from migd.sim.nodes import documents
from migd.sim.nodes.world import Workload

Json = dict[str, Any]
Devices = dict[str, str]
PLAN: Final = "pool"
PARTITIONS: Final = "gpupartitions"
LATEST_S: Final = 3600.0
WIDTH: Final = 118
BOLD, DIM, PLAIN = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")
MOMENT: Final = "{:6}  {:11}  {:6}  {:14}  {:11}  {}"


class UntoldError(Exception):
    """Something is not as this story tells it."""


class Story:
    """What is told of a fleet, and looked up in its objects."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.cluster = fleet.cluster
        self.closed_at_once = 0
        self.longest_closed_s = 0.0

    # ---- looking

    def partitions(self, node: str = "") -> list[Json]:
        """The GPUPartitions, or those of a node, by node and index."""
        mine = (p for p in self.cluster.all(PARTITIONS) if node in ("", p["spec"]["nodeName"]))
        return sorted(mine, key=lambda p: (p["spec"]["nodeName"], found(p, ".status.board.index")))

    def plan(self, path: str, name: str = PLAN) -> Any:
        """A value of a plan."""
        return found(self.fleet.plan(name), path)

    def closed(self) -> list[str]:
        """The nodes that carry our taint."""
        return [
            node["metadata"]["name"]
            for node in self.cluster.all("nodes")
            if any(taint["key"] == TAINT for taint in node["spec"].get("taints") or ())
        ]

    def devices(self) -> Devices:
        """MIG devices by the pod that holds them, as the kubelets tell it."""
        return {
            held.pod: ", ".join(held.device_ids)
            for node in self.fleet.nodes
            for held in node.kubelet.pod_resources()
            if held.namespace == "default"
        }

    def migs(self) -> set[str]:
        """The UUIDs of all MIG devices that there are."""
        return {i["migUUID"] for p in self.partitions() for i in found(p, ".status.observed.instances") or ()}

    def running(self, workload: Workload) -> list[str]:
        """The running pods of a workload."""
        return [p["metadata"]["name"] for p in self.cluster.pods(app=workload.name) if documents.running(p)]

    # ---- telling

    def show(self, plural: str, objects: Iterable[Json]) -> None:
        """As `kubectl get` shows them."""
        print(get(plural, objects, self.cluster.cluster.now()))

    def pods(self, before: Devices | None = None) -> None:
        """The pods that hold MIG devices; compared with what they held before, if that is given."""
        heads = ["Pod", "Node", "Asks for", "MIG device", *(["The same as before"] if before is not None else [])]
        rows = []
        now = self.devices()
        for pod in sorted(self.cluster.pods(), key=lambda p: str(p["metadata"]["name"])):
            name = pod["metadata"]["name"]
            if name in now and (before is None or name in before):
                asked = ", ".join(f"{number} {resource}" for resource, number in documents.requested(pod).items())
                same = [] if before is None else ["yes" if now[name] == before[name] else "NO"]
                rows.append([name, documents.node_of(pod), asked, now[name], *same])
        print(table(heads, rows))

    def preview(self, name: str = PLAN) -> None:
        """The preview in a plan's status."""
        totals, groups = self.plan(".status.preview.totals", name), self.plan(".status.preview.groups", name)
        rows = [
            [
                ", ".join(group["exampleNodes"]),
                str(group["gpus"]),
                group["from"],
                *(counts(group.get(part)) for part in ("keep", "destroy", "create")),
                group.get("modeChange", ""),
                group.get("reason", ""),
            ]
            for group in groups
        ]
        print(table(["Nodes", "GPUs", "From", "Keep", "Destroy", "Create", "MIG", "Waits for"], rows))
        print(
            f"{some(totals.get('gpus', 0), 'GPU')} on {some(totals.get('nodes', 0), 'node')} would change, into"
            f" {' or '.join(sorted({group['to'] for group in groups}))}: {did(totals)}."
        )

    def labels(self) -> None:
        """The node labels of migd, and what the kubelets offer."""
        nodes = self.cluster.all("nodes")
        keys = sorted({key for node in nodes for key in documents.labels_of(node) if key.startswith("migd.dev/")})
        kubectl(f"get nodes -L {','.join(keys)}")
        rows = []
        for node in nodes:
            name = node["metadata"]["name"]
            offered = self.cluster.allocatable(name).items()
            rows.append(
                [
                    name,
                    *(documents.labels_of(node).get(key, "") for key in keys),
                    ", ".join(f"{resource} {number}" for resource, number in sorted(offered) if number),
                ]
            )
        print(table(["Name", *(key.split("/")[1] for key in keys), "Allocatable"], rows))

    # ---- going on

    async def until_it_waits(self) -> None:
        """Go on until a node waits for somebody."""
        async for _ in self._changes("a GPU that waits for its holder"):
            if any(found(p, ".status.blockers") for p in self.partitions()):
                return

    async def until_said(self, reason: str) -> None:
        """Go on until a GPU says this."""
        async for _ in self._changes(f"a GPU that says {reason}"):
            if any(found(p, ".status.reason") == reason for p in self.partitions()):
                return

    async def until_ready(self) -> None:
        """Go on until the plan is carried out."""
        async for _ in self._changes("the plan to be Ready"):
            if self.fleet.condition(PLAN, "Ready")[0] == "True":
                return

    async def _changes(self, what: str) -> AsyncIterator[None]:
        """Tell how nodes change, and look at each moment; what: that is waited for."""
        clock = self.cluster.stage
        told = {node.name: self._of(node.name) for node in self.fleet.nodes}
        since_s: dict[str, float] = {}
        ends_s = clock.now_s() + LATEST_S
        while clock.now_s() < ends_s:
            await asyncio.sleep(0.5)
            self.fleet.check()
            since_s = {node: since_s.get(node, clock.now_s()) for node in self.closed()}
            self.closed_at_once = max(self.closed_at_once, len(since_s))
            self.longest_closed_s = max([self.longest_closed_s, *(clock.now_s() - began for began in since_s.values())])
            for name, before in told.items():
                now = self._of(name)
                if now != before:
                    told[name] = now
                    self._tell(name, *now)
            yield
        untrue(f"{what} within {age(LATEST_S)}")

    def _of(self, node: str) -> tuple[bool, tuple[str, ...]]:
        return node in self.closed(), tuple(found(p, ".status.phase") for p in self.partitions(node))

    def _tell(self, node: str, closed: bool, phases: tuple[str, ...]) -> None:
        """A line on a node: how long after the plan was let go, what its GPUs do, whether it is closed."""
        since_s = since(self.plan(".status.history")[0]["startedAt"], self.cluster.cluster.now())
        layouts = ", ".join(sorted({found(p, ".status.observed.summary") for p in self.partitions(node)}))
        is_so = "closed" if closed else "open"
        print(MOMENT.format(age(since_s), node, is_so, "/".join(sorted(set(phases))), self._ready(), layouts))

    def _ready(self) -> str:
        return str(self.plan(".status.nodes.summary"))


def tell(text: str) -> None:
    """A part of the story."""
    print(f"\n{BOLD}{text}{PLAIN}")


def kubectl(command: str) -> None:
    """What one would type."""
    print(f"{DIM}$ kubectl {command}{PLAIN}")


def expect(holds: object, what: str) -> None:
    """UntoldError where something is not as told."""
    if not holds:
        untrue(what)


def counts(listed: Iterable[Json] | None) -> str:
    """Profiles and how many, as one text."""
    return " ".join(f"{one['count']}×{one['profile']}" if one["count"] > 1 else one["profile"] for one in listed or ())


def did(totals: Json) -> str:
    """What becomes of instances, as one text."""
    return ", ".join(
        f"{totals.get(key, 0)} {word}"
        for key, word in (("keep", "kept"), ("destroy", "destroyed"), ("create", "created"))
    )


def some(number: int, what: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def since(began: str, now: Any) -> float:
    """Seconds since a time as the API has it."""
    return float((now - type(now).fromisoformat(began)).total_seconds())


def untrue(what: str) -> NoReturn:
    """End the demo: something is not as told."""
    raise UntoldError(f"this demo expected {what}: please report it")
