"""What a driver shows of a simulated machine: each file to the letter, and what changes when the machine does."""

from __future__ import annotations

import pynvml
import pytest

from migd.sim.files.shown import CharDevice, File, Folder, Kernel, Link, capability_minor, driver_files, fingerprint
from migd.sim.host import SimHost

KERNEL = Kernel(
    "Character devices:\n  1 mem\n  5 /dev/tty\n226 drm\n\nBlock devices:\n  8 sd\n",
    "ext4 1114112 1 - Live 0x0000000000000000\n",
)
CAPABILITIES = "proc/driver/nvidia/capabilities"


def made(spec: str = "2xa100-80gb", **switches: object) -> SimHost:
    return SimHost.fresh(spec, **switches)


def carve(host: SimHost, gpu: int, *profiles: tuple[int, int, int]) -> None:
    """MIG on; (profile id, start, size) each, with one whole compute instance."""
    nvml = host.nvml()
    nvml.nvmlInit()
    nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(gpu), 1)
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu)  # anew: a mode change may retire it
    for profile, start, size in profiles:
        placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
        instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, pynvml.byref(placement))
        whole = {19: 0, 14: 1, 9: 2}[profile]
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, whole)
    nvml.nvmlShutdown()


def files(host: SimHost, kernel: Kernel = KERNEL) -> dict[str, object]:
    return dict(driver_files(host.snapshot(), kernel))


def text(host: SimHost, path: str, kernel: Kernel = KERNEL) -> str:
    found = files(host, kernel)[path]
    assert isinstance(found, File)
    return found.content.decode()


@pytest.mark.parametrize(
    ("gpu", "gi", "ci", "minor"),
    # the second and third are lines of a real machine, as NVIDIA's DRA driver quotes them; 21 and 22 were seen in a pod
    [
        (0, 0, None, 3),
        (0, 3, None, 30),
        (0, 3, 0, 31),
        (0, 2, None, 21),
        (0, 2, 0, 22),
        (7, 14, 7, 1082),
        (31, 14, 7, 4322),
    ],
)
def test_a_capability_has_the_minor_of_the_drivers_table(gpu: int, gi: int, ci: int | None, minor: int) -> None:
    assert capability_minor(gpu, gi, ci) == minor


def test_the_minors_are_those_of_the_whole_table_whatever_exists() -> None:
    lines = text(made(), "proc/driver/nvidia-caps/mig-minors").splitlines()
    assert lines[:4] == ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4"]
    assert lines[-1] == "gpu31/gi14/ci7/access 4322"
    assert len(lines) == len(set(lines)) == 2 + 32 * 15 * 9
    assert "gpu1/gi2/ci0/access 157" in lines


def test_the_information_of_a_gpu_is_as_the_driver_prints_it() -> None:
    host = made()
    uuid = host.gpu_uuids()[1]
    assert text(host, "proc/driver/nvidia/gpus/0000:06:00.0/information") == (
        "Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 65\n"
        f"GPU UUID: \t {uuid}\nVideo BIOS: \t ??.??.??.??.??\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n"
        "DMA Mask: \t 0x7fffffffffff\nBus Location: \t 0000:06:00.0\nDevice Minor: \t 1\n"
        "GPU Firmware: \t 580.95.05\nGPU Excluded:\t No\n"
    )


def test_the_kernels_character_devices_stay_and_the_drivers_stand_among_them() -> None:
    assert text(made(), "proc/devices") == (
        "Character devices:\n  1 mem\n  5 /dev/tty\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n226 drm\n"
        "240 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
    )


def test_a_major_that_the_kernel_uses_is_not_taken() -> None:
    kernel = Kernel("Character devices:\n240 hidraw\n239 other\n511 strange\n195 nvidia\n\nBlock devices:\n238 blk\n")
    found = files(made(), kernel)
    assert found["dev/nvidia-caps/nvidia-cap1"] == CharDevice(238, 1, 0o400)
    assert found["dev/nvidia-uvm"] == CharDevice(510, 0, 0o666)
    assert text(made(), "proc/devices", kernel).count("195 nvidia\n") == 1


