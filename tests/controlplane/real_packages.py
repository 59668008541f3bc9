"""What a machine needs for a real node: root, namespaces and some of Debian's packages; what is missing is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from controlplane import real_cgroups
from controlplane.real_config import CGROUP

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PREPARE: Final = "make real-node"
_APT: Final = ("apt-get", "--quiet", "--quiet", "--yes", "--no-install-recommends", "--no-remove", "install")
"""Nothing is removed for it: a runc of another vendor is as good, and stays."""


@dataclass(frozen=True, slots=True)
class Package:
    """A Debian package, and the programs that are taken from it."""

    name: str
    programs: tuple[str, ...]


PACKAGES: Final = (
    Package("gcc", ("gcc",)),  # part of NVIDIA's programs is C
    Package("libc6-dev", ("gcc",)),  # its headers, where there was no compiler
    Package("runc", ("runc",)),
    Package("buildah", ("buildah",)),
    Package("debootstrap", ("debootstrap",)),
    Package("mount", ("mount",)),
    Package("util-linux", ("nsenter", "unshare")),
)


class PackageError(Exception):
    """Packages could not be installed; the text says which, and what apt-get said."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine as far as it matters here. programs: those of PACKAGES that it has.

    namespaces, cgroups: "", or why it makes none.
    """

    system: str
    root: bool
    programs: frozenset[str]
    apt: bool
    namespaces: str
    cgroups: str


def seen(environment: Mapping[str, str] = os.environ) -> Seen:
    """This machine."""
    path = f"{environment.get('PATH', '')}:{PATH}"
    programs = [program for package in PACKAGES for program in package.programs]
    found = frozenset(program for program in programs if shutil.which(program, path=path))
    root = sys.platform == "linux" and os.geteuid() == 0
    return Seen(
        system=sys.platform,
        root=root,
        programs=found,
        apt=shutil.which("apt-get", path=path) is not None,
        namespaces=_namespaces(path) if root and "unshare" in found else "",
        cgroups=real_cgroups.hindrance(CGROUP) if root else "",
    )


def missing(machine: Seen) -> tuple[Package, ...]:
    """The packages of which a program is missing."""
    return tuple(package for package in PACKAGES if not machine.programs.issuperset(package.programs))


def hindrance(machine: Seen) -> str:
    """Why there can be no real node on this machine, in a sentence; "" where there can."""
    if machine.system != "linux":
        return f"a real node needs Linux; this is {machine.system}"
    if not machine.root:
        return "a real node needs root, for containerd and kubelet: run the tests as root"
    if machine.namespaces:
        return f"a real node needs namespaces of its own, and this root may make none: {machine.namespaces}"
    if machine.cgroups:
        return f"a real node needs a cgroup for its pods, and none can be made: {machine.cgroups}"
    lacking = missing(machine)
    if lacking:
        wanted = (p for package in lacking for p in package.programs if p not in machine.programs)
        programs = ", ".join(dict.fromkeys(wanted))
        names = " ".join(package.name for package in lacking)
        how = f"`{PREPARE}` installs" if machine.apt else "there is no apt-get here: install what your system calls"
        return f"a real node needs {programs}, which are missing: {how} {names}"
    return ""


def installable(machine: Seen) -> bool:
    """Whether all that hinders a real node is packages that can be installed."""
    every = frozenset(program for package in PACKAGES for program in package.programs)
    return machine.apt and not hindrance(replace(machine, programs=every))


def install(packages: Sequence[Package], say: Callable[[str], None]) -> None:
    """Install these, as root on Debian or what is made of it; PackageError where that fails."""
    names = [package.name for package in packages]
    say(f"installing {', '.join(names)}")
    for command in (["apt-get", "--quiet", "--quiet", "update"], [*_APT, *names]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-2000:]
            raise PackageError(f"cannot install {', '.join(names)}: `{' '.join(command)}` said\n{said}")


def _namespaces(path: str) -> str:
    """Try it: a container's root often may not, whatever it is called."""
    unshare = shutil.which("unshare", path=path)
    assert unshare is not None
    done = subprocess.run(
        [unshare, "--pid", "--fork", "--mount", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"unshare ended with {done.returncode}"
