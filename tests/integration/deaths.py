"""Nodes whose agents die where a case says, one case after the other on each node, all nodes at the same time."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from controlplane.api import Json
from controlplane.clusters import Cluster
from controlplane.deploying import applied
from controlplane.nodes import SimNode
from controlplane.nodes_styles import STYLES, Style, node_labels, plugin_manifests
from controlplane.nursery import Nursery
from integration.acting import (
    HALF,
    OFF,
    PARTITIONS,
    PLANS,
    SMALL,
    annotate,
    apply,
    closed,
    deploy,
    eventually,
    introduced,
    labels,
    partitions,
    plan,
    quiet,
    ready,
    running,
    taints,
)
from integration.dying import FOLDER, Point
from integration.promises import Machines, Promise
from staging import make, stranger

from migd.mig.operations import SetMode

PROGRAM: Final = (sys.executable, str(Path(__file__).with_name("dying.py")))
GPU: Final = "a100-80gb"
END_S: Final = 400.0
EVICT: Final[Json] = {"policy": "Evict", "timeout": "5m"}
SMALLS: Final = 4
"""Pods on each node that want a 1g.10gb; one more wants a 3g.40gb."""


@dataclass(frozen=True)
class Case:
    """One death. style: how the device plugin is installed there, "" for the usual way. node, turn: where and when.

    change: what is wished in that turn: MIG on and cut, cut otherwise, or MIG off again.
    """

    style: str
    node: int
    turn: int
    change: str
    point: Point

    @property
    def name(self) -> str:
        """The node's name."""
        return f"{self.style or 'k'}{self.node}"

    def __str__(self) -> str:
        return f"{self.point.when}-{self.point.at}".replace(" ", "-")


class Mortal:
    """The nodes of these cases, under way."""

    def __init__(self, cluster: Cluster, cases: Sequence[Case], pool: ThreadPoolExecutor) -> None:
        self.cluster = cluster
        self._ends: dict[Case, Future[None]] = {case: Future() for case in cases}
        for name in {case.name for case in cases}:
            pool.submit(self._play, [case for case in cases if case.name == name])

    def end_of(self, case: Case) -> None:
        """Wait for the end of a case; what went wrong is raised."""
        self._ends[case].result(END_S)

    def free(self) -> list[str]:
        """The nodes with the usual device plugin, once all cases are over; their plans are gone."""
        for case, end in self._ends.items():
            if not case.style:
                end.exception(END_S)
        names = sorted({case.name for case in self._ends if not case.style})
        for name in names:
            self.cluster.plane.admin.delete(f"{PLANS}/{name}")
        return names

    def passed(self) -> set[str]:
        """The gates that any agent passed."""
        found = set()
        for node in self.cluster.nodes.values():
            lines = (_folder(node) / "passed").read_text().splitlines()
            found |= {line.partition(" ")[2] for line in lines}
        return found

    def _play(self, cases: Sequence[Case]) -> None:
        """All cases of one node, in order of turns; after one that failed the rest is not tried."""
        failed: BaseException | None = None
        for case in sorted(cases, key=lambda c: c.turn):
            try:
                assert failed is None, f"{case.name} failed in an earlier turn"
                self._die(case)
            except BaseException as error:
                failed = error
                self._ends[case].set_exception(error)
            else:
                self._ends[case].set_result(None)

    def _die(self, case: Case) -> None:
        cluster, name, node = self.cluster, case.name, self.cluster.nodes[case.name]
        place, agent = _folder(node), cluster.agent(name)
        promise, restarts = Promise(cluster, name, [name]), agent.restarts
        since = len(cluster.plane.audit.requests())
        (place / "died").unlink(missing_ok=True)
        (place / "new").write_text(json.dumps(asdict(case.point)))
        (place / "new").rename(place / "point")
        if case.point.at == "ForgetRetry":
            annotate(cluster, f"{PARTITIONS}/{partitions(cluster, name)[0]['metadata']['name']}", retry="now")
        rule = OFF if case.change == "off" else HALF if case.change == "on" else _other(cluster, name)
        least = in_the_way(cluster, name, rule)
        generation = apply(cluster, plan(name, [name], rule, foreignInstances="Adopt", disruption=EVICT))
        if case.point.at == "save Backing":
            closed(cluster, name)
            annotate(cluster, f"/api/v1/nodes/{name}", hold="to back out")
            eventually(lambda: taints(cluster, name), [])
        eventually((place / "died").exists, True)
        annotate(cluster, f"/api/v1/nodes/{name}", hold=None)
        backed_out = case.point.at == "save Backing"
        if backed_out:  # after some had gone, so that nobody else is evicted until somebody says so
            annotate(cluster, f"{PARTITIONS}/{partitions(cluster, name)[0]['metadata']['name']}", retry="now")
        eventually(lambda: agent.restarts > restarts, True)
        promise.said(generation)
        ready(cluster, name)
        promise.kept(deaths=1)
        quiet(cluster, name)
        offered = _offered(cluster, name)
        eventually(lambda: {key: n for key, n in cluster.allocatable(name).items() if n}, offered)
        eventually(lambda: labels(cluster, name).get("migd.dev/state"), "ready")
        self._evicted(name, since, least, exactly=not backed_out)

    def _evicted(self, name: str, since: int, least: int, exactly: bool) -> None:
        """As many pods as had to go were evicted, and none twice, whoever died meanwhile."""
        gone = [
            (request.name, request.code)
            for request in self.cluster.plane.audit.requests()[since:]
            if request.resource == "pods/eviction" and request.name.startswith(f"{name}-")
        ]
        accepted = [pod for pod, code in gone if code == 201]
        assert len(accepted) == len(set(accepted)), f"{name}: evicted twice: {gone}"
        assert len(accepted) == least or (not exactly and len(accepted) > least), f"{name}: {gone}; {least} had to go"