def test_a_kernel_that_shows_nothing_still_has_devices_and_modules() -> None:
    assert "240 nvidia-caps\n" in text(made(), "proc/devices", Kernel())
    assert [line.split()[0] for line in text(made(), "proc/modules", Kernel()).splitlines()] == [
        "nvidia_uvm",
        "nvidia_modeset",
        "nvidia",
    ]


def test_the_drivers_modules_stand_before_the_kernels() -> None:
    lines = text(made(), "proc/modules").splitlines()
    assert "nvidia 56848384 2 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (OE)" in lines
    assert lines[-1] == "ext4 1114112 1 - Live 0x0000000000000000"


def test_a_gpu_is_a_pci_device_as_sysfs_lays_it_out() -> None:
    found = files(made("a100-80gb,l40s"))
    assert found["sys/bus/pci/devices/0000:06:00.0"] == Link("../../../devices/pci0000:06/0000:06:00.0")
    assert found["sys/bus/pci/drivers/nvidia/0000:06:00.0"] == Link("../../../../devices/pci0000:06/0000:06:00.0")
    here = "sys/devices/pci0000:06/0000:06:00.0"
    values = {name: found[f"{here}/{name}"] for name in ("vendor", "device", "class", "numa_node", "subsystem_device")}
    assert values == {
        "vendor": File(b"0x10de\n"),
        "device": File(b"0x26b9\n"),
        "class": File(b"0x030200\n"),
        "numa_node": File(b"-1\n"),
        "subsystem_device": File(b"0x1533\n"),
    }
    assert found[f"{here}/subsystem_vendor"] == File(b"0x10de\n")
    assert found[f"{here}/driver"] == Link("../../../bus/pci/drivers/nvidia")
    assert found["sys/devices/pci0000:03/0000:03:00.0/device"] == File(b"0x20b2\n")


def test_a_pci_device_has_seven_regions_of_which_the_second_holds_its_memory() -> None:
    lines = text(made("a100-80gb"), "sys/devices/pci0000:03/0000:03:00.0/resource").splitlines()
    regions = [tuple(int(word, 16) for word in line.split()) for line in lines]
    assert len(regions) == 7
    start, end, _flags = regions[1]
    assert end - start + 1 == 128 << 30
    assert regions[2] == (0, 0, 0)


def test_pci_ids_are_those_that_nvml_tells() -> None:
    host = made("a100-80gb,t4,2xh200")
    nvml = host.nvml()
    nvml.nvmlInit()
    for index in range(4):
        told = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByIndex(index))
        address = told.busId[4:].lower()
        here = f"sys/devices/pci{address[:7]}/{address}"
        packed = int(text(host, f"{here}/device"), 16) << 16 | int(text(host, f"{here}/vendor"), 16)
        below = int(text(host, f"{here}/subsystem_device"), 16) << 16 | int(text(host, f"{here}/subsystem_vendor"), 16)
        assert (packed, below) == (told.pciDeviceId, told.pciSubSystemId)


def test_the_nodes_of_the_driver_are_there_before_any_instance() -> None:
    found = files(made())
    ours = {path: node for path, node in found.items() if path.startswith("dev/nvidia")}
    assert ours == {
        "dev/nvidia0": CharDevice(195, 0),
        "dev/nvidia1": CharDevice(195, 1),
        "dev/nvidiactl": CharDevice(195, 255),
        "dev/nvidia-modeset": CharDevice(195, 254),
        "dev/nvidia-uvm": CharDevice(511, 0),
        "dev/nvidia-uvm-tools": CharDevice(511, 1),
        "dev/nvidia-caps": Folder(),
        "dev/nvidia-caps/nvidia-cap1": CharDevice(240, 1, 0o400),
        "dev/nvidia-caps/nvidia-cap2": CharDevice(240, 2, 0o400),
    }


