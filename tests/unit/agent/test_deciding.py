"""decide() alone: total, pure, bounded, and never after what is in use or somebody else's, whatever it is shown.

The world here is a value that answers as it likes: it does what is asked, refuses it, lies, or changes by itself.
Left out: what real operations need of each other, which tests/sim has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from boards import board
from hypothesis import given, settings
from hypothesis import strategies as st

from migd.agent.deciding import accept, decide, failed, hung, under_way
from migd.agent.effects import LookAgain, Pause, Seen
from migd.agent.orders import Goal, Order
from migd.agent.patience import TURNS_MAX
from migd.agent.records import AwaitingReboot, Cause, GpuRecord, Outcome, Record, Transaction
from migd.agent.store import decode, encode
from migd.mig.geometry import EMPTY, Geometry, GpuInstance, Layout
from migd.mig.observed import Holder, MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    ResetGpu,
    SetMode,
)
from migd.mig.table import table_of
from migd.plans.plan import GpuSelector, InstanceRule, Rule

BOARD = board("a30")
TABLE = table_of(BOARD)
SETS = [TABLE.geometry(found.bits) for found in TABLE.sets]
NARROW = max(SETS, key=len)
WIDEST = next(found for found in SETS if [i.placement.size for i in found] == [BOARD.memory_slices])
UUIDS = ("GPU-a", "GPU-b")
EVERY = GpuSelector(every=True)
REASONS = ("InUse", "NVMLError", "NoPermission", "ResetRefused", "RebootRequired", "GPUUnhealthy", "ModeChangeFailed")

# --- any record, any sight ---

geometries = st.sampled_from(SETS)
layouts = st.one_of(st.just(Layout(False)), geometries.map(lambda found: Layout(True, found)))
causes = st.builds(Cause, st.sampled_from(REASONS), st.just("why"))
outcomes = st.builds(
    Outcome,
    st.sampled_from(("Ready", "Blocked", "RebootRequired", "Failed", "Held", "Lost")),
    causes,
    st.booleans(),
    st.booleans(),
)
steps = st.sampled_from(("", "MIG mode on", "MIG mode off", "GPU reset", "create GPU instance 1g.6gb@0"))


@st.composite
def transactions(draw: st.DrawFn, there: Geometry) -> Transaction:
    """A transaction at any point of its way, most often one that has to do with what is there."""
    some = st.one_of(layouts, st.just(Layout(True, there)), parts(there).map(lambda found: Layout(True, found)))
    return Transaction(
        order_id=draw(st.sampled_from(("old", "order"))),
        before=draw(some),
        target=draw(st.one_of(st.none(), some)),
        hold=draw(st.booleans()),
        back=draw(st.booleans()),
        cause=draw(st.one_of(st.none(), causes)),
        step=draw(steps),
        tries=draw(st.integers(0, 12)),
        error=draw(st.one_of(st.none(), causes)),
        resets=draw(st.integers(0, 3)),
        touched=draw(st.booleans()),
        turns=draw(st.sampled_from((0, 1, TURNS_MAX - 1, TURNS_MAX))),
        not_before_s=draw(st.sampled_from((0.0, 0.0, 100.5, 1e9))),
        parked=draw(st.sampled_from((False, False, True))),
    )


def parts(there: Geometry) -> st.SearchStrategy[Geometry]:
    """Some of these instances."""
    return st.sets(st.sampled_from(sorted(there))).map(frozenset) if there else st.just(EMPTY)


awaiting = st.builds(
    AwaitingReboot, st.sampled_from(("boot", "earlier")), st.sampled_from(("old", "order")), st.booleans()
)


@st.composite
def gpu_records(draw: st.DrawFn, there: Geometry) -> GpuRecord:
    """What may be recorded of a GPU with these instances: some are ours, or none of what was still is."""
    return GpuRecord(
        draw(st.one_of(st.just(there), parts(there), geometries)),
        draw(st.one_of(st.none(), layouts)),
        draw(st.one_of(st.none(), transactions(there), transactions(there))),
        draw(st.one_of(st.none(), awaiting)),
        draw(st.one_of(st.none(), outcomes)),
        draw(st.one_of(st.none(), layouts)),
    )


WHOLE = (SeenComputeInstance(0, True, "MIG-0"),)
insides = st.sampled_from((WHOLE, WHOLE, WHOLE, (), (SeenComputeInstance(0, False, None),)))


@st.composite
def sights(draw: st.DrawFn, uuid: str, index: int) -> SeenGpu:
    """One GPU in any state that a look can find."""
    if draw(st.integers(0, 19)) == 0:
        return SeenGpu(uuid, index, "", "", 0, None, lost=True)
    if draw(st.integers(0, 19)) == 0:
        return SeenGpu(uuid, index, "NVIDIA L40S", "0x26B910DE", 46068, None)
    on = draw(st.booleans())
    instances = tuple(
        SeenInstance(found, 1, draw(insides), busy, (Holder(4711),) if busy else ())
        for found in sorted(draw(geometries) if on else EMPTY, key=lambda i: i.placement)
        for busy in [draw(st.sampled_from((False, False, False, True)))]
    )
    in_use = draw(st.booleans())
    return SeenGpu(
        uuid,
        index,
        "NVIDIA A30",
        "0x20B710DE",
        24576,
        MigMode(on, draw(st.sampled_from((on, on, not on)))),
        draw(st.booleans()),
        None if not on and draw(st.booleans()) else BOARD,
        instances,
        in_use,
        (Holder(4712),) if in_use else (),
        draw(st.sampled_from(("", "", "", "a reset is needed"))),
    )


@st.composite
def goals(draw: st.DrawFn) -> Goal:
    """A wish or an exact layout."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Rule(gpus=EVERY, mig="Disabled")
    if kind == 1:
        return draw(layouts)
    names = draw(st.lists(st.sampled_from([p.name for p in BOARD.profiles] + ["7g.80gb"]), unique=True, max_size=2))
    items = tuple(InstanceRule(profile=name, count=draw(st.integers(1, 4))) for name in names)
    return Rule(gpus=EVERY, instances=items, allow_empty=not items)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    named = draw(st.lists(st.sampled_from((*UUIDS, "GPU-gone")), min_size=1, unique=True))
    return Order(
        "order",
        {uuid: draw(goals()) for uuid in named},
        draw(st.sampled_from(("Refuse", "Adopt"))),
        draw(st.sampled_from(("Rollback", "Hold"))),
        draw(st.sampled_from((None, 50.0, 200.0))),
    )


