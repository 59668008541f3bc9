"""Containers whose image is one of ours run as processes of this machine, with what a kubelet would give them.

A process has no mounts of its own: where a word or a variable names a path in a volume, it gets the path outside. It
finds the API server by the kubeconfig that KUBECONFIG names, with the token of its pod.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from controlplane.api import Api, Json
from controlplane.nodes_pods import ContainerState, address_of, container_id, now_text, uid_of
from controlplane.nodes_tokens import Ground, Token
from controlplane.processes import Child

_HERE: Final = Path(__file__).parent
_ROOT: Final = _HERE.parents[1]
_PYTHON: Final = sys.executable
PLUGIN: Final = "k8s-device-plugin"
PROGRAMS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "migd": {"migd": (_PYTHON, "-m", "migd"), "migd-operator": (_PYTHON, "-m", "migd_operator")},
    PLUGIN: {"nvidia-device-plugin": (_PYTHON, str(_HERE / "plugin.py"))},
}
"""Image, without registry and tag -> the programs in it, the first being its entrypoint."""
AS_IT_IS: Final[Mapping[str, Sequence[str]]] = {}
_KUBECONFIG: Final = "--kubeconfig=$(KUBECONFIG)"
"""What our programs are told besides: they look for a pod's token where no process without mounts has one."""
BACKOFF_MAX_S: Final = 300.0
_VARIABLE: Final = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_KEYED: Final = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


def image_of(container: Json) -> str:
    """The image's name without registry, tag and digest."""
    return str(container["image"]).rpartition("/")[2].partition("@")[0].partition(":")[0]


def is_program(container: Json) -> bool:
    """Whether its image is one that runs here."""
    return image_of(container) in PROGRAMS


def words_of(container: Json, instead: Mapping[str, Sequence[str]] = AS_IT_IS) -> tuple[list[str], list[str]]:
    """The command line: our program for the image's, or another one instead; and what follows, as the pod says."""
    programs = {**PROGRAMS[image_of(container)], **instead}
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    name = Path(words[0]).name if words else ""
    more = [] if image_of(container) == PLUGIN else [_KUBECONFIG]
    if name in programs:
        return [*programs[name]], [*words[1:], *more]
    return [*next(iter(programs.values()))], [*words, *more]


