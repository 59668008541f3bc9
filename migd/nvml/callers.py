"""Callers: who runs a call to NVML, and gives up waiting at a deadline, since no NVML call has one of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Caller(Protocol):
    """Runs functions that call NVML, one at a time."""

    def run(self, fn: Callable[[], T], deadline_s: float) -> T:
        """What fn returns or raises; TimeoutError once deadline_s seconds passed, although fn may go on."""
        ...


class _Job:
    """One function on its way through the worker thread."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn = fn
        self.name = getattr(fn, "__name__", repr(fn))
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            self.result = self.fn()
        except BaseException as error:  # whatever it is, it belongs to the thread that asked
            self.error = error
        finally:
            self.done.set()


class ThreadCaller:
    """One long-lived thread owns NVML; whoever asks waits for it until the deadline.

    A call that outlives its deadline cannot be ended, and nobody may call NVML beside it. So from then on every run
    raises TimeoutError at once, until that call has returned after all; its late answer is thrown away.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hanging: _Job | None = None

    def run(self, fn: Callable[[], T], deadline_s: float) -> T:
        """Run fn on the worker thread and wait for it, at most deadline_s seconds."""
        with self._turn:
            if self._hanging is not None and not self._hanging.done.is_set():
                raise TimeoutError(f"an earlier call has still not returned: {self._hanging.name}")
            job = self._hanging = _Job(fn)  # also what an interrupt while waiting leaves behind
            self._start()
            self._jobs.put(job)
            if not job.done.wait(deadline_s):
                raise TimeoutError(f"no answer within {deadline_s:g} s: {job.name}")
            self._hanging = None
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, because a process must be able to end although its GPU hangs.
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="nvml", daemon=True)
            self._thread.start()


def _work(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().work()
