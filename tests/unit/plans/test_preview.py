"""What would be done, GPU by GPU: busy and foreign instances, MIG mode, repairs, rollback goals.

Left out: how a target is chosen among those that fit (tests of migd.mig.transition).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plans.boards import A100_40, at, geometry, gpu, not_capable, there, uuid
from unit.plans.texts import everywhere, plan

from migd.mig.geometry import EMPTY, Geometry, Layout, counts_of
from migd.mig.observed import Holder, MigMode, SeenGpu
from migd.mig.table import table_of
from migd.plans.preview import NO_PEER_TO_PEER, GpuPreview, plan_gpu, plan_layout, preview
from migd.plans.wishes import UnknownYet, Wish

MIXED = "3g.20gb@4 2g.10gb@0 1g.5gb@2 1g.5gb@3"
SEVEN = Wish(True, (("1g.5gb", 7),))
PAIR = Wish(True, (("3g.20gb", 2),))
OFF = Wish(False)


def shown(instances: Any) -> str:
    return " ".join(map(str, instances))


def one(seen: SeenGpu, wish: Wish, *, foreign: str = "Refuse", owned: Geometry | None = None) -> GpuPreview:
    """The preview of one GPU; all that is there is ours unless said otherwise."""
    return plan_gpu(seen, wish, seen.geometry if owned is None else owned, foreign)  # type: ignore[arg-type]


def reasons(found: GpuPreview) -> list[tuple[str, str | None, int | None]]:
    return [(b.reason, str(b.instance) if b.instance else None, b.holder.pid) for b in found.blocked_by]


def test_b27_an_instance_in_use_that_fits_is_kept_and_the_others_make_room():
    found = one(gpu(0, instances=MIXED, busy="1g.5gb@3"), SEVEN)
    assert shown(found.destroy) == "2g.10gb@0 3g.20gb@4"
    assert shown(found.keep) == "1g.5gb@2 1g.5gb@3"
    assert shown(found.create) == "1g.5gb@0 1g.5gb@1 1g.5gb@4 1g.5gb@5 1g.5gb@6"
    assert found.blocked is None


def test_an_instance_in_use_that_must_go_blocks_and_is_named_with_its_holder():
    found = one(gpu(0, instances=MIXED, busy="1g.5gb@3 3g.20gb@4"), PAIR)
    assert reasons(found) == [("InUse", "1g.5gb@3", 103)]
    assert found.blocked is not None
    assert found.blocked.reason == "InUse"
    assert found.blocked.message.startswith("in use: 1g.5gb@3 by pid 103 (python train.py)")
    assert found.refused is None


def test_what_blocks_is_no_more_than_must_go_and_the_lists_say_what_happens_then():
    found = one(gpu(0, instances=MIXED, busy=MIXED), PAIR)
    assert {b.instance for b in found.blocked_by} == set(found.destroy)
    assert shown(found.keep) == "3g.20gb@4"
    assert shown(found.create) == "3g.20gb@0"


def test_an_instance_in_use_by_nobody_known_blocks_all_the_same():
    seen = gpu(0, instances=(dataclasses.replace(there(at("7g.40gb@0", A100_40)), in_use=True),))
    assert reasons(one(seen, PAIR)) == [("InUse", "7g.40gb@0", None)]


def test_a_wish_that_never_fits_is_refused_whatever_is_in_use():
    found = one(gpu(0, instances=MIXED, busy=MIXED), Wish(True, (("1g.5gb", 1), ("3g.20gb", 2))))
    assert found.refused is not None
    assert found.refused.reason == "Infeasible"
    assert found.blocked is None
    assert not found.changes
    assert set(found.keep) == found.seen.geometry


def test_nothing_to_do_is_nothing_done():
    found = one(gpu(0, instances=MIXED, busy=MIXED), Wish(True, counts_of(geometry(MIXED, A100_40))))
    assert not found.changes
    assert set(found.keep) == geometry(MIXED, A100_40)
    assert found.blocked is None


def test_a_gpu_without_a_rule_is_left_alone_whatever_its_state():
    seen = gpu(0, instances=MIXED, busy=MIXED, trouble="row remap failed", mode=MigMode(True, False))
    found = plan_gpu(seen, None, EMPTY)
    assert not found.changes
    assert (found.blocked, found.refused, found.target) == (None, None, seen.layout)
    assert found.notes == ("MIG off is pending: it takes effect at the next reset or reboot",)


def test_b60_foreign_instances_in_the_way_are_refused_or_adopted():
    handmade = gpu(0, instances=" ".join(f"1g.5gb@{k}" for k in range(7)))
    refused = one(handmade, PAIR, owned=EMPTY)
    assert refused.blocked is not None
    assert refused.blocked.reason == "ForeignInstances"
    assert "foreignInstances: Adopt takes them over" in refused.blocked.message
    adopted = one(handmade, PAIR, owned=EMPTY, foreign="Adopt")
    assert adopted.blocked is None
    assert len(adopted.destroy) == 7
    assert shown(adopted.create) == "3g.20gb@0 3g.20gb@4"


def test_a_foreign_instance_that_fits_the_wish_is_kept_either_way():
    for policy in ("Refuse", "Adopt"):
        found = one(gpu(0, instances="3g.20gb@4"), PAIR, owned=EMPTY, foreign=policy)
        assert (shown(found.keep), shown(found.create), found.blocked) == ("3g.20gb@4", "3g.20gb@0", None)


def test_the_reason_is_in_use_as_soon_as_something_of_ours_blocks_too():
    seen = gpu(0, instances="1g.5gb@0 1g.5gb@4", busy="1g.5gb@0")
    found = one(seen, Wish(True, (("7g.40gb", 1),)), owned=geometry("1g.5gb@0", A100_40))
    assert found.blocked is not None
    assert found.blocked.reason == "InUse"
    assert reasons(found) == [("InUse", "1g.5gb@0", 100), ("ForeignInstances", "1g.5gb@4", None)]


@pytest.mark.parametrize("resetless", [False, True])
def test_mig_on_changes_the_mode_first_and_resets_where_the_architecture_needs_it(resetless):
    found = one(gpu(0, resetless=resetless), PAIR)
    assert (found.mode_change, found.reset) == ("Enable", not resetless)
    assert shown(found.create) == "3g.20gb@0 3g.20gb@4"
    assert found.target == Layout(True, frozenset(found.create))
    assert NO_PEER_TO_PEER in found.notes


@pytest.mark.parametrize("resetless", [False, True])
def test_mig_off_destroys_all_and_changes_the_mode(resetless):
    found = one(gpu(0, instances=MIXED, resetless=resetless), OFF)
    assert (found.mode_change, found.reset) == ("Disable", not resetless)
    assert set(found.destroy) == geometry(MIXED, A100_40)
    assert found.target == Layout(False)
    assert found.notes == ()


def test_mig_off_waits_for_what_is_in_use_and_for_what_is_foreign():
    busy = one(gpu(0, instances=MIXED, busy="1g.5gb@3"), OFF)
    assert reasons(busy) == [("InUse", "1g.5gb@3", 103)]
    foreign = one(gpu(0, instances="1g.5gb@3"), OFF, owned=EMPTY)
    assert foreign.blocked is not None
    assert foreign.blocked.reason == "ForeignInstances"
    assert one(gpu(0, instances="1g.5gb@3"), OFF, owned=EMPTY, foreign="Adopt").blocked is None


@pytest.mark.parametrize("wish", [PAIR, OFF])
def test_a_client_of_the_whole_gpu_blocks_a_mode_change(wish):
    instances = None if wish.mig else "3g.20gb@4"
    seen = gpu(0, instances=instances, in_use=True, holders=(Holder(9, "nvidia-persistenced"),))
    found = one(seen, wish)
    assert reasons(found) == [("InUse", None, 9)]
    assert found.blocked is not None
    assert "the GPU as a whole by pid 9 (nvidia-persistenced)" in found.blocked.message


def test_a_client_of_the_whole_gpu_blocks_the_first_instance_but_not_another():
    clients: dict[str, Any] = {"in_use": True, "holders": (Holder(9),)}
    assert reasons(one(gpu(0, instances="", **clients), PAIR)) == [("InUse", None, 9)]
    assert one(gpu(0, instances="3g.20gb@4", **clients), PAIR).blocked is None


def test_a_gpu_in_use_by_nobody_known_blocks_a_mode_change():
    assert reasons(one(gpu(0, in_use=True), PAIR)) == [("InUse", None, None)]


@pytest.mark.parametrize(
    ("mode", "wish", "change", "reset"),
    [
        (MigMode(False, True), OFF, "Disable", False),
        (MigMode(True, False), Wish(True, (), True), "Enable", False),
        (MigMode(False, True), Wish(True, (), True), "Enable", True),
        (MigMode(True, False), OFF, "Disable", True),
    ],
)
def test_a_pending_mode_is_called_off_or_finished(mode, wish, change, reset):
    found = one(gpu(0, mode=mode), wish)
    assert (found.mode_change, found.reset) == (change, reset)
    assert "pending" in found.notes[0]


def test_a_pending_mode_that_is_called_off_needs_nobody_gone():
    assert one(gpu(0, mode=MigMode(False, True), in_use=True), OFF).blocked is None


def test_without_a_profile_list_only_the_mode_change_is_said():
    wish = UnknownYet(("7×1g.5gb",), "known once MIG is on")
    found = plan_gpu(gpu(0, board=None), wish, EMPTY)
    assert (found.mode_change, found.create, found.target, found.unknown_yet) == ("Enable", (), None, True)
    assert "known once MIG is on" in found.notes


@pytest.mark.parametrize("wish", [PAIR, OFF])
def test_an_unhealthy_gpu_blocks_only_where_there_is_something_to_do(wish):
    seen = gpu(0, instances=MIXED, trouble="needs a reset: row remap pending")
    found = one(seen, wish)
    assert found.blocked is not None
    assert found.blocked.reason == "GPUUnhealthy"
    assert "row remap pending" in found.blocked.message
    assert one(seen, Wish(True, counts_of(seen.geometry))).blocked is None


def test_a_lost_gpu_is_blocked_as_unhealthy():
    lost = SeenGpu(uuid(3), 3, "", "", 0, None, lost=True)
    found = preview(plan(everywhere({"3g.20gb": 2})), [gpu(0), lost], {}).gpus[1]
    assert found.refused is None
    assert found.blocked is not None
    assert found.blocked.reason == "GPUUnhealthy"
    assert "fell off the bus" in found.blocked.message


def test_mig_off_on_a_gpu_that_cannot_do_mig_is_nothing_to_do():
    found = plan_gpu(not_capable(), OFF, EMPTY)
    assert not found.changes
    assert (found.blocked, found.refused) == (None, None)


@pytest.mark.parametrize("compute", ["none", "narrow"])
def test_an_idle_instance_without_a_whole_compute_instance_is_kept_and_repaired(compute):
    seen = gpu(0, instances=(there(at("3g.20gb@4", A100_40), compute=compute),))
    found = one(seen, PAIR)
    assert (shown(found.keep), shown(found.repair), shown(found.create)) == ("3g.20gb@4", "3g.20gb@4", "3g.20gb@0")
    assert found.blocked is None


def test_a_repair_alone_is_something_to_do():
    seen = gpu(0, instances=(there(at("7g.40gb@0", A100_40), compute="none"),))
    assert one(seen, Wish(True, (("7g.40gb", 1),))).changes


def test_an_instance_in_use_through_narrower_compute_instances_blocks():
    seen = gpu(0, instances=(there(at("3g.20gb@4", A100_40), 55, compute="narrow"),))
    assert reasons(one(seen, PAIR)) == [("InUse", "3g.20gb@4", 55)]


def test_a_foreign_instance_is_completed_but_its_compute_instances_are_not_taken_away():
    for compute, blocked in (("none", False), ("narrow", True)):
        seen = gpu(0, instances=(there(at("3g.20gb@4", A100_40), compute=compute),))
        assert (one(seen, PAIR, owned=EMPTY).blocked is not None) == blocked
        assert one(seen, PAIR, owned=EMPTY, foreign="Adopt").blocked is None


def test_a_rollback_goes_to_exact_places():
    goal = Layout(True, geometry("3g.20gb@0 1g.5gb@4", A100_40))
    seen = gpu(0, instances="3g.20gb@4 1g.5gb@0")
    found = plan_layout(seen, goal, seen.geometry)
    assert (shown(found.destroy), shown(found.create), found.target) == (
        "1g.5gb@0 3g.20gb@4",
        "3g.20gb@0 1g.5gb@4",
        goal,
    )
    assert not plan_layout(seen, seen.layout, EMPTY).changes


def test_a_rollback_respects_what_is_in_use_and_what_is_foreign():
    seen = gpu(0, instances=MIXED, busy="1g.5gb@3")
    found = plan_layout(seen, Layout(False), seen.geometry)
    assert (found.mode_change, reasons(found)) == ("Disable", [("InUse", "1g.5gb@3", 103)])
    foreign = plan_layout(gpu(0, instances=MIXED), Layout(True), EMPTY)
    assert foreign.blocked is not None
    assert foreign.blocked.reason == "ForeignInstances"


def test_a_rollback_to_a_layout_that_cannot_exist_is_refused():
    overlapping = plan_layout(gpu(0), Layout(True, geometry("3g.20gb@0 1g.5gb@3", A100_40)), EMPTY)
    assert overlapping.refused is not None
    elsewhere = plan_layout(gpu(0, "NVIDIA A100-SXM4-80GB"), Layout(True, geometry("3g.20gb@0", A100_40)), EMPTY)
    assert elsewhere.refused is not None
    assert "3g.20gb@0 cannot exist on NVIDIA A100-SXM4-80GB" in elsewhere.refused.message
    incapable = plan_layout(not_capable(), Layout(True), EMPTY)
    assert incapable.refused is not None
    assert incapable.refused.reason == "NotCapable"


def test_every_gpu_of_the_node_is_listed_by_index():
    found = preview(plan({"gpus": {"indices": [1]}, "mig": "Disabled"}), [gpu(2), gpu(0), gpu(1), not_capable(3)], {})
    assert [(g.index, g.rule) for g in found.gpus] == [(0, None), (1, 0), (2, None), (3, None)]


TABLE = table_of(A100_40)
SETS = st.sampled_from(TABLE.sets)
PARTS = st.sampled_from(["whole", "none", "narrow"])


@st.composite
def states(draw: st.DrawFn) -> tuple[SeenGpu, Geometry]:
    """A GPU in any state that can be, and the instances of it that are ours."""
    found = []
    owned = set()
    for instance in sorted(TABLE.geometry(draw(SETS).bits)):
        pid = draw(st.sampled_from([None, None, 5]))
        found.append(there(instance, pid, draw(PARTS)))
        if draw(st.booleans()):
            owned.add(instance)
    on = bool(found) or draw(st.booleans())
    mode = MigMode(on, draw(st.sampled_from([on, on, not on])))
    return gpu(
        0, instances=tuple(found), mode=mode, in_use=draw(st.booleans()), resetless=draw(st.booleans())
    ), frozenset(owned)


@settings(max_examples=500, deadline=None)
@given(states(), SETS, st.booleans(), st.sampled_from(["Refuse", "Adopt"]))
def test_in_any_state_nothing_in_use_or_foreign_is_touched_unless_it_is_said_to_block(state, wanted, mig, policy):
    seen, owned = state
    wish = Wish(mig, wanted.counts if mig else (), True)
    found = plan_gpu(seen, wish, owned, policy)
    protected = seen.busy | (seen.geometry - owned if policy == "Refuse" else EMPTY)
    touched = protected & frozenset(found.destroy)
    blocking = {b.instance for b in found.blocked_by}
    assert touched <= blocking
    assert seen.busy & frozenset(found.repair) <= blocking
    assert frozenset(found.keep) | frozenset(found.destroy) == seen.geometry
    assert found.target is not None
    assert found.target.instances == frozenset(found.keep) | frozenset(found.create)
    assert counts_of(found.target.instances) == wish.counts
    assert found.target.mig == mig
    assert (found.mode_change is None) == (seen.mode == MigMode(mig, mig))
    assert found.blocked is None or found.changes


@settings(max_examples=200, deadline=None)
@given(states(), SETS, st.booleans())
def test_after_the_steps_there_is_nothing_left_to_do(state, wanted, mig):
    seen, owned = state
    wish = Wish(mig, wanted.counts if mig else (), True)
    found = plan_gpu(seen, wish, owned, "Adopt")
    assert found.target is not None
    then = gpu(
        0,
        instances=tuple(there(i) for i in sorted(found.target.instances)),
        mode=MigMode(mig, mig),
        resetless=seen.resetless,
    )
    assert not plan_gpu(then, wish, then.geometry).changes
    assert not plan_layout(then, found.target, then.geometry).changes
