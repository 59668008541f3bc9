"""The kubelet of a simulated node: it admits, runs and ends the pods that are bound to it, and tells of the node.

Source: kubelet 1.37, as measured on a real node; times are drawn by seed. What it does to devices is `devices`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from migd.sim.cluster.entries import Happened
from migd.sim.cluster.fields import Json
from migd.sim.host import SimHost
from migd.sim.nodes import documents
from migd.sim.nodes.acting import Actor, Stage
from migd.sim.nodes.devices import AdmissionError, DeviceManager, Held
from migd.sim.nodes.plugin import PluginConfig
from migd.sim.nodes.programs import PROGRAMS, Program, ProgramError, Sandbox
from migd.sim.nodes.statuses import Telling
from migd.sim.nodes.strangers import MigManager

BACKOFF_S: Final = (10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


class KubeletDownError(Exception):
    """The kubelet does not answer."""


@dataclass(slots=True)
class _Run:
    """A pod that was admitted. program: of its containers, None while they do not run.

    outcome: how they ended, where that is not told yet. told: what was last said of why they wait. stopping: asked to;
    then it is done at done_s and killed at killed_s, whichever is first, and grace is what it was last given.
    """

    uid: str
    namespace: str
    name: str
    program: Program | None = None
    outcome: str = ""
    told: str = ""
    restarts: int = 0
    starts: int = 0
    failures: int = 0
    stopping: bool = False
    done_s: float = math.inf
    killed_s: float = math.inf
    grace: int | None = None
    pid: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)
    containers: tuple[str, ...] = ()

    def news(self, pod: Json) -> bool:
        """Whether it is asked for something: to stop, sooner than before, or to hang no more.

        Anything else is what the kubelet wrote itself.
        """
        if not self.stopping:
            return "deletionTimestamp" in pod["metadata"]
        let_go = documents.HANGS in self.annotations and not documents.annotation(pod, documents.HANGS)
        return let_go or self.grace != pod["metadata"].get("deletionGracePeriodSeconds")


class Kubelet(Actor):
    """One node's kubelet, and the machine's power switch.

    manager: its device manager. up: it runs. lost_statuses: so many of the next status updates do not arrive.
    reregisters: the plugins of this node mind a kubelet that restarts.
    """

    def __init__(
        self, stage: Stage, node: str, host: SimHost, config: PluginConfig, labels: Mapping[str, str], leases: bool
    ) -> None:
        super().__init__(stage, f"kubelet {node}", f"system:node:{node}")
        self.node, self.host, self.config = node, host, config
        self.manager = DeviceManager(lambda ids, number: sorted(self.dice.sample(sorted(ids), number)))
        self.up = False
        self.down_since_s = 0.0
        self.reregisters = True
        self.lost_statuses = 0
        self._features = Actor(stage, f"nfd {node}", "system:serviceaccount:node-feature-discovery:nfd-master")
        self._programs = {**PROGRAMS, "mig-manager": MigManager}
        self._runs: dict[str, _Run] = {}
        self._era = 0
        self._next_pid = 3_000
        self._telling = Telling(self, labels, leases)
        stage.hear("pods", self._heard)

    # ---- what others ask of it

    def pod_resources(self) -> tuple[Held, ...]:
        """What active pods hold, as the pod-resources API lists it; KubeletDownError where nobody answers."""
        if not self.up:
            raise KubeletDownError(f"kubelet of {self.node}: connection refused")
        return self.manager.held()

    def hang_up(self, uid: str) -> bool:
        """SIGHUP to the container of this pod; False where no such container runs."""
        run = self._runs.get(uid)
        if run is None or run.program is None:
            return False
        run.program.hang_up()
        return True

    def pod_of(self, container: str) -> str:
        """The uid of the pod whose container has this id; "" for none of this node's."""
        for run in self._runs.values():
            if documents.container_id(run.uid, run.restarts) == container:
                return run.uid
        return ""

    def look(self) -> None:
        """The GPUs have something to tell, such as an Xid: who listens hears of it."""
        for run in list(self._runs.values()):
            if run.program is not None:
                run.program.look()

    # ---- power and restarts

    def begin(self) -> None:
        """The kubelet starts: it tells of the node, and takes up the pods that are bound to it."""
        self.up = True
        self._era += 1
        self.manager.restarted(self.stage.now_s())
        self._telling.begin()
        for run in list(self._runs.values()):
            if run.program is not None:
                run.program.kubelet_restarted()
        bound = [pod for pod in self.all("pods") if documents.node_of(pod) == self.node]
        there = {pod["metadata"]["uid"] for pod in bound}
        for run in [run for uid, run in self._runs.items() if uid not in there]:
            self._gone(run)
        for wants in self.manager.active():
            if wants.uid not in there:
                self.manager.free(wants.uid)
        for pod in bound:
            self._soon(pod)
        for run in self._runs.values():
            if run.program is None and not run.outcome and not run.stopping:
                self._start_later(run)

    def end(self) -> None:
        """The kubelet is not there; containers go on."""
        self.up = False
        self._era += 1
        self.down_since_s = self.stage.now_s()

    def restart(self, away_s: float = 2.0) -> None:
        """The kubelet ends and comes back."""
        self.say("restarts")
        self.end()
        self.stage.later(away_s, lambda: None if self.up else self.begin())

    def power_off(self) -> None:
        """The machine is off: kubelet, containers and all."""
        self.say("power off")
        self.end()
        for run in self._runs.values():
            if run.program is not None:
                run.program.stop()
            run.program = None
            run.starts += 1
        self.host.reboot()

    def power_on(self) -> None:
        """The machine starts: its pods are admitted anew, before any plugin is there."""
        self.say("power on")
        for run in [run for run in self._runs.values() if not run.outcome]:
            del self._runs[run.uid]
        self.begin()

    def reboot(self, away_s: float = 40.0) -> None:
        """Off and on again."""
        self.power_off()
        self.stage.later(away_s, self.power_on)

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after so long, if the kubelet has not been restarted since."""
        era = self._era
        self.stage.later(seconds, lambda: act() if era == self._era else None)

    # ---- pods

    def _heard(self, happened: Happened) -> None:
        pod = happened.after.document
        if not self.up or pod["spec"].get("nodeName") != self.node:
            return
        run = self._runs.get(pod["metadata"]["uid"])
        if run is None or happened.deleted or run.news(pod):
            self._soon(pod)

    def _soon(self, pod: Json) -> None:
        metadata = pod["metadata"]
        uid, namespace, name = metadata["uid"], metadata["namespace"], metadata["name"]
        era = self._era
        self.later(0.005, 0.05, lambda: self._sync(uid, namespace, name) if era == self._era else None)

    def _sync(self, uid: str, namespace: str, name: str) -> None:
        pod = self.read("pods", name, namespace)
        run = self._runs.get(uid)
        if pod is None or pod["metadata"]["uid"] != uid:
            if run is not None:
                self._gone(run)
        elif "deletionTimestamp" in pod["metadata"]:
            self._asked_to_stop(pod, run)
        elif run is None:
            if not documents.terminal(pod):
                self._admit(pod)
        elif run.outcome:
            self._tell_outcome(run)

    def _admit(self, pod: Json) -> None:
        metadata = pod["metadata"]
        wants = documents.wants_of(pod)
        node = self.read("nodes", self.node)
        told = documents.resources_in(((node or {}).get("status") or {}).get("allocatable"))
        try:
            self.manager.admit(wants)
            self.manager.needs(wants, told)
        except AdmissionError as error:
            self.say(f"{wants.namespace}/{wants.name} fails: {error.reason}: {error}")
            body = {"phase": "Failed", "reason": error.reason, "message": f"Pod was rejected: {error}"}
            self.merge("pods", wants.name, {"status": body}, wants.namespace, "status")
            return
        devices = self.manager.devices(wants.uid)
        if devices:
            self.say(f"{wants.namespace}/{wants.name} gets {', '.join(devices)}")
        annotations = metadata.get("annotations") or {}
        run = _Run(wants.uid, wants.namespace, wants.name, annotations=annotations, containers=tuple(wants.containers))
        self._runs[wants.uid] = run
        self._start_later(run)

    def _start_later(self, run: _Run) -> None:
        run.starts += 1
        self._when(run, 0.3, 1.5, lambda: self._start(run))

    def _when(self, run: _Run, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        """Do something later, if this run is still at the same start then."""
        at = run.starts
        self.later(least_s, most_s, lambda: act() if self._runs.get(run.uid) is run and run.starts == at else None)

    def _start(self, run: _Run) -> None:
        """Start the containers; where they cannot, they wait and are tried again."""
        if run.stopping or not self.up:
            return
        hinders = self.manager.hinders(run.uid)
        if hinders:
            self._wait(run, "CreateContainerConfigError", hinders, 10.0)
            return
        devices = self.manager.devices(run.uid)
        if not run.pid or run.restarts:
            self._next_pid += 1
            run.pid = self._next_pid
        container = documents.container_id(run.uid, run.restarts)
        box = Sandbox(
            *(self.node, self, self.host, self.manager, self._features),
            *(run.pid, container, devices, self.config, self._minded),
        )
        called = run.annotations.get(documents.PROGRAM, "compute" if devices else "idle")
        program = self._programs[called](box)
        try:
            program.start()
        except ProgramError as error:
            backoff = BACKOFF_S[min(run.failures, len(BACKOFF_S) - 1)]
            run.failures += 1
            self._wait(run, "RunContainerError", str(error), backoff)
            return
        run.program, run.told = program, ""
        self._tell(run, "Running", "")
        lasts, crashes = run.annotations.get(documents.LASTS_S), run.annotations.get(documents.CRASHES_AFTER_S)
        if lasts is not None:
            self._when(run, float(lasts), float(lasts), lambda: self._ends(run, "Succeeded"))
        if crashes is not None:
            self._when(run, float(crashes), float(crashes), lambda: self.crash(run.uid))

    def _minded(self) -> bool:
        return self.reregisters

    def _wait(self, run: _Run, reason: str, why: str, again_s: float) -> None:
        if run.told != reason:
            self.say(f"{run.namespace}/{run.name} waits: {reason}: {why}")
            run.told = reason
            self._tell(run, "Pending", reason)
        self._when(run, again_s, again_s + 1.0, lambda: self._start(run))

    def crash(self, uid: str) -> None:
        """The container of this pod ends badly, and is started again after a backoff."""
        run = self._runs.get(uid)
        if run is None or run.program is None:
            return
        if run.stopping:
            run.done_s = self.stage.now_s()
            self._stopped(run)
            return
        run.program.stop()
        run.program = None
        run.restarts += 1
        run.starts += 1
        self.say(f"{run.namespace}/{run.name} crashes")
        run.told = "CrashLoopBackOff"
        self._tell(run, "Running", "CrashLoopBackOff")
        backoff = BACKOFF_S[min(run.restarts - 1, len(BACKOFF_S) - 1)] if run.restarts > 1 else 0.5
        self._when(run, backoff, backoff + 1.0, lambda: self._start(run))

    def _ends(self, run: _Run, outcome: str) -> None:
        if run.program is not None:
            run.program.stop()
            run.program = None
        run.starts += 1
        run.outcome = outcome
        if self.up and not run.stopping:
            self._tell_outcome(run)

    def _tell_outcome(self, run: _Run) -> None:
        self.manager.free(run.uid)
        del self._runs[run.uid]
        self._tell(run, run.outcome, "")

    def _asked_to_stop(self, pod: Json, run: _Run | None) -> None:
        if run is None:
            self.manager.free(pod["metadata"]["uid"])
            self.delete("pods", pod, 0)
            return
        now_s = self.stage.now_s()
        run.grace = int(pod["metadata"].get("deletionGracePeriodSeconds", 30))
        run.annotations = pod["metadata"].get("annotations") or {}
        if not run.stopping:
            run.stopping = True
            asked = run.annotations.get(documents.STOPS_IN_S)
            takes = float(asked) if asked is not None else 0.05 + 0.95 * self.dice.random()
            run.done_s = now_s + (0.0 if run.program is None else takes)
        run.killed_s = min(run.killed_s, now_s + run.grace)
        self.stage.later(max(0.0, min(run.done_s, run.killed_s) - now_s), lambda: self._stopped(run))

    def _stopped(self, run: _Run) -> None:
        """Its time is over: say how it ended, and that it is gone. One that hangs does not end when it is killed."""
        if self._runs.get(run.uid) is not run:
            return
        if run.annotations.get(documents.HANGS):
            self.say(f"{run.namespace}/{run.name} does not end")
            return
        pod = self.read("pods", run.name, run.namespace)
        self._over(run)
        if self.up and pod is not None and pod["metadata"]["uid"] == run.uid:
            if not documents.terminal(pod):
                self._tell(run, "Failed" if run.killed_s < run.done_s else "Succeeded", "")
            self.delete("pods", pod, 0)

    def _gone(self, run: _Run) -> None:
        """The API server has it no more: what it was given is given to others, whether it can be ended or not."""
        if run.annotations.get(documents.HANGS):
            self.manager.free(run.uid)
        else:
            self._over(run)

    def _over(self, run: _Run) -> None:
        if run.program is not None:
            run.program.stop()
            run.program = None
        self._runs.pop(run.uid, None)
        self.manager.free(run.uid)

    def _tell(self, run: _Run, phase: str, waiting: str) -> None:
        """Write the pod's status, if the kubelet is there to do it."""
        if not self.up:
            return
        pod = self.read("pods", run.name, run.namespace)
        body = documents.pod_status(pod, run.uid, phase, waiting, run.restarts, run.containers)
        if phase in ("Running", "Succeeded"):
            self.say(f"{run.namespace}/{run.name} {phase}")
        self.merge("pods", run.name, {"status": body}, run.namespace, "status")
