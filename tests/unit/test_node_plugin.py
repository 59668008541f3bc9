"""NVIDIA's device plugin, simulated: what it offers, when it fails as a whole, and how long it believes what it saw."""

from __future__ import annotations

import pynvml
import pytest

from migd.sim import SimHost
from migd.sim.nodes.plugin import (
    DevicePlugin,
    PluginConfig,
    PluginError,
    Resources,
    device_of,
    enumerated,
    preferred,
    shared,
)

IDS = {"1g.10gb": 19, "2g.20gb": 14, "3g.40gb": 9}


def machine(*layouts: list[str] | None, spec: str = "a100-80gb") -> SimHost:
    """A machine with a GPU for each layout: None is MIG off."""
    host = SimHost.fresh(f"{len(layouts)}x{spec}")
    admin = host.nvml(pid=10)
    admin.nvmlInit()
    for index, layout in enumerate(layouts):
        if layout is not None:
            handle = admin.nvmlDeviceGetHandleByIndex(index)
            assert admin.nvmlDeviceSetMigMode(handle, 1) == 0
            for profile in layout:
                make(admin, index, profile)
    admin.nvmlShutdown()
    return host


def make(admin, index: int, profile: str, compute: int | None = None) -> None:
    handle = admin.nvmlDeviceGetHandleByIndex(index)
    gi = admin.nvmlDeviceCreateGpuInstance(handle, IDS[profile])
    slices = int(profile[0])
    value = {1: 0, 2: 1, 3: 2}[slices if compute is None else compute]
    admin.nvmlGpuInstanceCreateComputeInstance(gi, admin.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, value, 0).id)


def offered(host: SimHost, config: PluginConfig | None = None) -> dict[str, int]:
    return {name: len(devices) for name, devices in plugin(host, config).start().items()}


def plugin(host: SimHost, config: PluginConfig | None = None) -> DevicePlugin:
    return DevicePlugin(host.nvml(pid=20, command="nvidia-device-plugin", container="c1"), config)


def test_mixed_offers_whole_gpus_and_every_profile_under_its_own_name():
    host = machine(["3g.40gb", "1g.10gb", "1g.10gb"], None, ["2g.20gb"])
    assert offered(host) == {
        "nvidia.com/gpu": 1,
        "nvidia.com/mig-1g.10gb": 2,
        "nvidia.com/mig-2g.20gb": 1,
        "nvidia.com/mig-3g.40gb": 1,
    }


def test_the_ids_are_the_uuids_that_nvml_tells():
    host = machine(["1g.10gb"], None)
    found = plugin(host).start()
    assert list(found["nvidia.com/gpu"]) == [host.gpu_uuids()[1]]
    assert list(found["nvidia.com/mig-1g.10gb"]) == [host.snapshot().gpus[0].instances[0].compute[0].uuid]


def test_the_resource_of_an_extra_profile_is_spelled_with_a_dot():
    host = machine([])
    admin = host.nvml(pid=10)
    admin.nvmlInit()
    handle = admin.nvmlDeviceGetHandleByIndex(0)
    gi = admin.nvmlDeviceCreateGpuInstance(handle, 20)
    admin.nvmlGpuInstanceCreateComputeInstance(gi, 0)
    assert offered(host) == {"nvidia.com/mig-1g.10gb.me": 1}


def test_none_takes_no_notice_of_mig():
    assert offered(machine(["1g.10gb"], None), PluginConfig("none")) == {"nvidia.com/gpu": 2}


def test_single_offers_instances_as_gpus_where_all_are_alike():
    host = machine(["3g.40gb", "3g.40gb"], ["3g.40gb"])
    assert offered(host, PluginConfig("single")) == {"nvidia.com/gpu": 3}
    assert offered(machine(None, None), PluginConfig("single")) == {"nvidia.com/gpu": 2}


@pytest.mark.parametrize(
    ("layouts", "why"),
    [
        ((["3g.40gb", "1g.10gb"],), "more than one MIG device type present on node"),
        ((["1g.10gb"], ["2g.20gb"]), "more than one MIG device type present on node"),
        ((["1g.10gb"], None), "all devices on the node must be configured with the same migEnabled value"),
        ((["1g.10gb"], []), "device 1 has no MIG devices configured"),
    ],
)
def test_single_refuses_the_whole_node_where_they_are_not(layouts, why: str):
    with pytest.raises(PluginError, match=why):
        offered(machine(*layouts), PluginConfig("single"))


def test_b42_an_empty_mig_gpu_takes_every_gpu_of_the_node_with_it_unless_the_plugin_is_new_and_mixed():
    host = machine(["1g.10gb"] * 7, [])
    assert offered(host) == {"nvidia.com/mig-1g.10gb": 7}
    for config in (PluginConfig("single"), PluginConfig("mixed", empty_mig_fails=True)):
        tried = plugin(host, config)
        with pytest.raises(PluginError, match="device 1 has no MIG devices configured"):
            tried.start()
        assert tried.resources == {}


def test_one_compute_instance_smaller_than_its_gpu_instance_fails_the_whole_node_under_mixed():
    host = machine(["1g.10gb"], None)
    admin = host.nvml(pid=10)
    admin.nvmlInit()
    make(admin, 0, "3g.40gb", compute=1)
    with pytest.raises(PluginError, match=r"MIG profile '1c.3g.40gb' does not match any resource patterns"):
        offered(host)


