"""The effects that a decision about a node may ask for, one at a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from migd.agent.effects import LookAgain
from migd.kube.nodes import NodeChange
from migd.mig.operations import Operation

REST_LOOK_S: Final = 30.0
"""At rest, look again after so long: no watch tells of what happens on a GPU."""


@dataclass(frozen=True, slots=True)
class StopPlugin:
    """Delete this pod of a DaemonSet on this node, the device plugin's, if it still has this uid. Gone is well."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"stop pod {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ChangeNode:
    """Change what is ours on the node, in one request, decided on `NodeSeen.node`. A conflict: just look again.

    then: what will have to be done once this is: where the API server would deny it, nothing is changed at all.
    """

    change: NodeChange
    why: str
    then: tuple[StopPlugin, ...] = ()

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class HangUp:
    """SIGHUP to the device plugin's process in each of these pods, so that it looks at the GPUs again.

    pods: (namespace, name, uid). None of them running any more is an error for people.
    """

    pods: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        return "have the device plugin look at the GPUs again"


@dataclass(frozen=True, slots=True)
class RefreshDevices:
    """Make device nodes and CDI specifications of the instances that are there now. Doing it again is harmless."""

    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return "make device nodes and CDI specifications"


@dataclass(frozen=True, slots=True)
class ForgetRetry:
    """Take the annotation migd.dev/retry off this partition: it was heard."""

    partition: str

    def __str__(self) -> str:
        return f"take the annotation off {self.partition}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for so long, at most; whatever changes in the cluster ends it. why: for people."""

    seconds: float
    why: str

    def __str__(self) -> str:
        return self.why


Effect = Operation | ChangeNode | StopPlugin | HangUp | RefreshDevices | ForgetRetry | Wait | LookAgain
Acting = Operation | ChangeNode | StopPlugin | HangUp | RefreshDevices | ForgetRetry
"""The effects that change something, and so can fail."""

__all__ = [
    "REST_LOOK_S",
    "Acting",
    "ChangeNode",
    "Effect",
    "ForgetRetry",
    "HangUp",
    "LookAgain",
    "RefreshDevices",
    "StopPlugin",
    "Wait",
]
