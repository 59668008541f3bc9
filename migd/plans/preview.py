"""What would be done, GPU by GPU, as data: the preview that is shown, and the steps that are then taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from migd.mig.boards import Board
from migd.mig.geometry import EMPTY, Counts, Geometry, GpuInstance, Layout, by_start, counts_of, occupied
from migd.mig.observed import Holder, SeenGpu, SeenInstance
from migd.mig.table import table_of
from migd.mig.transition import Refusal, Transition, say, transition
from migd.plans.matching import match
from migd.plans.plan import Plan
from migd.plans.problems import Problem
from migd.plans.wishes import Refused, UnknownYet, Wish, resolve

BlockReason = Literal["GPUUnhealthy", "InUse", "ForeignInstances"]
ForeignPolicy = Literal["Refuse", "Adopt"]
NO_PEER_TO_PEER: Final = "MIG on ends NVLink peer-to-peer of this GPU"


UNKNOWN: Final = Holder(None)
_NO_STEPS: Final = Transition(EMPTY, (), (), ())


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing in the way: who holds what. instance: None for the GPU as a whole; holder.pid None: not known who."""

    reason: BlockReason
    holder: Holder = UNKNOWN
    instance: GpuInstance | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why nothing can be done on a GPU now, though it could later. by: at least one blocker."""

    reason: BlockReason
    message: str
    by: tuple[Blocker, ...]


@dataclass(frozen=True, slots=True)
class GpuPreview:
    """What would be done on one GPU of the node.

    seen: the GPU as it was looked at. rule: the index of the rule that decides, None where none does.
    wish: what that rule means here; None where there is no rule or an exact layout is the goal.
    target: the layout afterwards; None where it is not known yet, or where the GPU cannot tell.
    keep, destroy, create: in order of start. Kept and created make up the target. repair: the part of keep whose
    compute instances are made anew, the GPU instance staying. mode_change, reset: the MIG mode, and whether it
    takes a GPU reset. All of it describes what is done once nothing blocks: while `blocked` is set, nothing is.
    refused: it can never be met here; then nothing is in the other lists but keep.
    """

    seen: SeenGpu
    rule: int | None
    wish: Wish | UnknownYet | None
    target: Layout | None
    keep: tuple[GpuInstance, ...] = ()
    destroy: tuple[GpuInstance, ...] = ()
    create: tuple[GpuInstance, ...] = ()
    repair: tuple[GpuInstance, ...] = ()
    mode_change: Literal["Enable", "Disable"] | None = None
    reset: bool = False
    blocked: Blocked | None = None
    refused: Refused | None = None
    notes: tuple[str, ...] = ()

    @property
    def index(self) -> int:
        """The NVML index."""
        return self.seen.index

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self.seen.uuid

    @property
    def unknown_yet(self) -> bool:
        """Whether the instances can be said only once MIG is on."""
        return isinstance(self.wish, UnknownYet)

    @property
    def blocked_by(self) -> tuple[Blocker, ...]:
        """What is in the way; empty where nothing is."""
        return self.blocked.by if self.blocked else ()

    @property
    def changes(self) -> bool:
        """Whether there is anything to do, now or once nothing blocks."""
        return bool(self.destroy or self.create or self.repair or self.mode_change)


@dataclass(frozen=True, slots=True)
class Preview:
    """What a plan would do on one node: every GPU of it, by index.

    problems: GPUs that the plan names and the node lacks. notes: what concerns no single GPU.
    """

    gpus: tuple[GpuPreview, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def preview(plan: Plan, gpus: Sequence[SeenGpu], owned: Mapping[str, Geometry]) -> Preview:
    """What a plan would do on these GPUs, which are all NVIDIA GPUs of one node, in whatever order.

    owned: by GPU UUID, the instances in this node's record; all others are foreign. Equal input, equal output.
    """
    ordered = sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))
    matching = match(plan, ordered)
    foreign = plan.spec.foreign_instances
    previews = []
    for gpu, rule in zip(ordered, matching.rules, strict=True):
        wish = None if rule is None else resolve(plan.spec.rules[rule], gpu)
        found = plan_gpu(gpu, wish, owned.get(gpu.uuid, EMPTY), foreign)
        previews.append(replace(found, rule=rule))
    return Preview(tuple(previews), matching.problems, matching.notes)


def plan_gpu(
    seen: SeenGpu,
    wish: Wish | UnknownYet | Refused | None,
    owned: Geometry,
    foreign: ForeignPolicy = "Refuse",
    freed: Geometry = EMPTY,
) -> GpuPreview:
    """What a wish would do on one GPU; None leaves it alone.

    owned: the instances that are ours. A foreign one that fits the wish is kept; with Refuse the others count as
    busy, with Adopt they are as ours. freed: instances in use that are to be free by then, so that the layout is
    chosen as if they were idle; those of them that go are in the way until they are.
    """
    return _planned(seen, wish, owned, foreign, freed)


@lru_cache(maxsize=2048)
def _planned(
    seen: SeenGpu, wish: Wish | UnknownYet | Refused | None, owned: Geometry, foreign: ForeignPolicy, freed: Geometry
) -> GpuPreview:
    """The answer, remembered: agent and operator ask for it again at every look, and mostly nothing has changed."""
    if wish is None:
        return _untouched(seen, None)
    if seen.out_of_reach:
        return _unhealthy(seen, None if isinstance(wish, Refused) else wish)
    if isinstance(wish, Refused):
        return replace(_untouched(seen, None), refused=wish)
    if isinstance(wish, UnknownYet):
        return _finish(seen, _Goal(wish, None), owned, foreign)
    if not wish.mig:
        steps = Transition(EMPTY, (), by_start(seen.geometry), ())
        return _finish(seen, _Goal(wish, Layout(False), steps), owned, foreign)
    if seen.board is None:
        steps = Transition(EMPTY, (), by_start(seen.geometry), ())
        assert not wish.counts, "a wish with profiles is resolved on a board"
        return _finish(seen, _Goal(wish, Layout(True), steps), owned, foreign)
    fixed = _fixed(seen, owned, foreign) - freed
    found = _towards(seen, seen.board, wish.counts, fixed)
    if isinstance(found, Refused):
        return replace(_untouched(seen, wish), refused=found)
    steps, detail = found
    return _finish(seen, _Goal(wish, Layout(True, steps.target), steps, detail), owned, foreign)


def plan_layout(seen: SeenGpu, layout: Layout, owned: Geometry, foreign: ForeignPolicy = "Refuse") -> GpuPreview:
    """What it takes to get one GPU to exactly this layout, places included: a rollback's goal."""
    if seen.out_of_reach:
        return _unhealthy(seen, None)
    if layout.mig and seen.mode is None:
        return replace(
            _untouched(seen, None), refused=Refused("NotCapable", f"{seen.model or 'this GPU'} is not MIG-capable")
        )
    if not _can_exist(layout.instances, seen.board):
        message = f"{', '.join(map(str, by_start(layout.instances)))} cannot exist on {seen.model or 'this GPU'}"
        return replace(_untouched(seen, None), refused=Refused("Infeasible", message, counts_of(layout.instances)))
    current, goal = seen.geometry, layout.instances
    steps = Transition(goal, by_start(current & goal), by_start(current - goal), by_start(goal - current))
    return _finish(seen, _Goal(None, layout, steps), owned, foreign)


