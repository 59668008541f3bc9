"""What a plan's preview said, held against what then happened to the simulated GPUs.

The witness is the simulated machine itself and the audit log, not what the agent tells: every GPU before and after,
each instance by its own number, and how many were made in all, so that nothing was tried and undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.audit import Request
from controlplane.clusters import Cluster
from controlplane.nodes import SimNode
from controlplane.processes import until
from integration.acting import EVERY_S, partitions, status
from integration.deployed import OPERATOR

from migd.mig.geometry import GpuInstance, Layout
from migd.mig.profiles import Placement

_WITHIN_S: Final = 60.0
_TOTALS: Final = (
    "nodes",
    "gpus",
    "unchanged",
    "refused",
    "blocked",
    "keep",
    "destroy",
    "create",
    "modeChanges",
    "resets",
)
Counts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Cut:
    """One GPU at one moment. instances: by a number that no other ever has.

    resets: a change of its mode takes a reset, which the driver does by itself where nobody has the GPU open.
    """

    model: str
    mig: bool
    instances: dict[int, GpuInstance]
    resets: bool

    @property
    def layout(self) -> str:
        """As the API tells it."""
        return str(Layout(self.mig, frozenset(self.instances.values())))


@dataclass(frozen=True)
class Machines:
    """Several nodes' GPUs at one moment. cuts: by GPU UUID; made: how many instances there ever were, by node."""

    cuts: dict[str, Cut]
    made: dict[str, int]

    @classmethod
    def seen(cls, cluster: Cluster, nodes: Sequence[str]) -> Machines:
        """As they are now; no NVML session is opened, since one would block a reset."""
        cuts: dict[str, Cut] = {}
        made: dict[str, int] = {}
        for name in nodes:
            found, made[name] = _cuts(cluster.nodes[name])
            cuts |= found
        return cls(cuts, made)


@dataclass(frozen=True, order=True)
class Step:
    """What is done on one GPU, as a group of a preview has it."""

    model: str
    before: str
    after: str
    keep: Counts
    destroy: Counts
    create: Counts
    mode: str
    reset: bool


class Promise:
    """A plan's word. Taken before the plan is applied or edited; `said` once it is, `kept` once all has happened."""

    def __init__(self, cluster: Cluster, plan: str, nodes: Sequence[str]) -> None:
        self._cluster = cluster
        self._plan = plan
        self._nodes = list(nodes)
        self._since = len(cluster.plane.audit.requests())
        self._before = Machines.seen(cluster, nodes)
        self.preview: dict[str, Any] = {}
        self.generation = 0

    def said(self, generation: int, of: Callable[[dict[str, Any]], bool] = lambda _totals: True) -> dict[str, Any]:
        """The first preview of this generation, which the operator wrote before it gave any node a turn for it.

        of: which one is meant by its totals, where what is in a plan's way goes without an edit of it.
        """
        requests: Sequence[Request] = ()

        def logged() -> bool:  # a look at the log costs the API server nothing
            nonlocal requests
            requests = self._cluster.plane.audit.logged(self._since)
            return any(self._told(request, generation, of) for request in requests)

        assert until(logged, _WITHIN_S, EVERY_S), f"plan {self._plan}: generation {generation} was not previewed"
        at = next(i for i, request in enumerate(requests) if self._told(request, generation, of))
        early = [r.name for r in requests[:at] if self._gives(r, generation)]
        assert not early, f"plan {self._plan}: {early} had a turn before anything was previewed"
        _eventually(lambda: status(self._cluster, self._plan).get("observedGeneration"), generation)
        told = requests[at].body["status"]["preview"]
        self.preview = {"groups": [], **told, "totals": {**dict.fromkeys(_TOTALS, 0), **told["totals"]}}
        self.generation = generation
        return self.preview

    def kept(self, deaths: int = 0, by_now: int | None = None) -> None:
        """Everything happened as it was said, on every GPU, and nothing else; and it is told so.

        deaths: how often an agent was killed meanwhile, and each may have left one instance half made, which is then
        made once more. by_now: the plan's generation, where it was edited while this one was carried out.
        """
        after = Machines.seen(self._cluster, self._nodes)
        done = Counter(
            step for uuid, cut in after.cuts.items() if (step := _step(self._before.cuts[uuid], cut)) is not None
        )
        promised = Counter[Step]()
        for group in self.preview["groups"]:
            if _changes(group):
                promised[_promised(group)] += group["gpus"]
        assert done == promised, f"plan {self._plan}: said {promised}, done {done}"
        totals = self.preview["totals"]
        changed = [uuid for uuid, cut in after.cuts.items() if _step(self._before.cuts[uuid], cut) is not None]
        sums = {
            "gpus": len(changed),
            "nodes": len({self._node_of(uuid) for uuid in changed}),
            "destroy": sum(n * _number(step.destroy) for step, n in done.items()),
            "create": sum(n * _number(step.create) for step, n in done.items()),
            "modeChanges": sum(n for step, n in done.items() if step.mode),
            "resets": sum(n for step, n in done.items() if step.reset),
        }
        assert {key: totals[key] for key in sums} == sums, f"plan {self._plan}: {totals}"
        made = {name: after.made[name] - self._before.made[name] for name in self._nodes}
        # an instance takes a number, and its compute instance another one
        again = sum(made.values()) - 2 * sums["create"]
        assert 0 <= again <= 2 * deaths, f"plan {self._plan}: made and undone: {made}, {sums}, {deaths} deaths"
        self._is_told(after, changed, by_now or self.generation)

    def nothing_happened(self) -> None:
        """No GPU of these nodes is another than before, and no instance was made."""
        after = Machines.seen(self._cluster, self._nodes)
        assert after == self._before, f"plan {self._plan}: {self._before} became {after}"

    def _is_told(self, after: Machines, changed: Sequence[str], by_now: int) -> None:
        """The partitions tell of the same change; and the preview now says that nothing is left to do."""

        def told() -> list[tuple[str, ...]]:
            found = {one["metadata"]["name"]: one["status"] for one in partitions(self._cluster, *self._nodes)}
            rows = []
            for uuid in changed:
                last = found[uuid.lower()].get("lastTransition") or {}
                words = (last.get("from"), last.get("to"), last.get("result"), last.get("generation"))
                rows.append((found[uuid.lower()]["observed"]["summary"], *words))
            return rows

        wanted = [
            (
                after.cuts[uuid].layout,
                self._before.cuts[uuid].layout,
                after.cuts[uuid].layout,
                "Succeeded",
                self.generation,
            )
            for uuid in changed
        ]
        _eventually(told, wanted)
        _eventually(lambda: _left(status(self._cluster, self._plan)), (by_now, 0, 0, 0))

    def _node_of(self, uuid: str) -> str:
        return next(name for name in self._nodes if uuid in _cuts(self._cluster.nodes[name])[0])

    def _told(self, request: Request, generation: int, of: Callable[[dict[str, Any]], bool]) -> bool:
        if (request.user, request.resource, request.name) != (OPERATOR, "gpupartitionplans/status", self._plan):
            return False
        preview = ((request.body or {}).get("status") or {}).get("preview") or {}
        told = request.writes and request.code < 300 and preview.get("observedGeneration") == generation
        return told and of(preview["totals"])

    def _gives(self, request: Request, generation: int) -> bool:
        if (request.user, request.resource) != (OPERATOR, "gpupartitions") or not request.writes:
            return False
        spec = (request.body or {}).get("spec") or {}
        by = (spec.get("desired") or {}).get("plan") or {}
        return bool(spec.get("assignment")) and (by.get("name"), by.get("generation")) == (self._plan, generation)


