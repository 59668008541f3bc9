"""Writes what is told of the node where it differs, beside the loop, so that no API server holds up the hardware."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Final

from migd.agent.node.announcing import notes
from migd.agent.node.logs import logger
from migd.agent.node.looking import Caches
from migd.agent.node.metrics import Metrics
from migd.agent.node.telling import Told
from migd.kube.errors import ConflictError, KubeError, MissingError, UnavailableError
from migd.kube.events import Note
from migd.kube.nodes import NodeChange
from migd.kube.partitions import PARTITIONS
from migd.kube.ports import Cluster
from migd.kube.queueing import Backoff
from migd.kube.stored import Stored
from migd.plans.partitions import Partition, PartitionStatus, written

NOTES_MAX: Final = 256
"""So many events wait at most while the API server is away; the oldest are dropped first."""
BACKOFF: Final = Backoff(first_s=1.0, most_s=30.0, jitter=0.2)
_log = logger(__name__)


class Reporter:
    """Keeps the partitions' status and the node's labels as they were told last.

    Only the last that was told counts: what an API server missed meanwhile is not written later. written_at: by name
    of partition, when its status was last written, on the loop's clock. trouble: what the last try failed on, "" when
    well. again: called where somebody else was faster, and all is to be decided anew.
    """

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        metrics: Metrics,
        again: Callable[[], None],
        dice: random.Random | None = None,
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._metrics = metrics
        self._again = again
        self._dice = dice or random.Random()  # noqa: S311  jitter only
        self._due: Told | None = None
        self._last: dict[str, PartitionStatus] = {}
        self._there: dict[str, tuple[str, PartitionStatus]] = {}  # uid -> resource version, and what it says of ours
        self._notes: deque[Note] = deque(maxlen=NOTES_MAX)
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self.written_at: dict[str, float] = {}
        self.trouble = ""

    def tell(self, told: Told) -> None:
        """Have this written, where it differs from what is there."""
        for partition, status in self._ours(told):
            before = self._last.get(partition.uid, partition.value.status)
            if before != status:
                self._metrics.told(before, status)
                self._notes.extend(notes(partition, before, status))
            self._last[partition.uid] = status
        self._due = told
        self._settled.clear()
        self._wake.set()

    async def settled(self, most_s: float) -> None:
        """Returns when all is written, at once where the last try failed, and after so long in any case."""
        if self.trouble:
            return
        try:
            async with asyncio.timeout(most_s):
                await self._settled.wait()
        except TimeoutError:
            return

    async def run(self) -> None:
        """Write until cancelled."""
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            wait_s = await self._round()
            if wait_s is None:
                failures = 0
                continue
            failures += 1
            await asyncio.sleep(max(wait_s, BACKOFF.wait_s(failures, self._dice)))
            self._wake.set()

    async def _round(self) -> float | None:
        """Write what is due; None when all is, else how long to wait at least."""
        told = self._due
        error = await self._write(told) if told is not None else None
        while error is None and self._notes:
            await self._cluster.tell(self._notes.popleft())
        self.trouble = str(error or "")
        self._metrics.api_trouble(error is not None)
        if error is not None:
            self._settled.set()
            _log.warning("not reported", error=str(error))
            return error.retry_after_s if isinstance(error, UnavailableError) else 0.0
        if self._due is told:  # and nothing newer was told meanwhile
            self._due = None
            self._settled.set()
        return None

    async def _write(self, told: Told) -> KubeError | None:
        """Write each object; the worst that came of it. One that is refused does not hold up the others."""
        worst: KubeError | None = None
        for partition, status in self._ours(told):
            if self._there.get(partition.uid) == (partition.resource_version, status):
                continue  # to find out that nothing differs takes longer than to remember it
            try:
                stored = await self._cluster.apply(
                    PARTITIONS, partition.name, {"status": written(status)}, partition, "status"
                )
                self._there[partition.uid] = (stored.resource_version, status)
                if stored is not partition:
                    self.written_at[partition.name] = asyncio.get_running_loop().time()
            except KubeError as error:
                worst = self._failed(error) or worst
                if isinstance(error, UnavailableError):
                    return worst
        node = self._caches.node
        if node is None:
            return worst
        try:
            await self._cluster.change_node(node, NodeChange(labels=dict(told.labels)))
        except KubeError as error:
            worst = self._failed(error) or worst
        return worst

    def _failed(self, error: KubeError) -> KubeError | None:
        """Count it; None where the caches will tell what to do about it."""
        self._metrics.api_error(type(error).__name__)
        if isinstance(error, ConflictError | MissingError):
            self._again()
            return None
        return error

    def _ours(self, told: Told) -> list[tuple[Stored[Partition], PartitionStatus]]:
        """The partitions that are there, and are of this node and no earlier one of its name."""
        node = self._caches.node
        found = ((self._caches.partitions.cache.get(name), told.statuses[name]) for name in sorted(told.statuses))
        return [
            (partition, status)
            for partition, status in found
            if partition is not None and node is not None and partition.value.spec.node_uid == node.uid
        ]
