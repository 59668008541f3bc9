"""The files that an NVIDIA driver shows of a machine: what lies at which path under a driver root, as plain values.

Sources: kernel-open/nvidia/nv-caps.c and nv-procfs.c of open-gpu-kernel-modules; proc(5); the kernel's ABI of
/sys/bus/pci; NVIDIA's MIG user guide on device nodes. None of it was compared with a MIG GPU by experiment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

from migd.sim.catalog import models
from migd.sim.machine import Gpu, Machine

GPUS_MAX: Final = 32
"""So many GPUs, by their minors, the driver's table of capabilities has; each with these instances:"""
INSTANCES_MAX: Final = 15
COMPUTE_MAX: Final = 8
_EACH_INSTANCE: Final = 1 + COMPUTE_MAX
_EACH_GPU: Final = INSTANCES_MAX * _EACH_INSTANCE
_CONFIG, _MONITOR, _FIRST = 1, 2, 3  # 0 is the fabric's
_NVIDIA: Final = 195
_NVIDIACTL, _MODESET = 255, 254  # minors
_SUBSYSTEM: Final = 0x1533
_CONFIG_BYTES: Final = 256
"""What root reads of a PCI configuration space; GPU feature discovery takes no less."""
_MODULES: Final = ("nvidia_uvm", "nvidia_modeset")


@dataclass(frozen=True, slots=True)
class File:
    """A regular file. mode: its permission bits."""

    content: bytes
    mode: int = 0o444


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder. opaque: what lies in it is somebody else's, such as a mount."""

    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class CharDevice:
    """A character device. mode: its permission bits."""

    major: int
    minor: int
    mode: int = 0o666


Node: TypeAlias = File | Folder | Link | CharDevice


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel shows that really runs: the texts of its /proc/devices and /proc/modules, "" for none."""

    devices: str = ""
    modules: str = ""


USUAL_DEVICES: Final[Mapping[str, CharDevice]] = {
    "null": CharDevice(1, 3),
    "zero": CharDevice(1, 5),
    "full": CharDevice(1, 7),
    "random": CharDevice(1, 8),
    "urandom": CharDevice(1, 9),
    "tty": CharDevice(5, 0),
}
"""What every program expects in /dev. Source: OCI runtime specification, default devices."""
USUAL_FOLDERS: Final = ("pts", "shm", "mqueue")
_USUAL_LINKS: Final = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}


def capability_minor(gpu_minor: int, gi_id: int, ci_id: int | None = None) -> int:
    """The minor of /dev/nvidia-caps/nvidia-capN for a GPU instance or a compute instance of it."""
    return _FIRST + _EACH_GPU * gpu_minor + _EACH_INSTANCE * gi_id + (0 if ci_id is None else 1 + ci_id)


def pci_address(gpu: Gpu) -> str:
    """The GPU's address as the kernel writes it: 0000:03:00.0, where NVML writes 00000000:03:00.0."""
    return gpu.bus_id[4:].lower()


def fingerprint(machine: Machine) -> tuple[object, ...]:
    """What driver_files depends on: equal for two machines whose files are the same. Hashable, cheap to make."""
    return (
        machine.switches.driver_version,
        *((g.uuid, g.key, g.name, g.minor, g.bus_id, g.mig, g.lost, _ids(g)) for g in machine.gpus),
    )


def _ids(gpu: Gpu) -> tuple[tuple[int, ...], ...]:
    return tuple((i.gi_id, *(c.ci_id for c in i.compute)) for i in gpu.instances)


def driver_files(machine: Machine, kernel: Kernel = Kernel()) -> dict[str, Node]:
    """Path under the driver root -> what lies there, folders included, each before what is in it.

    In the order in which new ones may appear: nodes of /dev, then /sys, then what tells of them under /proc.
    kernel: what /proc/devices and /proc/modules say besides; a major that it uses is not taken.
    """
    uvm, caps = _free_majors(kernel.devices)
    found: dict[str, Node] = {}
    for paths in (_dev(machine, uvm, caps), _sys(machine), _proc(machine, uvm, caps, kernel)):
        for path, node in paths:
            for end in (i for i, letter in enumerate(path) if letter == "/"):
                found.setdefault(path[:end], Folder())
            found[path] = node
    return found


# ---- /dev


