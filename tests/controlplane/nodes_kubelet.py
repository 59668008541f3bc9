"""The kubelet of one simulated node: a thread that takes what happens one by one, and brings each pod a step further.

Pods come from a watch of the real API server, bound by the real scheduler. One whose image is ours runs as a process;
any other is only said to run, and computes on the devices that it was given.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc

from controlplane.api import MERGE, Api, Json
from controlplane.nodes_object import NodeObject
from controlplane.nodes_pods import (
    LASTS_S,
    PROGRAM,
    STOPS_IN_S,
    ContainerState,
    address_of,
    annotation,
    container_id,
    grace_s,
    now_text,
    refused,
    same_status,
    status_of,
    terminal,
    uid_of,
    wants_of,
)
from controlplane.nodes_programs import Ground, Program, is_program
from controlplane.nodes_sockets import Closed, Listed, Plugin, Sockets
from migd.sim import SimHost
from migd.sim.errors import SimulationError
from migd.sim.node_devices import AdmissionError, DeviceManager, Held, Wants
from migd.sim.node_plugin import device_of

T = TypeVar("T")
_TICK_S: Final = 0.2
_WATCH_S: Final = 300
_DO_S: Final = 60.0


@dataclass(slots=True)
class Pod:
    """A pod of this node. state: waiting, running, ending or ended; status: as it was last sent."""

    document: Json
    seen_s: float
    state: str = "waiting"
    programs: dict[str, Program] = field(default_factory=dict)
    simulated: dict[str, int] = field(default_factory=dict)  # container -> restarts
    computing: list[int] = field(default_factory=list)  # pids in the simulated machine
    started: str = ""
    started_s: float = 0.0
    stops_at_s: float = 0.0
    kill_at_s: float | None = None
    verdict: Json | None = None  # the status it ended with
    status: Json | None = None
    gone: bool = False  # the API server has it no more

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.document['metadata']['namespace']}/{self.document['metadata']['name']}"


class Kubelet:
    """One node's kubelet. `start`, then `stop`; in between tests may turn its switches.

    api: with the node's certificate. machine: opens the simulated machine, None for a node without GPUs.
    admit_after_s: a bound pod waits so long before it is admitted. broken: images whose containers end at once;
    missing: images that cannot be pulled.
    """

    def __init__(
        self,
        api: Api,
        node: NodeObject,
        ground: Ground,
        machine: Callable[[], SimHost] | None,
        say: Callable[[str], None],
    ) -> None:
        self.admit_after_s = 0.0
        self.broken: set[str] = set()
        self.missing: set[str] = set()
        self._api = api
        self._node = node
        self._ground = ground
        self._open = machine
        self._say = say
        self._host: SimHost | None = None
        self._manager = DeviceManager()
        self._numbers: dict[Plugin, int] = {}
        self._snapshot: tuple[Sequence[Wants], Sequence[Held]] = ((), ())
        self._sockets = Sockets(ground.root / "var/lib/kubelet", self._put, lambda: self._snapshot)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pods: dict[str, Pod] = {}
        self._down = False
        self._listed = False
        self._stopping = threading.Event()
        self._watching: Any = None
        self._threads: list[threading.Thread] = []

    # ---- from outside

    def start(self) -> None:
        """Register the node and go to work."""
        self._host = self._open() if self._open else None
        self._node.register()
        self._sockets.start()
        for target in (self._run, self._watch):
            thread = threading.Thread(target=target, name=f"{target.__name__} {self._ground.node}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End it and every process of its pods; the node object stays, and turns NotReady after a while."""
        if self._threads:
            self.do(self._shut_down)
        self._stopping.set()
        self._close_watch()
        for thread in self._threads:
            thread.join(timeout=30.0)
        self._threads.clear()
        self._sockets.stop()

    def restart(self) -> None:
        """The kubelet ends and starts again: its sockets are made anew, containers go on meanwhile."""
        self.do(self._restart)

    def crash(self) -> None:
        """The kubelet is gone until `restart`; containers go on."""
        self.do(self._go_down)

    def reboot(self) -> None:
        """The machine restarts: no process survives, instances are gone, pods with devices fail, others start again."""
        self.do(self._reboot)

    def do(self, work: Callable[[], T]) -> T:
        """Have something done by the kubelet's own thread, between two events; what it returns or raises."""
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def job() -> None:
            try:
                answer.put((work(), None))
            except BaseException as error:
                answer.put((None, error))

        self._inbox.put(job)
        result, error = answer.get(timeout=_DO_S)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def programs(self) -> Mapping[str, tuple[str, Program]]:
        """The containers that run as processes, by `namespace/pod/container`, with the uid of their pod."""
        return self.do(
            lambda: {
                f"{pod.key}/{name}": (uid, program)
                for uid, pod in self._pods.items()
                if pod.state != "ended"
                for name, program in pod.programs.items()
            }
        )

    def held(self) -> Sequence[Held]:
        """What pods hold now, as pod-resources tells it."""
        return self._snapshot[1]

    # ---- the thread

    def _put(self, event: object) -> None:
        self._inbox.put(event)

    def _run(self) -> None:
        ticked_s = 0.0
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Empty):
                self._take(self._inbox.get(timeout=max(0.0, ticked_s + _TICK_S - time.monotonic())))
            now_s = time.monotonic()
            if now_s >= ticked_s + _TICK_S and not self._down:
                ticked_s = now_s
                self._guarded(self._report)
                for pod in list(self._pods.values()):
                    self._guarded(lambda pod=pod: self._step(pod))

    def _report(self) -> None:
        self._node.step(time.monotonic(), self._boot_id(), self._manager.report)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._say(f"{self._ground.node}: the API server is away: {error}")
        except Exception:  # one broken pod must not stop the node; the log has it, and the test waits in vain
            traceback.print_exc(file=sys.stderr)

    def _take(self, event: Any) -> None:
        match event:
            case Listed(plugin=plugin, devices=devices, first=True):
                self._numbers[plugin] = self._manager.register(plugin.resource, devices, plugin.prefer)
            case Listed(plugin=plugin, devices=devices):
                self._manager.update(self._numbers[plugin], devices)
            case Closed(plugin=plugin):
                if plugin in self._numbers:
                    self._manager.gone(self._numbers.pop(plugin), time.monotonic())
            case ("pods", items):
                self._relist(items)
            case ("pod", kind, document):
                self._changed(kind, document)
            case _:
                event()

    def _boot_id(self) -> str:
        return self._host.boot_id() if self._host else "11111111-2222-3333-4444-555555555555"

    # ---- pods as the API server has them

    def _relist(self, items: Sequence[Json]) -> None:
        for document in items:
            self._changed("MODIFIED", document)
        there = {uid_of(document) for document in items}
        for uid in self._pods.keys() - there:
            self._pods[uid].gone = True
        self._listed = True

    def _changed(self, kind: str, document: Json) -> None:
        uid = uid_of(document)
        pod = self._pods.get(uid)
        if pod is None:
            if kind == "DELETED" or (terminal(document) and grace_s(document) is None):
                return
            pod = self._pods[uid] = Pod(document, time.monotonic())
        pod.document = document
        pod.gone = pod.gone or kind == "DELETED"
        if not self._down:
            self._guarded(lambda: self._step(pod))

    def _watch(self) -> None:
        where = {"fieldSelector": f"spec.nodeName={self._ground.node}"}
        while not self._stopping.is_set():
            try:
                listed = self._api.get("/api/v1/pods", **where).object()
                self._put(("pods", listed["items"]))
                version = listed["metadata"]["resourceVersion"]
                self._watching = self._api.watch("/api/v1/pods", _WATCH_S, resourceVersion=version, **where)
                for event in self._watching:
                    if event["type"] == "ERROR":
                        break
                    self._put(("pod", event["type"], event["object"]))
            except (OSError, AssertionError, ValueError):
                self._stopping.wait(0.5)

    def _close_watch(self) -> None:
        if self._watching is not None:
            self._watching.close()

    # ---- one pod

    def _step(self, pod: Pod) -> None:
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
            self._go_on_ending(pod, now_s)
        if pod.state == "ended":
            self._bury(pod)

    def _admit(self, pod: Pod, now_s: float) -> None:
        wants = wants_of(pod.document)
        try:
            self._manager.admit(wants)
            self._allocate(wants)
        except AdmissionError as error:
            self._say(f"{self._ground.node}: {pod.key}: {error}")
            self._manager.free(wants.uid)
            pod.verdict = refused("UnexpectedAdmissionError", str(error))
            pod.state = "ended"
            return
        finally:
            self._publish()
        pod.state = "running"
        pod.started = now_text()
        pod.started_s = now_s
        for container in pod.document["spec"]["containers"]:
            if is_program(container):
                pod.programs[container["name"]] = Program(self._ground, pod.document, container, self._api)
            else:
                pod.simulated[container["name"]] = 0
        if pod.simulated and annotation(pod.document, PROGRAM) != "idle":
            self._compute(pod)

    def _allocate(self, wants: Wants) -> None:
        """Tell the plugins, as a kubelet does; what was given before is told again."""
        plugins = {plugin.resource: plugin for plugin in self._numbers}
        for one in self._manager.held():
            if (one.namespace, one.pod) == (wants.namespace, wants.name) and one.resource in plugins:
                try:
                    plugins[one.resource].allocate(one.device_ids)
                except grpc.RpcError as error:
                    raise AdmissionError(f"Allocate failed due to {error}, which is unexpected") from error

    def _compute(self, pod: Pod) -> None:
        """Have it run something on its devices, so that NVML shows them in use."""
        assert pod.simulated
        if self._host is None:
            return
        name = next(iter(pod.simulated))
        container = container_id(uid_of(pod.document), name, pod.simulated[name])
        for device in sorted({device_of(one) for one in self._manager.devices(uid_of(pod.document))}):
            at = _place_of(self._host, device)
            if at is None:
                self._say(f"{self._ground.node}: {pod.key} was given {device}, which is not there")
                continue
            with contextlib.suppress(SimulationError):  # a GPU without MIG that has it on by now
                pid = self._host.start_process(at[0], at[1], command=f"python {pod.key}", container=container)
                pod.computing.append(pid)

    def _run_containers(self, pod: Pod, now_s: float) -> None:
        states = {name: self._container(pod, name, program, now_s) for name, program in pod.programs.items()}
        lasts_s = annotation(pod.document, LASTS_S)
        over = bool(lasts_s) and now_s >= pod.started_s + float(lasts_s)
        for name, restarts in pod.simulated.items():
            kind = "terminated" if over else "running"
            made = container_id(uid_of(pod.document), name, restarts)
            states[name] = ContainerState(kind, ready=not over, restarts=restarts, since=pod.started, container_id=made)
        if states and all(state.kind == "terminated" for state in states.values()):
            well = all(state.exit_status == 0 for state in states.values())
            self._end(pod, "Succeeded" if well else "Failed", states)
            return
        waits = any(state.kind == "waiting" and not state.restarts for state in states.values())
        self._send(pod, self._status(pod, "Pending" if waits else "Running", states))

    def _container(self, pod: Pod, name: str, program: Program, now_s: float) -> ContainerState:
        if program.image in self.missing and program.pid is None:
            return ContainerState("waiting", "ImagePullBackOff", f"Back-off pulling image {program.image}")
        hinders = self._manager.hinders(uid_of(pod.document)) if program.pid is None else ""
        if hinders:
            return ContainerState("waiting", "CreateContainerConfigError", hinders, restarts=program.restarts)
        program.broken = program.image in self.broken
        return program.step(now_s)

    def _begin_end(self, pod: Pod, now_s: float, grace: float) -> None:
        pod.state = "ending"
        pod.kill_at_s = now_s + grace
        if pod.simulated:
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
        if any(program.pid is not None for program in pod.programs.values()):
            return
        if now_s < min(pod.stops_at_s, pod.kill_at_s):
            return
        names = (*pod.programs, *pod.simulated)
        killed = ContainerState("terminated", since=now_text(), exit_status=137 if over else 0)
        self._end(pod, "Failed" if over else "Succeeded", dict.fromkeys(names, killed))

    def _end(self, pod: Pod, phase: str, states: Mapping[str, ContainerState]) -> None:
        pod.verdict = self._status(pod, phase, states)
        pod.state = "ended"

    def _bury(self, pod: Pod) -> None:
        """It has ended: free what it held, say so, and confirm its deletion where that was asked for."""
        uid = uid_of(pod.document)
        if self._host is not None:
            for pid in pod.computing:
                with contextlib.suppress(SimulationError):  # ended with a reboot
                    self._host.end_process(pid)
        pod.computing.clear()
        self._manager.free(uid)
        self._publish()
        if pod.gone:
            del self._pods[uid]
            return
        if pod.verdict is not None:
            self._send(pod, pod.verdict)
        metadata = pod.document["metadata"]
        if grace_s(pod.document) is not None:
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            now = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._api.request("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", **now})

    def _status(self, pod: Pod, phase: str, states: Mapping[str, ContainerState]) -> Json:
        address = address_of(uid_of(pod.document))
        return status_of(pod.document, phase, states, address, pod.started or now_text())

    def _send(self, pod: Pod, status: Json) -> None:
        if pod.status is not None and same_status(pod.status, status):
            return
        metadata = pod.document["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        if self._api.patch(path, {"metadata": {"uid": metadata["uid"]}, "status": status}, MERGE).ok:
            pod.status = status

    def _publish(self) -> None:
        self._snapshot = (self._manager.active(), self._manager.held())

    # ---- what happens to it

    def _go_down(self) -> None:
        self._down = True
        self._sockets.stop()

    def _restart(self) -> None:
        self._go_down()
        self._come_up()

    def _come_up(self) -> None:
        self._numbers.clear()
        self._manager.restarted(time.monotonic())
        self._sockets.start()
        self._node.register()
        self._down = False

    def _reboot(self) -> None:
        self._go_down()
        self._kill_everything()
        if self._host is not None:
            self._host.reboot()
        for pod in self._pods.values():
            pod.computing.clear()
            if pod.state in ("running", "ending"):
                pod.state = "waiting"
                pod.programs.clear()
                pod.simulated.clear()
        self._come_up()

    def _shut_down(self) -> None:
        self._down = True  # or what is killed might be started again
        self._kill_everything()

    def _kill_everything(self) -> None:
        for pod in self._pods.values():
            for program in pod.programs.values():
                program.kill()


def _place_of(host: SimHost, device: str) -> tuple[int, int | None] | None:
    """Index of the GPU and first memory slice of the instance, None for a whole GPU; None where it is not there."""
    for gpu in host.snapshot().gpus:
        if gpu.uuid == device:
            return gpu.index, None
        for instance in gpu.instances:
            if any(compute.uuid == device for compute in instance.compute):
                return gpu.index, instance.start
    return None
