"""A plan's preview: grouped, bounded, and named by a digest that carries what an approval covers."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.migd_operator.fleets import HALVES, board_of_a100, fleet, gpu, node, plan, turn

from migd.mig.table import table_of
from migd.plans.partitions import Partition, partition_document, partition_of, written
from migd.plans.statuses import PlanPreview, Totals
from migd_operator.facts import APPROVED, Fleet
from migd_operator.previewing import approved


def preview(found: Fleet) -> PlanPreview:
    """The preview of the only plan, read back from what was written."""
    status = turn(found).plans[0].status
    assert status.preview is not None
    return status.preview


def of_model(one: Partition, model: str) -> Partition:
    document = partition_document(one)
    document["status"]["board"]["model"] = model
    return partition_of(document)


def test_gpus_for_which_the_same_is_done_are_one_group_with_some_of_their_nodes():
    names = [f"n{k}" for k in range(8)]
    gpus = [gpu(n, k, layout="7g.80gb") for n in names for k in range(2)]
    (group,) = preview(fleet([plan(instances=HALVES)], [node(n) for n in names], gpus)).groups
    assert (group.gpus, group.nodes, group.example_nodes) == (16, 8, tuple(names[:5]))
    assert (group.from_layout, group.to) == ("7g.80gb", "2×3g.40gb")
    assert [(p.profile, p.count) for p in group.destroy] == [("7g.80gb", 1)]
    assert [(p.profile, p.count) for p in group.create] == [("3g.40gb", 2)]


def test_what_is_in_use_blocks_under_wait_for_idle_and_is_counted_under_evict():
    busy = gpu(layout="7g.80gb", busy=["7g.80gb@0"])
    waits = preview(fleet([plan()], [node()], [busy]))
    assert (waits.groups[0].reason, waits.totals.blocked, waits.totals.evict) == ("InUse", 1, 0)
    evicts = preview(fleet([plan(disruption={"policy": "Evict"})], [node()], [busy]))
    assert (evicts.groups[0].reason, evicts.totals.blocked, evicts.totals.evict) == (None, 0, 1)
    foreign = preview(fleet([plan()], [node()], [gpu(layout="7g.80gb", foreign=True)]))
    assert foreign.groups[0].reason == "ForeignInstances"


LAYOUTS = ["7g.80gb", "3g.40gb 3g.40gb", "4g.40gb 2g.20gb 1g.10gb", "3g.40gb 2g.20gb 1g.10gb", "2g.20gb 1g.10gb"]
WISHES = [
    HALVES,
    [{"profile": "1g.10gb", "count": 4}, {"profile": "3g.40gb", "count": 1}],
    [{"profile": "2g.20gb", "count": 3}],
    [{"profile": "3g.40gb", "count": 1}],
    [{"profile": "1g.10gb", "count": 7}],
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LAYOUTS), st.sampled_from(WISHES), st.data())
def test_the_fewest_instances_in_use_go_that_any_layout_of_the_wish_needs(
    layout: str, wish: list[dict[str, object]], data: st.DataObject
):
    there = gpu(layout=layout).owned
    busy = data.draw(st.sets(st.sampled_from(sorted(there, key=str))))
    one = gpu(layout=layout, busy=[str(i) for i in busy])
    found = preview(fleet([plan(instances=wish, disruption={"policy": "Evict"})], [node()], [one])).totals
    table = table_of(board_of_a100())
    counts = tuple(sorted((str(w["profile"]), int(str(w["count"]))) for w in wish))
    used = table.bits_of(busy)
    assert used is not None
    fewest = min((used & ~layout.bits).bit_count() for layout in table.with_counts(counts))
    assert found.evict == fewest
    assert (found.blocked, found.refused) == (0, 0)
    assert found.destroy + found.keep == len(there)
    assert found.create + found.keep == sum(number for _, number in counts)
    assert found.destroy >= found.evict


def test_who_holds_a_gpu_as_a_whole_goes_for_a_change_of_mode_and_instances_of_others_stay():
    evicts = {"disruption": {"policy": "Evict"}}
    document = partition_document(gpu(layout=None))
    document["status"]["observed"]["busy"] = True
    whole = partition_of(document)
    assert preview(fleet([plan()], [node()], [whole])).groups[0].reason == "InUse"
    found = preview(fleet([plan(**evicts)], [node()], [whole]))
    assert (found.totals.evict, found.totals.blocked, found.groups[0].mode_change) == (1, 0, "Enable")
    off = gpu(layout="3g.40gb 3g.40gb", busy=["3g.40gb@0"])
    assert preview(fleet([plan(instances=None, **evicts)], [node()], [off])).totals.evict == 1
    foreign = gpu(layout="7g.80gb", busy=["7g.80gb@0"], foreign=True)
    found = preview(fleet([plan(**evicts)], [node()], [foreign]))
    assert (found.totals.evict, found.groups[0].reason) == (0, "ForeignInstances")


def test_an_approval_lapses_when_more_must_go_and_not_when_fewer_do():
    spec = {"disruption": {"policy": "Evict"}, "approval": "Manual"}
    idle, busy = gpu(layout="7g.80gb"), gpu(layout="7g.80gb", busy=["7g.80gb@0"])
    asking = plan(**spec)
    few, many = (preview(fleet([asking], [node()], [one])) for one in (idle, busy))
    assert not approved(replace(asking, annotations={APPROVED: few.digest}), many)
    assert approved(replace(asking, annotations={APPROVED: many.digest}), few)


def test_modes_and_resets_are_told():
    found = preview(fleet([plan()], [node()], [gpu(layout=None)]))
    assert (found.totals.mode_changes, found.totals.resets) == (1, 1)
    assert (found.groups[0].mode_change, found.groups[0].reset) == ("Enable", True)


def test_what_is_as_wished_already_is_counted_and_not_listed():
    found = preview(fleet([plan(instances=HALVES)], [node()], [gpu(layout="3g.40gb 3g.40gb")]))
    assert found.groups == ()
    assert (found.totals.unchanged, found.totals.gpus, found.totals.nodes) == (1, 0, 0)


def test_at_most_fifty_groups_are_listed_and_the_object_stays_small():
    names = [f"node-{k:03}-{'x' * 240}" for k in range(70)]
    gpus = [of_model(gpu(f"n{k}", layout="7g.80gb"), f"{k} " + "M" * 250) for k in range(70)]
    gpus = [
        p.model_copy(update={"spec": p.spec.model_copy(update={"node_name": n, "node_uid": f"uid-{n}"})})
        for p, n in zip(gpus, names, strict=True)
    ]
    found = preview(fleet([plan()], [node(n) for n in names], gpus))
    assert len(found.groups) == 50
    assert found.groups_left_out == 20
    assert found.totals.gpus == 70
    assert len(json.dumps(written(found), ensure_ascii=False).encode()) < 256 * 1024


def test_the_digest_names_the_content_and_the_generation():
    def digest(generation: int, *gpus: Partition) -> str:
        return preview(fleet([plan(generation=generation)], [node()], gpus)).digest

    one, two = gpu(index=0, layout="7g.80gb"), gpu(index=1)
    assert digest(1, one, two) == digest(1, two, one)
    assert len({digest(1, one), digest(2, one), digest(1, two), digest(1, one, two)}) == 4


@given(st.tuples(*[st.integers(0, 3)] * 3), st.tuples(*[st.integers(0, 3)] * 3))
def test_an_approval_holds_exactly_while_nothing_that_it_covers_has_grown(
    then: tuple[int, int, int], now: tuple[int, int, int]
):
    def named(counts: tuple[int, int, int], content: str) -> str:
        return "a" * 16 + content * 16 + "".join(f"{n:08x}" for n in counts)

    given_ = replace(plan(approval="Manual"), annotations={APPROVED: named(then, "b")})
    current = PlanPreview(digest=named(now, "c"), observed_generation=1, totals=Totals())
    assert approved(given_, current) == all(n <= t for n, t in zip(now, then, strict=True))
    other = current.model_copy(update={"digest": "b" + current.digest[1:]})
    assert not approved(given_, other)
