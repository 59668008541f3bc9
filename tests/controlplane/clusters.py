"""A whole cluster on one machine: control plane, simulated nodes, device plugin, and migd as `deploy/` installs it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from controlplane.deploying import NAMESPACE, OVERLAYS, applied, for_simulated_nodes, rendered
from controlplane.nodes import SPEC, SimNode
from controlplane.nodes_programs import Program
from controlplane.nodes_styles import STYLES, node_labels, plugin_manifests
from controlplane.processes import Forking, StartError, until
from controlplane.running import ControlPlane
from migd.sim.spec import parse_spec

NODES: Final = ("node-1", "node-2", "node-3")
CONTROL: Final = "control"
_CONTROL_TAINT: Final = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
_READY_S: Final = 120.0
_LOOK_S: Final = 0.3  # between two looks at all nodes
_RESTARTS_MAX: Final = 4  # who ended so often while starting does not come up any more
_KINDS: Final = ("gpupartitionplans", "gpupartitions")
_MIGD: Final = "/apis/migd.dev/v1alpha1"


class Process:
    """A container that runs as a process: an agent, the operator, a device plugin. Found anew at every question.

    `kill` is a crash, after which its kubelet starts it again; `stop` keeps it away until `start`.
    """

    def __init__(self, node: SimNode, container: str, namespace: str) -> None:
        self._node = node
        self._container = container
        self._namespace = namespace

    @property
    def program(self) -> Program:
        """The container as its kubelet has it; AssertionError where there is none now."""
        found = self._found()
        assert found is not None, f"no {self._container} of {self._namespace} is on {self._node.name}"
        return found

    @property
    def exists(self) -> bool:
        """Whether its pod is there, running or not."""
        return self._found() is not None

    @property
    def pid(self) -> int | None:
        """Its process id, None while it does not run."""
        found = self._found()
        return None if found is None else found.pid

    @property
    def pod(self) -> str:
        """The name of its pod."""
        return self.program.pod

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self.program.restarts

    @property
    def log(self) -> Path:
        """What it says, over all its starts."""
        return self.program.log

    def kill(self) -> None:
        """SIGKILL, as in a crash; it comes back after the kubelet's backoff."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Any signal."""
        program = self.program
        self._node.kubelet.do(lambda: program.end(number))

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = 30.0) -> None:
        """End it, and let it not be started again. StartError where it does not end."""
        program = self.program
        program.held = True
        self.send(number)
        if not until(lambda: program.pid is None, within_s):
            raise StartError(f"{self._container} on {self._node.name} does not end: {self.log}")

    def start(self, within_s: float = 30.0) -> None:
        """Let it be started again after `stop`, and see that it was."""
        self.program.held = False
        if not until(lambda: self.pid is not None, within_s):
            raise StartError(f"{self._container} on {self._node.name} is not started: {self.log}")

    def _found(self) -> Program | None:
        for key, (_, program) in self._node.kubelet.programs().items():
            namespace, _, container = key.split("/")
            if (namespace, container) == (self._namespace, self._container):
                return program
        return None


