"""The simulated device plugin as a process on real sockets: what a kubelet hears of it, for each MIG strategy.

What it finds is tried in virtual time; what the kubelet and the scheduler make of it in tests/integration.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from controlplane import plugin
from controlplane.nodes_sockets import Closed, Listed, Sockets
from controlplane.processes import Child, until
from staging import make, stranger

from migd.mig.operations import SetMode
from migd.sim import SimHost
from migd.sim.nodes.devices import AdmissionError

WITHIN_S = 20.0
GPU, SMALL, LARGE = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"


class Site:
    """A folder that is a node's `/`, its machine, a kubelet's sockets, and a plugin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = folder / "gpus.json"
        self.heard: list[Listed | Closed] = []
        self.sockets = Sockets(folder / "var/lib/kubelet", self.heard.append, lambda: ((), ()))
        self.child: Child | None = None

    def host(self) -> SimHost:
        return SimHost.open(self.machine, "2xa100-80gb", duration_scale=0.0)

    def cut(self, *texts: str) -> None:
        """Lay out GPUs by hand, in order of their indices; those that are not named keep MIG off."""
        with stranger(self.host()) as gpus:
            for index, text in enumerate(texts):
                if not gpus.look()[index].mig_on:
                    gpus.perform(SetMode(gpus.look()[index].uuid, True))
                make(gpus, gpus.look()[index], text)

    def run(self, strategy: str) -> Child:
        seen = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRPC_VERBOSITY": "ERROR"}
        told = {"SIMULATED_STATE": str(self.machine), "SIMULATED_ROOT": str(self.folder), "MIG_STRATEGY": strategy}
        self.child = Child("plugin", [sys.executable, plugin.__file__], self.folder / "log", environment=seen | told)
        self.child.start()
        return self.child

    def offered(self) -> dict[str, int]:
        """Healthy devices by resource, as the kubelet heard last of each plugin that is still there."""
        gone = {one.plugin for one in self.heard if isinstance(one, Closed)}
        lists = [one for one in self.heard if isinstance(one, Listed) and one.plugin not in gone]
        return {one.plugin.resource: sum(one.devices.values()) for one in lists}

    def wait_offered(self, expected: Mapping[str, int]) -> None:
        assert until(lambda: self.offered() == expected, WITHIN_S), (self.offered(), (self.folder / "log").read_text())


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="migd-") as folder:
        made = Site(Path(folder))
        made.host()
        made.sockets.start()
        yield made
        if made.child is not None:
            made.child.stop()
        made.sockets.stop()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("none", {GPU: 2}), ("mixed", {GPU: 1, SMALL: 2, LARGE: 1})],
)
def test_a_strategy_names_the_resources(site: Site, strategy: str, expected: dict[str, int]):
    site.cut("3g@4 1g@0 1g@1")
    site.run(strategy)
    site.wait_offered(expected)


def test_under_single_all_instances_are_gpus_and_anything_else_keeps_the_plugin_away(site: Site):
    site.cut("3g@0 3g@4", "3g@0 3g@4")
    child = site.run("single")
    site.wait_offered({GPU: 4})
    child.stop()
    assert until(lambda: site.offered() == {}, WITHIN_S), "its socket closed"
    host = site.host()
    host.reboot()
    site.cut("3g@0", "1g@0")
    child.start()
    log = site.folder / "log"
    assert until(lambda: "more than one MIG device type present on node" in log.read_text(), WITHIN_S)
    assert site.offered() == {}


def test_it_looks_again_on_sighup_and_when_the_kubelet_is_another(site: Site):
    site.cut("1g@0")
    child = site.run("mixed")
    site.wait_offered({GPU: 1, SMALL: 1})
    site.cut("1g@1")
    child.send(signal.SIGHUP)
    site.wait_offered({GPU: 1, SMALL: 2})
    site.cut("1g@2")
    site.sockets.stop()
    site.sockets.start()
    site.wait_offered({GPU: 1, SMALL: 3})
    assert child.running


def test_an_allocation_of_a_device_that_it_does_not_offer_is_refused(site: Site):
    site.cut("1g@0")
    site.run("mixed")
    site.wait_offered({GPU: 1, SMALL: 1})
    (mine,) = [one for one in site.heard if isinstance(one, Listed) and one.plugin.resource == SMALL]
    mine.plugin.allocate(mine.devices)
    with pytest.raises(AdmissionError, match="unknown device: MIG-none"):
        mine.plugin.allocate(["MIG-none"])


def test_a_critical_xid_makes_devices_unhealthy_and_nothing_makes_them_well_but_a_restart(site: Site):
    child = site.run("mixed")
    site.wait_offered({GPU: 2})
    site.host().raise_xid(0, 79)
    site.wait_offered({GPU: 1})
    child.send(signal.SIGHUP)
    site.wait_offered({GPU: 2})
