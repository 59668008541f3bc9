"""A driver under a root of its own: which library is loaded, when, and what programs that we start are told."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest
import yaml

from migd.nvml.callers import ThreadCaller
from migd.nvml.errors import NoDriverError
from migd.nvml.roots import FOLDERS, NAME, ROOT, RootedLibrary
from migd.nvml.session import Deadlines, Session

DEPLOY = Path(__file__).parents[3] / "deploy"


class Nvml:
    """Stands for pynvml: counts its inits."""

    NVML_SUCCESS = 0

    def __init__(self) -> None:
        self.inits = 0
        self.answer = pynvml.NVML_SUCCESS

    def nvmlInit(self) -> None:
        self.inits += 1
        if self.answer:
            raise pynvml.NVMLError(self.answer)


class World:
    def __init__(self, root: Path, broken: tuple[str, ...] = ()) -> None:
        self.root = root
        self.broken = broken
        self.loaded: list[str] = []
        self.environment = {"PATH": "/usr/bin"}
        self.nvml = Nvml()
        self.library = RootedLibrary(root, self.environment, self.load, self.nvml)

    def load(self, path: str) -> object:
        self.loaded.append(path)
        if any(part in path for part in self.broken):
            raise OSError("wrong ELF class")
        return self

    def has(self, folder: str) -> str:
        path = self.root / folder / NAME
        path.parent.mkdir(parents=True)
        path.touch()
        return str(path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_library_is_found_wherever_drivers_put_it(tmp_path: Path, folder: str):
    world = World(tmp_path)
    path = world.has(folder)
    world.library.nvmlInit()
    assert (world.loaded, world.nvml.inits) == ([path], 1)
    assert world.environment["LD_PRELOAD"] == path
    assert world.environment["PATH"].split(":")[:2] == ["/usr/bin", f"{tmp_path}/usr/bin"]


def test_a_driver_that_comes_later_is_found_then_and_loaded_once(tmp_path: Path):
    world = World(tmp_path)
    world.library.nvmlInit()
    assert (world.loaded, world.environment) == ([], {"PATH": "/usr/bin"})
    path = world.has("usr/lib64")
    world.library.nvmlInit()
    before = dict(world.environment)
    world.library.nvmlInit()
    assert (world.loaded, world.nvml.inits, world.environment) == ([path], 3, before)


def test_a_library_of_another_architecture_is_passed_over(tmp_path: Path):
    world = World(tmp_path, broken=("x86_64",))
    world.has("usr/lib/x86_64-linux-gnu")
    path = world.has("usr/lib/aarch64-linux-gnu")
    world.library.nvmlInit()
    assert world.loaded[-1] == world.environment["LD_PRELOAD"] == path


def test_where_there_is_none_the_root_that_was_named_is_named(tmp_path: Path):
    world = World(tmp_path)
    world.nvml.answer = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    with pytest.raises(NoDriverError, match=f"not found.*neither under {tmp_path}, as MIGD_DRIVER_ROOT has it"):
        Session(world.library, ThreadCaller(), Deadlines(), lambda _: None).run("look", "", 1.0, lambda: None)


def test_other_answers_at_opening_are_passed_on(tmp_path: Path):
    world = World(tmp_path)
    world.nvml.answer = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        world.library.nvmlInit()


def test_all_else_is_pynvml(tmp_path: Path):
    assert World(tmp_path).library.NVML_SUCCESS == 0


def test_the_agents_daemonset_names_the_root_that_it_mounts():
    pod = yaml.safe_load((DEPLOY / "base" / "agent.yaml").read_text())["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [root] = [e["value"] for e in container["env"] if e["name"] == ROOT]
    assert root in {m["mountPath"] for m in container["volumeMounts"]}
