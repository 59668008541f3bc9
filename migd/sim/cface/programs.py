"""A program that uses the library, as the server knows it: its connections, and what it was answered already."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final, Protocol

import pynvml

from migd.sim.cface.peers import Peer, gone
from migd.sim.cface.sessions import Session
from migd.sim.cface.wire import REPLY

ANSWERS_KEPT: Final = 4096
RECONNECTS_WITHIN_S: Final = 5.0
"""A program whose process cannot be seen, and whose connections we cut, has so long to come back."""


class Connection(Protocol):
    """One connection of a program."""

    def shut(self) -> None:
        """End it as if the other side had."""
        ...


class Pending:
    """One request that must not be done twice: what it was answered, once it was."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply = b""

    def settle(self, reply: bytes) -> None:
        """This is the answer, also when the same request comes again."""
        self.reply = reply
        self.done.set()


class Answers:
    """Which requests were done. A request is known by its library's token and its number there.

    Of a request that comes again it can tell whether it was done, if it came to this server the first time;
    of those before it says that nobody knows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Pending] = OrderedDict()
        self._floors: dict[int, int] = {}

    def meet(self, token: int, upcoming: int) -> None:
        """A library says hello; its next request has this number."""
        with self._lock:
            self._floors.setdefault(token, upcoming)

    def find(self, token: int, number: int) -> Pending | None:
        """The request, where it was kept."""
        return self._kept.get((token, number))

    def begin(self, token: int, number: int, again: bool) -> tuple[Pending, bool]:
        """The request, and whether it is to be done now. One that nobody knows of is settled as UNKNOWN."""
        with self._lock:
            found = self._kept.get((token, number))
            if found is not None:
                return found, False
            made = self._kept[token, number] = Pending()
            while len(self._kept) > ANSWERS_KEPT:
                (old, at), _ = self._kept.popitem(last=False)
                self._floors[old] = max(self._floors.get(old, 0), at + 1)
            if again and number < self._floors.get(token, 0):
                made.settle(unknown(number))
                return made, False
            return made, True


def unknown(number: int) -> bytes:
    """The answer to a request of which nobody knows whether it was done."""
    return REPLY.pack(pynvml.NVML_ERROR_UNKNOWN, 0, number)


class Program:
    """One process: all its threads, connections and copies of the library are one NVML client."""

    def __init__(self, key: tuple[object, ...], peer: Peer, session: Session) -> None:
        self.key = key
        self.peer = peer
        self.session = session
        self.answers = Answers()
        self.connections: set[Connection] = set()
        self._cut_at_s: float | None = None

    def expect_back(self) -> None:
        """A connection of it broke on our side: it is not gone before it had time to come back."""
        self._cut_at_s = time.monotonic()

    @property
    def left(self) -> bool:
        """Whether its last connection ended from its side, as happens when a process ends."""
        return not self.connections and self._cut_at_s is None

    @property
    def over(self) -> bool:
        """Whether its process has ended, as far as can be seen or guessed."""
        if gone(self.peer):
            return True
        if self.connections or self._cut_at_s is None:
            return False
        seen = self.peer.real and self.peer.started is not None
        return not seen and time.monotonic() - self._cut_at_s > RECONNECTS_WITHIN_S