def _can_exist(instances: Geometry, board: Board | None) -> bool:
    """Whether a GPU can hold these at once; a GPU that lists no profiles is asked by trying."""
    if sum(i.placement.size for i in instances) != occupied(instances).bit_count():
        return False
    return board is None or table_of(board).bits_of(instances) is not None


@dataclass(frozen=True, slots=True)
class _Goal:
    """Where one GPU is to go, as if nothing were in the way. detail: what a refusal in use had to add."""

    wish: Wish | UnknownYet | None
    layout: Layout | None
    steps: Transition = _NO_STEPS
    detail: str = ""


def _untouched(seen: SeenGpu, wish: Wish | UnknownYet | None) -> GpuPreview:
    target = None if seen.out_of_reach else seen.layout
    return GpuPreview(seen, None, wish, target, keep=by_start(seen.geometry), notes=_pending(seen))


def _unhealthy(seen: SeenGpu, wish: Wish | UnknownYet | None) -> GpuPreview:
    message = seen.trouble or seen.out_of_reach
    blocked = Blocked("GPUUnhealthy", f"GPU {seen.index} must not be worked on: {message}", (Blocker("GPUUnhealthy"),))
    return replace(_untouched(seen, wish), blocked=blocked)


def _towards(seen: SeenGpu, board: Board, wanted: Counts, fixed: Geometry) -> tuple[Transition, str] | Refused:
    """The steps to a wish; where something fixed is in the way, the steps once only that has gone."""
    current = seen.geometry
    found = transition(board, current, fixed, wanted)
    if isinstance(found, Transition):
        return found, ""
    if found.reason == "Infeasible":
        return Refused("Infeasible", f"{seen.model or 'this GPU'}: {found.message}", found.left_over, found.nearest)
    once_free = transition(board, current, fixed - frozenset(found.blocked_by), wanted)
    assert isinstance(once_free, Transition), "what blocks is all that blocks"
    return once_free, _around(found, wanted)


def _around(refusal: Refusal, wanted: Counts) -> str:
    nearest = " or ".join(say(multiset) for multiset in refusal.nearest)
    return f"{say(wanted)} needs their place" + (f"; around them fits {nearest}" if nearest else "")


