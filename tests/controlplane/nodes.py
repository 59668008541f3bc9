"""Simulated nodes of a real control plane: each a kubelet with its credentials, sockets, GPUs and pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from controlplane.api import Json
from controlplane.building import kubernetes_version
from controlplane.nodes_kubelet import Kubelet
from controlplane.nodes_object import NodeObject
from controlplane.nodes_pods import now_text
from controlplane.nodes_tokens import Ground
from controlplane.processes import Forking
from controlplane.running import ControlPlane
from migd.sim import SimHost

SPEC: Final = "8xa100-80gb"
SOCKET_ROOM: Final = 50
"""So many bytes of a socket's path come after the node's root folder and may be needed at most."""


class SimNode:
    """One node. Use it as a context, or call `start` and `stop`.

    root: the folder that is its `/`, with a short path since sockets lie in it. spec: its GPUs, "" for none. seed: of
    the GPUs' UUIDs; the node's name where not given.
    status_every_s: how often the kubelet looks at the node's status; backoff_s: before a container's first restart.
    instead: program -> the command that runs in its place. forking: where Python programs are forked from.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        root: Path,
        spec: str = SPEC,
        *,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[Json] = (),
        status_every_s: float = 1.0,
        backoff_s: float = 1.0,
        seed: str = "",
        leashed: bool = True,
        instead: Mapping[str, Sequence[str]] | None = None,
        forking: Forking | None = None,
    ) -> None:
        assert len(str(root)) <= 107 - SOCKET_ROOM - len("/var/lib/kubelet"), f"{root} is too long for sockets"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = name
        self.root = root
        self.spec = spec
        self.log = plane.logs / f"kubelet-{name}.log"
        self.machine_file = root / "var/lib/migd/gpus.json"
        self.machine_file.parent.mkdir(parents=True, exist_ok=True)
        self._seed = seed or name
        pair = plane.authority.client(f"node-{name}", f"system:node:{name}", ["system:nodes"])
        self.api = plane.as_client(pair)
        variables = {"MIGD_SIMULATE": spec, "SIMULATED_STATE": str(self.machine_file)} if spec else {}
        ground = Ground(
            node=name,
            root=root,
            server=plane.server,
            authority=plane.authority.certificate,
            logs=plane.logs / "pods" / name,
            variables=variables,
            backoff_s=backoff_s,
            leashed=leashed,
            instead=instead or {},
            forking=forking,
        )
        self.object = NodeObject(self.api, name, kubernetes_version(), labels or {}, taints, status_every_s)
        self.kubelet = Kubelet(self.api, self.object, ground, self.machine if spec else None, self._say)

    def __enter__(self) -> SimNode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _say(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{now_text()} {line}\n")

    @property
    def kubelet_folder(self) -> Path:
        """Where its sockets are."""
        return self.root / "var/lib/kubelet"

    def machine(self) -> SimHost:
        """Its simulated machine, as a client of one's own: what one does there, its programs see."""
        return SimHost.open(self.machine_file, self.spec, seed=self._seed, duration_scale=0.1)

    def start(self) -> None:
        """Register it, and run what is bound to it."""
        self.kubelet.start()

    def stop(self) -> None:
        """End its kubelet and its pods' processes; the node object stays."""
        self.kubelet.stop()
