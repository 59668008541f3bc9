"""Containers that are only said to run: they compute on their pod's devices, end, crash and start again as it says."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from controlplane.api import Json
from controlplane.nodes_pods import (
    CRASHES_AFTER_S,
    LASTS_S,
    PROGRAM,
    ContainerState,
    annotation,
    container_id,
    now_text,
    uid_of,
)
from migd.sim import SimHost
from migd.sim.errors import SimulationError

_BACKOFF_MAX_S: Final = 300.0


class Simulated:
    """Those of one pod; they are all alike, as its annotations say when it is admitted.

    names: of the containers, perhaps none. host: the machine that they compute on, None for none. backoff_s: before
    the first restart; it doubles each time. say: takes a line for the log.
    """

    def __init__(
        self, pod: Json, names: Sequence[str], host: SimHost | None, backoff_s: float, say: Callable[[str], None]
    ) -> None:
        self.names = tuple(names)
        self.restarts = 0
        self._pod = pod
        self._host = host
        self._say = say
        self._backoff_s = backoff_s
        self._lasts_s = _seconds(pod, LASTS_S)
        self._crashes_s = _seconds(pod, CRASHES_AFTER_S)
        self._policy = str(pod["spec"].get("restartPolicy", "Always"))
        self._kind = "waiting"
        self._since = ""
        self._exit_status = 0
        self._over_at_s = math.inf
        self._crash_at_s = math.inf
        self._again_at_s = 0.0
        self._pids: list[int] = []

    @property
    def running(self) -> bool:
        """Whether they run now."""
        return self._kind == "running"

    def step(self, now_s: float, devices: Iterable[str], hinders: str) -> Mapping[str, ContainerState]:
        """Start, crash or end them, as is due; how they are then. hinders: why none can be started, "" for nothing."""
        if self._kind == "waiting" and now_s >= self._again_at_s and not hinders:
            self._start(now_s, devices)
        if self._kind == "running" and now_s >= self._over_at_s:
            self._finish("terminated", 0)
        if self._kind == "running" and now_s >= self._crash_at_s:
            self._crash(now_s)
        return {name: self._state(name, now_s, hinders) for name in self.names}

    def stop(self) -> None:
        """What they compute ends."""
        for pid in self._pids:
            with contextlib.suppress(SimulationError):  # ended with a reboot
                assert self._host is not None
                self._host.end_process(pid)
        self._pids.clear()

    def _start(self, now_s: float, devices: Iterable[str]) -> None:
        if self._over_at_s == math.inf:
            self._over_at_s = now_s + self._lasts_s
        self._crash_at_s = now_s + self._crashes_s
        self._kind = "running"
        self._since = now_text()
        if self.names and annotation(self._pod, PROGRAM) != "idle":
            self._compute(devices)

    def _compute(self, devices: Iterable[str]) -> None:
        """Run something on the devices, so that NVML shows them in use."""
        if self._host is None:
            return
        metadata = self._pod["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        made = self._made(self.names[0])
        for device in sorted(devices):
            at = place_of(self._host, device)
            if at is None:
                self._say(f"{name} was given {device}, which is not there")
                continue
            with contextlib.suppress(SimulationError):  # a GPU without MIG that has it on by now
                self._pids.append(self._host.start_process(*at, command=f"python {name}", container=made))

    def _crash(self, now_s: float) -> None:
        if self._policy == "Never":
            self._finish("terminated", 1)
            return
        self._finish("waiting", 1)
        self.restarts += 1
        self._again_at_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)

    def _finish(self, kind: str, exit_status: int) -> None:
        self.stop()
        self._kind = kind
        self._since = now_text()
        self._exit_status = exit_status

    def _made(self, name: str) -> str:
        return container_id(uid_of(self._pod), name, self.restarts)

    def _state(self, name: str, now_s: float, hinders: str) -> ContainerState:
        if self._kind == "running":
            return ContainerState(
                "running", ready=True, restarts=self.restarts, since=self._since, container_id=self._made(name)
            )
        if self._kind == "terminated":
            done = self._exit_status, self._made(name)
            return ContainerState("terminated", "", "", False, self.restarts, self._since, *done)
        if now_s < self._again_at_s:
            return ContainerState("waiting", "CrashLoopBackOff", restarts=self.restarts)
        return ContainerState("waiting", "CreateContainerConfigError", hinders, restarts=self.restarts)


def _seconds(pod: Json, key: str) -> float:
    said = annotation(pod, key)
    return float(said) if said else math.inf


def place_of(host: SimHost, device: str) -> tuple[int, int | None] | None:
    """Index of the GPU and first memory slice of the instance, None for a whole GPU; None where it is not there."""
    for gpu in host.snapshot().gpus:
        if gpu.uuid == device:
            return gpu.index, None
        for instance in gpu.instances:
            if any(compute.uuid == device for compute in instance.compute):
                return gpu.index, instance.start
    return None