def test_a_gpu_that_fell_off_the_bus_fails_the_whole_node():
    host = machine(None, None)
    host.lose_gpu(1)
    with pytest.raises(PluginError, match="GPU is lost|device map"):
        offered(host)


def test_gpus_that_cannot_do_mig_are_offered_whole():
    assert offered(machine(None, None, spec="l40s")) == {"nvidia.com/gpu": 2}


def test_what_changed_is_seen_after_sighup_and_not_before():
    host = machine(["1g.10gb"])
    running = plugin(host)
    before = running.start()
    admin = host.nvml(pid=10)
    admin.nvmlInit()
    make(admin, 0, "2g.20gb")
    running.listen()
    assert running.resources == before == {"nvidia.com/mig-1g.10gb": before["nvidia.com/mig-1g.10gb"]}
    assert set(running.hang_up()) == {"nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"}


def test_an_unhealthy_device_stays_so_until_the_plugin_starts_again():
    host = machine(["1g.10gb", "1g.10gb"], None)
    running = plugin(host)
    running.start()
    host.raise_xid(1, 48)
    assert running.listen()
    assert running.resources["nvidia.com/gpu"] == {host.gpu_uuids()[1]: False}
    assert all(running.resources["nvidia.com/mig-1g.10gb"].values())
    assert not running.listen()
    assert running.resources["nvidia.com/gpu"] == {host.gpu_uuids()[1]: False}
    assert running.hang_up()["nvidia.com/gpu"] == {host.gpu_uuids()[1]: True}


def test_of_several_mig_devices_of_a_gpu_only_the_last_hears_of_an_xid():
    host = machine(["1g.10gb", "1g.10gb"])
    first, last = sorted(host.snapshot().gpus[0].instances, key=lambda i: i.gi_id)
    running = plugin(host)
    running.start()
    host.raise_xid(0, 48, start=first.start)
    assert not running.listen()
    host.raise_xid(0, 48, start=last.start)
    assert running.listen()
    assert running.resources["nvidia.com/mig-1g.10gb"] == {first.compute[0].uuid: True, last.compute[0].uuid: False}


def test_an_event_of_a_gpu_that_cannot_say_who_it_is_makes_every_device_unhealthy():
    host = machine(["1g.10gb"], None)
    running = plugin(host)
    running.start()
    host.lose_gpu(1)
    host.raise_xid(1, 48)
    assert running.listen()
    assert not any(healthy for devices in running.resources.values() for healthy in devices.values())


def test_the_fault_of_a_program_is_not_the_gpus():
    host = machine(None)
    running = plugin(host)
    running.start()
    host.raise_xid(0, 31)
    assert not running.listen()


def test_its_session_is_in_the_way_of_a_mode_change_until_it_stops():
    host = machine(None)
    running = plugin(host)
    running.start()
    admin = host.nvml(pid=10)
    admin.nvmlInit()
    handle = admin.nvmlDeviceGetHandleByIndex(0)
    assert admin.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_ERROR_IN_USE
    running.stop()
    assert admin.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_SUCCESS


def test_a_plugin_that_failed_holds_no_session_and_starts_once_the_layout_is_right():
    host = machine([])
    config = PluginConfig("single")
    running = plugin(host, config)
    with pytest.raises(PluginError):
        running.start()
    assert not host.snapshot().clients
    admin = host.nvml(pid=10)
    admin.nvmlInit()
    make(admin, 0, "3g.40gb")
    assert {name: len(found) for name, found in running.start().items()} == {"nvidia.com/gpu": 1}


def test_a_machine_that_rebooted_ends_it_without_an_error():
    host = machine(None)
    running = plugin(host)
    running.start()
    host.reboot()
    running.stop()
    assert running.start() == {"nvidia.com/gpu": {host.gpu_uuids()[0]: True}}


def test_replicas_cut_a_device_into_time_slices_and_may_rename_the_resource():
    host = machine(None)
    uuid = host.gpu_uuids()[0]
    replicas = {"nvidia.com/gpu": 3}
    assert plugin(host, PluginConfig(replicas=replicas)).start() == {
        "nvidia.com/gpu": {f"{uuid}::0": True, f"{uuid}::1": True, f"{uuid}::2": True}
    }
    assert offered(host, PluginConfig(replicas=replicas, renamed=True)) == {"nvidia.com/gpu.shared": 3}
    assert device_of(f"{uuid}::2") == uuid


@pytest.mark.parametrize("number", [1, 0, -2])
def test_replicas_below_two_are_a_configuration_that_cannot_be_loaded(number: int):
    with pytest.raises(PluginError, match="replicas must be >= 2"):
        PluginConfig(replicas={"nvidia.com/gpu": number})


def test_a_strategy_that_does_not_exist_cannot_be_loaded():
    with pytest.raises(PluginError, match="unknown MIG strategy"):
        PluginConfig("both")


def test_replicas_are_spread_over_the_devices():
    resources: Resources = {"nvidia.com/gpu": {"a": True, "b": True}}
    cut = shared(resources, PluginConfig(replicas={"nvidia.com/gpu": 2}))["nvidia.com/gpu"]
    assert {device_of(one) for one in preferred(cut, 2)} == {"a", "b"}
    assert preferred(["a::1", "b::0", "b::1"], 1) == ["b::0"]
    assert preferred(["a", "b"], 3) == ["a", "b"]


def test_it_needs_a_session_that_somebody_opened():
    host = machine(None)
    with pytest.raises(PluginError, match="Uninitialized"):
        enumerated(host.nvml(pid=20), PluginConfig())
