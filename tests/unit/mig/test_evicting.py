"""The fewest pods that must go from a node: cases people meet, and random nodes. Proven in proof/test_evictions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from boards import DOUBLE, ME, at, board, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from migd.mig.boards import Board
from migd.mig.evicting import Eviction, Occupied, fewest
from migd.mig.geometry import EMPTY, GpuInstance, by_start, counts
from migd.mig.profiles import Placement
from migd.mig.table import table_of
from migd.mig.transition import Refusal, Transition, transition

BASIC = board("a100-40gb", ME + DOUBLE)
A30 = board("a30", ME)
H100 = board("h100-sxm-80gb")
SEVEN = "1g@0 1g@1 1g@2 1g@3 1g@4 1g@5 1g@6"


def gpu(
    current: str, wanted: dict[str, int] | None, held: dict[str, str], fixed: str = "", board: Board = BASIC
) -> Occupied:
    """A GPU in short. held: instance -> the pods on it, as words in one text."""
    pods = tuple((instance, frozenset(on.split())) for one, on in held.items() for instance in at(board, one))
    wish = None if wanted is None else counts(wanted)
    return Occupied(board, at(board, current), wish, at(board, fixed), pods)


def pods(*gpus: Occupied) -> set[str]:
    return set(fewest(gpus).pods)


def test_no_pod_goes_where_a_layout_fits_around_all_of_them() -> None:
    found = fewest([gpu("3g@4 1g@0 1g@1", {"3g.20gb": 1, "2g.10gb": 1}, {"3g@4": "train"})])
    assert (found.pods, found.freed, found.destroyed) == (frozenset(), (EMPTY,), 2)
    assert found.proven


def test_nothing_to_change_evicts_nobody() -> None:
    full = {f"1g@{k}": f"pod-{k}" for k in range(7)}
    assert fewest([gpu(SEVEN, {"1g.5gb": 7}, full)] * 2).pods == frozenset()
    assert fewest([]) == Eviction(frozenset(), (), 0)


def test_only_the_pods_on_instances_that_go_are_evicted() -> None:
    """A 3g in the upper half takes the place of three, in the lower half of four."""
    full = {f"1g@{k}": f"pod-{k}" for k in range(7)}
    found = fewest([gpu(SEVEN, {"3g.20gb": 1, "1g.5gb": 4}, full)])
    assert found.pods == {"pod-4", "pod-5", "pod-6"}
    assert found.freed == (at(BASIC, "1g@4 1g@5 1g@6"),)
    assert found.destroyed == 3


def test_idle_instances_go_before_a_pod_does() -> None:
    """More instances are destroyed this way, and nobody is evicted."""
    lower_idle = {"1g@4": "busy"}
    found = fewest([gpu("1g@0 1g@1 1g@2 1g@3 1g@4", {"3g.20gb": 1, "1g.5gb": 1}, lower_idle)])
    assert (found.pods, found.destroyed) == (frozenset(), 4)


def test_one_pod_with_two_instances_goes_before_two_pods_with_one_each() -> None:
    one = {"1g@0": "big", "1g@1": "big", "1g@4": "left", "1g@5": "right"}
    assert pods(gpu("1g@0 1g@1 1g@4 1g@5", {"1g.5gb": 2}, one)) == {"big"}


def test_a_pod_on_several_gpus_frees_all_its_instances_and_spares_others() -> None:
    """Each GPU alone could take either of its pods; together they take the one that is on both."""
    here = gpu("3g@0 3g@4", {"3g.20gb": 1}, {"3g@0": "here", "3g@4": "both"})
    there = gpu("3g@0 3g@4", {"3g.20gb": 1}, {"3g@0": "both", "3g@4": "there"})
    found = fewest([here, there])
    assert found.pods == {"both"}
    assert found.freed == (at(BASIC, "3g@4"), at(BASIC, "3g@0"))


def test_a_pod_on_most_gpus_stays_where_others_must_go_anyway() -> None:
    """Whoever frees most GPUs at once looks best and is not needed: b and c go for two other GPUs and do for all."""
    one = gpu("2g@0 2g@2", {"2g.10gb": 1}, {"2g@0": "a", "2g@2": "b"})
    two = gpu("2g@0 2g@2", {"2g.10gb": 1}, {"2g@0": "a", "2g@2": "c"})
    three = gpu("3g@0", {}, {"3g@0": "b"})
    four = gpu("3g@0", {}, {"3g@0": "c"})
    assert pods(one, two, three, four) == {"b", "c"}


def test_what_an_evicted_pod_holds_elsewhere_is_free_too() -> None:
    goes = gpu("3g@0", {"2g.10gb": 1}, {"3g@0": "wide"})
    stays = gpu("1g@0 3g@4", {"1g.5gb": 1, "3g.20gb": 1}, {"1g@0": "wide", "3g@4": "other"})
    found = fewest([stays, goes])
    assert found.pods == {"wide"}
    assert found.freed == (at(BASIC, "1g@0"), at(BASIC, "3g@0"))
    assert found.destroyed == 1


def test_an_instance_is_free_once_all_pods_on_it_are_gone() -> None:
    """Two pods share 3g@0 and one has 3g@4, so the one goes."""
    assert pods(gpu("3g@0 3g@4", {"3g.20gb": 1}, {"3g@0": "a b", "3g@4": "c"})) == {"c"}
    found = fewest([gpu("3g@0 3g@4", {"3g.20gb": 1}, {"3g@0": "a b", "3g@4": "a"})])
    assert (found.pods, found.freed) == ({"a"}, (at(BASIC, "3g@4"),))


def test_of_equally_few_pods_those_go_that_take_the_fewest_instances_with_them() -> None:
    """A 3g needs one half, and each has one pod: the half with fewer idle instances is taken."""
    wanted, two = {"3g.20gb": 1, "1g.5gb": 2}, {"1g@0": "low", "1g@4": "high"}
    low = fewest([gpu("1g@0 1g@4 1g@5 1g@6", wanted, two)])
    high = fewest([gpu("1g@0 1g@1 1g@2 1g@4", wanted, two)])
    assert (low.pods, low.destroyed) == ({"low"}, 2)
    assert (high.pods, high.destroyed) == ({"high"}, 2)


def test_of_equal_costs_the_better_layout_decides() -> None:
    """One of two single instances has to go: the one whose place is worth more, whatever its pod is called."""
    for low, high in (("a", "z"), ("z", "a")):
        found = fewest([gpu("1g@0 1g@6", {"1g.5gb": 1}, {"1g@0": low, "1g@6": high})])
        way = transition(BASIC, at(BASIC, "1g@0 1g@6"), EMPTY, counts({"1g.5gb": 1}))
        assert isinstance(way, Transition)
        assert found.freed == (frozenset(way.destroy),)


def test_a_gpu_whose_fixed_instance_is_in_the_way_takes_nobody_with_it() -> None:
    stuck = gpu("3g@0 3g@4", {"7g.40gb": 1}, {"3g@4": "a"}, fixed="3g@0")
    fine = gpu("3g@4", {"1g.5gb": 7}, {"3g@4": "b"})
    found = fewest([stuck, fine])
    assert (found.pods, found.freed) == ({"b"}, (None, at(BASIC, "3g@4")))
    refusal = transition(BASIC, stuck.current, stuck.fixed, stuck.wanted or ())
    assert isinstance(refusal, Refusal)
    assert refusal.blocked_by == by_start(at(BASIC, "3g@0"))


def test_a_wish_that_never_fits_takes_nobody() -> None:
    found = fewest([gpu("3g@0", {"3g.20gb": 2, "1g.5gb": 1}, {"3g@0": "a"})])
    assert (found.pods, found.freed, found.destroyed) == (frozenset(), (None,), 0)


def test_what_must_stay_moves_the_choice_to_others() -> None:
    seven = {f"1g@{k}": f"pod-{k}" for k in range(7)}
    del seven["1g@5"]
    assert pods(gpu(SEVEN, {"3g.20gb": 1, "1g.5gb": 3}, seven, fixed="1g@5")) == {"pod-0", "pod-1", "pod-2", "pod-3"}


def test_turning_mig_off_takes_all_pods_and_those_on_the_whole_gpu() -> None:
    found = fewest([replace(gpu("3g@0 1g@4 1g@5", None, {"3g@0": "a", "1g@4": "b"}), whole=frozenset({"w"}))])
    assert found.pods == {"a", "b", "w"}
    assert (found.freed, found.destroyed) == ((at(BASIC, "3g@0 1g@4"),), 3)
    assert fewest([gpu("3g@0 1g@4", None, {"3g@0": "a"}, fixed="1g@4")]).freed == (None,)


def test_turning_mig_on_takes_the_pods_on_the_whole_gpu() -> None:
    """There are no instances yet; and a board that lists no profiles while MIG is off is not asked."""
    off = Occupied(BASIC, EMPTY, counts({"3g.20gb": 2}), EMPTY, (), frozenset({"w", "v"}))
    assert fewest([off]).pods == {"w", "v"}
    assert fewest([Occupied(Board(()), EMPTY, None, EMPTY, (), frozenset({"w"}))]).freed == (EMPTY,)


def test_a_pod_that_goes_anyway_is_used_where_others_could_go() -> None:
    off = Occupied(BASIC, EMPTY, None, EMPTY, (), frozenset({"w"}))
    either = gpu("3g@0 3g@4", {"3g.20gb": 1}, {"3g@0": "w", "3g@4": "a"})
    also = gpu("3g@0 3g@4", {"3g.20gb": 1}, {"3g@0": "a", "3g@4": "w"})
    assert pods(off, either, also) == {"w"}


def test_an_instance_that_the_board_does_not_list_has_to_go_with_its_pod() -> None:
    strange = GpuInstance("6g.30gb", Placement(0, 6))
    seen = Occupied(BASIC, frozenset({strange}), counts({"3g.20gb": 1}), EMPTY, ((strange, frozenset({"a"})),))
    found = fewest([seen])
    assert (found.pods, found.freed, found.destroyed) == ({"a"}, (frozenset({strange}),), 1)
    assert fewest([replace(seen, held=(), fixed=frozenset({strange}))]).freed == (None,)


def test_boards_of_several_kinds_are_one_question() -> None:
    one = gpu("3g@0 3g@4", {"3g.40gb": 1}, {"3g@0": "both", "3g@4": "a"}, board=H100)
    two = gpu("2g@0 2g@2", {"2g.12gb": 1}, {"2g@0": "b", "2g@2": "both"}, board=A30)
    assert pods(one, two) == {"both"}


@pytest.mark.parametrize(
    ("fixed", "held", "message"),
    [
        ("3g@4", {}, "must exist"),
        ("", {"3g@4": "a"}, "must exist"),
        ("3g@0", {"3g@0": "a"}, "must stay"),
        ("", {"3g@0": ""}, "no pod"),
    ],
)
def test_a_gpu_that_makes_no_sense_is_a_bug_of_the_caller(fixed: str, held: dict[str, str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        gpu("3g@0", {}, held, fixed=fixed)


# --- random nodes


@st.composite
def nodes(draw: st.DrawFn) -> list[Occupied]:
    """One to four GPUs with up to eight pods anywhere, and wishes that their boards can be cut into."""
    boards = draw(st.lists(st.sampled_from([BASIC, A30, H100]), min_size=1, max_size=4))
    names = [f"pod-{k}" for k in range(draw(st.integers(1, 8)))]
    node = []
    for one in boards:
        table = table_of(one)
        there = table.members(draw(st.sampled_from(table.sets)).bits)
        fixed, held = set(), []
        for instance in there:
            match draw(st.sampled_from("pppppif")):
                case "p":
                    on_it = draw(st.frozensets(st.sampled_from(names), min_size=1, max_size=2))
                    held.append((instance, on_it))
                case "f":
                    fixed.add(instance)
                case _:
                    pass
        wish = draw(st.none() | st.sampled_from(table.multisets()))
        node.append(Occupied(one, frozenset(there), wish, frozenset(fixed), tuple(held)))
    return node


@settings(max_examples=150)
@given(nodes(), st.randoms(use_true_random=False))
def test_the_order_of_reports_changes_nothing(node: list[Occupied], dice: random.Random) -> None:
    found = fewest(node)
    shuffled = [replace(one, held=tuple(dice.sample(one.held, len(one.held)))) for one in node]
    assert fewest(shuffled) == found
    order = dice.sample(range(len(node)), len(node))
    moved = fewest([node[k] for k in order])
    assert (len(moved.pods), moved.destroyed) == (len(found.pods), found.destroyed)
    assert [freed is None for freed in moved.freed] == [found.freed[k] is None for k in order]


@settings(max_examples=150)
@given(nodes())
def test_what_pods_are_called_changes_nothing(node: list[Occupied]) -> None:
    def other(pods: frozenset[str]) -> frozenset[str]:
        return frozenset(pod[::-1] for pod in pods)

    renamed = [replace(one, held=tuple((instance, other(pods)) for instance, pods in one.held)) for one in node]
    found = fewest(node)
    assert fewest(renamed) == replace(found, pods=other(found.pods))


@settings(max_examples=150)
@given(nodes(), st.data())
def test_a_pod_that_may_not_be_evicted_never_saves_another_one(node: list[Occupied], data: st.DataObject) -> None:
    """Its instances must stay. No fewer pods go then, counted over the GPUs that can still be cut as wished."""
    everyone = sorted({pod for one in node for _, pods in one.held for pod in pods})
    kept = data.draw(st.sampled_from([*everyone, "nobody"]))
    harder = []
    for one in node:
        staying = frozenset(instance for instance, pods in one.held if kept in pods)
        held = tuple((instance, pods) for instance, pods in one.held if instance not in staying)
        harder.append(replace(one, fixed=one.fixed | staying, held=held))
    found = fewest(harder)
    able = [one for one, freed in zip(node, found.freed, strict=True) if freed is not None]
    assert kept not in found.pods
    assert len(found.pods) >= len(fewest(able).pods)


@settings(max_examples=150)
@given(nodes())
def test_nobody_goes_exactly_where_transitions_find_ways_around_all(node: list[Occupied]) -> None:
    around = [transition(one.board, one.current, one.busy, one.wanted or ()) for one in node]
    found = fewest(node)
    able = [way for way, freed in zip(around, found.freed, strict=True) if freed is not None]
    assert (not found.pods) == all(isinstance(way, Transition) for way in able)


@settings(max_examples=150)
@given(nodes())
def test_no_pod_that_goes_could_stay(node: list[Occupied]) -> None:
    found = fewest(node)
    for pod in found.pods:
        others = found.pods - {pod}
        assert any(
            isinstance(transition(g.board, g.current, g.busy - g.free_without(others), g.wanted or ()), Refusal)
            for g, freed in zip(node, found.freed, strict=True)
            if freed is not None
        )


def test_eight_full_gpus_with_pods_across_them_are_proven() -> None:
    """56 instances: each pod on two anywhere, and each GPU may keep any three or four of its seven."""
    listed = sorted(at(BASIC, SEVEN))
    for seed in range(3):
        places = [(k, instance) for k in range(8) for instance in listed]
        random.Random(seed).shuffle(places)
        holder = {place: f"pod-{k // 2}" for k, place in enumerate(places)}
        node = [
            Occupied(
                BASIC,
                frozenset(listed),
                counts({"1g.5gb": 3 + k % 2}),
                EMPTY,
                tuple((instance, frozenset({holder[k, instance]})) for instance in listed),
            )
            for k in range(8)
        ]
        found = fewest(node)
        assert found.proven
        assert 14 <= len(found.pods) < 28 == len(set(holder.values()))
        assert found.destroyed >= 28


def test_the_listing_of_a_model_is_all_it_takes() -> None:
    """Every model of the catalog: two of its smallest, one held; one is wished, and the idle one goes."""
    for model in ("gb200", "h200", "rtx-pro-6000-blackwell", "gh200-96gb", "a30"):
        one = board(model)
        smallest = min(rows(model).values(), key=lambda row: (row["placements"][0][1], row["name"]))["name"]
        twice = next(s for s in table_of(one).with_counts(((smallest, 2),)))
        first, second = table_of(one).members(twice.bits)
        seen = Occupied(one, frozenset({first, second}), ((smallest, 1),), EMPTY, ((first, frozenset({"a"})),))
        assert fewest([seen]) == Eviction(frozenset(), (EMPTY,), 1)
