"""The thread that owns NVML: deadlines, a call that hangs, and what reaches the thread that asked."""

from __future__ import annotations

import signal
import threading

import pytest

from migd.nvml import ThreadCaller

SOON = 30.0  # a bound for failing tests only; passing ones never wait for it


def test_results_and_errors_come_back_to_who_asked():
    caller = ThreadCaller()
    assert caller.run(lambda: 42, SOON) == 42
    with pytest.raises(ZeroDivisionError):
        caller.run(lambda: 1 / 0, SOON)
    assert caller.run(lambda: None, SOON) is None


def test_all_calls_run_on_one_thread_that_is_not_ours():
    caller = ThreadCaller()
    threads = {caller.run(threading.get_ident, SOON) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_the_thread_does_not_keep_the_process_alive():
    assert ThreadCaller().run(lambda: threading.current_thread().daemon, SOON)


def test_a_hanging_call_is_named_and_blocks_the_next_ones_until_it_returns():
    caller = ThreadCaller()
    entered, release = threading.Event(), threading.Event()
    ran = []

    def stuck() -> str:
        entered.set()
        release.wait(SOON)
        return "late"

    with pytest.raises(TimeoutError, match="no answer within 0 s: stuck"):
        caller.run(stuck, 0)
    entered.wait(SOON)
    hanging = caller._hanging
    with pytest.raises(TimeoutError, match="an earlier call has still not returned: stuck"):
        caller.run(lambda: ran.append("beside it"), SOON)
    release.set()
    assert hanging.done.wait(SOON)
    assert caller.run(lambda: "next", SOON) == "next"
    assert ran == []


def test_an_interrupt_while_waiting_leaves_the_call_marked_as_hanging():
    caller = ThreadCaller()
    release = threading.Event()
    asker = threading.get_ident()
    told: list[int] = []

    def once(number: int, _frame: object) -> None:
        if not told:
            told.append(number)
            raise KeyboardInterrupt

    def stuck() -> None:
        while not told:  # a signal that comes just before the wait begins does not end it: send another
            signal.pthread_kill(asker, signal.SIGINT)
            release.wait(0.01)
        release.wait(SOON)

    usual = signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):
            caller.run(stuck, SOON)
    finally:
        signal.signal(signal.SIGINT, usual)
    with pytest.raises(TimeoutError, match="an earlier call has still not returned: stuck"):
        caller.run(lambda: None, SOON)
    release.set()


def test_two_askers_take_turns():
    caller = ThreadCaller()
    inside = []
    overlaps = []

    def work() -> None:
        overlaps.extend(inside)
        inside.append(1)
        inside.remove(1)

    askers = [threading.Thread(target=lambda: [caller.run(work, SOON) for _ in range(50)]) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert overlaps == []
