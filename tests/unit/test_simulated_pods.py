"""Containers that are only said to run on a simulated node: what they compute on, and how they end, crash and wait."""

from __future__ import annotations

from typing import Any

import pytest
from controlplane.nodes_pods import CRASHES_AFTER_S, LASTS_S, PROGRAM, container_id
from controlplane.nodes_simulated import Simulated

from migd.sim import SimHost

UID = "11111111-2222-3333-4444-555555555555"


class Pod:
    """A pod with one container on a machine with one whole GPU."""

    def __init__(self, policy: str = "Always", names: tuple[str, ...] = ("main",), **annotations: str) -> None:
        notes = {key: value for key, value in annotations.items() if value}
        metadata = {"name": "p", "namespace": "ns", "uid": UID, "annotations": notes}
        document: dict[str, Any] = {"metadata": metadata, "spec": {"restartPolicy": policy}}
        self.host = SimHost.fresh("1xa100-80gb", clock="virtual")
        self.devices = self.host.gpu_uuids()
        self.said: list[str] = []
        self.containers = Simulated(document, names, self.host, 1.0, self.said.append)

    def at(self, now_s: float, hinders: str = "") -> tuple[str, str, bool, int]:
        (state,) = {
            (one.kind, one.reason, one.ready, one.restarts)
            for one in self.containers.step(now_s, self.devices, hinders).values()
        }
        return state

    def computing(self) -> list[str]:
        return [process.container for process in self.host.snapshot().processes.values()]


RUNNING = ("running", "", True, 0)


def test_all_containers_run_and_one_of_them_computes():
    pod = Pod(names=("main", "sidecar"))
    assert pod.at(0.0) == RUNNING
    assert pod.at(9.0) == RUNNING
    assert pod.computing() == [container_id(UID, "main", 0)]
    pod.containers.stop()
    assert pod.computing() == []


def test_an_idle_pod_computes_nothing():
    pod = Pod(**{PROGRAM: "idle"})
    assert pod.at(0.0) == RUNNING
    assert pod.computing() == []


def test_what_it_was_given_may_not_be_there():
    pod = Pod()
    pod.devices = ("MIG-gone",)
    assert pod.at(0.0) == RUNNING
    assert pod.said == ["ns/p was given MIG-gone, which is not there"]


def test_it_waits_while_something_hinders_it():
    pod = Pod()
    assert pod.at(0.0, "no plugin") == ("waiting", "CreateContainerConfigError", False, 0)
    assert pod.computing() == []
    assert pod.at(1.0) == RUNNING


def test_it_ends_well_after_its_time():
    pod = Pod(**{LASTS_S: "5"})
    assert pod.at(10.0) == RUNNING
    assert pod.at(14.9) == RUNNING
    assert pod.at(15.0) == ("terminated", "", False, 0)
    assert pod.computing() == []
    assert pod.at(99.0) == ("terminated", "", False, 0)


def test_it_crashes_after_each_start_and_waits_twice_as_long_each_time():
    pod = Pod(**{CRASHES_AFTER_S: "2"})
    for restarts, start_s, backoff_s in ((0, 0.0, 1.0), (1, 3.0, 2.0), (2, 7.0, 4.0), (3, 13.0, 8.0)):
        assert pod.at(start_s) == ("running", "", True, restarts)
        assert pod.computing() == [container_id(UID, "main", restarts)]
        waiting = ("waiting", "CrashLoopBackOff", False, restarts + 1)
        assert pod.at(start_s + 2.0) == waiting
        assert pod.computing() == []
        assert pod.at(start_s + 2.0 + backoff_s - 0.1) == waiting
    assert not pod.containers.running


@pytest.mark.parametrize(("policy", "kind", "exits"), [("Never", "terminated", 1), ("OnFailure", "waiting", 0)])
def test_it_is_started_again_as_its_policy_says(policy: str, kind: str, exits: int):
    pod = Pod(policy, **{CRASHES_AFTER_S: "2"})
    pod.at(0.0)
    (state,) = pod.containers.step(2.0, pod.devices, "").values()
    assert (state.kind, state.exit_status) == (kind, exits)


def test_a_time_that_it_lasts_goes_on_over_its_crashes():
    pod = Pod(**{CRASHES_AFTER_S: "2", LASTS_S: "5"})
    pod.at(0.0)
    assert pod.at(2.0)[0] == "waiting"
    assert pod.at(3.0)[0] == "running"
    assert pod.at(5.0)[0] == "terminated"


def test_a_reboot_may_have_ended_what_it_computed():
    pod = Pod()
    pod.at(0.0)
    pod.host.reboot()
    pod.containers.stop()
    assert pod.computing() == []
