"""The queue of keys; time is a number that the test moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migd.kube.queueing import Backoff, KeyQueue

STEADY = Backoff(first_s=1.0, most_s=8.0, jitter=0.0)


def test_a_key_added_many_times_is_worked_on_once():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    for _ in range(5):
        queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    assert queue.take(0.0) is None
    queue.done("a", 0.0)
    assert (len(queue), queue.next_at_s()) == (0, None)


def test_a_key_is_not_taken_twice_at_once_and_comes_again_if_added_meanwhile():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 1.0)
    assert queue.take(5.0) is None
    queue.done("a", 5.0)
    assert queue.take(5.0) == "a"


def test_the_earliest_of_several_times_counts():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("a", 0.0, 10.0)
    queue.add("a", 0.0, 3.0)
    queue.add("a", 0.0, 7.0)
    assert queue.next_at_s() == 3.0
    assert queue.take(2.9) is None
    assert queue.take(3.0) == "a"
    queue.done("a", 3.0)
    assert queue.take(100.0) is None


def test_who_is_due_longest_comes_first():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("later", 0.0, 2.0)
    queue.add("sooner", 0.0, 1.0)
    queue.add("same", 0.0, 1.0)
    assert [queue.take(9.0) for _ in range(4)] == ["sooner", "same", "later", None]


def test_a_key_comes_back_after_the_time_it_asked_for():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.done("a", 1.0, again_after_s=30.0)
    assert queue.next_at_s() == 31.0


def test_failures_wait_longer_each_time_and_success_forgets_them():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("a", 0.0)
    now, waits = 0.0, []
    for _ in range(5):
        assert queue.take(now) == "a"
        waits.append(queue.failed("a", now))
        now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert queue.take(now) == "a"
    queue.done("a", now)
    queue.add("a", now)
    queue.take(now)
    assert queue.failed("a", now) == 1.0


def test_a_change_brings_a_failed_key_back_early_but_not_before_the_api_server_allows():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("a", 0.0)
    queue.take(0.0)
    assert queue.failed("a", 0.0, at_least_s=5.0) == 5.0
    queue.add("a", 1.0)
    assert queue.next_at_s() == 5.0
    queue.take(5.0)
    queue.failed("a", 5.0)
    queue.add("a", 5.5)
    assert queue.next_at_s() == 5.5


def test_a_forgotten_key_does_not_come():
    queue: KeyQueue[str] = KeyQueue(STEADY)
    queue.add("a", 0.0)
    queue.forget("a")
    assert queue.take(9.0) is None
    queue.add("b", 0.0)
    queue.take(0.0)
    queue.add("b", 0.0)
    queue.forget("b")
    queue.done("b", 0.0)
    assert queue.take(9.0) is None


def test_a_key_that_was_not_taken_cannot_be_done():
    with pytest.raises(AssertionError, match="was not taken"):
        KeyQueue(STEADY).done("a", 0.0)


@given(st.integers(1, 200), st.integers(0, 1000))
def test_a_wait_has_bounds(failures: int, seed: int):
    backoff = Backoff(first_s=0.5, most_s=30.0, jitter=0.5)
    assert 0.5 <= backoff.wait_s(failures, random.Random(seed)) <= 45.0


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "done", "failed"]), st.integers(0, 2), st.floats(0, 5))))
def test_no_key_is_lost_or_doubled_in_any_order_of_calls(steps):
    """Compared with the dumbest queue there is: who was added since it was last taken is still in."""
    queue: KeyQueue[int] = KeyQueue(STEADY)
    now, owed, taken = 0.0, set(), set()
    for what, key, after in steps:
        now += after
        if what == "add":
            queue.add(key, now, after)
            owed.add(key)
        elif what == "take":
            found = queue.take(now)
            if found is not None:
                assert found in owed
                assert found not in taken
                owed.discard(found)
                taken.add(found)
        elif key in taken:
            taken.discard(key)
            if what == "done":
                queue.done(key, now)
            else:
                queue.failed(key, now)
                owed.add(key)
    for key in taken:
        queue.done(key, now)
    later = now + 1e6
    left = []
    while (found := queue.take(later)) is not None:
        left.append(found)
    assert sorted(left) == sorted(owed)
