"""Device nodes and CDI: which of NVIDIA's programs are run, and what is said when they do not help."""

from __future__ import annotations

from pathlib import Path

import pytest

from migd.agent.host import ProgramError
from migd.agent.node.devices import DevicesError, HostDeviceFiles


class Programs:
    """Runs nothing, and remembers it; `nvidia-modprobe` makes the node of the capability it is given."""

    def __init__(self, root, missing=(), works=True):
        self.root, self.absent, self.works = root, set(missing), works
        self.ran = []

    def __call__(self, command, timeout_s):
        if command[0] in self.absent:
            raise ProgramError(f"cannot run `{' '.join(command)}`: No such file or directory", missing=True)
        self.ran.append(command)
        if command[0] == "nvidia-modprobe" and self.works:
            minor = Path(command[2]).read_text().split()[1]
            (self.root / f"dev/nvidia-caps/nvidia-cap{minor}").touch()


@pytest.fixture
def root(tmp_path):
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    for at, minor in (("gi1", 12), ("gi1/ci0", 13)):
        folder = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig" / at
        folder.mkdir(parents=True)
        (folder / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    return tmp_path


def test_nodes_that_nvidia_smi_has_made_need_nothing_more(root):
    for minor in (12, 13):
        (root / f"dev/nvidia-caps/nvidia-cap{minor}").touch()
    programs = Programs(root)
    HostDeviceFiles(programs, root).refresh()
    assert programs.ran == [("nvidia-smi", "-L")]


@pytest.mark.parametrize("missing", [(), ("nvidia-smi",)])
def test_a_missing_node_is_made_from_its_capability_file(root, missing):
    (root / "dev/nvidia-caps/nvidia-cap12").touch()
    programs = Programs(root, missing)
    HostDeviceFiles(programs, root).refresh()
    access = root / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access"
    assert programs.ran[-1] == ("nvidia-modprobe", "-f", str(access))
    assert (root / "dev/nvidia-caps/nvidia-cap13").exists()


def test_a_node_that_nobody_makes_is_named(root):
    with pytest.raises(DevicesError, match=r"no device node was made .*gi1/access, .*gi1/ci0/access"):
        HostDeviceFiles(Programs(root, works=False), root).refresh()
    with pytest.raises(DevicesError, match="nvidia-modprobe.*No such file"):
        HostDeviceFiles(Programs(root, missing={"nvidia-modprobe"}), root).refresh()


def test_a_host_wide_specification_is_written_again_where_there_is_one(root):
    for minor in (12, 13):
        (root / f"dev/nvidia-caps/nvidia-cap{minor}").touch()
    specification = root / "var/run/cdi/nvidia.yaml"
    specification.parent.mkdir(parents=True)
    specification.touch()
    programs = Programs(root)
    HostDeviceFiles(programs, root).refresh()
    assert programs.ran[-1] == ("nvidia-ctk", "cdi", "generate", f"--output={specification}")
    with pytest.raises(DevicesError, match="nvidia-ctk"):
        HostDeviceFiles(Programs(root, missing={"nvidia-ctk"}), root).refresh()


def test_a_program_that_fails_is_told_with_its_words(root):
    def fails(command, timeout_s):
        raise ProgramError("`nvidia-smi -L` ended with 9: no driver")

    with pytest.raises(DevicesError, match="ended with 9: no driver"):
        HostDeviceFiles(fails, root).refresh()
