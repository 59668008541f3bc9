"""Others who act on simulated nodes: admins, the GPU Operator's labels, mig-manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import pynvml

from migd.sim.cluster_store import Happened
from migd.sim.node_acting import Actor, Stage
from migd.sim.node_carving import clear, fill, set_mode
from migd.sim.node_documents import labels_of
from migd.sim.node_programs import Idle

CLIENTS: Final = ("device-plugin", "gpu-feature-discovery", "dcgm", "dcgm-exporter")
_PAUSED: Final = "paused-for-mig-change"
DEPLOY: Final = "nvidia.com/gpu.deploy."
CONFIG: Final = "nvidia.com/mig.config"
STATE: Final = "nvidia.com/mig.config.state"


class Admin(Actor):
    """Somebody with kubectl."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "admin", "admin")

    def cordon(self, node: str, on: bool = True) -> None:
        """kubectl cordon, or uncordon."""
        self.say(f"{'cordons' if on else 'uncordons'} {node}")
        self.merge("nodes", node, {"spec": {"unschedulable": on or None}})

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        """Set labels; None removes one."""
        self.merge("nodes", node, {"metadata": {"labels": dict(labels)}})


class GpuOperator(Actor):
    """The GPU Operator's node labels: a client's label that is missing or empty becomes "true" again."""

    def __init__(self, stage: Stage, nodes: Iterable[str], clients: tuple[str, ...] = CLIENTS) -> None:
        super().__init__(stage, "gpu-operator", "system:serviceaccount:gpu-operator:gpu-operator")
        self._nodes = frozenset(nodes)
        self._clients = clients
        stage.hear("nodes", self._node_changed)

    def _node_changed(self, happened: Happened) -> None:
        node = happened.after.document
        name = node["metadata"]["name"]
        if name in self._nodes and not happened.deleted and self._missing(labels_of(node)):
            self.later(0.1, 1.0, lambda: self._label(name))

    def _label(self, name: str) -> None:
        node = self.read("nodes", name)
        missing = self._missing(labels_of(node)) if node is not None else {}
        if missing:
            self.merge("nodes", name, {"metadata": {"labels": missing}})

    def _missing(self, labels: Mapping[str, str]) -> dict[str, str]:
        names = [DEPLOY + client for client in self._clients]
        return {name: "true" for name in names if not labels.get(name)}


class MigManager(Idle):
    """mig-manager: at its start, makes every GPU what the label `nvidia.com/mig.config` says, over whatever is there.

    It knows `all-disabled` and `all-PROFILE`.
    """

    def start(self) -> None:
        """Begin."""
        super().start()
        self.later(1.0, 3.0, self._pause)

    def _pause(self) -> None:
        node = self.box.features.read("nodes", self.box.node)
        labels = labels_of(node) if node is not None else {}
        wanted = labels.get(CONFIG)
        if not wanted or labels.get(STATE) == "success":
            return
        self.box.me.say(f"mig-manager on {self.box.node}: {wanted}")
        names = [DEPLOY + client for client in CLIENTS]
        self._write({STATE: "pending", **{name: _PAUSED for name in names if labels.get(name) == "true"}})
        self.later(5.0, 10.0, lambda: self._change(wanted))

    def _change(self, wanted: str) -> None:
        profile = "" if wanted == "all-disabled" else wanted.removeprefix("all-")
        try:
            for gpu in self.box.host.snapshot().gpus:
                clear(self.box.host, gpu.index)
                if profile:
                    fill(self.box.host, gpu.index, profile)
                else:
                    set_mode(self.box.host, gpu.index, False)
            state = "success"
        except pynvml.NVMLError as error:
            self.box.me.say(f"mig-manager on {self.box.node} fails: {error}")
            state = "failed"
        self._write({STATE: state, **{DEPLOY + client: "true" for client in CLIENTS}})

    def _write(self, labels: dict[str, str]) -> None:
        self.box.features.merge("nodes", self.box.node, {"metadata": {"labels": labels}})