def _dev(machine: Machine, uvm: int, caps: int) -> Iterator[tuple[str, Node]]:
    for name, usual in USUAL_DEVICES.items():
        yield f"dev/{name}", usual
    for name in USUAL_FOLDERS:
        yield f"dev/{name}", Folder(opaque=True)
    for name, target in _USUAL_LINKS.items():
        yield f"dev/{name}", Link(target)
    yield "dev/nvidiactl", CharDevice(_NVIDIA, _NVIDIACTL)
    yield "dev/nvidia-modeset", CharDevice(_NVIDIA, _MODESET)
    yield "dev/nvidia-uvm", CharDevice(uvm, 0)
    yield "dev/nvidia-uvm-tools", CharDevice(uvm, 1)
    for gpu in machine.gpus:
        yield f"dev/nvidia{gpu.minor}", CharDevice(_NVIDIA, gpu.minor)
    for minor in (_CONFIG, _MONITOR):
        yield f"dev/nvidia-caps/nvidia-cap{minor}", CharDevice(caps, minor, 0o400)
    for _path, minor in _instance_capabilities(machine):
        yield f"dev/nvidia-caps/nvidia-cap{minor}", CharDevice(caps, minor, 0o444)


def _free_majors(devices: str) -> tuple[int, int]:
    """Majors for nvidia-uvm and nvidia-caps that no driver of the real kernel has: a node must never open another's."""
    lines = [line.split(maxsplit=1) for line in devices.partition("Block devices:")[0].splitlines()]
    taken = {
        int(line[0]) for line in lines if len(line) == 2 and line[0].isdigit() and not line[1].startswith("nvidia")
    }
    free = [major for major in (*range(240, 233, -1), *range(511, 383, -1)) if major not in taken]
    return next(major for major in free[1:] if major > 240), free[0]


# ---- /sys


def _sys(machine: Machine) -> Iterator[tuple[str, Node]]:
    yield "sys/bus/pci/devices", Folder()
    yield "sys/bus/pci/drivers/nvidia", Folder()
    for gpu in machine.gpus:
        address = pci_address(gpu)
        root = f"devices/pci{address[:7]}/{address}"
        for name, node in _pci_device(gpu):
            yield f"sys/{root}/{name}", node
        yield f"sys/bus/pci/drivers/nvidia/{address}", Link(f"../../../../{root}")
        yield f"sys/bus/pci/devices/{address}", Link(f"../../../{root}")


def _pci_device(gpu: Gpu) -> Iterator[tuple[str, Node]]:
    packed = models()[gpu.key].pci_ids[gpu.name]
    vendor, device = packed & 0xFFFF, packed >> 16
    yield "vendor", _line(f"0x{vendor:04x}")
    yield "device", _line(f"0x{device:04x}")
    yield "subsystem_vendor", _line(f"0x{vendor:04x}")
    yield "subsystem_device", _line(f"0x{_SUBSYSTEM:04x}")
    yield "class", _line("0x030200")
    yield "revision", _line("0xa1")
    yield "numa_node", _line("-1")  # as where the firmware does not say; so a kubelet aligns nothing by it
    yield "resource", File(_resources(gpu))
    yield "config", File(b"\xff" * _CONFIG_BYTES if gpu.lost else _config_space(vendor, device), 0o644)
    identity = f"v{vendor:08X}d{device:08X}sv{vendor:08X}sd{_SUBSYSTEM:08X}bc03sc02i00"
    yield "modalias", _line(f"pci:{identity}")
    yield (
        "uevent",
        _line(
            f"DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID={vendor:04X}:{device:04X}\n"
            f"PCI_SUBSYS_ID={vendor:04X}:{_SUBSYSTEM:04X}\nPCI_SLOT_NAME={pci_address(gpu)}\nMODALIAS=pci:{identity}"
        ),
    )
    yield "driver", Link("../../../bus/pci/drivers/nvidia")
    yield "subsystem", Link("../../../bus/pci")


def _resources(gpu: Gpu) -> bytes:
    """Start, end and flags of six regions and the ROM: registers, memory, more registers; invented addresses."""
    slot = int(gpu.bus_id.split(":")[1], 16)
    memory = 1 << (models()[gpu.key].fb_total_mib - 1).bit_length() + 20
    registers, aperture, more = (
        0x9000_0000 + (slot << 25),
        0x2000_0000_0000 + (slot << 39),
        0x1F00_0000_0000 + (slot << 26),
    )
    regions = (
        (registers, registers + (1 << 24) - 1, 0x40200),
        (aperture, aperture + memory - 1, 0x14220C),
        (0, 0, 0),
        (more, more + (1 << 25) - 1, 0x14220C),
        *((0, 0, 0),) * 3,
    )
    return "".join(f"0x{start:016x} 0x{end:016x} 0x{flags:016x}\n" for start, end, flags in regions).encode()


def _config_space(vendor: int, device: int) -> bytes:
    """The PCI configuration space: a header, and no capabilities; of a lost GPU every byte reads 0xff instead."""
    head = struct.pack("<HHHHBBBB", vendor, device, 0x0406, 0x0010, 0xA1, 0x00, 0x02, 0x03)
    return (head.ljust(44, b"\0") + struct.pack("<HH", vendor, _SUBSYSTEM)).ljust(_CONFIG_BYTES, b"\0")


# ---- /proc


