"""The kubelet's device manager, simulated: what a node tells of its devices, and which pod gets and keeps which."""

from __future__ import annotations

import pytest

from migd.sim.nodes.devices import GRACE_S, AdmissionError, DeviceManager, Held, Wants, advertised

GPU, SMALL, WHOLE = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-7g.40gb"
EIGHT = [f"GPU-{n}" for n in range(8)]


def well(*ids: str) -> dict[str, bool]:
    return dict.fromkeys(ids, True)


def many(name: str, number: int) -> dict[str, bool]:
    return well(*(f"MIG-{name}-{n:02}" for n in range(number)))


def pod(name: str, number: int = 1, resource: str = SMALL) -> Wants:
    return Wants(f"uid-{name}", "default", name, {"main": {resource: number}})


class Node:
    """A node's status as the API server has it, and the manager that it is told by."""

    def __init__(self) -> None:
        self.manager = DeviceManager()
        self.capacity: dict[str, int] = {}
        self.allocatable: dict[str, int] = {}

    def tell(self, now_s: float, lost: bool = False) -> dict[str, int]:
        """One status update. lost: the request failed, and what the manager told with it is gone."""
        report = self.manager.report(now_s)
        if not lost:
            self.capacity, self.allocatable = advertised(self.capacity, report)
        return self.allocatable


def test_a_plugin_that_goes_leaves_nothing_allocatable_at_the_next_update_and_its_capacity_for_five_minutes():
    node = Node()
    number = node.manager.register(SMALL, many("a", 7))
    assert node.tell(0) == {SMALL: 7}
    node.manager.gone(number, 1)
    assert node.allocatable == {SMALL: 7}  # nobody has told yet
    assert (node.tell(10), node.capacity) == ({SMALL: 0}, {SMALL: 7})
    assert (node.tell(1 + GRACE_S), node.capacity) == ({SMALL: 0}, {SMALL: 7})
    assert (node.tell(1.1 + GRACE_S), node.capacity) == ({SMALL: 0}, {SMALL: 0})
    assert (node.tell(9000), node.capacity) == ({SMALL: 0}, {SMALL: 0})


def test_a_plugin_that_comes_back_replaces_the_old_list_at_once():
    node = Node()
    number = node.manager.register(SMALL, many("a", 7))
    node.manager.gone(number, 1)
    node.manager.register(SMALL, many("b", 3))
    assert (node.tell(2), node.capacity) == ({SMALL: 3}, {SMALL: 3})
    node.manager.gone(number, 3)  # its predecessor's socket is heard of late
    node.manager.update(number, {})
    assert node.tell(4) == {SMALL: 3}


def test_unhealthy_devices_count_in_capacity_only():
    node = Node()
    number = node.manager.register(SMALL, many("a", 7))
    node.manager.update(number, {**many("a", 7), "MIG-a-03": False})
    assert (node.tell(0), node.capacity) == ({SMALL: 6}, {SMALL: 7})


def test_after_a_kubelet_restart_there_is_nothing_until_plugins_register_again_and_pods_keep_what_they_have():
    node = Node()
    node.manager.register(SMALL, many("a", 7))
    node.manager.admit(pod("p", 2))
    held = node.manager.held()
    node.manager.restarted(50)
    assert (node.tell(50), node.capacity) == ({SMALL: 0}, {SMALL: 0})
    node.manager.admit(pod("p", 2), running=True)
    assert node.manager.held() == held
    node.manager.register(SMALL, many("a", 7))
    assert node.tell(60) == {SMALL: 7}
    node.manager.admit(pod("q", 5))
    with pytest.raises(AdmissionError, match="Requested: 1, Available: 0"):
        node.manager.admit(pod("r", 1))


def test_b40_h10_the_three_pictures_come_about_one_after_the_other():
    """Off, then 7g on each, then 7 × 1g on each: what each step leaves behind, and what a kubelet restart cleans up.

    The old `gpu` number came back to life because the one update that would have said 0 was lost; `7g` is still served
    by a plugin pod that did not end when its successor came.
    """
    node = Node()
    off = node.manager.register(GPU, well(*EIGHT))
    assert node.tell(0) == {GPU: 8}
    node.manager.gone(off, 10)
    node.manager.register(WHOLE, many("7g", 8))
    assert node.tell(20) == {GPU: 0, WHOLE: 8}
    node.tell(10 + GRACE_S + 1, lost=True)
    assert node.tell(10 + GRACE_S + 11) == {GPU: 8, WHOLE: 8}
    node.manager.register(SMALL, many("1g", 56))
    assert node.tell(400) == {GPU: 8, SMALL: 56, WHOLE: 8}  # after plugin restart
    node.manager.restarted(500)
    node.manager.register(SMALL, many("1g", 56))
    assert node.tell(510) == {GPU: 8, SMALL: 56, WHOLE: 0}  # after kubelet restart
    assert node.capacity == {GPU: 8, SMALL: 56, WHOLE: 0}