def test_an_instance_brings_its_capabilities_and_their_nodes_and_takes_them_away() -> None:
    host = made()
    before = files(host)
    carve(host, 1, (9, 4, 4))
    (instance,) = host.snapshot().gpus[1].instances
    after = files(host)
    gi = capability_minor(1, instance.gi_id)
    here = f"{CAPABILITIES}/gpu1/mig/gi{instance.gi_id}"
    assert {path: node for path, node in after.items() if path not in before and not isinstance(node, Folder)} == {
        f"{here}/access": File(f"DeviceFileMinor: {gi}\nDeviceFileMode: 292\nDeviceFileModify: 1\n".encode()),
        f"{here}/ci0/access": File(f"DeviceFileMinor: {gi + 1}\nDeviceFileMode: 292\nDeviceFileModify: 1\n".encode()),
        f"dev/nvidia-caps/nvidia-cap{gi}": CharDevice(240, gi, 0o444),
        f"dev/nvidia-caps/nvidia-cap{gi + 1}": CharDevice(240, gi + 1, 0o444),
    }
    host.reboot()
    assert set(files(host)) == {*before, f"{CAPABILITIES}/gpu1", f"{CAPABILITIES}/gpu1/mig"}


def test_the_capabilities_of_reconfiguring_are_roots() -> None:
    said = "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
    assert text(made(), f"{CAPABILITIES}/mig/config") == said
    assert text(made(), f"{CAPABILITIES}/mig/monitor") == said.replace("Minor: 1", "Minor: 2")


def test_a_mode_change_that_renumbers_the_minor_moves_all_that_is_named_after_it() -> None:
    host = made(minor_renumber_on_mode_change=True)
    carve(host, 0, (19, 0, 1))
    found = files(host)
    (instance,) = host.snapshot().gpus[0].instances
    assert host.snapshot().gpus[0].minor == 2
    assert "dev/nvidia0" not in found
    assert found["dev/nvidia2"] == CharDevice(195, 2)
    assert "Device Minor: \t 2\n" in text(host, "proc/driver/nvidia/gpus/0000:03:00.0/information")
    assert f"{CAPABILITIES}/gpu2/mig/gi{instance.gi_id}/access" in found
    assert f"{CAPABILITIES}/gpu0" not in found


def test_a_minor_past_the_drivers_table_has_no_capabilities() -> None:
    host = made()
    carve(host, 0, (19, 0, 1))
    host.snapshot().gpus[0].minor = 32
    found = files(host)
    assert found["dev/nvidia32"] == CharDevice(195, 32)
    assert not [path for path in found if path.startswith(f"{CAPABILITIES}/gpu")]


def test_of_a_lost_gpu_all_stays_but_its_configuration_space_which_reads_ones() -> None:
    host = made()
    before = files(host)
    host.lose_gpu(0)
    config = "sys/devices/pci0000:03/0000:03:00.0/config"
    assert {path: node for path, node in files(host).items() if before[path] != node} == {
        config: File(b"\xff" * 256, 0o644)
    }
    host.find_gpu(0)
    assert files(host) == before
    was = before[config]
    assert isinstance(was, File)
    assert was.content[:4] == b"\xde\x10\xb2\x20"


def test_another_board_in_the_slot_has_its_own_uuid_and_ids() -> None:
    host = made()
    uuid = host.swap_gpu(0, "l40s")
    assert f"GPU UUID: \t {uuid}\n" in text(host, "proc/driver/nvidia/gpus/0000:03:00.0/information")
    assert text(host, "sys/devices/pci0000:03/0000:03:00.0/device") == "0x26b9\n"


def test_every_folder_comes_before_what_is_in_it_and_nodes_before_the_files_that_tell_of_them() -> None:
    host = made()
    carve(host, 0, (19, 0, 1), (9, 4, 4))
    order = {path: place for place, path in enumerate(files(host))}
    for path, place in order.items():
        folder = path.rpartition("/")[0]
        assert not folder or order[folder] < place
    assert max(order[p] for p in order if p.startswith("dev/")) < min(order[p] for p in order if p.startswith("proc/"))


def test_the_fingerprint_changes_when_a_file_does_and_only_then() -> None:
    host = made(minor_renumber_on_mode_change=True)
    seen = {fingerprint(host.snapshot()): files(host)}
    for step in (
        lambda: carve(host, 0, (19, 0, 1)),
        lambda: carve(host, 0, (9, 4, 4)),
        lambda: host.start_process(1),
        lambda: host.lose_gpu(1),
        lambda: host.find_gpu(1),
        lambda: host.swap_gpu(1),
        lambda: host.switch("driver_version", "570.1"),
        host.reboot,
    ):
        step()
        found = files(host)
        assert seen.setdefault(fingerprint(host.snapshot()), found) == found
    assert len(seen) == 7
