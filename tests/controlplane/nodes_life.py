"""The pods of one simulated node: each is brought a step further, from bound over admitted and running to gone.

Nothing here waits or has a thread: the kubelet steps each pod again and again, and what failed is tried once more.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from controlplane.api import MERGE, Api, Json
from controlplane.nodes_pods import (
    HANGS,
    STOPS_IN_S,
    ContainerState,
    address_of,
    annotation,
    grace_s,
    now_text,
    refused,
    same_status,
    status_of,
    terminal,
    uid_of,
    wants_of,
)
from controlplane.nodes_programs import Program, is_program
from controlplane.nodes_simulated import Simulated
from controlplane.nodes_sockets import Plugin
from controlplane.nodes_tokens import Ground
from migd.sim import SimHost
from migd.sim.nodes.devices import AdmissionError, DeviceManager, Held, Wants
from migd.sim.nodes.plugin import device_of

_CONFIRM_S: Final = 2.0


@dataclass(slots=True)
class Pod:
    """A pod of this node. state: waiting, running, ending or ended; status: as it was last sent."""

    document: Json
    seen_s: float
    state: str = "waiting"
    programs: dict[str, Program] = field(default_factory=dict)
    simulated: Simulated | None = None  # those of its containers that are no programs
    started: str = ""
    stops_at_s: float = 0.0
    kill_at_s: float | None = None
    verdict: Json | None = None  # the status it ended with
    status: Json | None = None
    shown: tuple[Json, str, Mapping[str, ContainerState]] | None = None  # of what the status tells: as it was sent
    gone: bool = False  # the API server has it no more
    confirm_at_s: float = 0.0  # when to confirm its deletion, once more if need be

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.document['metadata']['namespace']}/{self.document['metadata']['name']}"


class Pods:
    """All pods of a node. host: its simulated machine, None for none; set before the first step.

    admit_after_s: a bound pod waits so long before it is admitted. broken: images whose containers end at once;
    missing: images that cannot be pulled. plugins: those that are registered now, with their numbers in the manager.
    snapshot: who is active and what they hold; another value after each change, so any thread may read it.
    """

    def __init__(self, api: Api, ground: Ground, say: Callable[[str], None]) -> None:
        self.admit_after_s = 0.0
        self.broken: set[str] = set()
        self.missing: set[str] = set()
        self.host: SimHost | None = None
        self.manager = DeviceManager()
        self.plugins: dict[Plugin, int] = {}
        self.snapshot: tuple[Sequence[Wants], Sequence[Held]] = ((), ())
        self.known: dict[str, Pod] = {}
        self._api = api
        self._ground = ground
        self._say = say

    def step(self, pod: Pod) -> None:
        """Bring it as far as it goes now."""
        now_s = time.monotonic()
        grace = 30.0 if pod.gone else grace_s(pod.document)
        if pod.state == "waiting":
            if grace is not None or terminal(pod.document):
                pod.state = "ended"
            elif now_s >= pod.seen_s + self.admit_after_s:
                self._admit(pod, now_s)
        if pod.state == "running":
            if grace is not None:
                self._begin_end(pod, now_s, grace)
            else:
                self._run_containers(pod, now_s)
        if pod.state == "ending":
            if pod.gone:  # what it was given is given to others, whether it has ended or not
                self.manager.free(uid_of(pod.document))
                self._publish()
            self._go_on_ending(pod, now_s)
        if pod.state == "ended":
            self._bury(pod)

    def _admit(self, pod: Pod, now_s: float) -> None:
        wants = wants_of(pod.document)
        try:
            self.manager.admit(wants)
            self._allocate(wants)
        except AdmissionError as error:
            self._say(f"{pod.key}: {error}")
            self.manager.free(wants.uid)
            pod.verdict = refused("UnexpectedAdmissionError", str(error))
            pod.state = "ended"
            return
        finally:
            self._publish()
        pod.state = "running"
        pod.started = now_text()
        for container in pod.document["spec"]["containers"]:
            if is_program(container):
                pod.programs[container["name"]] = Program(self._ground, pod.document, container, self._api)
        names = [c["name"] for c in pod.document["spec"]["containers"] if c["name"] not in pod.programs]
        if names:
            pod.simulated = Simulated(pod.document, names, self.host, self._ground.backoff_s, self._say)

    def _allocate(self, wants: Wants) -> None:
        """Tell the plugins, as a kubelet does; what was given before is told again."""
        plugins = {plugin.resource: plugin for plugin in self.plugins}
        for one in self.manager.held():
            if (one.namespace, one.pod) == (wants.namespace, wants.name) and one.resource in plugins:
                try:
                    plugins[one.resource].allocate(one.device_ids)
                except grpc.RpcError as error:
                    raise AdmissionError(f"Allocate failed due to {error}, which is unexpected") from error

    def _run_containers(self, pod: Pod, now_s: float) -> None:
        states = {name: self._container(pod, name, program, now_s) for name, program in pod.programs.items()}
        if pod.simulated is not None:
            uid = uid_of(pod.document)
            devices = {device_of(one) for one in self.manager.devices(uid)}
            states |= pod.simulated.step(now_s, devices, self.manager.hinders(uid))
        if states and all(state.kind == "terminated" for state in states.values()):
            well = all(state.exit_status == 0 for state in states.values())
            self._end(pod, "Succeeded" if well else "Failed", states)
            return
        waits = any(state.kind == "waiting" and not state.restarts for state in states.values())
        phase = "Pending" if waits else "Running"
        if pod.shown is not None and pod.shown[0] is pod.document and pod.shown[1:] == (phase, states):
            return
        sent = self._send(pod, self._status(pod, phase, states))
        pod.shown = (pod.document, phase, states) if sent else None

    def _container(self, pod: Pod, name: str, program: Program, now_s: float) -> ContainerState:
        if program.image in self.missing and program.pid is None:
            return ContainerState("waiting", "ImagePullBackOff", f"Back-off pulling image {program.image}")
        hinders = self.manager.hinders(uid_of(pod.document)) if program.pid is None else ""
        if hinders:
            return ContainerState("waiting", "CreateContainerConfigError", hinders, restarts=program.restarts)
        program.broken = program.image in self.broken
        return program.step(now_s)

    def _begin_end(self, pod: Pod, now_s: float, grace: float) -> None:
        pod.state = "ending"
        pod.kill_at_s = now_s + grace
        if pod.simulated is not None and pod.simulated.running:
            pod.stops_at_s = now_s + float(annotation(pod.document, STOPS_IN_S) or 0)
        for program in pod.programs.values():
            program.end(signal.SIGTERM)

    def _go_on_ending(self, pod: Pod, now_s: float) -> None:
        """A shorter grace may have been asked for meanwhile, as by a forced deletion."""
        grace = grace_s(pod.document)
        assert pod.kill_at_s is not None
        if grace is not None:
            pod.kill_at_s = min(pod.kill_at_s, now_s + grace)
        over = now_s >= pod.kill_at_s
        if over:
            for program in pod.programs.values():
                program.end(signal.SIGKILL)
        if annotation(pod.document, HANGS) or any(program.pid is not None for program in pod.programs.values()):
            return
        if now_s < min(pod.stops_at_s, pod.kill_at_s):
            return
        names = (*pod.programs, *(pod.simulated.names if pod.simulated else ()))
        killed = ContainerState("terminated", since=now_text(), exit_status=137 if over else 0)
        self._end(pod, "Failed" if over else "Succeeded", dict.fromkeys(names, killed))

    def _end(self, pod: Pod, phase: str, states: Mapping[str, ContainerState]) -> None:
        pod.verdict = self._status(pod, phase, states)
        pod.state = "ended"

    def _bury(self, pod: Pod) -> None:
        """It has ended: free what it held, say so, and confirm its deletion where that was asked for."""
        uid = uid_of(pod.document)
        if pod.simulated is not None:
            pod.simulated.stop()
        self.manager.free(uid)
        self._publish()
        if pod.gone:
            del self.known[uid]
            return
        if pod.verdict is not None:
            self._send(pod, pod.verdict)
        metadata = pod.document["metadata"]
        now_s, grace = time.monotonic(), grace_s(pod.document)
        if grace == 0 and not pod.confirm_at_s:  # it is being taken away already, unless that does not succeed
            pod.confirm_at_s = now_s + _CONFIRM_S
        if grace is not None and now_s >= pod.confirm_at_s:
            pod.confirm_at_s = now_s + _CONFIRM_S
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            now = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._api.request("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", **now})

    def _status(self, pod: Pod, phase: str, states: Mapping[str, ContainerState]) -> Json:
        address = address_of(uid_of(pod.document))
        return status_of(pod.document, phase, states, address, pod.started or now_text(), pod.status)

    def _send(self, pod: Pod, status: Json) -> bool:
        """Whether the API server has it then."""
        if pod.status is not None and same_status(pod.status, status):
            return True
        metadata = pod.document["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        sent = self._api.patch(path, {"metadata": {"uid": metadata["uid"]}, "status": status}, MERGE).ok
        if sent:
            pod.status = status
        return sent

    def _publish(self) -> None:
        self.snapshot = (self.manager.active(), self.manager.held())

    # ---- all of them

    def power_off(self) -> None:
        """The machine goes off: no process survives, and what ran has to be admitted anew."""
        self.kill()
        for pod in self.known.values():
            pod.simulated = None
            if pod.state in ("running", "ending"):
                pod.state = "waiting"
                pod.programs.clear()

    def kill(self) -> None:
        """End every process at once."""
        for pod in self.known.values():
            for program in pod.programs.values():
                program.kill()