def test_b40_h10_the_true_layout_is_what_is_told_where_nothing_is_lost():
    node = Node()
    off = node.manager.register(GPU, well(*EIGHT))
    node.tell(0)
    node.manager.gone(off, 10)
    whole = node.manager.register(WHOLE, many("7g", 8))
    node.tell(20)
    node.manager.gone(whole, 30)
    node.manager.register(SMALL, many("1g", 56))
    for now_s in (40, 400, 4000):
        assert node.tell(now_s) == {GPU: 0, SMALL: 56, WHOLE: 0}


def test_a_pod_gets_devices_nobody_else_has_and_gives_them_back_when_it_ends():
    manager = DeviceManager()
    manager.register(SMALL, many("a", 3))
    manager.admit(pod("p", 2))
    manager.admit(pod("q", 1))
    assert manager.held() == (
        Held("default", "p", "main", SMALL, ("MIG-a-00", "MIG-a-01")),
        Held("default", "q", "main", SMALL, ("MIG-a-02",)),
    )
    assert manager.devices("uid-p") == ("MIG-a-00", "MIG-a-01")
    with pytest.raises(AdmissionError, match="requested number of devices unavailable"):
        manager.admit(pod("r", 1))
    manager.free("uid-p")
    manager.admit(pod("r", 2))
    assert manager.devices("uid-r") == ("MIG-a-00", "MIG-a-01")


@pytest.mark.parametrize("away", ["gone", "restarted"])
def test_a_pod_that_comes_while_the_plugin_is_away_fails_and_holds_nothing(away: str):
    manager = DeviceManager()
    number = manager.register(SMALL, many("a", 3))
    if away == "gone":
        manager.gone(number, 5)
    else:
        manager.restarted(5)
    with pytest.raises(AdmissionError, match="no healthy devices present") as caught:
        manager.admit(pod("p"))
    assert caught.value.reason == "UnexpectedAdmissionError"
    assert manager.held() == ()
    assert manager.active() == ()


def test_a_pod_of_two_containers_gets_all_or_nothing():
    manager = DeviceManager()
    manager.register(SMALL, many("a", 3))
    both = Wants("uid-p", "default", "p", {"one": {SMALL: 2}, "two": {SMALL: 2}})
    with pytest.raises(AdmissionError):
        manager.admit(both)
    assert manager.held() == ()


def test_after_a_reboot_a_pod_whose_devices_are_no_longer_there_fails():
    manager = DeviceManager()
    manager.register(SMALL, many("a", 3))
    manager.admit(pod("p"))
    manager.restarted(5)
    manager.register(SMALL, many("b", 3))
    with pytest.raises(AdmissionError, match="no longer healthy"):
        manager.admit(pod("p"))


def test_a_resource_that_never_was_here_is_not_the_device_managers():
    manager = DeviceManager()
    wants = pod("p", 1, "example.com/thing")
    manager.admit(wants)
    manager.needs(wants, {})
    assert manager.held() == ()
    assert manager.active() == (wants,)


def test_a_resource_that_was_forgotten_and_stands_at_zero_is_refused_by_the_nodes_own_numbers():
    node = Node()
    node.manager.gone(node.manager.register(SMALL, many("a", 3)), 0)
    node.tell(1)
    node.tell(1 + GRACE_S)
    node.manager.admit(pod("p"))
    with pytest.raises(AdmissionError, match="Node didn't have enough resource") as caught:
        node.manager.needs(pod("p"), node.allocatable)
    assert caught.value.reason == f"OutOf{SMALL}"
    assert node.manager.active() == ()


def test_a_container_of_a_kept_pod_starts_again_within_the_grace_and_hangs_after_it():
    manager = DeviceManager()
    number = manager.register(SMALL, many("a", 3))
    manager.admit(pod("p"))
    manager.gone(number, 0)
    manager.report(GRACE_S)
    assert manager.hinders("uid-p") == ""
    manager.report(GRACE_S + 1)
    assert "endpoint not found" in manager.hinders("uid-p")
    manager.register(SMALL, many("b", 3))
    assert manager.hinders("uid-p") == ""


def test_the_plugin_may_choose_which_devices_are_taken():
    manager = DeviceManager()
    manager.register(SMALL, many("a", 3), prefer=lambda available, number: sorted(available)[-number:])
    manager.admit(pod("p"))
    assert manager.devices("uid-p") == ("MIG-a-02",)
