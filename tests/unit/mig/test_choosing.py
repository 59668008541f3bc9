"""Choosing one option a group at the least total: compared with trying every choice, also where rows are scarce."""

from __future__ import annotations

import random
from functools import reduce
from itertools import product
from operator import or_

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migd.mig.choosing import ROWS_MAX, Choice, Option, cheapest

Groups = list[list[Option]]


def groups(items: int = 7, most: int = 5) -> st.SearchStrategy[Groups]:
    option = st.builds(Option, st.integers(0, (1 << items) - 1), st.integers(0, 12))
    return st.lists(st.lists(option, min_size=1, max_size=most), max_size=most)


def total(items: int, asked: Groups, price: int) -> int:
    """What a choice costs that has just these items; a choice with any other fails."""
    within = [[o.cost for o in options if not o.items & ~items] for options in asked]
    return price * items.bit_count() + sum(map(min, within))


def least(asked: Groups, price: int) -> int:
    return min(
        price * reduce(or_, (o.items for o in choice), 0).bit_count() + sum(o.cost for o in choice)
        for choice in product(*asked)
    )


def hard(seed: int, number: int = 8, items: int = 24) -> Groups:
    """Groups that want three of their seven instances free, each of which two of many items hold."""
    dice = random.Random(seed)
    held = [[1 << dice.randrange(items) | 1 << dice.randrange(items) for _ in range(7)] for _ in range(number)]
    every = [(a, b, c) for a in range(7) for b in range(a) for c in range(b)]
    return [[Option(one[a] | one[b] | one[c], k) for k, (a, b, c) in enumerate(every)] for one in held]


@settings(max_examples=400)
@given(groups(), st.sampled_from([1, 3, 100]))
def test_no_choice_costs_less(asked: Groups, price: int) -> None:
    found = cheapest(asked, price)
    assert found.proven
    assert total(found.items, asked, price) == least(asked, price)


@settings(max_examples=400)
@given(groups(), st.integers(0, 12))
def test_with_few_rows_the_choice_is_the_best_or_said_to_be_unproven(asked: Groups, rows_max: int) -> None:
    found = cheapest(asked, 5, rows_max)
    assert total(found.items, asked, 5) >= least(asked, 5)
    if found.proven:
        assert total(found.items, asked, 5) == least(asked, 5)


def test_a_bound_that_is_met_is_told_and_more_rows_find_no_worse() -> None:
    asked = hard(1)
    price = 10_000
    found = [cheapest(asked, price, rows_max) for rows_max in (8, 512, ROWS_MAX)]
    totals = [total(choice.items, asked, price) for choice in found]
    assert [choice.proven for choice in found] == [False, False, True]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


@pytest.mark.parametrize(("seed", "price"), [(0, 4), (1, 20), (2, 10_000), (12, 20)])
def test_a_hard_question_is_answered_as_by_trying_every_set_of_items(seed: int, price: int) -> None:
    asked = hard(seed, items=16)
    found = cheapest(asked, price)
    assert found.proven
    assert total(found.items, asked, price) == best_of_all(asked, price, items=16)


def test_a_wider_try_finds_what_is_better_by_the_least_there_is() -> None:
    """What the narrow one found leaves rows out of the next, but none that may be better."""
    asked, price = hard(12, items=16), 20
    narrow, whole = cheapest(asked, price, 8 * 64), cheapest(asked, price)
    assert (narrow.proven, whole.proven) == (False, True)
    assert total(narrow.items, asked, price) == total(whole.items, asked, price) + 1


def best_of_all(asked: Groups, price: int, items: int) -> int:
    """The least total over all sets of items that leave each group an option."""
    needed = [{o.items for o in options} for options in asked]
    sets = range(1 << items)
    enough = [have for have in sets if all(any(not n & ~have for n in needs) for needs in needed)]
    return min(total(have, asked, price) for have in enough)


def test_nothing_to_choose_has_no_items() -> None:
    assert cheapest([], 1) == Choice(0, True)
    assert cheapest([[Option(0, 3), Option(0, 2)]], 1) == Choice(0, True)


def test_an_item_that_two_groups_share_is_paid_for_once() -> None:
    shared, one, other = 1, 2, 4
    asked = [[Option(shared, 2), Option(one, 0)], [Option(shared, 2), Option(other, 0)]]
    assert cheapest(asked, 10) == Choice(shared, True)
    assert cheapest(asked, 3) == Choice(one | other, True)
    assert cheapest(asked[:1], 10) == Choice(one, True)


def test_a_group_without_options_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="no choice"):
        cheapest([[Option(1, 0)], []], 1)