sights_of_all = st.tuples(sights(UUIDS[0], 0), sights(UUIDS[1], 1)).flatmap(
    lambda both: st.sampled_from((both, both[::-1], both[:1]))
)
seen_by = st.builds(Seen, st.just("boot"), st.just(100.0), sights_of_all, st.one_of(st.none(), orders()))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Record, Seen]:
    """A record, and what is seen when it is looked at."""
    seen = draw(seen_by)
    there = {gpu.uuid: gpu.geometry for gpu in seen.gpus}
    known = draw(st.sets(st.sampled_from((*UUIDS, "GPU-gone"))))
    gpus = {uuid: draw(gpu_records(there.get(uuid, EMPTY))) for uuid in sorted(known)}
    boot_id = draw(st.sampled_from(("boot", "boot", "boot", "earlier")))
    return Record(boot_id, draw(st.sampled_from(("", "old", "order"))), gpus), seen


@settings(max_examples=600, deadline=None)
@given(situations())
def test_any_record_and_any_sight_have_an_answer_and_always_the_same(situation: tuple[Record, Seen]) -> None:
    record, seen = situation
    first = decide(record, seen)
    assert first == decide(record, seen)
    assert decode(encode(first[0])) == first[0], "what is decided can be kept"


@settings(max_examples=400, deadline=None)
@given(situations())
def test_at_rest_nothing_more_is_decided_until_something_changes(situation: tuple[Record, Seen]) -> None:
    record, seen = situation
    after, effect = decide(record, seen)
    if effect is None:
        assert decide(after, seen) == (after, None)
        assert under_way(after) == ()
        if seen.order is not None:
            assert after.order_id == seen.order.id


