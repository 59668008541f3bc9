"""The record: the little that cannot be seen again after a crash, as values. `store` keeps it on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from migd.mig.geometry import EMPTY, Geometry, Layout

VERSION: Final = 3
"""Of the record's form on disk. A newer one is refused, never guessed at.

Version 1 had no node's part, version 2 no drain in it.
"""

Phase = Literal["Ready", "Blocked", "RebootRequired", "Failed", "Held", "Lost"]
"""How one GPU stands at rest after an order, in the API's closed list."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something did not go as wished. reason: from the API's closed list; message: a sentence for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one GPU under an order.

    changed: its layout or mode is another than before. touched: an operation was begun, even if it was undone again.
    """

    phase: Phase
    cause: Cause
    changed: bool = False
    touched: bool = False


AS_WISHED: Final = Cause("AsWished", "as wished")
READY: Final = Outcome("Ready", AS_WISHED)
"""The outcome of a GPU that was as wished before anything was begun."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """One GPU being changed. Written before the first effect, gone when the GPU is verified or given up.

    before: the layout to go back to. target: the layout to reach; None until the driver lists profiles, MIG being on.
    back: on the way back to `before`, for `cause`. hold: on failure stop where it is, instead of going back.
    step: the operation last begun. tries: how often in a row. error: what it last answered. resets: GPU resets tried
    since the mode was last asked for. touched: an operation was begun. turns: operations begun in all.
    not_before_s: on the clock; the next try is not earlier. parked: at rest, until the next command goes on with it.
    """

    order_id: str
    before: Layout
    target: Layout | None
    hold: bool = False
    back: bool = False
    cause: Cause | None = None
    step: str = ""
    tries: int = 0
    error: Cause | None = None
    resets: int = 0
    touched: bool = False
    turns: int = 0
    not_before_s: float = 0.0
    parked: bool = False


@dataclass(frozen=True, slots=True)
class AwaitingReboot:
    """A mode change that only a reboot can finish. boot_id: of the boot in which it was asked for."""

    boot_id: str
    order_id: str
    mig: bool


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """What this machine's record says of one GPU.

    owned: instances that migd began to create here, or adopted, and that were there ever since; all others are foreign
    and are never destroyed. previous: the layout before the last change, which `migd rollback` returns to.
    older: what `previous` was before a change was given up half way or lost to a reboot. Until one ends well,
    `previous` is the layout that counts as there, whatever is found; None while nothing of the kind happened.
    """

    owned: Geometry = EMPTY
    previous: Layout | None = None
    transaction: Transaction | None = None
    awaiting: AwaitingReboot | None = None
    outcome: Outcome | None = None
    older: Layout | None = None

    @property
    def before(self) -> Layout | None:
        """The layout that a rollback returns to; None where migd has changed nothing yet."""
        return self.previous if self.transaction is None or self.older is not None else self.transaction.before

    @property
    def ready(self) -> bool:
        """Whether it was as wished when it was last worked on."""
        return self.outcome is not None and self.outcome.phase == "Ready"

    @property
    def lasting(self) -> GpuRecord:
        """The same without what only the command that did it tells."""
        return replace(self, outcome=READY) if self.ready and self.outcome != READY else self

    def left_at(self, before: Layout) -> GpuRecord:
        """The record once a change that began from `before` has not ended well."""
        return self if self.older is not None else replace(self, previous=before, older=self.previous or before)

    def changed_from(self, before: Layout, target: Layout) -> GpuRecord:
        """The record once a change from `before` to `target` has ended well."""
        if self.older is not None:
            return replace(self, previous=self.older if target == self.previous else self.previous, older=None)
        return self if target == before else replace(self, previous=before)


_NOTHING: Final = GpuRecord()

Stage = Literal[
    "Rest", "Waiting", "Closing", "Draining", "Settling", "Pausing",
    "Applying", "Refreshing", "Opening", "Verifying", "Backing",
]  # fmt: skip
"""Where a node's transaction is. From Closing on the node may be closed, from Applying on hardware may be changed."""

