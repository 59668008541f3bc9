"""The kubelet of one simulated node: a thread that takes what happens one by one, and brings each pod a step further.

Pods come from a watch of the real API server, bound by the real scheduler. One whose image is ours runs as a process;
any other is only said to run, and computes on the devices that it was given.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from controlplane.api import Api, Json
from controlplane.nodes_life import Pod, Pods
from controlplane.nodes_object import NodeObject
from controlplane.nodes_pods import grace_s, terminal, uid_of
from controlplane.nodes_programs import Program
from controlplane.nodes_sockets import Closed, Listed, Sockets
from controlplane.nodes_tokens import Ground
from migd.sim import SimHost
from migd.sim.nodes.devices import Held

T = TypeVar("T")
_TICK_S: Final = 0.5
_WATCH_S: Final = 300
_DO_S: Final = 60.0


class Kubelet:
    """One node's kubelet. `start`, then `stop`.

    api: with the node's certificate. machine: opens the simulated machine, None for a node without GPUs. pods: has the
    switches that a test may turn: `admit_after_s`, `broken`, `missing`.
    """

    def __init__(
        self,
        api: Api,
        node: NodeObject,
        ground: Ground,
        machine: Callable[[], SimHost] | None,
        say: Callable[[str], None],
    ) -> None:
        self.pods = Pods(api, ground, say)
        self._api = api
        self._node = node
        self._ground = ground
        self._open = machine
        self._say = say
        self._sockets = Sockets(ground.root / "var/lib/kubelet", self._put, lambda: self.pods.snapshot)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._boot = ""  # the machine's boot id, once it was read
        self._down = False
        self._away = False
        self._stopping = threading.Event()
        self._watching: Any = None
        self._threads: list[threading.Thread] = []

    # ---- from outside

    def start(self) -> None:
        """Register the node and go to work."""
        self.pods.host = self._open() if self._open else None
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
                for uid, pod in self.pods.known.items()
                if pod.state != "ended"
                for name, program in pod.programs.items()
            }
        )

    def held(self) -> Sequence[Held]:
        """What pods hold now, as pod-resources tells it."""
        return self.pods.snapshot[1]

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
                for pod in list(self.pods.known.values()):
                    self._guarded(lambda pod=pod: self.pods.step(pod))

    def _report(self) -> None:
        self._node.step(time.monotonic(), self._boot_id, self.pods.manager.report)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._away = False
        except OSError as error:
            if not self._away:
                self._say(f"the API server is away: {error}")
            self._away = True
        except Exception:  # one broken pod must not stop the node; the log has it, and the test waits in vain
            self._say(traceback.format_exc())

    def _take(self, event: Any) -> None:
        match event:
            case Listed(plugin=plugin, devices=devices, first=True):
                self.pods.plugins[plugin] = self.pods.manager.register(plugin.resource, devices, plugin.prefer)
            case Listed(plugin=plugin, devices=devices):
                self.pods.manager.update(self.pods.plugins[plugin], devices)
            case Closed(plugin=plugin):
                if plugin in self.pods.plugins:
                    self.pods.manager.gone(self.pods.plugins.pop(plugin), time.monotonic())
            case ("pods", items):
                self._relist(items)
            case ("pod", kind, document):
                self._changed(kind, document)
            case _:
                event()

    def _boot_id(self) -> str:
        if not self._boot:
            self._boot = self.pods.host.boot_id() if self.pods.host else "11111111-2222-3333-4444-555555555555"
        return self._boot

    # ---- pods as the API server has them

    def _relist(self, items: Sequence[Json]) -> None:
        for document in items:
            self._changed("MODIFIED", document)
        there = {uid_of(document) for document in items}
        for uid in self.pods.known.keys() - there:
            self.pods.known[uid].gone = True

    def _changed(self, kind: str, document: Json) -> None:
        uid = uid_of(document)
        pod = self.pods.known.get(uid)
        if pod is None:
            if kind == "DELETED" or (terminal(document) and grace_s(document) is None):
                return
            pod = self.pods.known[uid] = Pod(document, time.monotonic())
        pod.document = document
        pod.gone = pod.gone or kind == "DELETED"
        if not self._down:
            self._guarded(lambda: self.pods.step(pod))

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

    # ---- what happens to it

    def _go_down(self) -> None:
        self._down = True
        self._sockets.stop()

    def _restart(self) -> None:
        self._go_down()
        self._come_up()

    def _come_up(self) -> None:
        self.pods.plugins.clear()
        self.pods.manager.restarted(time.monotonic())
        self._sockets.start()
        self._node.registered = False
        self._down = False

    def _reboot(self) -> None:
        self._go_down()
        self.pods.power_off()
        if self.pods.host is not None:
            self.pods.host.reboot()
        self._boot = ""
        self._come_up()

    def _shut_down(self) -> None:
        self._down = True  # or what is killed might be started again
        self.pods.kill()