@settings(max_examples=600, deadline=None)
@given(situations())
def test_no_operation_is_ever_on_what_is_in_use_or_not_ours(situation: tuple[Record, Seen]) -> None:
    record, seen = situation
    after, effect = decide(record, seen)
    if not isinstance(effect, Operation):
        return
    now = seen.gpu(effect.gpu_uuid)
    assert now is not None
    assert not now.lost
    transaction = after.gpu(now.uuid).transaction
    assert transaction is not None, "written down before it is begun"
    assert transaction.step == str(effect)
    if isinstance(effect, DestroyComputeInstances | DestroyGpuInstance):
        assert effect.instance not in now.busy
        assert effect.instance in record.gpu(now.uuid).owned
    if isinstance(effect, SetMode | ResetGpu) and now.mode is not None:
        turns_over = isinstance(effect, ResetGpu) or effect.enable != now.mode.current
        assert not (turns_over and now.instances), "it could end instances"
        undoing = transaction.back and isinstance(effect, SetMode) and not effect.enable
        assert not (turns_over and now.in_use) or undoing or isinstance(effect, ResetGpu)
    if isinstance(effect, CreateGpuInstance):
        assert effect.instance not in now.geometry
        assert effect.instance in after.gpu(now.uuid).owned


@settings(max_examples=200, deadline=None)
@given(situations())
def test_of_a_gpu_that_no_order_names_and_no_crash_left_only_what_is_gone_is_noted(
    situation: tuple[Record, Seen],
) -> None:
    record, seen = situation
    record = replace(record, boot_id="boot")
    named = set(seen.order.goals) if seen.order else set()
    after, effect = decide(record, seen)
    for uuid in set(UUIDS) - named - set(under_way(record)):
        assert replace(after.gpu(uuid), owned=EMPTY) == replace(record.gpu(uuid), owned=EMPTY)
        gone = record.gpu(uuid).owned - after.gpu(uuid).owned
        now = seen.gpu(uuid)
        assert after.gpu(uuid).owned <= record.gpu(uuid).owned
        assert not gone or (now is not None and not gone & now.geometry), "what is there stays ours"
        assert not isinstance(effect, Operation) or effect.gpu_uuid != uuid


@settings(max_examples=200, deadline=None)
@given(situations(), orders())
def test_accepting_an_order_takes_up_only_its_own_gpus(situation: tuple[Record, Seen], order: Order) -> None:
    record, _ = situation
    accepted = accept(record, order)
    assert accepted.order_id == ""
    for uuid, gpu in record.gpus.items():
        if uuid not in order.goals:
            assert accepted.gpu(uuid) == gpu
        else:
            assert accepted.gpu(uuid).outcome is None
            assert gpu.transaction is None or uuid in under_way(accepted)
    assert set(under_way(accept(record, None))) == set(record.open)


# --- hostile worlds ---


@dataclass
class Play:
    """A world of two GPUs that answers operations as told, with decide() at work on it.

    answer: (operation, how many came before) -> None to do it, a Cause to refuse it, or "" to lie.
    """

    seen: Seen
    answer: Callable[[Operation, int], Cause | str | None]
    record: Record
    done: list[Operation]
    paused_s: float = 0.0

    def run(self, most: int) -> Record:
        """Turns until rest, at most so many."""
        for _ in range(most):
            self.record, effect = decide(self.record, self.seen)
            if effect is None:
                return self.record
            if isinstance(effect, Pause):
                assert 0 < effect.seconds <= 60
                self.paused_s += effect.seconds
                self.seen = replace(self.seen, now_s=self.seen.now_s + effect.seconds)
            elif not isinstance(effect, LookAgain):
                found = self.answer(effect, len(self.done))
                self.done.append(effect)
                if isinstance(found, Cause):
                    self.record = failed(self.record, effect, found, self.seen.now_s)
                elif found is None:
                    gpus = tuple(after(g, effect) if g.uuid == effect.gpu_uuid else g for g in self.seen.gpus)
                    self.seen = replace(self.seen, gpus=gpus)
        raise AssertionError(f"no rest after {most} turns: {[str(step) for step in self.done[-8:]]}")


def after(gpu: SeenGpu, step: Operation) -> SeenGpu:
    """The GPU once an operation took effect."""
    match step:
        case SetMode(_, enable):
            return replace(
                gpu, mode=MigMode(enable, enable), board=BOARD, instances=() if not enable else gpu.instances
            )
        case ResetGpu():
            return gpu
        case DestroyComputeInstances(_, instance):
            return _with(gpu, instance, ())
        case DestroyGpuInstance(_, instance):
            return replace(gpu, instances=tuple(i for i in gpu.instances if i.instance != instance))
        case CreateGpuInstance(_, instance):
            return replace(gpu, instances=(*gpu.instances, SeenInstance(instance, 1)))
        case CreateComputeInstance(_, instance):
            return _with(gpu, instance, WHOLE)


