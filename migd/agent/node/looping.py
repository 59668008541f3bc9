"""The loop of the agent on a cluster's node: look, decide, remember, report, act. All decisions are `deciding`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from migd.agent.deciding import hung, under_way
from migd.agent.effects import LookAgain
from migd.agent.node.acting import Answered, act
from migd.agent.node.deciding import answered, decide, needs_list
from migd.agent.node.effects import REST_LOOK_S, Acting, Effect, ForgetRetry, Wait
from migd.agent.node.logs import logger
from migd.agent.node.looking import AgentPorts, Caches, Looking
from migd.agent.node.metrics import Metrics
from migd.agent.node.registering import Registering
from migd.agent.node.relieving import relief
from migd.agent.node.reporting import Reporter
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.telling import Told, told
from migd.agent.node.troubles import unread, unsaved
from migd.agent.records import Cause, Record
from migd.agent.running import ON_INSTANCE, reason_of
from migd.agent.store import RecordError
from migd.kube.errors import KubeError
from migd.kube.nodes import NODES
from migd.mig.operations import Operation
from migd.nvml.errors import GpuError, HungError, VersionError
from migd.plans.conditions import Reason

REPORT_S: Final = 5.0
"""How long a turn waits at most for its report to arrive before it acts."""
HASTY_S: Final = 1.0
"""The same, before an operation on a GPU: meanwhile the node's GPU clients are paused."""
BUSY_LOOK_S: Final = 5.0
"""In a transaction, look again after so long at the latest, also where a watch should have told."""
TROUBLE_S: Final = 2.0
"""How long to wait before a look or a save that failed is tried again."""
GATHER_S: Final = 0.1
"""Changes come in bunches, as a turn's wishes for all GPUs do: wait so long for the rest of them."""
CALM_S: Final = 3.0
"""At rest, so long at least between looks, whatever happens in the cluster."""
UNSAVED_S: Final = 15.0
"""A record that cannot be saved is told of in the status after so long; before, a moment's trouble is no news."""
UNREADABLE_S: Final = 60.0
"""A GPU under way that cannot be read is waited for so long; then it is decided upon as it is."""
LOOKS_MAX: Final = 64
"""Looks in a row without an effect between them; more are a mistake of ours, and are slowed down."""
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Mind:
    """What decides and what tells; all of it pure. See `deciding` and `telling`."""

    decide: Callable[[Record, NodeSeen], tuple[Record, Effect | None]] = decide
    answered: Callable[[Record, Acting, Cause | None, float], Record] = answered
    needs_list: Callable[[Record], bool] = needs_list
    told: Callable[[Record, NodeSeen, Mapping[str, float]], Told] = told


MIND: Final = Mind()


class LibraryReplacedError(Exception):
    """The driver was upgraded: this process has the library of the one before, and the next one loads the new one."""


class HungAgentError(Exception):
    """A call to the hardware has not returned: this process can do no more, and the next one goes on."""


@dataclass(slots=True)
class Health:
    """How the loop is, for probes and for the lease. turned_at_s: when it last made a turn, on the loop's clock.

    trouble: why the last turn decided nothing, "" when well. at_rest: nothing is under way. duplicates: partitions of
    other nodes that this node's GPUs should have.
    """

    turned_at_s: float
    trouble: str = "starting"
    at_rest: bool = False
    duplicates: tuple[str, ...] = ()


