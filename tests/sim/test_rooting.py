"""A driver root on disk: in step with the machine, repaired after an interruption, and never anybody else's folder."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from migd.sim.files.rooting import MARKER, Root, RootError
from migd.sim.files.shown import CharDevice, File, Folder, Kernel, Link, driver_files
from migd.sim.host import SimHost

KERNEL = Kernel("Character devices:\n  1 mem\n")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone makes device nodes")


def carved(host: SimHost, *profiles: int) -> SimHost:
    nvml = host.nvml()
    nvml.nvmlInit()
    nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(0), 1)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)  # anew: a mode change may retire it
    for profile in profiles:
        nvml.nvmlDeviceCreateGpuInstance(handle, profile)
    nvml.nvmlShutdown()
    return host


def lies(folder: Path) -> dict[str, object]:
    """What is under proc, sys and dev of a root, as values."""
    found: dict[str, object] = {}
    for path in sorted(p for name in ("proc", "sys", "dev") for p in [folder / name, *(folder / name).rglob("*")]):
        state = path.lstat()
        mode = stat.S_IMODE(state.st_mode)
        name = str(path.relative_to(folder))
        if stat.S_ISLNK(state.st_mode):
            found[name] = Link(os.readlink(path))
        elif stat.S_ISDIR(state.st_mode):
            found[name] = Folder(opaque=name in ("dev/pts", "dev/shm", "dev/mqueue"))
        elif stat.S_ISCHR(state.st_mode):
            found[name] = CharDevice(os.major(state.st_rdev), os.minor(state.st_rdev), mode)
        else:
            found[name] = File(path.read_bytes(), mode)
    return found


def right(folder: Path, host: SimHost) -> bool:
    return lies(folder) == dict(driver_files(host.snapshot(), KERNEL))


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in folder.rglob("*") if not p.is_dir()}


@as_root
def test_a_root_holds_what_the_driver_shows(tmp_path: Path) -> None:
    host = carved(SimHost.fresh("2xa100-80gb"), 9, 19)
    Root(tmp_path / "root", KERNEL).write(host.snapshot())
    assert right(tmp_path / "root", host)


@as_root
def test_it_follows_the_machine_in_whatever_happens(tmp_path: Path) -> None:
    host = SimHost.fresh("2xa100-80gb", minor_renumber_on_mode_change=True)
    root = Root(tmp_path, KERNEL)
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: carved(host, 9),
        lambda: carved(host, 19, 19),
        lambda: host.lose_gpu(1),
        lambda: host.swap_gpu(1, "l40s"),
        host.reboot,
        lambda: carved(host, 14),
    ]
    for step in steps:
        step()
        root.write(host.snapshot())
        assert right(tmp_path, host)


@as_root
def test_only_what_differs_is_touched(tmp_path: Path) -> None:
    host = carved(SimHost.fresh("2xa100-80gb"), 9)
    root = Root(tmp_path, KERNEL)
    root.write(host.snapshot())
    before = inodes(tmp_path)
    carved(host, 19)
    root.write(host.snapshot())
    after = inodes(tmp_path)
    assert {path: after[path] for path in before} == before
    new = {Path(path).name for path in set(after) - set(before)}
    assert new == {"access", "nvidia-cap66"}  # of GPU instance 7
    Root(tmp_path, KERNEL).write(host.snapshot())  # as after a restart
    assert inodes(tmp_path) == after


def test_a_machine_that_shows_nothing_new_costs_no_look_at_the_disk(tmp_path: Path) -> None:
    host = SimHost.fresh("2xa100-80gb")
    root = Root(tmp_path / "root", KERNEL)
    root.write(host.snapshot())
    (tmp_path / "root").rename(tmp_path / "away")  # a look would miss it and make it anew
    host.start_process(0)
    root.write(host.snapshot())
    assert not (tmp_path / "root").exists()


@as_root
def test_whatever_an_interruption_or_a_stranger_left_is_repaired_by_the_next_start(tmp_path: Path) -> None:
    host = carved(SimHost.fresh("2xa100-80gb"), 9)
    Root(tmp_path, KERNEL).write(host.snapshot())
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.chmod(0o600)
    minors.write_text("half")
    (tmp_path / "proc/driver/nvidia-caps/.migd.new").write_text("half")
    (tmp_path / "dev/nvidia0").unlink()
    (tmp_path / "dev/nvidia0").mkdir()
    (tmp_path / "dev/nvidia0/x").write_text("")
    (tmp_path / "dev/nvidia1").unlink()
    (tmp_path / "dev/nvidia1").write_text("")
    (tmp_path / "dev/nvidia9").write_text("")
    os.mkfifo(tmp_path / "dev/pipe")
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0").unlink()
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0").mkdir()
    (tmp_path / "proc/driver/nvidia/capabilities/gpu7/mig/gi1").mkdir(parents=True)
    Root(tmp_path, KERNEL).write(host.snapshot())
    assert right(tmp_path, host)


@as_root
def test_links_do_not_lead_out_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for name in ("driver", "gpus"):
        (outside / name).mkdir(parents=True)
    (outside / "mine").write_text("mine")
    root, host = tmp_path / "root", SimHost.fresh("a100-80gb")
    Root(root, KERNEL).claim()
    (root / "proc").symlink_to(outside)
    (root / "dev").mkdir()
    (root / "dev/nvidia0").symlink_to(outside / "mine")
    (root / "dev/nvidia-caps").symlink_to(outside / "gpus")
    (root / "dev/stray").symlink_to(outside)
    Root(root, KERNEL).write(host.snapshot())
    assert right(root, host)
    assert sorted(str(p.relative_to(outside)) for p in outside.rglob("*")) == ["driver", "gpus", "mine"]
    assert (outside / "mine").read_text() == "mine"


def test_a_folder_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    for act in (Root(tmp_path).claim, lambda: Root(tmp_path).write(SimHost.fresh("t4").snapshot())):
        with pytest.raises(RootError, match=f"not empty and no driver root of ours .it lacks {MARKER}.: give another"):
            act()
    assert [p.name for p in tmp_path.iterdir()] == ["letter"]


def test_a_file_in_its_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RootError, match=f"{tmp_path}/file: .*cannot be written"):
        Root(tmp_path / "file").write(SimHost.fresh("t4").snapshot())


@as_root
def test_what_others_put_beside_and_into_the_shared_folders_stays(tmp_path: Path) -> None:
    host = SimHost.fresh("a100-80gb")
    root = Root(tmp_path, KERNEL)
    root.claim()
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/nvidia-smi").write_text("#!/bin/sh\n")
    root.write(host.snapshot())
    (tmp_path / "dev/shm/theirs").write_text("theirs")
    Root(tmp_path, KERNEL).write(carved(host, 9).snapshot())
    assert (tmp_path / "usr/bin/nvidia-smi").exists()
    assert (tmp_path / "dev/shm/theirs").read_text() == "theirs"


def test_a_root_that_somebody_removed_is_made_anew_with_the_next_change(tmp_path: Path) -> None:
    host = SimHost.fresh("2xa100-80gb")
    root = Root(tmp_path / "root", KERNEL)
    root.write(host.snapshot())
    (tmp_path / "root").rename(tmp_path / "away")
    root.write(carved(host, 9).snapshot())
    assert set(lies(tmp_path / "root")) == set(driver_files(host.snapshot(), KERNEL))


# ---- interrupted, and looked at from outside


def stepwise(step: Callable[[str], None], write: Callable[[], None]) -> None:
    """Write in a process of its own, in which `step` is told of each change to a folder before it is made."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            said = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.symlink": 1}
            sys.addaudithook(lambda event, args: step(f"{event} {args[said[event]]}") if event in said else None)
            write()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@as_root
