"""What one GPU *is* right now: ids, UUIDs, modes and holders, as values. Filled by whoever reads the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from migd.mig.boards import Board
from migd.mig.geometry import Geometry, GpuInstance, Layout


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """Who holds a GPU or one of its instances.

    pid: the process, or None where no process could be named (unknown counts as busy).
    command: what it runs; "" until looked up; without a pid who it is otherwise, such as "pod ml/train".
    container: the container's id, "" for a process of the host.
    """

    pid: int | None
    command: str = ""
    container: str = ""

    def __str__(self) -> str:
        if self.pid is None:
            return self.command or "an unknown client"
        who = f"pid {self.pid}"
        where = f" in container {self.container[:12]}" if self.container else ""
        return who + (f" ({self.command})" if self.command else "") + where


@dataclass(frozen=True, slots=True)
class SeenComputeInstance:
    """A compute instance that exists.

    whole: it spans every compute slice of its GPU instance, which is the only kind migd makes.
    mig_uuid: of the MIG device it is; None where the driver would not tell.
    """

    ci_id: int
    whole: bool
    mig_uuid: str | None


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """A GPU instance that exists. Its gi_id says where it lies and is reused at once; it proves nothing.

    instance: profile name as this board spells it, and the placement that NVML reports.
    in_use: somebody holds it, or it could not be found out.
    """

    instance: GpuInstance
    gi_id: int
    compute_instances: tuple[SeenComputeInstance, ...] = ()
    in_use: bool = False
    holders: tuple[Holder, ...] = ()

    @property
    def whole(self) -> bool:
        """Usable as migd makes it: exactly one compute instance, spanning it all."""
        return len(self.compute_instances) == 1 and self.compute_instances[0].whole


@dataclass(frozen=True, slots=True)
class MigMode:
    """The MIG mode of a GPU that can do MIG: what holds now, and what the next activation will make of it."""

    current: bool
    pending: bool

    @property
    def settled(self) -> bool:
        """Nothing is waiting for a reset or a reboot."""
        return self.current == self.pending


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One physical GPU as it is.

    index: the NVML index, which may change; uuid: "GPU-…", its identity ("lost:INDEX" for one that was lost before it
    could say). pci_device_id: "0x20B210DE", device then vendor. memory_mib: the whole GPU's, 0 where not readable.
    mode: None where the GPU cannot do MIG.
    resetless: a mode change takes effect without a GPU reset (Hopper and later).
    board: None where it cannot do MIG, or where an older driver does not list profiles while MIG is off.
    instances: in order of start. holders: processes on the GPU outside every instance; in_use: those, or not known.
    trouble: why the GPU must not be worked on ("" when healthy). lost: it fell off the bus; unreadable: why it cannot
    be read, though it is there ("" when it can). With either, all but uuid and index is empty.
    """

    uuid: str
    index: int
    model: str
    pci_device_id: str
    memory_mib: int
    mode: MigMode | None
    resetless: bool = False
    board: Board | None = None
    instances: tuple[SeenInstance, ...] = ()
    in_use: bool = False
    holders: tuple[Holder, ...] = ()
    trouble: str = ""
    lost: bool = False
    unreadable: str = ""

    @property
    def out_of_reach(self) -> str:
        """Why nothing can be said or done about this GPU now; "" where it can."""
        return "it fell off the bus" if self.lost else self.unreadable

    @property
    def mig_on(self) -> bool:
        """MIG mode is on now."""
        return self.mode is not None and self.mode.current

    @property
    def geometry(self) -> Geometry:
        """The GPU instances that exist, with or without compute instances."""
        return frozenset(s.instance for s in self.instances)

    @property
    def layout(self) -> Layout:
        """Mode and geometry as they are."""
        return Layout(self.mig_on, self.geometry)

    @property
    def busy(self) -> Geometry:
        """The GPU instances in use, or not known to be idle."""
        return frozenset(s.instance for s in self.instances if s.in_use)