class Program:
    """One container as a process, restarted as the pod's policy says."""

    def __init__(self, ground: Ground, pod: Json, container: Json, api: Api) -> None:
        metadata = pod["metadata"]
        self.name = str(container["name"])
        self.image = image_of(container)
        self.pod = str(metadata["name"])
        self.held = False
        self.broken = False
        self.restarts = 0
        self._ground = ground
        self._pod = pod
        self._container = container
        self.token = Token(ground, pod, api)
        logs = ground.logs / f"{metadata['namespace']}_{metadata['name']}"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{self.name}.log"
        self._child: Child | None = None
        self._again_at_s = 0.0
        self._backoff_s = ground.backoff_s
        self._started_s = 0.0
        self._since = ""
        self._ended: int | None = None
        self._probes = {
            kind: Probe(container, container[kind], _address(pod))
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if container.get(kind)
        }

    @property
    def pid(self) -> int | None:
        """Its process, None while there is none."""
        return self._child.pid if self._child is not None and self._child.running else None

    def step(self, now_s: float) -> ContainerState:
        """Start, restart or probe it, as is due; how it is then."""
        self.token.step(now_s)
        child = self._child
        if child is not None and child.running:
            return self._running(now_s)
        if child is not None and child.exit_status is not None:
            self._ended = child.exit_status
            child.stop()  # what is left of its group
            self._child = None
            self._since = now_text()
            self.restarts += int(self._restarts())
            if now_s - self._started_s > BACKOFF_MAX_S * 2:
                self._backoff_s = self._ground.backoff_s
            self._again_at_s = now_s + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        if self._ended is not None and not self._restarts():
            return self._state("terminated", exit_status=self._ended)
        if self.held or now_s < self._again_at_s or not self.token.ready:
            waits = self._ended is not None
            return self._state("waiting", "CrashLoopBackOff" if waits else "ContainerCreating")
        self._start(now_s)
        return self._running(now_s)

    def end(self, number: signal.Signals) -> None:
        """Send it a signal. Who does not step it afterwards does not start it again."""
        if self._child is not None and self._child.running:
            self._child.send(number)

    def kill(self) -> None:
        """End it at once, and see it gone."""
        if self._child is not None:
            self._child.kill()

    def _restarts(self) -> bool:
        policy = self._pod["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and self._ended != 0)

    def _start(self, now_s: float) -> None:
        made = container_id(uid_of(self._pod), self.name, self.restarts)
        # a container's name has the uid of its pod in it, as its cgroup has on a real machine
        seen = self.variables() | {"CONTAINER_ID": f"{uid_of(self._pod)}/{made}"}
        words = ["/bin/false"] if self.broken else self.command(seen)
        name, ground = f"{self.name}@{self._ground.node}", self._ground
        self._child = Child(name, words, self.log, ground.leashed, seen, ground.forking)
        with self.log.open("a") as log:
            log.write(f"--- {now_text()} start {self.restarts}: {' '.join(words)}\n")
        self._child.start()
        self._started_s = now_s
        self._since = now_text()
        for probe in self._probes.values():
            probe.begin(now_s)

    def _running(self, now_s: float) -> ContainerState:
        startup = self._probes.get("startupProbe")
        started = startup is None or startup.well or self._probed("startupProbe", now_s)  # it is asked until then
        ready = started and self._probed("readinessProbe", now_s)
        alive = not started or self._probed("livenessProbe", now_s)
        if not alive or (not started and self._probes["startupProbe"].gave_up):
            self.end(signal.SIGTERM)
        return self._state("running", ready=ready)

    def _probed(self, kind: str, now_s: float) -> bool:
        probe = self._probes.get(kind)
        return probe is None or probe.step(now_s, until_bad=kind == "livenessProbe")

    def _state(self, kind: str, reason: str = "", ready: bool = False, exit_status: int = 0) -> ContainerState:
        made = container_id(uid_of(self._pod), self.name, self.restarts) if kind == "running" else ""
        return ContainerState(kind, reason, "", ready, self.restarts, self._since, exit_status, made)

    # ---- what it sees

    def command(self, seen: Mapping[str, str]) -> list[str]:
        """What is run. Python and its environment may lie anywhere, also where the pod has a volume: /tmp."""
        program, given = words_of(self._container, self._ground.instead)
        return [*program, *(_expanded(self.outside(word), seen) for word in given)]

    def variables(self) -> dict[str, str]:
        """What it sees in its environment."""
        given = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        given |= {"HOME": str(self.token.folder), "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        given["GRPC_VERBOSITY"] = "ERROR"  # else each socket that closes is told of
        given |= {"SIMULATED_ROOT": str(self._ground.root), "KUBECONFIG": str(self.token.kubeconfig)}
        for one in self._container.get("env") or ():
            value = self._field(one["valueFrom"]) if "valueFrom" in one else str(one.get("value", ""))
            given[one["name"]] = _expanded(self.outside(value), given)
        return given | self._ground.variables  # of its GPUs the node knows best

    def _field(self, source: Json) -> str:
        path = source["fieldRef"]["fieldPath"]
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        keyed = _KEYED.fullmatch(path)
        if keyed:
            return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
        fields = {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": spec["nodeName"],
            "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
            "status.hostIP": "127.0.0.1",
            "status.podIP": _address(self._pod),
        }
        return str(fields[path])

    def outside(self, word: str) -> str:
        """The word as it is outside of the container: paths in its volumes, and its network, are elsewhere."""
        name, equals, path = word.partition("=")
        if not equals:
            name, path = "", word
        if path.startswith("0.0.0.0:"):
            return f"{name}{equals}{_address(self._pod)}{path.removeprefix('0.0.0.0')}"
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes") or ()}
        mounts = sorted(self._container.get("volumeMounts") or (), key=lambda m: -len(m["mountPath"]))
        for mount in mounts:
            inside = mount["mountPath"].rstrip("/")
            if path == inside or path.startswith(f"{inside}/"):
                return f"{name}{equals}{self._place(volumes[mount['name']])}{path.removeprefix(inside)}"
            host = (volumes[mount["name"]].get("hostPath") or {}).get("path", "")
            if path != "/" and inside.startswith(f"{path}/") and inside == host:  # a folder above it
                return f"{name}{equals}{self._ground.root / path.lstrip('/')}"
        return word

    def _place(self, volume: Json) -> Path:
        if "hostPath" in volume:
            place = self._ground.root / volume["hostPath"]["path"].lstrip("/")
            if not place.exists():
                place.mkdir(parents=True)
            return place
        place = self.token.folder / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        return place


class Probe:
    """A probe of a container: over HTTP at the pod's address; other kinds always succeed."""

    def __init__(self, container: Json, spec: Json, address: str) -> None:
        self._http = spec.get("httpGet")
        self._address = address
        self._port = _port(container, self._http["port"]) if self._http else 0
        self._period_s = float(spec.get("periodSeconds") or 10)
        self._delay_s = float(spec.get("initialDelaySeconds") or 0)
        self._bad_max = int(spec.get("failureThreshold") or 3)
        self._timeout_s = min(float(spec.get("timeoutSeconds") or 1), 1.0)
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """The container was started."""
        self._next_s = now_s + self._delay_s
        self._well = False
        self._bad = 0

    @property
    def well(self) -> bool:
        """Whether the container was well when asked last, and was asked."""
        return self._well

    @property
    def gave_up(self) -> bool:
        """It failed as often as it may."""
        return self._bad >= self._bad_max

    def step(self, now_s: float, until_bad: bool) -> bool:
        """Whether the container is well. until_bad: it is until shown otherwise, as liveness is."""
        if self._http is None:
            return True
        if now_s >= self._next_s:
            well = self._answers()
            self._next_s = now_s + (self._period_s if self._well else min(self._period_s, 1.0))
            self._bad = 0 if well else self._bad + 1
            self._well = well or (self._well and self._bad < self._bad_max)
            if until_bad:
                self._next_s = now_s + self._period_s
        return self._bad < self._bad_max if until_bad else self._well

    def _answers(self) -> bool:
        host = self._http.get("host") or self._address
        connection = http.client.HTTPConnection(host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", self._http.get("path", "/"))
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _port(container: Json, port: Any) -> int:
    if isinstance(port, int):
        return port
    named = {one.get("name"): int(one["containerPort"]) for one in container.get("ports") or ()}
    return named[port]


def _address(pod: Json) -> str:
    return address_of(uid_of(pod))


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), word)


def python_path() -> str:
    """Where our programs find their modules."""
    return os.pathsep.join(str(path) for path in (_ROOT, _ROOT / "operator", _ROOT / "tests"))