def _with(gpu: SeenGpu, which: GpuInstance, inside: tuple[SeenComputeInstance, ...]) -> SeenGpu:
    instances = (replace(i, compute_instances=inside) if i.instance == which else i for i in gpu.instances)
    return replace(gpu, instances=tuple(instances))


def is_as(gpu: SeenGpu, goal: Layout) -> bool:
    """Exactly this layout, the mode settled, every instance usable."""
    settled = gpu.mode is not None and gpu.mode.settled
    return gpu.layout == goal and settled and all(there.whole for there in gpu.instances)


def idle(uuid: str, there: Geometry | None, index: int = 0) -> SeenGpu:
    """An idle A30 cut so; None for MIG off."""
    on = there is not None
    found = tuple(SeenInstance(i, 1, WHOLE) for i in sorted(there or EMPTY, key=lambda i: i.placement))
    return SeenGpu(uuid, index, "NVIDIA A30", "0x20B710DE", 24576, MigMode(on, on), board=BOARD, instances=found)


def played(start: Geometry | None, goal: Layout, answer: Callable[[Operation, int], Cause | str | None]) -> Play:
    order = Order("order", dict.fromkeys(UUIDS, goal))
    gpus = (idle(UUIDS[0], start), idle(UUIDS[1], start, 1))
    owned = {uuid: GpuRecord(owned=start or EMPTY) for uuid in UUIDS}
    return Play(Seen("boot", 0.0, gpus, order), answer, accept(Record("boot", gpus=owned), order), [])


starts = st.one_of(st.none(), geometries)


@settings(max_examples=150, deadline=None)
@given(starts, layouts)
def test_in_a_world_that_does_as_it_is_asked_the_goal_is_reached(start: Geometry | None, goal: Layout) -> None:
    play = played(start, goal, lambda step, before: None)
    record = play.run(400)
    assert {gpu.layout for gpu in play.seen.gpus} == {goal}
    assert {record.gpu(uuid).outcome.phase for uuid in UUIDS} == {"Ready"}  # type: ignore[union-attr]
    assert len(play.done) == len(set(play.done)), "nothing is done twice"


@pytest.mark.parametrize("reason", [*REASONS, None])
@settings(max_examples=40, deadline=None)
@given(start=starts, goal=layouts, data=st.data())
def test_in_a_world_where_every_operation_fails_or_lies_it_soon_rests(
    reason: str | None, start: Geometry | None, goal: Layout, data: st.DataObject
) -> None:
    """Also from the k-th operation on, so that the way back fails as well."""
    good = data.draw(st.integers(0, 12))
    bad = "" if reason is None else Cause(reason, "never")
    play = played(start, goal, lambda step, before: None if before < good else bad)
    record = play.run(600)
    assert len(play.done) <= good + 60, "no more than a few tries of each"
    for uuid in UUIDS:
        outcome = record.gpu(uuid).outcome
        now = play.seen.gpu(uuid)
        assert outcome is not None
        assert now is not None
        assert outcome.phase != "Ready" or is_as(now, goal), "Ready is what is there, never what was asked"
        assert outcome.phase in ("Ready", "Failed", "Blocked", "RebootRequired")
        assert under_way(record) == ()


@settings(max_examples=150, deadline=None)
@given(starts, layouts, st.randoms(use_true_random=False))
def test_in_a_world_that_answers_at_random_it_rests_and_says_what_is_there(
    start: Geometry | None, goal: Layout, dice: object
) -> None:
    choices: list[Cause | str | None] = [None, None, "", *(Cause(reason, "now and then") for reason in REASONS)]
    play = played(start, goal, lambda step, before: dice.choice(choices))  # type: ignore[attr-defined]
    record = play.run(4 * TURNS_MAX)
    for uuid in UUIDS:
        outcome, now = record.gpu(uuid).outcome, play.seen.gpu(uuid)
        assert outcome is not None
        assert now is not None
        assert outcome.phase != "Ready" or is_as(now, goal)
        if outcome.phase == "Failed" and record.gpu(uuid).transaction is None:
            assert now.layout == (Layout(False) if start is None else Layout(True, start)), "put back, as it says"