def test_killed_at_any_step_it_is_right_after_the_next_start(tmp_path: Path) -> None:
    before = carved(SimHost.fresh("2xa100-80gb", minor_renumber_on_mode_change=True), 9, 19).snapshot()
    after = SimHost.fresh("2xa100-80gb")
    carved(after, 14)
    for number in itertools.count(1):
        Root(tmp_path, KERNEL).write(before)
        left, ended = number, tmp_path.parent / f"ended-{number}"

        def die(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(0)

        def write(ended: Path = ended) -> None:
            Root(tmp_path, KERNEL).write(after.snapshot())
            ended.write_text("")

        stepwise(die, write)
        Root(tmp_path, KERNEL).write(after.snapshot())
        assert right(tmp_path, after), f"killed at step {number}"
        if ended.exists():
            break
    assert number > 20


@as_root
def test_a_node_is_there_before_a_file_tells_of_it_and_longer(tmp_path: Path) -> None:
    host = SimHost.fresh("a100-80gb")
    nvml = host.nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceSetMigMode(gpu, 1)
    Root(tmp_path, KERNEL).write(host.snapshot())
    instance = nvml.nvmlDeviceCreateGpuInstance(gpu, 9)
    told = tmp_path.parent / "told"

    def write() -> None:
        Root(tmp_path, KERNEL).write(host.snapshot())

    def steps() -> list[str]:
        told.write_text("")
        with told.open("a", buffering=1) as file:
            stepwise(lambda step: file.writelines([step, "\n"]), write)
        return [step for step in told.read_text().splitlines() if not step.endswith((".migd.new", str(tmp_path)))]

    assert steps() == ["os.rename nvidia-cap21", "os.mkdir gi2", "os.rename access"]
    nvml.nvmlGpuInstanceDestroy(instance)
    assert steps() == ["os.remove access", "os.remove gi2", "os.rmdir gi2", "os.remove nvidia-cap21"]
