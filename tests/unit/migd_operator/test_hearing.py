"""Whether agents are alive: by our own clock, from what we saw ourselves, and not while we were deaf."""

from __future__ import annotations

from migd.kube.leases import Lease
from migd_operator.hearing import DEAF_S, EXPIRES_S, PAYS_S, Hearing

NEVER = float("-inf")


def lease(renewed: str, holder: str = "n1", duration_s: int = 180) -> Lease:
    return Lease(holder, duration_s, "", renewed, 0)


def heard(at_s: float) -> Hearing:
    """An agent that was seen to renew at this time, after a start at 0."""
    found = Hearing()
    found.lease("n1", lease("1"), 0.0)
    found.listed()
    found.lease("n1", lease("2"), at_s)
    return found


def test_an_agent_is_alive_for_three_minutes_after_a_renewal_and_overdue_ten_minutes_later():
    found = heard(10.0)
    ends_s = 10.0 + EXPIRES_S
    assert (found.agent("n1", 10.0), found.agent("n1", ends_s - 0.1), found.agent("n1", ends_s)) == (
        "alive",
        "alive",
        "silent",
    )
    assert (found.overdue("n1", ends_s + PAYS_S - 0.1), found.overdue("n1", ends_s + PAYS_S)) == (False, True)
    assert found.next_s(["n1"], 11.0) == ends_s
    assert found.next_s(["n1"], ends_s) == ends_s + PAYS_S
    assert found.next_s(["n1"], ends_s + PAYS_S) is None


def test_a_lease_that_was_there_at_the_start_is_unheard_until_it_is_renewed_or_its_time_is_over():
    found = Hearing()
    found.lease("n1", lease("1"), 0.0)
    found.listed()
    found.lease("n1", lease("1"), 50.0)  # the same again, as a later list brings it
    assert (found.agent("n1", 179.0), found.agent("n1", 180.0)) == ("unheard", "silent")
    found.lease("n1", lease("2"), 500.0)
    assert found.agent("n1", 500.0) == "alive"


def test_a_lease_that_is_made_later_is_a_sign_of_life_and_one_that_is_missing_gets_the_same_time():
    found = Hearing()
    found.listed()
    assert (found.agent("n1", 5.0), found.agent("n1", 5.0 + EXPIRES_S)) == ("unheard", "silent")
    found.lease("n1", lease("1"), 300.0)
    assert found.agent("n1", 300.0) == "alive"
    found.lease("n1", None, 310.0)
    assert (found.agent("n1", 311.0), found.agent("n1", 310.0 + EXPIRES_S)) == ("unheard", "silent")


def test_a_lease_that_was_given_up_lasts_like_any_other_since_a_restart_does_that():
    found = heard(10.0)
    found.lease("n1", lease("3", holder="", duration_s=1), 60.0)
    assert found.agent("n1", 60.0 + EXPIRES_S - 0.1) == "alive"


def test_silence_counts_only_while_we_hear_and_all_have_their_time_anew_after_we_were_deaf():
    found = heard(0.0)
    assert found.listening(0.0, 0.0) == 0.0
    assert found.listening(60.0, 80.0) == 80.0  # a bookmark a minute
    assert found.listening(60.0, 2000.0) == 60.0 + DEAF_S
    assert found.agent("n1", found.listening(60.0, 2000.0)) == "alive"
    until_s = found.listening(2000.0, 2000.0)
    assert (found.agent("n1", until_s), found.agent("n1", until_s + EXPIRES_S)) == ("alive", "silent")
