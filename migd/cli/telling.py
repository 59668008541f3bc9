"""What `apply` and `rollback` tell on standard error while they work, and what they say at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from migd.agent.effects import Pause
from migd.agent.records import Outcome
from migd.agent.running import Progress
from migd.cli import printing
from migd.cli.wording import count, places, seconds
from migd.mig.geometry import EMPTY, GpuInstance
from migd.mig.observed import SeenGpu
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
)


class Teller:
    """Listens to a run and tells it in few lines: one for each kind of step in a row on one GPU, with its duration.

    A failure and the beginning of a wait are told at once, each once. On a terminal the step under way is shown in a
    line of its own, which the next one replaces.
    """

    def __init__(self, gpus: Sequence[SeenGpu]) -> None:
        self._index = {gpu.uuid: gpu.index for gpu in gpus}
        self._told: set[tuple[str, str]] = set()
        self._doing: tuple[str, str] | None = None
        self._instances: list[GpuInstance] = []
        self._seconds = 0.0
        self._live = printing.shows_live()

    def __call__(self, step: Progress) -> None:
        """Hear of one step's begin or end."""
        if isinstance(step.effect, Pause):
            self._pause(step.effect, step.done)
        elif not step.done:
            self._begun(step.effect)
        elif step.error:
            self._failed(step.effect, step.error)
        else:
            self._done(step.effect, step.seconds)

    def end(self) -> None:
        """Tell what has not been told yet."""
        self._show("")
        if self._doing is not None:
            uuid, what = self._doing
            self._tell(uuid, f"{what} {places(self._instances)}" if self._instances else what, self._seconds)
        self._doing, self._instances, self._seconds = None, [], 0.0

    def _begun(self, operation: Operation) -> None:
        if self._doing is not None and self._doing != _kind(operation):
            self.end()
        self._show(f"GPU {self._gpu(operation.gpu_uuid)}  {operation} …")

    def _done(self, operation: Operation, took_s: float) -> None:
        self._doing = _kind(operation)
        self._seconds += took_s
        instance = getattr(operation, "instance", None)
        if isinstance(instance, GpuInstance) and instance not in self._instances:
            self._instances.append(instance)

    def _failed(self, operation: Operation, error: str) -> None:
        self.end()
        self._once(operation.gpu_uuid, f"{operation} failed: {error}", error)

    def _pause(self, pause: Pause, done: bool) -> None:
        if not done:
            self.end()
            self._once(pause.uuid, f"waiting: {pause.why}", pause.why)

    def _once(self, uuid: str, text: str, why: str) -> None:
        """A pause after a failure has the failure's text and is not told again."""
        if (uuid, why) not in self._told:
            self._told.add((uuid, why))
            self._tell(uuid, text)

    def _tell(self, uuid: str, text: str, took_s: float | None = None) -> None:
        self._show("")
        printing.aside(f"GPU {self._gpu(uuid)}  {text}" + ("" if took_s is None else f"  {seconds(took_s)}"))

    def _show(self, text: str) -> None:
        """Replace the line that shows what is under way, on a terminal."""
        if self._live:
            printing.unline()
            printing.aside(text, end="")

    def _gpu(self, uuid: str) -> str:
        return str(self._index.get(uuid, "?"))


_VERBS = {
    DestroyComputeInstances: "destroyed",
    DestroyGpuInstance: "destroyed",
    CreateGpuInstance: "created",
    CreateComputeInstance: "created",
}


def _kind(operation: Operation) -> tuple[str, str]:
    """Which GPU, and what is done to it: steps of one kind in a row are told together."""
    return operation.gpu_uuid, _VERBS.get(type(operation)) or str(operation)


def changed(before: Sequence[SeenGpu], after: Sequence[SeenGpu], outcomes: Mapping[str, Outcome]) -> frozenset[str]:
    """UUIDs of the GPUs that are another than before: changed by this command, or finished by it for a dead one."""
    was = {gpu.uuid: gpu.layout for gpu in before}
    return frozenset(
        gpu.uuid
        for gpu in after
        if gpu.uuid in outcomes and (outcomes[gpu.uuid].changed or gpu.layout != was.get(gpu.uuid, gpu.layout))
    )


def total(before: Sequence[SeenGpu], after: Sequence[SeenGpu], outcomes: Mapping[str, Outcome], took_s: float) -> str:
    """What became of it all, in a line: "done in 7.3 s: 2 GPUs changed, 3 instances kept"."""
    was = {gpu.uuid: gpu.geometry for gpu in before}
    moved = changed(before, after, outcomes)
    phases = [outcome.phase for outcome in outcomes.values() if outcome.phase != "Ready"]
    others = ", ".join(
        f"{count(phases.count(p), 'GPU')} {_WORDS.get(p, p.lower())}" for p in sorted(set(phases), key=phases.index)
    )
    if not moved:
        return f"nothing was changed: {others or count(len(outcomes), 'GPU') + ' as wished already'}"
    parts = [f"{count(len(moved), 'GPU')} changed"]
    if any(was.get(uuid) for uuid in moved):
        kept = sum(len(gpu.geometry & was.get(gpu.uuid, EMPTY)) for gpu in after if gpu.uuid in moved)
        parts.append(f"{count(kept, 'instance')} kept")
    parts += [others] if others else []
    return f"{'ended after' if others else 'done in'} {seconds(took_s)}: {', '.join(parts)}"


_WORDS: Mapping[str, str] = {"RebootRequired": "waiting for a reboot"}
