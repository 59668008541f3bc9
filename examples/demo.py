"""The whole system in one process and in virtual time, on simulated nodes: `make demo`.

Operator and agents are the real ones; API server, kubelets, NVIDIA's stack, pods and GPUs are simulated. Every figure
that is printed is read from the objects of the run. Whatever is not as told ends the demo with exit code 1.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml
from columns import age, found, get, short, table
from fleet import Fleet

from migd.kube.nodes import TAINT
from migd.kube.owed import OWED
from migd.sim import node_documents as documents
from migd.sim.cluster_time import run_virtually
from migd.sim.node_world import NodeSpec, OverdueError, Workload

Json = dict[str, Any]
Devices = dict[str, str]
PLANS: Final = Path(__file__).resolve().parent / "plans"
PLAN: Final = "pool"
PARTITIONS: Final = "gpupartitions"
LATEST_S: Final = 3600.0
WIDTH: Final = 118
BOLD, DIM, PLAIN = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")

NODES: Final = (
    NodeSpec(
        "gpu-a100-01",
        "2xa100-80gb",
        style="operator",
        labels={"pool": "inference"},
        layout={0: ["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"], 1: ["3g.40gb@0", "3g.40gb@4"]},
    ),
    NodeSpec(
        "gpu-a100-02",
        "2xa100-80gb",
        labels={"pool": "inference"},
        layout={0: ["7g.80gb"], 1: ["2g.20gb@0", "2g.20gb@2", "3g.40gb@4"]},
    ),
    NodeSpec("gpu-h100-01", "2xh100-sxm-80gb", labels={"pool": "inference"}),
)
PODS: Final = (
    Workload("chat-api", {"nvidia.com/mig-1g.10gb": 1}, pods=2),
    Workload(
        "reranker", {"nvidia.com/mig-3g.40gb": 1}, spec={"nodeSelector": {"kubernetes.io/hostname": "gpu-a100-02"}}
    ),
    Workload("nightly-train", {"nvidia.com/mig-7g.80gb": 1}, lasts_s=(420.0, 420.0), pause_s=(LATEST_S, LATEST_S)),
)
WAITING: Final = Workload("embedder", {"nvidia.com/mig-1g.10gb": 1}, pods=12)


_MOMENT: Final = "{:6}  {:11}  {:6}  {:14}  {:11}  {}"


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
                *(_counts(group.get(part)) for part in ("keep", "destroy", "create")),
                group.get("modeChange", ""),
                group.get("reason", ""),
            ]
            for group in groups
        ]
        print(table(["Nodes", "GPUs", "From", "Keep", "Destroy", "Create", "MIG", "Waits for"], rows))
        print(
            f"{_n(totals.get('gpus', 0), 'GPU')} on {_n(totals.get('nodes', 0), 'node')} would change, into"
            f" {' or '.join(sorted({group['to'] for group in groups}))}: {_did(totals)}."
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
        _untrue(f"{what} within {age(LATEST_S)}")

    def _of(self, node: str) -> tuple[bool, tuple[str, ...]]:
        return node in self.closed(), tuple(found(p, ".status.phase") for p in self.partitions(node))

    def _tell(self, node: str, closed: bool, phases: tuple[str, ...]) -> None:
        """A line on a node: how long after the plan was let go, what its GPUs do, whether it is closed."""
        since_s = _since(self.plan(".status.history")[0]["startedAt"], self.cluster.cluster.now())
        layouts = ", ".join(sorted({found(p, ".status.observed.summary") for p in self.partitions(node)}))
        is_so = "closed" if closed else "open"
        print(_MOMENT.format(age(since_s), node, is_so, "/".join(sorted(set(phases))), self._ready(), layouts))

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
        _untrue(what)


async def main() -> None:
    """The story."""
    async with Fleet(NODES) as fleet:
        story = Story(fleet)
        before = await _begin(story)
        _refused(story)
        await fleet.until(lambda: not fleet.plan("infeasible"))
        await _previewed(story)
        said, existed = story.plan(".status.preview.totals"), story.migs()
        await _carried_out(story)
        _ended(story, before, said, existed)


async def _begin(story: Story) -> Devices:
    cluster = story.cluster
    for workload in PODS:
        cluster.run(workload)
    await story.fleet.until(lambda: all(len(story.running(workload)) == workload.pods for workload in PODS))
    cluster.run(WAITING)
    gpus = sum(len(node.host.snapshot().gpus) for node in story.fleet.nodes)
    await story.fleet.until(lambda: len([p for p in cluster.all(PARTITIONS) if found(p, ".status.phase")]) == gpus)
    await cluster.quiet(30)
    print("migd in a cluster of simulated nodes, in one process and in virtual time. Operator and agents are the real")
    print("programs; tables are as kubectl prints them, with long names cut.")
    tell("1. Three nodes, cut by hand long ago. Some slices are at work, and pods wait for small ones.")
    kubectl(f"get {PARTITIONS}")
    story.show(PARTITIONS, story.partitions())
    print()
    story.pods()
    waiting = WAITING.pods - len(story.running(WAITING))
    print(f"Besides, {waiting} of {WAITING.pods} pods of {WAITING.name} wait: no node has a slice left for them.")
    expect(waiting, "pods that wait for slices")
    held = story.devices()
    _apply(story, "infeasible")
    await story.fleet.until(lambda: story.plan(".status.preview.totals.refused", "infeasible"))
    return held


def _refused(story: Story) -> None:
    tell(
        "2. A wish that cannot be, though 3 + 3 + 1 = 7: it is refused before anything is touched, with what would fit."
    )
    kubectl("apply -f examples/plans/infeasible.yaml")
    story.show("gpupartitionplans", [story.fleet.plan("infeasible")])
    groups = story.plan(".status.preview.groups", "infeasible")
    (message,) = {group["message"].split(": ", 1)[1] for group in groups if group["reason"] == "Infeasible"}
    print("\n".join(textwrap.wrap(f"Infeasible: {message}", WIDTH, subsequent_indent="  ")))
    expect("Nearest that fits" in message, "the nearest layouts that fit")
    expect(not any(p["spec"].get("assignment") for p in story.partitions()), "no node that begins")
    kubectl("delete gpp infeasible")
    story.cluster.delete("gpupartitionplans", "infeasible")


async def _previewed(story: Story) -> None:
    tell("3. One that can: a half and four small ones on every GPU. It is paused: what would it do?")
    kubectl("apply -f examples/plans/pool.yaml; kubectl get gpp pool -o yaml    # the preview in its status:")
    _apply(story, PLAN)
    await story.fleet.until(lambda: story.plan(".status.preview.groups"))
    await story.cluster.quiet(10)
    story.preview()
    expect(not any(p["spec"].get("assignment") for p in story.partitions()), "a paused plan that moves nothing")


async def _carried_out(story: Story) -> None:
    tell("4. Go. One node at a time is closed, for seconds; a slice in use is waited for, with its node open.")
    kubectl("""patch gpp pool --type=merge -p '{"spec":{"paused":false}}'""")
    story.fleet.edit(PLAN, paused=False)
    print(_MOMENT.format("AFTER", "NODE", "IS", "ITS GPUS ARE", "NODES READY", "LAYOUTS"))
    await story.until_it_waits()
    kubectl(f"get {PARTITIONS}")
    story.show(PARTITIONS, story.partitions())
    for one in story.partitions():
        for by in found(one, ".status.blockers") or ():
            print(
                f"{short(one['metadata']['name'])} waits: {by['instance']} is held by pod"
                f" {by['pod']['namespace']}/{by['pod']['name']}, pid {by.get('pid')}"
            )
    expect(not story.closed(), "a node that stays open while it waits")
    print()
    await story.until_ready()


def _ended(story: Story, before: Devices, said: Json, existed: set[str]) -> None:
    tell("5. All is as wished. The pods that could stay have their MIG devices still, and those that waited run.")
    kubectl(f"get {PARTITIONS}")
    story.show(PARTITIONS, story.partitions())
    print()
    story.pods(before)
    print()
    story.labels()
    there = story.migs()
    done = {"keep": len(there & existed), "destroy": len(existed - there), "create": len(there - existed)}
    running = len(story.running(WAITING))
    print(f"\n{running} of {WAITING.pods} pods of {WAITING.name} run now.")
    print(f"The preview said: {_did(said)}. By the UUIDs of MIG devices it was: {_did({**said, **done})}.")
    limit = story.plan(".spec.rollout.maxUnavailable")
    print(
        f"Closed at the same time: {_n(story.closed_at_once, 'node')} (maxUnavailable: {limit}), none for longer than"
        f" {age(story.longest_closed_s + 1)}."
    )
    now = story.devices()
    stay = {name: uuid for name, uuid in before.items() if not name.startswith(PODS[-1].name)}
    expect(stay.items() <= now.items(), "pods that keep their MIG devices")
    expect({key: said.get(key, 0) for key in done} == done, "a preview that is true")
    expect(1 <= story.closed_at_once <= limit, f"at most {limit} node closed at a time")
    expect(running == WAITING.pods, f"{WAITING.pods} pods of {WAITING.name} that run")
    expect(
        not any(documents.annotation(node, OWED) for node in story.cluster.all("nodes")), "nodes that are owed nothing"
    )
    print(
        "\nGo on: `make cluster` starts such a cluster with a real API server to play with, `make demo-node` shows\n"
        "one machine without Kubernetes, docs/plans.md says what a plan can say, docs/install.md how migd is installed."
    )


def _apply(story: Story, name: str) -> None:
    story.fleet.apply(yaml.safe_load((PLANS / f"{name}.yaml").read_text()))


def _counts(listed: Iterable[Json] | None) -> str:
    return " ".join(f"{one['count']}×{one['profile']}" if one["count"] > 1 else one["profile"] for one in listed or ())


def _did(totals: Json) -> str:
    return ", ".join(
        f"{totals.get(key, 0)} {word}"
        for key, word in (("keep", "kept"), ("destroy", "destroyed"), ("create", "created"))
    )


def _n(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _since(began: str, now: Any) -> float:
    return float((now - type(now).fromisoformat(began)).total_seconds())


def _untrue(what: str) -> NoReturn:
    raise UntoldError(f"this demo expected {what}: please report it")


if __name__ == "__main__":
    try:
        run_virtually(main())
    except (UntoldError, OverdueError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
