"""Containerd's folder with the images in it, unpacked once: a node then starts on a copy that shares the files.

These are migd's, and one of NVIDIA's programs on the same base. To unpack them takes some ten seconds of a processor,
which each test run would spend again.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controlplane.building import REAL_NODE, NotBuiltError, build_key, found_programs, only_one
from controlplane.real_config import Place
from controlplane.real_images import Keys, found_image, newest, overlays
from controlplane.real_layers import Base, image, layer
from controlplane.real_packages import PATH, PREPARE
from controlplane.real_space import Space

FOLDER: Final = "real-node"
"""Of our cache: what real nodes start from, and those that run."""
_MAKING: Final = "making-"
GPU_PROGRAMS: Final = "localhost/migd-nvidia:1"
"""The image of NVIDIA's programs: unmodified, on a Debian with a shell and `mount`."""
_IN_IT: Final = ("nvidia-device-plugin", "gpu-feature-discovery", "nfd-master")


def root_of(cache: Path, keys: Keys) -> Path:
    """Where the root with these images is, made or not."""
    return cache / f"root-{keys.image}-{build_key(REAL_NODE)}"


def gpu_programs(base: Base) -> bytes:
    """The image of NVIDIA's programs, as an archive that has only what is new. base: migd's image."""
    folder = found_programs(group=REAL_NODE)
    programs = {f"usr/bin/{name}": (folder / name).read_bytes() for name in _IN_IT}
    return image(base.lowest(), GPU_PROGRAMS, {"Env": [f"PATH={PATH}"]}, layer({}, programs))


def found_root(cache: Path) -> tuple[Keys, Path, Path]:
    """The image's keys and archive, and the root with it; NotBuiltError, with what to do, where either is missing."""
    keys, archive = found_image()
    root = root_of(cache, keys)
    if not root.exists():
        raise NotBuiltError(f"the image was built and not unpacked: run `{PREPARE}`")
    return keys, archive, root


def make_root(cache: Path, say: Callable[[str], None]) -> Path:
    """Unpack the image of this clone where that was not done yet."""
    keys, archive = found_image()
    cache.mkdir(parents=True, exist_ok=True)
    root = root_of(cache, keys)
    with only_one(cache / ".unpacking"):
        if root.exists():
            return root
        for left in cache.glob(f"{_MAKING}*"):
            shutil.rmtree(left)
        say("unpacking the images for containerd")
        with tempfile.TemporaryDirectory(prefix=_MAKING, dir=cache) as temporary:
            place = Place(Path(temporary))
            with Space(place, place.folder, overlays(place.folder), cgroup=False) as space:
                space.take_image(archive)
                space.take_image(gpu_programs(Base.of(archive)))
                assert space.containerd is not None
                space.containerd.stop()  # so that its database is whole
            (place.folder / "containerd").replace(root)
        newest(cache, "root-*")
    return root


def copied(root: Path, target: Path) -> None:
    """A copy of a root whose files are the same ones, but for databases: only these are ever written to."""
    done = subprocess.run(["cp", "-a", "--link", str(root), str(target)], capture_output=True, text=True, check=False)
    if done.returncode != 0:  # another file system
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(root), str(target)], check=True)
        return
    for database in target.glob("*/*.db"):
        own = database.with_suffix(".own")
        shutil.copy2(database, own)
        own.replace(database)
