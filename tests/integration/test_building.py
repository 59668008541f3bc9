"""Building the control plane's programs, with a Go that only pretends."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from controlplane.building import (
    CONTROL_PLANE,
    GO_REQUIREMENTS,
    PROGRAMS,
    REAL_NODE,
    BuildError,
    Group,
    NotBuiltError,
    build,
    build_key,
    find_go,
    found_programs,
    missing_in,
)

PRETENDED = """#!{python} -S
import json, os, sys
if sys.argv[1:] == ["env", "GOVERSION"]:
    print({version!r})
    sys.exit()
if sys.argv[1] == "list":
    print({sources!r})
    sys.exit()
out = sys.argv[sys.argv.index("-o") + 1]
with open(out, "w") as made:
    made.write("#!/bin/true\\n")
os.chmod(out, 0o755)
with open({log!r}, "a") as log:
    log.write(json.dumps([os.getcwd(), sys.argv[1:], os.environ["CGO_ENABLED"], os.environ["GOTOOLCHAIN"]]) + "\\n")
if sys.argv[-1].endswith({broken!r}):
    sys.exit("undefined: everything")
"""


class Machine:
    """Where a build happens: a PATH with a pretended Go, and a cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cache = folder / "cache" / "migd"
        self.environment = {"PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(folder / "cache")}
        self.said: list[str] = []
        self.sources = folder / "sources"
        for file in REAL_NODE.files:
            path = self.sources / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{file.of}\n")

    def has(self, program: str) -> None:
        made = self._folder / "bin" / program
        made.parent.mkdir(exist_ok=True)
        made.write_text("#!/bin/true\n")
        made.chmod(0o755)

    def has_go(self, version: str, broken: str = "nothing") -> Path:
        go = self._folder / "bin" / "go"
        go.parent.mkdir(exist_ok=True)
        log = str(self._folder / "log")
        told = {"python": sys.executable, "version": version, "log": log, "broken": broken}
        go.write_text(PRETENDED.format(**told, sources=str(self.sources)))
        go.chmod(0o755)
        return go

    def build(self, group: Group = CONTROL_PLANE) -> Path:
        return build(self.said.append, self.environment, group)

    @property
    def builds(self) -> list[list[str]]:
        log = self._folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_build_makes_every_program_once(machine: Machine):
    machine.has_go("go1.99.0")
    folder = machine.build()
    assert folder == found_programs(machine.environment) == machine.cache / "control-plane" / build_key()
    assert [Path(command[-1]).name for _, command, *_ in machine.builds] == ["v3", *(p.name for p in PROGRAMS[1:])]
    machine.build()
    assert len(machine.builds) == len(PROGRAMS)


def test_a_build_changes_no_pinned_file_and_names_its_version(machine: Machine):
    machine.has_go("go1.99.0")
    machine.build()
    for (where, command, cgo, toolchain), program in zip(machine.builds, PROGRAMS, strict=True):
        assert Path(where).name == program.module
        assert {"-mod=readonly", "-trimpath"} <= set(command)
        assert (cgo, toolchain) == ("0", "local")
        (flags,) = [word for word in command if word.startswith("-ldflags=")]
        assert ("gitVersion=v1." in flags) == (program.module == "kubernetes")


def test_what_a_real_node_runs_is_built_apart_and_only_what_is_partly_c_by_a_compiler(machine: Machine):
    machine.has_go("go1.99.0")
    machine.has("gcc")
    folder = machine.build(REAL_NODE)
    assert folder == machine.cache / "node-programs" / build_key(REAL_NODE)
    assert [(Path(command[-1]).name, cgo) for _, command, cgo, _ in machine.builds] == [
        ("containerd", "0"),
        ("containerd-shim-runc-v2", "0"),
        ("ctr", "0"),
        ("nvidia-device-plugin", "1"),
        ("gpu-feature-discovery", "1"),
        ("nfd-master", "0"),
    ]
    for _, command, cgo, _ in machine.builds:
        assert any("-z,lazy" in word for word in command) == (cgo == "1"), "NVML's symbols are not there yet"
    assert (folder / "nfd-role.yaml").read_text() == "sigs.k8s.io/node-feature-discovery\n"
    with pytest.raises(NotBuiltError, match=r"no control plane here .* run `make control-plane` once"):
        found_programs(machine.environment)


def test_a_missing_compiler_is_named_before_anything_is_built(machine: Machine):
    machine.has_go("go1.99.0")
    with pytest.raises(BuildError, match=r"^nvidia-device-plugin, gpu-feature-discovery: .* no gcc here: install it"):
        machine.build(REAL_NODE)
    assert machine.builds == []
    with pytest.raises(NotBuiltError, match=r"no real node here \(containerd, .*\): run `make real-node` once"):
        found_programs(machine.environment, REAL_NODE)


def test_an_interrupted_build_leaves_nothing_that_looks_finished_and_goes_on_where_it_was(machine: Machine):
    machine.has_go("go1.99.0", broken="kube-scheduler")
    with pytest.raises(BuildError, match=r"(?s)building kube-scheduler failed.*undefined: everything"):
        machine.build()
    folder = machine.cache / "control-plane" / build_key()
    assert missing_in(folder) == ("kube-scheduler", "kubectl", "kubelet")
    machine.has_go("go1.99.0")
    machine.build()
    assert missing_in(folder) == ()
    assert len(machine.builds) == len(PROGRAMS) + 1


def test_ready_made_programs_are_not_built(machine: Machine, tmp_path: Path):
    machine.environment["KUBEBUILDER_ASSETS"] = str(tmp_path)
    for program in PROGRAMS:
        (tmp_path / program.name).touch(mode=0o755)
    assert machine.build() == tmp_path
    assert machine.builds == []


@pytest.mark.parametrize("version", ["go1.26.0", "go1.26.8", "go1.100", "go2.0"])
def test_a_go_on_the_path_that_is_new_enough_is_used(machine: Machine, version: str):
    go = machine.has_go(version)
    assert find_go(machine.said.append, machine.environment) == go


@pytest.mark.parametrize("version", ["go1.25.9", "devel", ""])
def test_an_older_go_is_passed_over_for_the_one_fetched_before(machine: Machine, version: str):
    machine.has_go(version)
    home = machine.cache / f"go-{hashlib.sha256(GO_REQUIREMENTS.read_bytes()).hexdigest()[:16]}"
    home.mkdir(parents=True)
    (home / "whole").touch()
    assert find_go(machine.said.append, machine.environment) == home / "bin" / "go"
    assert machine.said == []