@pytest.mark.parametrize("goal", [Layout(True, WIDEST), Layout(False)])
def test_a_world_that_undoes_every_step_is_given_up_after_a_bounded_number_of_them(goal: Layout) -> None:
    """Each step succeeds, and with the next one both are undone: no step is ever tried twice in a row."""
    play = played(NARROW, goal, lambda step, before: None)
    start = play.seen.gpus

    def undone(step: Operation, before: int) -> str | None:
        if before % 2:
            play.seen = replace(play.seen, gpus=start)
            return ""
        return None

    play.answer = undone
    record = play.run(10 * TURNS_MAX)
    assert len(play.done) >= TURNS_MAX, "the bound is what ended it"
    assert len(play.done) <= 2 * 2 * TURNS_MAX
    assert {gpu.outcome.phase for gpu in record.gpus.values() if gpu.outcome} == {"Failed"}


# --- single turns ---


def opened(goal: Layout, hold: bool = False) -> tuple[Record, Operation, Seen]:
    """A transaction with its first operation begun."""
    order = Order("order", {UUIDS[0]: goal}, on_failure="Hold" if hold else "Rollback")
    seen = Seen("boot", 0.0, (idle(UUIDS[0], None), idle(UUIDS[1], None, 1)), order)
    record, effect = decide(Record("boot"), seen)
    assert effect == LookAgain()
    record, effect = decide(record, seen)
    assert isinstance(effect, Operation)
    return record, effect, seen


@pytest.mark.parametrize("hold", [False, True])
def test_an_operation_that_hangs_leaves_its_gpu_resting_until_a_command_names_it(hold: bool) -> None:
    record, step, seen = opened(Layout(True, SETS[3]), hold)
    record = hung(record, step, Cause("NVMLError", "no answer"))
    assert under_way(record) == ()
    transaction = record.gpu(UUIDS[0]).transaction
    assert transaction is not None
    assert transaction.back is not hold
    other = Order("other", {UUIDS[1]: Layout(True)})
    assert under_way(accept(record, other)) == ()
    assert seen.order is not None
    assert under_way(accept(record, seen.order)) == (UUIDS[0],)
    assert under_way(accept(record, None)) == (UUIDS[0],)


def test_a_reboot_makes_an_order_begin_anew_that_had_been_carried_out() -> None:
    goal = Layout(True, SETS[3])
    play = played(None, goal, lambda step, before: None)
    play.run(400)
    gone = tuple(replace(gpu, instances=()) for gpu in play.seen.gpus)
    play.seen = replace(play.seen, boot_id="next", gpus=gone)
    record, effect = decide(play.record, play.seen)
    assert effect == LookAgain()
    assert set(record.open) == set(UUIDS)


def test_what_no_waiting_takes_away_is_the_reason_of_an_order_that_waits() -> None:
    """Else it would be begun again and again until its time is over."""
    there = idle(UUIDS[0], SETS[3])
    busy = replace(there, instances=tuple(replace(i, in_use=True, holders=(Holder(1),)) for i in there.instances))
    mine = frozenset(list(there.geometry)[:1]) if len(there.geometry) > 1 else EMPTY
    order = Order("order", {UUIDS[0]: Layout(False)}, wait_until_s=500.0)
    record, effect = decide(Record("boot", gpus={UUIDS[0]: GpuRecord(owned=mine)}), Seen("boot", 0.0, (busy,), order))
    outcome = record.gpu(UUIDS[0]).outcome
    assert effect is None
    assert outcome is not None
    assert (outcome.phase, outcome.cause.reason) == ("Blocked", "ForeignInstances")


@pytest.mark.parametrize(("wait_until_s", "again"), [(None, False), (0.0, False), (500.0, True)])
def test_an_order_that_waits_is_begun_again_when_only_the_driver_saw_who_was_there(
    wait_until_s: float | None, again: bool
) -> None:
    order = Order("order", {UUIDS[0]: Layout(True)}, wait_until_s=wait_until_s)
    outcome = Outcome("Blocked", Cause("InUse", "somebody"), touched=True)
    record = Record("boot", "order", {UUIDS[0]: GpuRecord(outcome=outcome)})
    seen = Seen("boot", 1.0, (idle(UUIDS[0], None),), order)
    found, effect = decide(record, seen)
    assert isinstance(effect, Pause) is again
    assert (found.order_id == "") is again
    if wait_until_s == 0.0:
        told = found.gpu(UUIDS[0]).outcome
        assert told is not None
        assert told.cause.reason == "NeverIdle"
