"""Others who act on simulated nodes: admins, the GPU Operator's labels, mig-manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pynvml

from migd.sim.cluster.entries import Happened
from migd.sim.errors import SimulationError
from migd.sim.nodes.acting import Actor, Stage
from migd.sim.nodes.carving import clear, fill, set_mode
from migd.sim.nodes.documents import labels_of
from migd.sim.nodes.programs import Idle, Sandbox

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
    """The GPU Operator's node labels: a client's label that is missing or empty becomes "true" again.

    nodes: those it looks after -> whether mig-manager is among the clients there; then an absent or empty
    `nvidia.com/mig.config` becomes `all-disabled`.
    """

    def __init__(self, stage: Stage, nodes: Mapping[str, bool]) -> None:
        super().__init__(stage, "gpu-operator", "system:serviceaccount:gpu-operator:gpu-operator")
        self._nodes = nodes
        stage.hear("nodes", self._node_changed)

    def _node_changed(self, happened: Happened) -> None:
        node = happened.after.document
        name = node["metadata"]["name"]
        if name in self._nodes and not happened.deleted and self._missing(name, labels_of(node)):
            self.later(0.1, 1.0, lambda: self._label(name))

    def _label(self, name: str) -> None:
        node = self.read("nodes", name)
        missing = self._missing(name, labels_of(node)) if node is not None else {}
        if missing:
            self.merge("nodes", name, {"metadata": {"labels": missing}})

    def _missing(self, node: str, labels: Mapping[str, str]) -> dict[str, str]:
        wanted = {DEPLOY + client: "true" for client in CLIENTS}
        if self._nodes[node]:
            wanted |= {DEPLOY + "mig-manager": "true", CONFIG: "all-disabled"}
        return {name: value for name, value in wanted.items() if not labels.get(name)}


class MigManager(Idle):
    """mig-manager: makes every GPU what the label `nvidia.com/mig.config` says, over whatever is there.

    At its start and at each change of the label; where the GPUs are so already, it only says so. It knows
    `all-disabled` and `all-PROFILE`.
    """

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box)
        self._done = ""
        self._busy = False

    def start(self) -> None:
        """Begin."""
        super().start()
        self.box.me.stage.hear("nodes", self._node_changed)
        self.later(1.0, 3.0, self._look)

    def _node_changed(self, happened: Happened) -> None:
        node = happened.after.document
        if self.alive and node["metadata"]["name"] == self.box.node and labels_of(node).get(CONFIG) != self._done:
            self.later(0.1, 1.0, self._look)

    def _look(self) -> None:
        node = self.box.features.read("nodes", self.box.node)
        labels = labels_of(node) if node is not None else {}
        wanted = labels.get(CONFIG, "")
        if self._busy or not wanted or wanted == self._done:
            return
        self._done = wanted
        if self._is(wanted):
            self._write({STATE: "success"})
            return
        self.box.me.say(f"mig-manager on {self.box.node}: {wanted}")
        names = [DEPLOY + client for client in CLIENTS if labels.get(DEPLOY + client) == "true"]
        self._write({STATE: "pending", **dict.fromkeys(names, _PAUSED)})
        self._busy = True
        self.later(5.0, 10.0, lambda: self._change(wanted, names))

    def _is(self, wanted: str) -> bool:
        host = self.box.host
        names = [
            [host.model(gpu.index).by_id()[instance.profile_id].name for instance in gpu.instances] or [str(gpu.mig)]
            for gpu in host.snapshot().gpus
        ]
        profile = "False" if wanted == "all-disabled" else wanted.removeprefix("all-")
        return all(set(found) == {profile} for found in names)

    def _change(self, wanted: str, paused: list[str]) -> None:
        self._busy = False
        profile = "" if wanted == "all-disabled" else wanted.removeprefix("all-")
        try:
            for gpu in self.box.host.snapshot().gpus:
                clear(self.box.host, gpu.index)
                if profile:
                    fill(self.box.host, gpu.index, profile)
                else:
                    set_mode(self.box.host, gpu.index, False)
            state = "success"
        except (pynvml.NVMLError, SimulationError) as error:
            self.box.me.say(f"mig-manager on {self.box.node} fails: {error}")
            state = "failed"
        self._write({STATE: state, **dict.fromkeys(paused, "true")})

    def _write(self, labels: dict[str, str]) -> None:
        self.box.features.merge("nodes", self.box.node, {"metadata": {"labels": labels}})