def _left(told: dict[str, Any]) -> tuple[int, int, int, int]:
    preview = told.get("preview") or {}
    totals = preview.get("totals") or {}
    work = (totals.get(key, 0) for key in ("gpus", "destroy", "create"))
    return (preview.get("observedGeneration", 0), *work)  # type: ignore[return-value]


def _eventually(look: Callable[[], object], wanted: object) -> None:
    assert until(lambda: look() == wanted, _WITHIN_S, EVERY_S), f"told {look()}, wanted {wanted}"


def _cuts(node: SimNode) -> tuple[dict[str, Cut], int]:
    host = node.machine()
    found = host.snapshot()
    cuts = {}
    for gpu in found.gpus:
        names = {number: profile.name for number, profile in host.model(gpu.index).by_id().items()}
        there = {
            compute.serial: GpuInstance(names[one.profile_id], Placement(one.start, one.size))
            for one in gpu.instances
            for compute in one.compute
        }
        assert len(there) == len(gpu.instances), f"{gpu.uuid} has instances without one compute instance: {gpu}"
        cuts[gpu.uuid] = Cut(gpu.name, gpu.mig, there, not host.model(gpu.index).resetless)
    return cuts, found.serial


def _step(before: Cut, after: Cut) -> Step | None:
    """What was done to a GPU; None for nothing."""
    if before == after:
        return None
    gone, new = before.instances.keys() - after.instances.keys(), after.instances.keys() - before.instances.keys()
    kept = before.instances.keys() & after.instances.keys()
    assert all(before.instances[uuid] == after.instances[uuid] for uuid in kept), "a kept instance moved"
    mode = "" if before.mig == after.mig else "Enable" if after.mig else "Disable"
    return Step(
        before.model,
        before.layout,
        after.layout,
        _counted(before.instances[uuid].profile for uuid in kept),
        _counted(before.instances[uuid].profile for uuid in gone),
        _counted(after.instances[uuid].profile for uuid in new),
        mode,
        bool(mode) and before.resets,
    )


def _promised(group: dict[str, Any]) -> Step:
    listed = (tuple(sorted((one["profile"], one["count"]) for one in group.get(key, ()))) for key in _LISTS)
    keep, destroy, create = listed
    mode, reset = group.get("modeChange") or "", bool(group.get("reset"))
    return Step(group["model"], group["from"], group["to"], keep, destroy, create, mode, reset)


_LISTS: Final = ("keep", "destroy", "create")


def _changes(group: dict[str, Any]) -> bool:
    return bool(group.get("destroy") or group.get("create") or group.get("modeChange"))


def _counted(profiles: Any) -> Counts:
    return tuple(sorted(Counter(profiles).items()))


def _number(counts: Counts) -> int:
    return sum(number for _, number in counts)
