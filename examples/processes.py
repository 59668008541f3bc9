"""Programs of migd as processes in a simulation: they die at once or are told to end, and are started again.

Of a process that died nothing is heard any more, and it hears nothing: its connection and its calls go with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from migd.agent.node.looping import HungAgentError
from migd.agent.node.running import NoNodeError
from migd.kube.errors import Json
from migd.kube.transport import Answer, Query, Transport
from migd.sim.cluster.server import SimCluster

if TYPE_CHECKING:
    from fleet import Fleet

OPERATOR: Final = "migd-operator"
AGENT: Final = "migd-agent"
RESTART_S: Final = (1.0, 4.0)
"""How long it takes until a process that ended is started again."""


class Program:
    """A program of ours, as a container: it is started again when it ends, unless somebody ended it for good.

    failed: the bug that it died of, if any. lives: how often it was started.
    """

    def __init__(self, name: str, fleet: Fleet, main: Callable[[Life], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self.failed: BaseException | None = None
        self.lives = 0
        self.life: Life | None = None
        self._fleet = fleet
        self._main = main
        self._wanted = 0  # a start that was put off counts only while this is the same
        self._dice = random.Random(f"{fleet.seed} {name}")  # noqa: S311

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return self.life is not None

    def start(self) -> None:
        """Start it; nothing where it runs."""
        if self.life is not None:
            return
        self._wanted += 1
        self.lives += 1
        life = Life(self, self._fleet, self.lives)
        self.life = life
        self._fleet.cluster.stage.say(self.name, "starts")
        life.task = asyncio.ensure_future(self._live(life))

    def kill(self, again: bool = True) -> None:
        """SIGKILL. again: it is started again a little later."""
        self._wanted += 1
        if self.life is not None:
            self._fleet.cluster.stage.say(self.name, "is killed")
            life, self.life = self.life, None
            life.kill()
        if again:
            self._again()

    async def end(self) -> None:
        """SIGTERM, and wait for its end."""
        self._wanted += 1
        life, self.life = self.life, None
        if life is not None and life.task is not None:
            life.stop.set()
            if life.name.startswith(OPERATOR):
                life.task.cancel()
            await asyncio.wait([life.task], timeout=300.0)
            life.kill()

    def _again(self) -> None:
        wanted = self._wanted
        seconds = self._dice.uniform(*RESTART_S)
        self._fleet.cluster.stage.later(seconds, lambda: self.start() if self._wanted == wanted else None)

    async def _live(self, life: Life) -> None:
        why = "ends"
        try:
            await self._main(life)
        except (HungAgentError, NoNodeError, asyncio.CancelledError) as error:
            why = f"ends: {error}" if str(error) else why
        except BaseException as error:
            self.failed = error
            why = f"fails: {error!r}"
        if self.life is life:  # by itself
            self.life = None
            self._fleet.cluster.stage.say(self.name, why)
            self._again()


class Life:
    """One process of a program. After its death nothing of it is heard any more, and it hears nothing."""

    def __init__(self, program: Program, fleet: Fleet, number: int) -> None:
        self.name, self.number = program.name, number
        self.stop = asyncio.Event()
        self.dice = random.Random(f"{fleet.seed} {program.name} {number}")  # noqa: S311
        self.line = Line(fleet.cluster.cluster, program.name, self)
        self.task: asyncio.Task[None] | None = None
        self.at_death: Callable[[], None] = lambda: None
        self._program = program
        self._fleet = fleet
        self._dead = False

    def kill(self) -> None:
        """It is over, wherever it is."""
        if not self._dead:
            self._dead = True
            self.at_death()
            if self.task is not None:
                self.task.cancel()

    def passes(self, where: str) -> None:
        """It is at a point where it may die, or has died."""
        if not self._dead and self._fleet.strikes(self.name, where):
            self.dies()
        if self._dead:
            raise asyncio.CancelledError

    def dies(self) -> NoReturn:
        """It dies by itself, here."""
        if not self._dead:
            self._program.kill()
        raise asyncio.CancelledError


class Line(Transport):
    """A process's connection to the API server. Its user is the program, or the name that a process has of its own."""

    def __init__(self, server: SimCluster, user: str, life: Life) -> None:
        self._server = server
        self._life = life
        self.call_itself(user)

    def call_itself(self, user: str) -> None:
        """Be this user from now on."""
        self._transport = self._server.transport(user)

    async def request(self, method: str, path: str, query: Query, body: Any, content_type: str) -> Answer:
        """See `Transport`."""
        where = f"{method} {path}"
        self._life.passes(f"before {where}")
        answer: Answer = await self._transport.request(method, path, query, body, content_type)
        self._life.passes(f"after {where}")
        return answer

    @asynccontextmanager
    async def watch(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[Json]]:
        """See `Transport`."""
        async with self._transport.watch(path, query) as events:
            yield events
