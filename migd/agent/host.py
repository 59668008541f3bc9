"""The real machine under the agent: clock, boot id, GPU reset through nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from migd.agent.ports import ResetRefusedError

RESET_TIMEOUT_S: Final = 120.0


class HostClock:
    """The kernel's monotonic clock; it goes on between processes of one boot."""

    def now_s(self) -> float:
        """Seconds since some moment of this boot."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)


class HostBoot:
    """The kernel's boot id."""

    def boot_id(self) -> str:
        """Of this boot. Source: proc(5), /proc/sys/kernel/random/boot_id."""
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class NvidiaSmiReset:
    """GPU reset by `nvidia-smi --gpu-reset -i UUID`: NVML has no such call.

    program: its path, from the driver root. A run that takes longer than timeout_s is ended with all its children.
    """

    def __init__(self, program: Sequence[str] = ("nvidia-smi",), timeout_s: float = RESET_TIMEOUT_S) -> None:
        self._program = tuple(program)
        self._timeout_s = timeout_s

    def reset(self, gpu_uuid: str) -> None:
        """Reset this GPU; ResetRefusedError with what the program said."""
        try:
            run_program([*self._program, "--gpu-reset", "-i", gpu_uuid], self._timeout_s)
        except ProgramError as error:
            raise ResetRefusedError(str(error)) from error


class ProgramError(Exception):
    """A program could not be run, failed, or did not end; the text says which, and what it said.

    missing: there is no such program.
    """

    def __init__(self, text: str, missing: bool = False) -> None:
        self.missing = missing
        super().__init__(text)


def run_program(command: Sequence[str], timeout_s: float) -> None:
    """Run a program to its end; ProgramError where it fails. One that takes longer is ended with all its children."""
    said = " ".join(command)
    try:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ProgramError(f"cannot run `{said}`: {error.strerror}", missing) from error
    with running:
        try:
            output, _ = running.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # its children too: one of them may be what hangs
            running.communicate()
            raise ProgramError(f"`{said}` did not end within {timeout_s:g} s and was ended") from None
    if running.returncode != 0:
        raise ProgramError(f"`{said}` ended with {running.returncode}: {' '.join(output.split())[:500]}")
