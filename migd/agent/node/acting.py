"""Carries out one effect, and says how it was answered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from migd.agent.node.devices import DevicesError
from migd.agent.node.effects import Acting, ChangeNode, ForgetRetry, HangUp, RefreshDevices, StopPlugin
from migd.agent.node.looking import AgentPorts
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.signals import SignalError
from migd.agent.records import Cause
from migd.agent.running import perform
from migd.kube.errors import ConflictError, DeniedError, KubeError, MissingError, RefusedError, UnavailableError
from migd.kube.partitions import PARTITIONS
from migd.kube.pods import PODS
from migd.mig.operations import Operation

RETRY: Final = "migd.dev/retry"
AGAIN_S: Final = 1.0
"""How long to wait for the caches after somebody else was faster."""


@dataclass(frozen=True, slots=True)
class Answered:
    """It was done (None), or failed for a cause."""

    error: Cause | None = None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The API server did not take it now: look again after so long at most, and decide anew."""

    error: KubeError
    seconds: float


Answer = Answered | Unanswered


async def act(ports: AgentPorts, effect: Acting, seen: NodeSeen) -> Answer:
    """Carry out one effect that was decided on this sight. HungError where a call to the hardware does not return."""
    match effect:
        case HangUp():
            return Answered(await _hang_up(ports, effect))
        case RefreshDevices():
            return Answered(await _refresh(ports))
        case ChangeNode() | StopPlugin() | ForgetRetry():
            return await _ask(ports, effect, seen)
        case _:
            operation: Operation = effect
            return Answered(await ports.off_loop(partial(perform, ports.machine, operation)))


async def _ask(ports: AgentPorts, effect: ChangeNode | StopPlugin | ForgetRetry, seen: NodeSeen) -> Answer:
    asked: ChangeNode | StopPlugin | ForgetRetry = effect
    try:
        for asked in effect.then if isinstance(effect, ChangeNode) else ():
            await _stop(ports, asked, seen, dry_run=True)
        asked = effect
        await _write(ports, effect, seen)
    except (ConflictError, MissingError) as error:
        return Unanswered(error, AGAIN_S)
    except UnavailableError as error:
        return Unanswered(error, max(error.retry_after_s, AGAIN_S))
    except (DeniedError, RefusedError) as error:
        return Answered(Cause("NoPermission", f"the API server does not let the agent {asked}: {error}"))
    except KubeError as error:
        return Unanswered(error, AGAIN_S)
    return Answered()


async def _write(ports: AgentPorts, effect: ChangeNode | StopPlugin | ForgetRetry, seen: NodeSeen) -> None:
    match effect:
        case ChangeNode(change=change):
            await ports.cluster.change_node(seen.node, change)
        case StopPlugin():
            await _stop(ports, effect, seen)
        case ForgetRetry():
            found = next((stored for stored in seen.partitions if stored.name == effect.partition), None)
            if found is not None:
                await ports.cluster.without_annotation(PARTITIONS, found, RETRY)


async def _stop(ports: AgentPorts, effect: StopPlugin, seen: NodeSeen, dry_run: bool = False) -> None:
    pod = next((pod for pod in seen.pods if pod.uid == effect.uid), None)
    if pod is not None:
        await ports.cluster.delete(PODS, pod, dry_run)


async def _hang_up(ports: AgentPorts, effect: HangUp) -> Cause | None:
    uids = frozenset(uid for _namespace, _name, uid in effect.pods)
    try:
        reached = await ports.off_loop(partial(ports.signals.hang_up, uids))
    except SignalError as error:
        return Cause("NoPermission", str(error))
    if reached:
        return None
    names = ", ".join(f"{namespace}/{name}" for namespace, name, _uid in effect.pods) or "no pod"
    why = "it crashes, or the agent runs without hostPID"
    return Cause("NoDevicePlugin", f"no device plugin was found running in {names}: {why}")


async def _refresh(ports: AgentPorts) -> Cause | None:
    try:
        await ports.off_loop(ports.devices.refresh)
    except DevicesError as error:
        return Cause("NVMLError", str(error))
    return None