def _proc(machine: Machine, uvm: int, caps: int, kernel: Kernel) -> Iterator[tuple[str, Node]]:
    yield "proc/devices", File(_devices(kernel.devices, uvm, caps).encode())
    yield "proc/modules", File(_modules(kernel.modules).encode())
    yield "proc/driver/nvidia-caps/mig-minors", File(mig_minors().encode())
    yield "proc/driver/nvidia-caps/nvlink-minors", File(b"fabric-mgmt 0\n")
    version = machine.switches.driver_version
    yield "proc/driver/nvidia/version", _line(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  simulated")
    yield "proc/driver/nvidia/capabilities/mig/config", _capability(_CONFIG, 0o400)
    yield "proc/driver/nvidia/capabilities/mig/monitor", _capability(_MONITOR, 0o400)
    for gpu in machine.gpus:
        yield f"proc/driver/nvidia/gpus/{pci_address(gpu)}/information", File(_information(gpu, version).encode())
        if gpu.mig and gpu.minor < GPUS_MAX:
            yield f"proc/driver/nvidia/capabilities/gpu{gpu.minor}/mig", Folder()
    for path, minor in _instance_capabilities(machine):
        yield f"proc/driver/nvidia/capabilities/{path}", _capability(minor, 0o444)


@cache
def mig_minors() -> str:
    """The text of /proc/driver/nvidia-caps/mig-minors: every capability there may ever be, whatever exists now."""
    lines = [f"config {_CONFIG}", f"monitor {_MONITOR}"]
    for gpu in range(GPUS_MAX):
        for gi in range(INSTANCES_MAX):
            lines.append(f"gpu{gpu}/gi{gi}/access {capability_minor(gpu, gi)}")
            lines.extend(f"gpu{gpu}/gi{gi}/ci{ci}/access {capability_minor(gpu, gi, ci)}" for ci in range(COMPUTE_MAX))
    return "\n".join([*lines, ""])


def _instance_capabilities(machine: Machine) -> Iterator[tuple[str, int]]:
    """(path under capabilities, minor) of every instance that exists; none where the driver's table has no room."""
    for gpu in machine.gpus:
        if gpu.minor >= GPUS_MAX:
            continue
        for instance in sorted(gpu.instances, key=lambda i: i.gi_id):
            folder = f"gpu{gpu.minor}/mig/gi{instance.gi_id}"
            yield f"{folder}/access", capability_minor(gpu.minor, instance.gi_id)
            for compute in sorted(instance.compute, key=lambda c: c.ci_id):
                minor = capability_minor(gpu.minor, instance.gi_id, compute.ci_id)
                yield f"{folder}/ci{compute.ci_id}/access", minor


def _capability(minor: int, mode: int) -> File:
    return _line(f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1")


def _information(gpu: Gpu, version: str) -> str:
    return (
        f"Model: \t\t {gpu.name}\n"
        f"IRQ:   \t\t {64 + gpu.minor}\n"
        f"GPU UUID: \t {gpu.uuid}\n"
        "Video BIOS: \t ??.??.??.??.??\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 47 bits\n"
        "DMA Mask: \t 0x7fffffffffff\n"
        f"Bus Location: \t {pci_address(gpu)}\n"
        f"Device Minor: \t {gpu.minor}\n"
        f"GPU Firmware: \t {version}\n"
        "GPU Excluded:\t No\n"
    )


def _devices(kernel: str, uvm: int, caps: int) -> str:
    """The kernel's text with the driver's character devices in their places; a bare one where the kernel has none."""
    characters, _title, blocks = (kernel or "Character devices:\n  1 mem\n  5 /dev/tty\n").partition("\nBlock devices:")
    title, *lines = characters.strip().splitlines()
    numbered = [(int(line.split()[0]), line) for line in lines if line.split()[1:] and "nvidia" not in line]
    ours = ((_NVIDIA, "nvidia"), (_NVIDIA, "nvidia-modeset"), (_NVIDIA, "nvidiactl"), (caps, "nvidia-caps"))
    numbered += [(major, f"{major:3d} {name}") for major, name in (*ours, (uvm, "nvidia-uvm"))]
    text = "\n".join([title, *(line for _, line in sorted(numbered, key=lambda found: found[0]))])
    return f"{text}\n\nBlock devices:{blocks}" if blocks else f"{text}\n\nBlock devices:\n"


def _modules(kernel: str) -> str:
    """The driver's modules as they stand when loaded, then the kernel's."""
    ours = [
        *(f"{name} 1536000 0 - Live 0x0000000000000000 (OE)" for name in _MODULES),
        f"nvidia 56848384 2 {','.join(_MODULES)}, Live 0x0000000000000000 (OE)",
    ]
    others = [line for line in kernel.splitlines() if not line.startswith("nvidia")]
    return "\n".join([*ours, *others, ""])


def _line(text: str) -> File:
    return File(f"{text}\n".encode())
