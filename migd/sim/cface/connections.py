"""One connection: a thread that reads requests, has them done, and answers; what faults mean to the other side."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import pynvml

from migd.sim.cface import wire
from migd.sim.cface.controls import Controller
from migd.sim.cface.handlers import CHANGING, COUNTED, HANDLERS, LISTENING, WAITING, Answer, Handler
from migd.sim.cface.peers import gone, peer_of
from migd.sim.cface.programs import Program, unknown
from migd.sim.errors import SimulatedCrash

if TYPE_CHECKING:
    from migd.sim.cface.serving import Server

SUCCESS: Final = int(pynvml.NVML_SUCCESS)
NOT_SUPPORTED: Final = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
UNINITIALIZED: Final = int(pynvml.NVML_ERROR_UNINITIALIZED)
UNKNOWN: Final = int(pynvml.NVML_ERROR_UNKNOWN)
MISMATCH: Final = int(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
LISTEN_S: Final = 0.05
"""How late an event may be heard."""


class Gone(BaseException):
    """The other side has ended, or we have ended it: nobody waits for an answer any more."""


class Link:
    """One connection. In its thread it stands for the program at the other end: it waits and dies as that does."""

    def __init__(self, server: Server, link: socket.socket) -> None:
        self._server = server
        self._core = server.core
        self._link = link
        self._program: Program | None = None
        self._token = 0
        self._cut = False

    # ---- what may be done to it from elsewhere

    def cut(self) -> None:
        """End it from this side, which says nothing of the process: whoever waits in it wakes up."""
        self._cut = True
        self.shut()

    def shut(self) -> None:
        """End it as if the other side had."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    # ---- the program at the other end, as the machine sees it (core.Caller)

    def wait(self, seconds: float | None) -> None:
        """Let real time pass, or wait for ever; Gone where the other side ends meanwhile."""
        poll = select.poll()
        poll.register(self._link, select.POLLRDHUP)
        if poll.poll(None if seconds is None else max(seconds, 0.0) * 1000):
            raise Gone

    def die(self) -> NoReturn:
        """A "kill" fault: SIGKILL to that program; to one that is only stated, the end of all it has open."""
        program = self._program
        if program is not None:
            peer = program.peer
            if peer.real and peer.started is not None and peer.pid != os.getpid() and not gone(peer):
                os.kill(peer.pid, signal.SIGKILL)
            for connection in tuple(program.connections):
                connection.shut()
        raise Gone

    # ---- its thread

    def run(self) -> None:
        """Answer until the other side ends, or we do."""
        buffer = bytearray(wire.PACKET_MAX)
        controller: Controller | None = None
        self._core.caller = self
        try:
            while size := self._link.recv_into(buffer):
                kind = buffer[0]
                if kind == wire.CALL and self._program is not None:
                    self._link.send(self._answer(self._program, buffer, size))
                elif kind == wire.HELLO and self._program is None:
                    if not self._greet(buffer, size):
                        return
                elif kind == wire.CONTROL:
                    controller = controller or Controller(self._server, peer_of(self._link, self._server.root))
                    wire.tell(self._link.send, controller.do(bytes(buffer[:size])))
                else:
                    return
        except (OSError, Gone, SimulatedCrash):  # a crash at a reset, which a control message asked for
            return
        finally:
            if controller is not None:
                controller.end()
            if self._program is not None:
                if self._cut:
                    self._program.expect_back()
                self._server.leave(self._program, self)
            self._link.close()

    def _greet(self, buffer: bytearray, size: int) -> bool:
        if size != wire.GREETING.size:
            return False
        _, protocol, stated, pid, token, upcoming, privilege = wire.GREETING.unpack_from(buffer)
        if protocol != wire.PROTOCOL:
            self._link.send(wire.REPLY.pack(MISMATCH, 0, 0))
            return False
        peer = peer_of(self._link, self._server.root)
        if stated and self._server.trusting:
            peer = self._server.stated(peer, pid, privilege.rstrip(b"\0").decode())
        self._token = token
        self._program = self._server.join(peer, token, self)
        self._program.answers.meet(token, upcoming)
        self._link.send(wire.REPLY.pack(0, 0, 0))
        return True

    # ---- one request

    def _answer(self, program: Program, buffer: bytearray, length: int) -> bytes:
        _, count, name_size, again, number = wire.REQUEST.unpack_from(buffer)
        at = wire.REQUEST.size
        if length < at or count >= len(wire.ARGUMENTS):
            raise Gone  # this is no request
        fields = wire.ARGUMENTS[count].unpack_from(buffer, at)
        at += wire.ARGUMENTS[count].size
        name = buffer[at : at + name_size].decode("ascii", "replace")
        at += name_size
        values = fields[::3]
        pointees: list[bytes | None] = []
        for size in fields[1::3]:
            pointees.append(bytes(buffer[at : at + size]) if size else None)
            at += size
        if at != length:
            raise Gone
        if name not in COUNTED and not again:
            return self._do(program, name, number, values, pointees)
        if name not in COUNTED:
            found = program.answers.find(self._token, number)
            return found.reply if found is not None else self._do(program, name, number, values, pointees)
        request, fresh = program.answers.begin(self._token, number, bool(again))
        if fresh:
            try:
                request.settle(self._do(program, name, number, values, pointees))
            except BaseException:
                request.settle(unknown(number))
                raise
        while not request.done.wait(LISTEN_S):  # another connection of it is at it
            self.wait(0)
        return request.reply

    def _do(
        self, program: Program, name: str, number: int, values: Sequence[int], pointees: Sequence[bytes | None]
    ) -> bytes:
        began_s = time.time()
        outputs: Sequence[tuple[int, bytes]] = ()
        session = program.session
        gpu = session.gpu_of(values[0].to_bytes(8, "little")) if values else ""
        try:
            handler = HANDLERS.get(name)
            if handler is None:
                self._server.records.missed(name)
                code = NOT_SUPPORTED if session.open else UNINITIALIZED
            elif name in WAITING:
                code, outputs = self._hear(program, handler, values, pointees)
            else:
                code, outputs = handler(session, values, pointees)
        except pynvml.NVMLError as error:
            code = int(error.value)
        except SimulatedCrash:  # the answer is lost, and so is the connection; asked again, nobody knows
            request, _ = program.answers.begin(self._token, number, False)
            request.settle(unknown(number))
            program.expect_back()
            raise Gone from None
        except Exception:
            self._server.troubled(traceback.format_exc())
            code = UNKNOWN
        finally:
            if name in CHANGING:
                self._server.look()
        if code == SUCCESS and name in LISTENING:
            self._server.listening()
        self._server.records.add(began_s, time.time(), program.peer.pid, name, gpu, code)
        reply = wire.REPLY.pack(code, 0, number)
        for place, written in outputs:
            reply += wire.OUTPUT.pack(place, len(written)) + written
        return reply

    def _hear(
        self, program: Program, handler: Handler, values: Sequence[int], pointees: Sequence[bytes | None]
    ) -> Answer:
        """Wait for an event as long as the program wants to, where time is real; else it passes at once."""
        session, read = program.session, self._core.read
        if read(lambda machine: machine.clock) == "virtual":
            return handler(session, values, pointees)
        until = time.monotonic() + (values[2] & 0xFFFFFFFF) / 1000
        while True:
            heard = read(session.newest_event)
            try:
                return handler(session, (values[0], values[1], 0), pointees)
            except pynvml.NVMLError_Timeout:
                while read(session.newest_event) == heard:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise
                    self.wait(min(left, LISTEN_S))