def _fixed(seen: SeenGpu, owned: Geometry, foreign: ForeignPolicy) -> Geometry:
    """The instances that must stay as they are: in use, or not known to be idle, or somebody else's."""
    return seen.busy | (_strangers(seen, owned) if foreign == "Refuse" else EMPTY)


def _strangers(seen: SeenGpu, owned: Geometry) -> Geometry:
    return seen.geometry - owned


def _finish(seen: SeenGpu, goal: _Goal, owned: Geometry, foreign: ForeignPolicy) -> GpuPreview:
    """The steps to a goal with MIG mode, repairs, and all that is in the way."""
    steps = goal.steps
    want_mig = goal.layout.mig if goal.layout else True
    mode_change, reset, notes = _mode(seen, want_mig)
    there = {s.instance: s for s in seen.instances}
    repair = tuple(i for i in steps.keep if not there[i].whole)
    done = GpuPreview(
        seen=seen,
        rule=None,
        wish=goal.wish,
        target=goal.layout,
        keep=steps.keep,
        destroy=steps.destroy,
        create=steps.create,
        repair=repair,
        mode_change=mode_change,
        reset=reset,
        notes=notes + ((goal.wish.message,) if isinstance(goal.wish, UnknownYet) else ()),
    )
    if not done.changes:
        return done
    if seen.trouble:
        return replace(done, blocked=_unhealthy(seen, goal.wish).blocked)
    strangers = _strangers(seen, owned) if foreign == "Refuse" else EMPTY
    blockers = [b for i in steps.destroy for b in _in_the_way(there[i], i in strangers)]
    for i in repair:
        blockers += _in_the_way(there[i], i in strangers and bool(there[i].compute_instances))
    if seen.in_use and _needs_whole_gpu(done):
        blockers += [Blocker("InUse", holder) for holder in by_pid(seen.holders) or (UNKNOWN,)]
    return replace(done, blocked=_blocked(blockers, goal.detail)) if blockers else done


def _mode(seen: SeenGpu, want: bool) -> tuple[Literal["Enable", "Disable"] | None, bool, tuple[str, ...]]:
    """Mode change, reset and notes that a wanted MIG mode takes."""
    mode = seen.mode
    if mode is None or (mode.current == want and mode.settled):
        return None, False, ()
    change: Literal["Enable", "Disable"] = "Enable" if want else "Disable"
    if mode.current == want:
        return change, False, (f"a pending change to MIG {_on(mode.pending)} is called off",)
    notes = () if mode.settled else (f"MIG {_on(want)} is pending already: it needs a reset or a reboot",)
    return change, not seen.resetless, notes + ((NO_PEER_TO_PEER,) if want else ())


def _pending(seen: SeenGpu) -> tuple[str, ...]:
    if seen.mode is None or seen.mode.settled:
        return ()
    return (f"MIG {_on(seen.mode.pending)} is pending: it takes effect at the next reset or reboot",)


def _on(mode: bool) -> str:
    return "on" if mode else "off"


def _needs_whole_gpu(done: GpuPreview) -> bool:
    """Whether clients of the GPU as a whole are in the way.

    So it is for a mode change that is not just called off, and for the first GPU instance on a GPU.
    Source: nvml.h at nvmlDeviceSetMigMode; open-gpu-kernel-modules, kmigmgrCreateGPUInstanceCheck.
    """
    assert done.seen.mode is not None
    switches = done.mode_change is not None and (done.mode_change == "Enable") != done.seen.mode.current
    return switches or bool(done.create and not done.keep)


def _in_the_way(there: SeenInstance, foreign: bool) -> Iterable[Blocker]:
    if foreign or there.in_use:
        reason: BlockReason = "ForeignInstances" if foreign else "InUse"
        for holder in by_pid(there.holders) or (UNKNOWN,):
            yield Blocker(reason, holder, there.instance)


def _blocked(blockers: Sequence[Blocker], detail: str) -> Blocked:
    """All blockers in one sentence; the reason is ForeignInstances only where nothing else blocks."""
    used, strange = [b for b in blockers if b.reason == "InUse"], [b for b in blockers if b.reason != "InUse"]
    parts = []
    if used:
        parts.append(f"in use: {_listed(used)}")
    if strange:
        made = ", ".join(dict.fromkeys(str(b.instance) for b in strange))
        parts.append(f"not made by migd: {made} (foreignInstances: Adopt takes them over)")
    if detail:
        parts.append(detail)
    return Blocked("InUse" if used else "ForeignInstances", "; ".join(parts), tuple(blockers))


def by_pid(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Holders in the order in which they are shown: by pid, those without one last."""
    return tuple(sorted(holders, key=lambda h: (h.pid is None, h.pid or 0, h.command, h.container)))


def _listed(used: Iterable[Blocker]) -> str:
    return ", ".join(f"{b.instance or 'the GPU as a whole'} by {b.holder}" for b in used)
