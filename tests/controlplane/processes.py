"""Child processes in groups of their own, and ports that no other test run takes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

LEASH: Final = Path(__file__).with_name("leash.py")
_PORTS: Final = range(20_000, 32_000)  # below the range that outgoing connections take theirs from
_STOP_S: Final = 10.0
_POLL_S: Final = 0.1


def until(look: Callable[[], bool], within_s: float, every_s: float = _POLL_S) -> bool:
    """Whether a look says yes within so many seconds; it is taken every 100 ms, or so often, and at least once."""
    asking = Retrying(
        retry=retry_if_result(lambda yes: not yes),
        wait=wait_fixed(every_s),
        stop=stop_after_delay(within_s),
        retry_error_callback=lambda _: False,
    )
    return asking(look)


class StartError(Exception):
    """A part of the control plane did not come up; the text has the end of its log."""


class Running(Protocol):
    """A process as `Child` needs it; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Forking(Protocol):
    """Where Python programs come from that need not import anew; see nursery."""

    def start(self, words: Sequence[str], log: int, environment: Mapping[str, str], folder: Path) -> Running: ...


class Child:
    """One program: started, stopped and started again with the same arguments; its output goes on in one log.

    leashed: it dies with the thread that started it. environment: what it sees; None for ours. forking: where it is
    forked from, with which it dies, where it is a program of our Python.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        leashed: bool = True,
        environment: Mapping[str, str] | None = None,
        forking: Forking | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._command = [str(word) for word in command]
        self._leashed = leashed
        self._environment = environment
        self._forking = forking if self._command[0] == sys.executable else None
        self._process: Running | None = None

    @property
    def pid(self) -> int:
        """The process id, also of the process group."""
        assert self._process is not None, f"{self.name} is not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and not self._ended(self._process)

    def start(self) -> None:
        """Start it, in a session and so in a process group of its own."""
        assert not self.running, f"{self.name} runs already"
        leash = [sys.executable, "-S", str(LEASH), str(os.getpid())] if self._leashed else []
        with self.log.open("ab") as log:
            if self._forking is not None:
                seen = os.environ if self._environment is None else self._environment
                self._process = self._forking.start(self._command, log.fileno(), seen, self.log.parent)
                return
            self._process = subprocess.Popen(
                [*leash, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.log.parent,
                env=self._environment,
            )

    def stop(self) -> None:
        """End it and all that it started: SIGTERM, then after 10 s SIGKILL. Nothing to do where it has ended."""
        if self._process is None:
            return
        if self.running:
            self._signal(signal.SIGTERM)
            until(lambda: not self.running, _STOP_S)
        if self.running:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End it at once with SIGKILL, as a crash would."""
        assert self._process is not None, f"{self.name} is not started"
        self._signal(signal.SIGKILL)
        self._process.wait()

    @property
    def exit_status(self) -> int | None:
        """How it ended, a signal as a negative number; None while it runs or has not been started."""
        return None if self._process is None or not self._ended(self._process) else self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it and all that it started a signal, and do not wait for what becomes of it."""
        assert self._process is not None, f"{self.name} is not started"
        self._signal(number)

    def wait_until(self, ready: Callable[[], bool], within_s: float) -> None:
        """Look again and again until it is ready; StartError where it ends first or takes too long."""

        def look() -> bool:
            if not self.running:
                raise StartError(f"{self.name} ended while starting:\n{self.tail()}")
            return ready()

        if not until(look, within_s):
            raise StartError(f"{self.name} was not ready within {within_s:.0f} s:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        """To its group; to nobody once it has ended, since its number may be another process's by then."""
        if self.running:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):  # a moment ago
                os.killpg(self._process.pid, number)

    def _ended(self, process: Running) -> bool:
        """Whether it has ended; what is left of its group is ended before its number is given back."""
        if isinstance(process, subprocess.Popen) and process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # another thread of ours was faster
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return False
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.poll() is not None


class Ports:
    """Loopback ports, each held by a file lock until closed, so that runs side by side never share one."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"migd-ports-{os.getuid()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._held: list[IO[bytes]] = []

    def take(self) -> int:
        """A port that is free now, and that no other `Ports` on this machine gives out."""
        for port in random.sample(_PORTS, k=len(_PORTS)):
            file = (self._folder / str(port)).open("wb")
            if _locked(file) and _free(port):
                self._held.append(file)
                return port
            file.close()
        raise StartError(f"no free port between {_PORTS.start} and {_PORTS.stop}")

    def close(self) -> None:
        """Give all ports back."""
        for file in self._held:
            file.close()
        self._held.clear()


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