PauseKind = Literal["", "Labels", "Pods", "None"]
"""How GPU clients are paused: by the GPU Operator's labels, by deleting the plugin's pods, or not at all."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a node's transaction, for people. at: wall clock, RFC 3339; began_s: on the clock of the boot."""

    name: str
    at: str
    began_s: float
    milliseconds: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class PodRef:
    """A pod that is asked to go. Another one may get its name: the uid tells them apart."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> str:
        """For people: namespace/name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A cluster node's transaction: the one under way, or how the last one ended. Times are on the clock of the boot.

    turn: the assignment it is for; "" for none. stage, since_s: where it is, and since when. began_s, began_at: when
    the turn was taken up, on the clock and by the wall's; ended_at: when it ended. closed_s, paused_s: when the node
    was closed and its clients paused, None while it is not. pause: how. why: what is in the way, or why it backs out.
    tries: attempts in a row that did not end well; not_before_s: the next is not earlier. refreshed: device nodes are
    made; refresh: why not, refresh_tries: how often tried. nudges, nudged_s: how often the plugin was told to look
    again, and when last. unadvertised: why allocatable is not as expected; short_s: since when it differs, at rest.
    wedged_s: since when labels are paused by somebody who is not there. denied_s: the API server denied a change, and
    is not asked again before; denied: what it said. at_once: close first, then look: the machine
    was rebooted. before, after: layouts of the GPUs that the transaction changes, for people. accepted: the layouts
    that the node has from its last wish, to come back to after a reboot.
    victims: while it drains, the pods that must go, by GPU UUID. asked: all that were asked to go in this attempt;
    gone_s: since when none of them is there any more. stuck_s: since when nobody that is waited for is going.
    spent: the wishes, as `spent_key` names them, for which pods were evicted in vain, or could not be: for these nobody
    is evicted again. spent_why: what came of it.
    """

    turn: str = ""
    stage: Stage = "Rest"
    since_s: float = 0.0
    began_s: float = 0.0
    began_at: str = ""
    ended_at: str = ""
    closed_s: float | None = None
    paused_s: float | None = None
    pause: PauseKind = ""
    why: Cause | None = None
    tries: int = 0
    not_before_s: float = 0.0
    refreshed: bool = False
    refresh: Cause | None = None
    refresh_tries: int = 0
    nudges: int = 0
    nudged_s: float = 0.0
    unadvertised: Cause | None = None
    short_s: float | None = None
    wedged_s: float | None = None
    denied_s: float = 0.0
    denied: Cause | None = None
    at_once: bool = False
    steps: tuple[StepTime, ...] = ()
    before: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    accepted: Mapping[str, Layout] = field(default_factory=dict)
    victims: Mapping[str, tuple[PodRef, ...]] = field(default_factory=dict)
    asked: tuple[PodRef, ...] = ()
    gone_s: float | None = None
    stuck_s: float | None = None
    spent: tuple[str, ...] = ()
    spent_why: Cause | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one machine. order_id: the order last begun; its outcomes stand in the GPUs' records.

    node: where the machine is a cluster's node, what its agent is at; None elsewhere.
    """

    boot_id: str
    order_id: str = ""
    gpus: Mapping[str, GpuRecord] = field(default_factory=dict)
    node: NodeWork | None = None

    def gpu(self, uuid: str) -> GpuRecord:
        """What is recorded of this GPU; an empty record where nothing is."""
        return self.gpus.get(uuid, _NOTHING)

    def with_gpu(self, uuid: str, gpu: GpuRecord) -> Record:
        """The record with this GPU's part replaced."""
        return Record(self.boot_id, self.order_id, {**self.gpus, uuid: gpu}, self.node)

    @property
    def open(self) -> tuple[str, ...]:
        """UUIDs of GPUs with a transaction under way or parked, ascending."""
        return tuple(sorted(uuid for uuid, gpu in self.gpus.items() if gpu.transaction is not None))

    @property
    def lasting(self) -> Record:
        """What of it is worth a write: that a GPU is as wished because of a change just now, only this command tells.

        So a command that finds everything as it was left writes nothing.
        """
        return Record(self.boot_id, self.order_id, {uuid: gpu.lasting for uuid, gpu in self.gpus.items()}, self.node)

    @property
    def owned(self) -> dict[str, Geometry]:
        """What is ours on each GPU."""
        return {uuid: gpu.owned for uuid, gpu in self.gpus.items()}