class Loop:
    """One node's loop, until `stop` is set: then the effect under way is finished, and no other begun.

    may_begin: whether a transaction may be begun: the lease is ours, so that others know that we live.
    """

    def __init__(
        self,
        ports: AgentPorts,
        caches: Caches,
        reporter: Reporter,
        metrics: Metrics,
        wake: asyncio.Event,
        stop: asyncio.Event,
        may_begin: Callable[[], bool],
        mind: Mind = MIND,
    ) -> None:
        self._mind = mind
        self._ports = ports
        self._caches = caches
        self._reporter = reporter
        self._metrics = metrics
        self._wake = wake
        self._stop = stop
        self._may_begin = may_begin
        self._looking = Looking(ports, caches)
        self._registering = Registering(ports.cluster, caches.partitions.cache)
        self._only = ""  # the one GPU that the last effect may have changed, "" for any
        self._unreadable_since_s: float | None = None
        self._looked = False  # at the GPUs, by this process
        self.health = Health(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Turn until stopped. HungAgentError, LibraryReplacedError: see there; RecordError where none is read."""
        machine = self._ports.machine
        boot_id = await self._ports.off_loop(machine.boot.boot_id)  # no process outlives its boot
        try:
            record = await self._ports.off_loop(machine.store.load) or Record(boot_id)
        except RecordError:
            await self._relieve(Record(""), boot_id)
            raise
        if record.boot_id == boot_id:  # by now: a process that ends again and again gets no further
            await self._relieve(record, boot_id)
        kept, unsaved_s, looks = record, None, 0  # unsaved_s: since when a save was due and failed
        while not self._stop.is_set():
            self._wake.clear()
            try:
                seen = await self._look(record)
            except (HungAgentError, LibraryReplacedError):
                await self._relieve(kept, boot_id)
                raise
            if seen is None:
                await self._relieve(kept, boot_id)
                await self._pause(TROUBLE_S if begun(record) else REST_LOOK_S, TROUBLE_S)
                continue
            after, effect = self._mind.decide(record, seen)
            acts = effect is not None and not isinstance(effect, Wait | LookAgain)
            if acts and not begun(record) and not isinstance(effect, ForgetRetry) and not await self._fresh(seen):
                await self._pause(BUSY_LOOK_S, GATHER_S)
                continue
            record = after
            if record.lasting != kept or unsaved_s is not None:
                try:
                    await self._ports.off_loop(partial(machine.store.save, record.lasting))
                except RecordError as error:
                    record, unsaved_s = kept, seen.now_s if unsaved_s is None else unsaved_s
                    self._unsaved(str(error), seen.now_s - unsaved_s)
                    await self._relieve(kept, boot_id)
                    await self._pause(TROUBLE_S, TROUBLE_S)
                    continue
                kept, unsaved_s = record.lasting, None
            self._turned(record, seen, at_rest=effect is None)
            await self._reporter.settled(HASTY_S if isinstance(effect, Operation) else REPORT_S)
            if effect is None:
                await self._pause(REST_LOOK_S, CALM_S)
            elif isinstance(effect, Wait):
                await self._pause(min(effect.seconds, BUSY_LOOK_S if begun(record) else REST_LOOK_S), GATHER_S)
            elif isinstance(effect, LookAgain):
                looks += 1
                if looks > LOOKS_MAX:
                    _log.warning("looked again and again without anything to do", times=looks)
                    await self._pause(CALM_S, CALM_S)
                continue
            else:
                record = await self._act(record, effect, seen)
            looks = 0

    # --- looking

    async def _look(self, record: Record) -> NodeSeen | None:
        """The node, or None where it cannot be seen; that has been told then."""
        clock = asyncio.get_running_loop()
        node = self._caches.node
        if node is None:
            self._troubled(f"the cluster has no node {self._caches.name} any more")
            return None
        waited_s = 0.0 if self._unreadable_since_s is None else clock.time() - self._unreadable_since_s
        needed = under_way(record) if waited_s < UNREADABLE_S else ()
        only, self._only = self._only, ""
        began_s = clock.time()
        try:
            seen = await self._looking.look(node, self._mind.needs_list(record), needed, only)
        except HungError as error:
            self._unread("NVMLError", str(error))
            await self._reporter.settled(REPORT_S)
            raise HungAgentError(str(error)) from error
        except GpuError as error:
            if self._unreadable_since_s is None:
                self._unreadable_since_s = clock.time()
            self._unread(cast("Reason", reason_of(error)), str(error))
            if isinstance(error, VersionError) and self._looked:
                await self._reporter.settled(REPORT_S)
                raise LibraryReplacedError(str(error)) from error
            return None
        self._looked = True
        self._unreadable_since_s = None
        self._metrics.looked(clock.time() - began_s)
        if not begun(record):  # an API server that hangs is not to hold up what is under way
            await self._register(seen)
        return seen

    async def _register(self, seen: NodeSeen) -> None:
        try:
            self.health.duplicates = await self._registering.register(seen.node, seen.gpus)
        except KubeError as error:  # it comes again with the next look
            self._metrics.api_error(type(error).__name__)
            _log.warning("not registered", error=str(error))

    async def _fresh(self, seen: NodeSeen) -> bool:
        """Whether a transaction may begin on this sight: the lease is ours, and the node is as seen even now."""
        if not self._may_begin():
            self._troubled("the lease is not renewed, so nothing is begun")
            return False
        try:
            node = await self._ports.cluster.get(NODES, seen.node.name)
        except KubeError as error:
            self._metrics.api_error(type(error).__name__)
            self._troubled(f"nothing is begun while the API server does not answer: {error}")
            return False
        return node is not None and (node.uid, node.value, node.annotations) == (
            seen.node.uid,
            seen.node.value,
            seen.node.annotations,
        )

    # --- reporting

    def _turned(self, record: Record, seen: NodeSeen, at_rest: bool) -> None:
        telling = self._mind.told(record, seen, self._reporter.written_at)
        self._reporter.tell(telling)
        self.health.turned_at_s = seen.now_s
        self.health.trouble = ""
        self.health.at_rest = at_rest and not begun(record)
        self._metrics.turn({name: status.phase for name, status in telling.statuses.items()})
        work = record.node
        self._metrics.state("closed", work is not None and work.closed_s is not None, seen.now_s)
        self._metrics.state("paused", work is not None and work.paused_s is not None, seen.now_s)
        if at_rest and not self._reporter.trouble:
            self._metrics.succeeded(seen.wall)

    def _troubled(self, why: str) -> None:
        if why != self.health.trouble:
            _log.warning("no decision", why=why)
        self.health.trouble = why
        self.health.turned_at_s = asyncio.get_running_loop().time()

    def _unread(self, reason: Reason, message: str) -> None:
        """Tell of GPUs that cannot be read."""
        self._metrics.nvml_error(reason)
        self._troubled(message)
        self._reporter.tell(unread(self._caches.partitions.cache, reason, message, self._ports.wall()))

    def _unsaved(self, message: str, lasted_s: float) -> None:
        """Tell of a record that cannot be saved, once that lasts."""
        self._troubled(message)
        if lasted_s >= UNSAVED_S:
            self._reporter.tell(unsaved(self._caches.partitions.cache, message, self._ports.wall()))

    # --- acting

    async def _act(self, record: Record, effect: Acting, seen: NodeSeen) -> Record:
        """Carry out one effect; the record after its answer."""
        clock = asyncio.get_running_loop()
        began_s = clock.time()
        _log.info("begun", effect=str(effect), gpu=getattr(effect, "gpu_uuid", ""))
        try:
            answer = await act(self._ports, effect, seen)
        except HungError as error:
            assert isinstance(effect, Operation), "only operations hang"
            await self._hung(record, effect, seen, error)
            raise HungAgentError(str(error)) from error
        if not isinstance(answer, Answered):
            self._metrics.api_error(type(answer.error).__name__)
            _log.warning("not done", effect=str(effect), error=str(answer.error), again_in_s=answer.seconds)
            await self._pause(answer.seconds, GATHER_S)
            return record
        failed = answer.error
        if failed is not None and isinstance(effect, Operation):
            self._metrics.nvml_error(failed.reason)
        seconds = round(clock.time() - began_s, 3)
        if failed is None:
            _log.info("done", effect=str(effect), seconds=seconds)
        else:
            _log.warning("failed", effect=str(effect), seconds=seconds, error=failed.message)
        self._only = effect.gpu_uuid if failed is None and isinstance(effect, ON_INSTANCE) else ""
        return self._mind.answered(record, effect, failed, clock.time())

    async def _relieve(self, kept: Record, boot_id: str) -> None:
        """Do what must be done in time where nothing could be decided."""
        node = self._caches.node
        due = None if node is None else relief(kept, node, boot_id, asyncio.get_running_loop().time())
        if node is None or due is None:
            return
        _log.warning("begun", effect=str(due))
        try:
            await self._ports.cluster.change_node(node, due.change)
        except KubeError as error:  # it comes again with the next look
            self._metrics.api_error(type(error).__name__)
            _log.warning("not done", effect=str(due), error=str(error))

    async def _hung(self, record: Record, operation: Operation, seen: NodeSeen, error: HungError) -> None:
        """Remember and tell that an operation did not return; more cannot be done in this process."""
        record = hung(record, operation, Cause("NVMLError", str(error)))
        self._metrics.nvml_error("NVMLError")
        try:
            await self._ports.off_loop(partial(self._ports.machine.store.save, record.lasting))
        except RecordError as unsaved:  # what was saved before it says that the operation was begun
            _log.warning("not saved", error=str(unsaved))
        self._reporter.tell(self._mind.told(record, seen, self._reporter.written_at))
        await self._reporter.settled(REPORT_S)

    # --- waiting

    async def _pause(self, seconds: float, least_s: float) -> None:
        """Wait until something changes or so long, but `least_s` in any case; a stop ends it at once."""
        await self._stopped_within(min(least_s, seconds))
        if self._stop.is_set() or seconds <= least_s:
            return
        waits = [asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(self._stop.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds - least_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        if self._wake.is_set():
            await self._stopped_within(GATHER_S)

    async def _stopped_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return


def begun(record: Record) -> bool:
    """Whether a transaction is past the point up to which it can simply be forgotten."""
    work = record.node
    return (work is not None and work.stage not in ("Rest", "Waiting", "Closing")) or bool(under_way(record))