@contextmanager
def mortal_nodes(cases: Sequence[Case], usual: int, folder: Path, programs: Path, nursery: Nursery) -> Iterator[Mortal]:
    """A cluster with these nodes, and with the cases under way on them."""
    ways: dict[str, Any] = {"instead": {"migd": PROGRAM}, "backoff_s": 0.3, "forking": nursery}
    names = [f"k{i}" for i in range(usual)]
    with ExitStack() as stack:
        cluster = Cluster(folder, names, spec=GPU, programs=programs, **ways)
        stack.enter_context(cluster)
        for style, name in {(case.style, case.name) for case in cases if case.style}:
            cluster.nodes[name] = stack.enter_context(_styled(cluster, STYLES[style], name, ways))
        introduced(cluster, *cluster.nodes)
        for name in cluster.nodes:  # whatever the node is cut into, as many of these run as there is room for
            deploy(cluster, f"{name}-small", name, SMALLS, mig_1g_10gb=1)
            deploy(cluster, f"{name}-wide", name, 1, mig_3g_40gb=1)
        pool = stack.enter_context(ThreadPoolExecutor(len(cluster.nodes)))
        yield Mortal(cluster, cases, pool)


def _styled(cluster: Cluster, style: Style, name: str, ways: dict[str, Any]) -> SimNode:
    """A node with another kind of device plugin, cut in seven already."""
    marks = {**node_labels(style, "mixed", GPU), "feature.node.kubernetes.io/pci-10de.present": "true", "plugin": name}
    del marks["nvidia.com/gpu.present"]  # by which the usual plugin finds its nodes
    documents = plugin_manifests(style, "mixed")
    for document in documents:
        if document["kind"] == "DaemonSet":
            document["metadata"]["name"] = name
            document["spec"]["template"]["spec"]["nodeSelector"] = {
                **{key: value for key, value in style.selector.items() if key in marks},
                "plugin": name,
            }
    node = SimNode(cluster.plane, name, cluster.roots / name, GPU, labels=marks, **ways)
    with stranger(node.machine()) as gpus:
        (gpu,) = gpus.look()
        gpus.perform(SetMode(gpu.uuid, True))
        make(gpus, gpus.look()[0], " ".join(f"1g@{at}" for at in range(7)))
    applied(cluster.plane, documents, f"the device plugin of {name}")
    return node


def _other(cluster: Cluster, name: str) -> Json:
    """Another way to cut a node's GPU than it is cut now."""
    (cut,) = Machines.seen(cluster, [name]).cuts.values()
    return HALF if cut.layout == "7×1g.10gb" else SMALL


def in_the_way(cluster: Cluster, name: str, rule: Json) -> int:
    """How many pods must go for this, once all that fit are there and told of; at least, over all layouts."""
    (cut,) = Machines.seen(cluster, [name]).cuts.values()
    if not cut.mig:
        return 0
    room = Counter(instance.profile for instance in cut.instances.values())
    small, wide = min(SMALLS, room["1g.10gb"]), min(1, room["3g.40gb"])
    eventually(lambda: (len(running(cluster, f"{name}-small")), len(running(cluster, f"{name}-wide"))), (small, wide))
    eventually(
        lambda: partitions(cluster, name)[0]["status"]["observed"].get("inUse"), f"{small + wide}/{sum(room.values())}"
    )
    if rule != HALF:
        return wide if rule == SMALL else small + wide
    held = {device.split("::")[0] for one in cluster.nodes[name].kubelet.held() for device in one.device_ids}
    gpus = cluster.nodes[name].machine().snapshot().gpus
    at = [one.start for gpu in gpus for one in gpu.instances for compute in one.compute if compute.uuid in held]
    low, high = sum(start < 4 for start in at), sum(start >= 4 for start in at)
    return min(low, high + max(0, low - 3))  # 3g.40gb lies at 0 or at 4, and three small ones stay beside it


def _folder(node: SimNode) -> Path:
    return node.machine_file.parent / FOLDER


def _offered(cluster: Cluster, name: str) -> dict[str, int]:
    """What a node's GPU should be advertised as; what is not there is left out."""
    (cut,) = Machines.seen(cluster, [name]).cuts.values()
    found = Counter(f"nvidia.com/mig-{instance.profile}" for instance in cut.instances.values())
    return dict(found) if cut.mig else {"nvidia.com/gpu": 1}
