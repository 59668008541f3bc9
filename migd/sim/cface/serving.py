"""The server: it owns one simulated machine, and answers every program that has the library under its driver root."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from migd.sim.cface import wire
from migd.sim.cface.building import NAME, library
from migd.sim.cface.connections import Link
from migd.sim.cface.event_sets import EventSets
from migd.sim.cface.holding import drop_holds
from migd.sim.cface.installing import place_library
from migd.sim.cface.peers import Peer
from migd.sim.cface.programs import Program
from migd.sim.cface.records import Records
from migd.sim.cface.sessions import Session
from migd.sim.errors import SimulationError
from migd.sim.host import SimHost
from migd.sim.machine import Machine
from migd.sim.processes import prune_clients

LOOK_S: Final = 0.25
"""How late it is seen that the machine was changed behind the server, or that a process has ended."""
JOIN_S: Final = 5.0


class AlreadyServedError(SimulationError):
    """Another server serves under this driver root."""


class Server:
    """Serves one machine under one driver root: the library and the socket; a thread for each connection.

    changed: called at the start and whenever the machine looks different to a program, before a call that changed it
    is answered. trusting: believe what clients state about themselves; for tests only.
    """

    def __init__(
        self,
        host: SimHost,
        root: Path,
        changed: Callable[[Machine], None] = lambda _machine: None,
        *,
        trusting: bool = False,
    ) -> None:
        self.host = host
        self.core = host.core
        self.root = Path(root)
        self.trusting = trusting
        self.records = Records()
        self.troubles: list[str] = []
        self._sets = EventSets(self.root)
        self._changed = changed
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._seen: Hashable = None
        self._programs: dict[tuple[object, ...], Program] = {}
        self._links: dict[Link, threading.Thread] = {}
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._held: IO[str] | None = None

    # ---- its life

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return wire.socket_of(self.root)

    @property
    def library(self) -> Path:
        """Where programs find the library."""
        return self.root / "usr" / "lib" / f"{platform.machine()}-linux-gnu" / NAME

    @property
    def links(self) -> tuple[Link, ...]:
        """Its connections."""
        with self._lock:
            return tuple(self._links)

    def start(self) -> None:
        """Put the library in place, and serve. AlreadyServedError, NotBuiltError, OSError where that cannot be."""
        built = library()
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._held = (self.socket.parent / "nvml.lock").open("w")
        try:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyServedError(f"{self.root}: a server is at work there already: end it first") from None
            place_library(built, self.library, self.host.snapshot().switches.driver_version)
            self._stopping.clear()
            self.core.read(self._sets.load)
            self.core.change(drop_holds)
            self.look()
            self._listener = wire.listen(self.socket)
        except BaseException:
            self._held.close()
            raise
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all connections. Sessions of programs that live stay the machine's, for the next server of it."""
        self._stopping.set()
        if self._listener is None or self._held is None:
            return
        self.socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            links = dict(self._links)
        for link in links:
            link.cut()
        for thread in (*self._threads, *links.values()):
            if thread is not threading.current_thread():
                thread.join(JOIN_S)
        self._programs.clear()
        self._held.close()
        self._listener = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- programs

    def stated(self, peer: Peer, pid: int, privilege: str) -> Peer:
        """The program as it says that it is."""
        return replace(peer, pid=pid, started=None, real=False, privilege=privilege or "root", command="", container="")

    def join(self, peer: Peer, token: int, link: Link) -> Program:
        """The program that a new connection belongs to."""
        seen = peer.real and peer.started is not None
        key: tuple[object, ...] = (peer.pid, peer.started) if seen else (peer.pid, "copy", token)
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                session = Session(self.core, "0", peer.pid, peer.privilege, peer.command, peer.container, peer.started)
                if seen and peer.pid != os.getpid() and self.core.change(session.resume):
                    self._sets.restore(session)
                program = self._programs[key] = Program(key, peer, session)
            program.connections.add(link)
            return program

    def leave(self, program: Program, link: Link) -> None:
        """A connection of it has ended."""
        with self._lock:
            program.connections.discard(link)
            if program.left and not self._stopping.is_set():
                self._forget(program)

    def _forget(self, program: Program) -> None:
        if self._programs.get(program.key) is program:
            del self._programs[program.key]
        self.core.change(program.session.close)
        self._sets.save(lambda: {program.session.client: {"sets": {}}})

    def listening(self) -> None:
        """A program has made an event set, changed one, or heard from one."""
        with self._lock:
            sessions = [program.session for program in self._programs.values()]

        def listened(machine: Machine) -> dict[str, Any]:
            return {one.client: one.listened() for one in sessions if one.client in machine.clients}

        self._sets.save(lambda: self.core.read(listened))

    # ---- what happens to the machine

    def look(self) -> None:
        """Tell who wants to know, if the machine looks different from when it was last told."""
        with self._looking:
            shape, machine = self.core.read(self._glance)
            if machine is None:
                return
            try:
                self._changed(machine)
                self._seen = shape
            except Exception as error:  # tried again at the next look
                self.troubled(f"what follows the machine failed: {error!r}")

    def _glance(self, machine: Machine) -> tuple[Hashable, Machine | None]:
        shape = shape_of(machine)
        return shape, None if shape == self._seen else copy.deepcopy(machine)

    def troubled(self, what: str) -> None:
        """Something that must not happen did: remembered, and said on stderr; once as long as it is the same."""
        if self.troubles[-1:] == [what]:
            return
        self.troubles.append(what)
        sys.stderr.write(f"migd sim serve: {what}\n")

    # ---- its threads

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError:
                if self._stopping.wait(0.05):  # no descriptor left, or the end
                    return
                continue
            made = Link(self, link)
            thread = threading.Thread(target=self._serve, args=(made,), daemon=True)
            with self._lock:
                self._links[made] = thread
            thread.start()
            if self._stopping.is_set():
                made.cut()

    def _serve(self, link: Link) -> None:
        try:
            link.run()
        except Exception as error:
            self.troubled(f"a connection failed: {error!r}")
        finally:
            with self._lock:
                self._links.pop(link, None)

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self.look()
                self.core.change(prune_clients)  # who ended while no server was there
                with self._lock:
                    for program in [p for p in self._programs.values() if p.over]:
                        self._forget(program)
            except Exception as error:
                self.troubled(f"the machine cannot be read: {error!r}")


def shape_of(machine: Machine) -> Hashable:
    """All of a machine that a program can see in files: GPUs, modes and instances."""
    return (
        machine.session,
        machine.switches.driver_version,
        tuple(
            (
                *(gpu.uuid, gpu.name, gpu.index, gpu.minor, gpu.bus_id, gpu.mig, gpu.lost, gpu.generation),
                tuple(
                    (i.serial, i.gi_id, i.start, i.size, tuple((c.serial, c.ci_id, c.uuid) for c in i.compute))
                    for i in gpu.instances
                ),
            )
            for gpu in machine.gpus
        ),
    )