class Cluster:
    """One cluster. Use it as a context, or call `start` and `stop`.

    folder: for the control plane, with all logs. nodes: their names. spec: the GPUs of each, or of each by name.
    style: how the device plugin is installed, see nodes_styles; strategy: its MIG strategy. operator: whether migd's
    operator runs; migd: whether migd is installed at all. instead: program -> the command that runs in its place.
    forking: where agents, operator and plugins are forked from; None starts each anew, as it is installed.
    say: gets a line for each thing that is done.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str] = NODES,
        style: str = "helm",
        *,
        spec: str | Mapping[str, str] = SPEC,
        strategy: str = "mixed",
        operator: bool = True,
        migd: bool = True,
        status_every_s: float = 1.0,
        backoff_s: float = 1.0,
        instead: Mapping[str, Sequence[str]] | None = None,
        forking: Forking | None = None,
        programs: Path | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.plane = ControlPlane(folder, programs)
        self.style = STYLES[style]
        self._strategy = strategy
        self._operator = operator
        self._migd = migd
        self._say = say
        self.roots = Path(tempfile.mkdtemp(prefix="migd-"))  # short: a socket's path has 107 bytes at most
        common: dict[str, Any] = {"status_every_s": status_every_s, "backoff_s": backoff_s, "forking": forking}
        specs = dict.fromkeys(nodes, spec) if isinstance(spec, str) else spec
        self.nodes = {
            name: SimNode(
                self.plane,
                name,
                self.roots / name,
                specs[name],
                labels=node_labels(self.style, strategy, parse_spec(specs[name])[0].name),
                instead=instead,
                **common,
            )
            for name in nodes
        }
        self.control = SimNode(self.plane, CONTROL, self.roots / CONTROL, "", taints=[_CONTROL_TAINT], **common)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- coming and going

    def start(self) -> None:
        """Start everything and wait until it is ready; StartError or DeployError, with all stopped again."""
        try:
            self._say("starting etcd, API server, controllers and scheduler")
            self.plane.start()
            self._say(f"starting the nodes {', '.join(self.nodes)} and {CONTROL}")
            for node in (self.control, *self.nodes.values()):
                node.start()
            applied(self.plane, plugin_manifests(self.style, self._strategy), "the device plugin")
            self._wait("the device plugin", self._plugins_registered)
            if self._migd:
                self.install()
        except BaseException:
            self.stop()
            raise

    def install(self) -> None:
        """Apply `deploy/`, and wait for its programs."""
        overlay = OVERLAYS[self.style.name]
        self._say(f"applying deploy/{overlay}")
        documents = rendered(self.plane, overlay)
        definitions = [d for d in documents if d["kind"] in ("CustomResourceDefinition", "Namespace")]
        applied(self.plane, definitions, f"the definitions of deploy/{overlay}")
        self._wait("the definitions", lambda: all(self.plane.admin.get(f"{_MIGD}/{kind}").ok for kind in _KINDS))
        adapted = for_simulated_nodes(documents, int(self._operator), CONTROL)
        agents = [d for d in adapted if d["kind"] == "DaemonSet"]
        applied(self.plane, [d for d in adapted if d not in agents], f"deploy/{overlay}")
        if self._operator:
            # first: what an operator finds when it starts, it believes once it was renewed, which takes a minute
            self._say("waiting for the operator")
            self._wait("the operator", lambda: self._all_ready("migd-operator", [self.operator()]))
        applied(self.plane, agents, f"the agents of deploy/{overlay}")
        self._say("waiting for the agents")
        self._wait("the agents", lambda: self._all_ready("migd-agent", [self.agent(name) for name in self.nodes]))

    def stop(self) -> None:
        """End everything; the folder stays, with the logs."""
        for node in (*self.nodes.values(), self.control):
            with contextlib.suppress(Exception):  # one that hangs must not keep the others
                node.stop()
        self.plane.stop()
        shutil.rmtree(self.roots, ignore_errors=True)

    # ---- what is in it

    def agent(self, node: str) -> Process:
        """The agent of a node."""
        return Process(self.nodes[node], "agent", NAMESPACE)

    def plugin(self, node: str) -> Process:
        """The device plugin of a node."""
        return Process(self.nodes[node], self.style.container, self.style.namespace)

    def operator(self) -> Process:
        """The operator."""
        return Process(self.control, "operator", NAMESPACE)

    def kubectl(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """kubectl as the admin; the caller looks at the exit status."""
        return self.plane.kubectl(*words, stdin=stdin)

    def node(self, name: str) -> Any:
        """A Node object as it is now."""
        return self.plane.admin.get(f"/api/v1/nodes/{name}").object()

    def allocatable(self, name: str) -> dict[str, int]:
        """What a node offers under nvidia.com/."""
        found = self.node(name)["status"].get("allocatable") or {}
        return {resource: int(n) for resource, n in found.items() if resource.startswith("nvidia.com/")}

    # ---- waiting

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        if not until(ready, _READY_S, _LOOK_S):
            pods = self.kubectl("get", "pods", "-A", "-o", "wide").stdout
            raise StartError(f"{what} did not get ready within {_READY_S:.0f} s; logs: {self.plane.logs}\n{pods}")

    def _plugins_registered(self) -> bool:
        return all(self.plugin(name).pid is not None and self.allocatable(name) for name in self.nodes)

    def _all_ready(self, name: str, processes: Sequence[Process]) -> bool:
        for process in processes:
            if process.exists and process.restarts >= _RESTARTS_MAX:
                raise StartError(f"{name} ends again and again; {process.log} ends with\n{_tail(process.log)}")
        where = {"labelSelector": f"app.kubernetes.io/name={name}"}
        pods = self.plane.admin.get(f"/api/v1/namespaces/{NAMESPACE}/pods", **where).object()["items"]
        ready = [
            pod
            for pod in pods
            for condition in pod.get("status", {}).get("conditions", ())
            if (condition["type"], condition["status"]) == ("Ready", "True")
        ]
        return len(ready) >= len(processes)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
