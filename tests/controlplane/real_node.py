"""A real node: kubelet and containerd with real pods, in a space of their own; GPUs and their driver are simulated.

One at a time on a machine: whoever comes second waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from controlplane.building import cache_home
from controlplane.nodes import SPEC
from controlplane.processes import Child, Ports, StartError, until
from controlplane.real_config import PAUSE, Place, kubelet_config
from controlplane.real_driver import Driver
from controlplane.real_images import overlays
from controlplane.real_layers import Base, image, layer
from controlplane.real_roots import FOLDER, copied, found_root
from controlplane.real_space import Space
from controlplane.running import ControlPlane
from migd.agent.node.signals import pod_uid_of
from migd.sim import SimHost

TOOLS: Final = "localhost/migd-tests:1"
"""The image of what runs on the node besides migd and NVIDIA's programs: what computes in pods, or looks at GPUs."""
TOOLS_AT: Final = "/opt/migd-tests"
_TOOLS: Final = ("__init__.py", "computing.py", "container_devices.py", "exporter.py", "taking.py")
_HERE: Final = Path(__file__).parent
_TURN_S: Final = 900.0
_READY_S: Final = 90.0


class RealNode:
    """One node. `begin` beside whatever else starts; then `start`, and `stop`. Or use it as a context.

    spec: its GPUs. labels: of the Node. seed: of the GPUs' UUIDs, its name where not given. The simulated GPUs are
    made at the start; calls to them take a tenth of the real time. tools: more files for the image TOOLS.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str = "real",
        spec: str = SPEC,
        labels: Mapping[str, str] | None = None,
        seed: str = "",
        programs: Path | None = None,
        tools: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self.spec = spec
        self._plane = plane
        self._labels = dict(labels or {})
        self._seed = seed or name
        self._tools = tools
        self._cache = cache_home() / FOLDER
        self.keys, self._archive, self._root = found_root(self._cache)
        self._programs = programs or plane.programs
        self._turn: IO[bytes] | None = None
        self._ports = Ports()
        self._port = self._ports.take()
        self._place: Place | None = None
        self._space: Space | None = None
        self._kubelet: Child | None = None
        self._driver: Driver | None = None

    def __enter__(self) -> Self:
        self.begin()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- coming and going

    def begin(self) -> None:
        """Take the turn, and start containerd with all images in it; needs no control plane yet."""
        self._take_turn()
        try:
            self._place = place = Place(Path(tempfile.mkdtemp(prefix="run-", dir=self._cache)))
            copied(self._root, place.folder / "containerd")
            self._space = Space(place, self._plane.logs, overlays(place.folder))
            self._space.open()
            base = Base.of(self._archive)
            user = {"User": "0:0", "Cmd": None}
            pause = image(base, PAUSE, {**user, "Entrypoint": ["/bin/sleep", "infinity"]})
            at = TOOLS_AT.lstrip("/")
            files = {f"{at}/controlplane/{name}": (_HERE / name).read_bytes() for name in _TOOLS}
            files |= {f"{at}/{path.name}": path.read_bytes() for path in self._tools}
            variables = [*base.config["config"]["Env"], f"PYTHONPATH={TOOLS_AT}", "GRPC_VERBOSITY=ERROR"]
            command = {"Entrypoint": ["python3", "-m", "controlplane.computing"]}
            tools = image(base, TOOLS, {**user, **command, "Env": variables}, layer(files))
            for archive in (pause, tools):
                self._space.take_image(archive)
            self.machine()
            self._driver = Driver(self._space)
            self._driver.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start the kubelet, and wait until the Node is ready; StartError, with all ended again, where it is not."""
        place, space = self.place, self.space
        pair = self._plane.authority.client(f"node-{self.name}", f"system:node:{self.name}", ["system:nodes"])
        shutil.copy(self._plane.kubeconfig_of(f"kubelet-{self.name}.kubeconfig", pair), place.kubeconfig)
        config = place.folder / "kubelet.json"
        config.write_text(json.dumps(kubelet_config(self._plane.authority.certificate, self._port)))
        self._kubelet = space.child(
            f"kubelet-{self.name}",
            self._programs / "kubelet",
            f"--config={config}",
            f"--kubeconfig={place.kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-labels={','.join(f'{key}={value}' for key, value in self._labels.items())}",
        )
        try:
            self._kubelet.start()
            self._kubelet.wait_until(self._is_ready, _READY_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the node; its Node stays, and of its folder the logs of pods, beside the others."""
        if self._space is not None:
            self._space.close()
        if self._driver is not None:
            self._driver.stop()
        if self._kubelet is not None:
            self._kubelet.stop()
        if self._place is not None:
            shutil.copytree(self._place.pod_logs, self._plane.logs / "pods" / self.name, dirs_exist_ok=True)
            shutil.rmtree(self._place.folder, ignore_errors=True)
            self._place = None
        self._ports.close()
        if self._turn is not None:
            self._turn.close()

    # ---- what is in it

    @property
    def place(self) -> Place:
        """Its folder, after `begin`."""
        assert self._place is not None, f"{self.name} has begun"
        return self._place

    @property
    def space(self) -> Space:
        """Its namespaces and containerd, after `begin`."""
        assert self._space is not None, f"{self.name} has begun"
        return self._space

    @property
    def kubelet(self) -> Child:
        """Its kubelet: `kill` is a crash, after which containers go on until `start`."""
        assert self._kubelet is not None, f"{self.name} has started"
        return self._kubelet

    @property
    def driver(self) -> Driver:
        """The driver of its GPUs, after `begin`."""
        assert self._driver is not None, f"{self.name} has begun"
        return self._driver

    def machine(self) -> SimHost:
        """Its simulated GPUs, as a client of one's own: what one does there, its programs see."""
        return SimHost.open(self.place.machine_file, self.spec, seed=self._seed, duration_scale=0.1)

    def pids(self, pod_uid: str) -> list[int]:
        """The processes of a pod, without its sandbox's, as the machine numbers them."""
        return [pid for pid in self._all() if self._pod_of(pid) == pod_uid and _comm(pid) != "sleep"]

    def inner(self, pid: int) -> int:
        """A process of the node, as the node itself numbers it."""
        status = Path(f"/proc/{pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[2])

    def _all(self) -> list[int]:
        return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())

    def _pod_of(self, pid: int) -> str | None:
        with contextlib.suppress(OSError):  # ended meanwhile
            return pod_uid_of(Path(f"/proc/{pid}/cgroup").read_text())
        return None

    # ---- how it is done

    def _take_turn(self) -> None:
        """Wait for the machine's turn, and clear away what a run left that was killed."""
        self._cache.mkdir(parents=True, exist_ok=True)
        turn = (self._cache / "turn").open("wb")

        def taken() -> bool:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not until(taken, _TURN_S, 0.5):
            turn.close()
            raise StartError(f"another real node has been running on this machine for {_TURN_S:.0f} s")
        self._turn = turn
        for left in self._cache.glob("run-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _is_ready(self) -> bool:
        found = self._plane.admin.get(f"/api/v1/nodes/{self.name}")
        conditions = found.body.get("status", {}).get("conditions", ()) if found.ok else ()
        return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
