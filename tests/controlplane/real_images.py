"""Builds the image of the Dockerfile with buildah, on a base that debootstrap makes, into a cache outside the clone.

The base, the libraries and our own sources are three steps, each done anew only where what it is made of changes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.building import BuildError, NotBuiltError, cache_home, only_one
from controlplane.real_packages import PATH, PREPARE

ROOT: Final = Path(__file__).parents[2]
SUITE: Final = "bookworm"
BASE_PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
LEAVE_OUT: Final = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)
"""Of the base: what no program reads, or what differs from one day to the next."""
REQUIREMENTS: Final = ("requirements-build.txt", "requirements-image.txt")
SOURCES: Final = (*REQUIREMENTS, "pyproject.toml", "README.md", "LICENSE", "migd", "operator")
"""What .dockerignore lets in."""
RECIPE: Final = ("Dockerfile", ".dockerignore")
_CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"
_PIP_OPTIONS: Final = (
    "index-url",
    "extra-index-url",
    "find-links",
    "trusted-host",
    "proxy",
    "timeout",
    "default-timeout",
)
_LEVELS: Final = ("global", "user", "site", "install", ":env:")
"""Of pip's configuration, from the weakest."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What the three steps are made of, each with what is below it, as short hashes."""

    base: str
    libraries: str
    image: str

    @classmethod
    def of(cls, root: Path = ROOT) -> Keys:
        """Those of a clone."""
        base = _hashed(repr((SUITE, BASE_PACKAGES, LEAVE_OUT)).encode())
        recipe = [(root / name).read_bytes() for name in RECIPE]
        libraries = _hashed(base.encode(), recipe[0], *((root / name).read_bytes() for name in REQUIREMENTS))
        parts = [part for path in _files(root) for part in (str(path.relative_to(root)).encode(), path.read_bytes())]
        return cls(base, libraries, _hashed(libraries.encode(), *recipe, *parts))

    @property
    def name(self) -> str:
        """The image's name."""
        return f"localhost/migd:{self.image}"


def folder_of(environment: Mapping[str, str] = os.environ) -> Path:
    """Where all of it is kept."""
    return cache_home(environment) / "image"


def archive_of(keys: Keys, environment: Mapping[str, str] = os.environ) -> Path:
    """The OCI archive of the image, built or not."""
    return folder_of(environment) / f"migd-{keys.image}.tar"


def found_image(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> tuple[Keys, Path]:
    """The image of a clone as it is now; NotBuiltError, with what to do, where it was not built."""
    keys = Keys.of(root)
    archive = archive_of(keys, environment)
    if not archive.exists():
        raise NotBuiltError(f"there is no image of this state of the sources: run `{PREPARE}`")
    return keys, archive


def build_image(say: Callable[[str], None], root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Path:
    """The archive, after building what is missing: seconds after an edit, a minute or two when cold. Needs root."""
    folder = folder_of(environment)
    folder.mkdir(parents=True, exist_ok=True)
    keys = Keys.of(root)
    archive = archive_of(keys, environment)
    with only_one(folder / ".building"):
        if not archive.exists():
            Builder(folder, root, environment, say).build(keys, archive)
    say(f"image {keys.name}: {archive}")
    return archive


class Builder:
    """One builder with its storage. folder: the cache; root: the clone."""

    def __init__(self, folder: Path, root: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._folder = folder
        self._root = root
        self._say = say
        driver = "overlay" if overlays(folder) else "vfs"
        self._storage = folder / f"storage-{driver}"
        self._buildah = (
            "buildah",
            f"--root={self._storage}",
            f"--runroot={folder / 'run'}",
            f"--storage-driver={driver}",
        )
        path = f"{environment.get('PATH', '')}:{PATH}"
        self._environment = {**environment, "PATH": path, "BUILDAH_ISOLATION": "chroot"}

    def build(self, keys: Keys, archive: Path) -> None:
        """Build it, and keep what is below it and a few images of earlier states of the sources."""
        self._base(keys)
        base, libraries = f"localhost/migd-base:{keys.base}", f"localhost/migd-libraries:{keys.libraries}"
        with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
            mounted = self._mounted(Path(temporary))
            common = ("--layers", "--timestamp=0", f"--build-arg=BASE={base}", *mounted)
            if not self._has(libraries):
                self._say("building the image's libraries")
                self._run("bud", "--target=libraries", *common, f"--tag={libraries}", str(self._root))
            self._say("building the image")
            self._run("bud", *common, f"--tag={keys.name}", str(self._root))
            made = Path(temporary) / archive.name
            self._run("push", "--quiet", keys.name, f"oci-archive:{made}:{keys.name}")
            made.replace(archive)
        kept = {_name_of(path) for path in newest(self._folder, "migd-*.tar")}
        self._forget({base, libraries, *kept})

    def _base(self, keys: Keys) -> None:
        name = f"localhost/migd-base:{keys.base}"
        if self._has(name):
            return
        self._say(f"making the image's base: Debian {SUITE} with {', '.join(BASE_PACKAGES)}")
        with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
            system = Path(temporary) / "system"
            included = ",".join(BASE_PACKAGES)
            self._command(
                "debootstrap", "--variant=minbase", f"--include={included}", SUITE, str(system), *self._mirror()
            )
            for left in LEAVE_OUT:
                shutil.rmtree(system / left, ignore_errors=True)
                (system / left).mkdir(parents=True)
            container = self._run("from", "scratch").strip()
            self._run("add", "--quiet", container, str(system), "/")
            self._run("commit", "--quiet", "--timestamp=0", "--rm", container, name)

    def _mirror(self) -> list[str]:
        """Where this machine's apt gets Debian from, where it does."""
        said = subprocess.run(
            [
                "apt-get",
                "indextargets",
                "--format",
                "$(CODENAME) $(REPO_URI)",
                "Created-By: Packages",
                "Component: main",
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        found = [line.split()[1] for line in said.splitlines() if line.startswith(f"{SUITE} ")]
        return found[:1]

    def _mounted(self, folder: Path) -> list[str]:
        """How pip is configured here, and whom it trusts: seen while the image is built, and not part of it."""
        listed = self._said(sys.executable, "-m", "pip", "config", "list")
        settings = pip_settings(listed)
        certificates = settings.pop("cert", "") or self._environment.get("SSL_CERT_FILE", "") or _CERTIFICATES
        mounted = []
        if Path(certificates).is_file():
            settings["cert"] = _CERTIFICATES
            mounted.append(f"--volume={Path(certificates).resolve()}:{_CERTIFICATES}:ro")
        local = [one for one in settings.get("find-links", "").split() if Path(one).is_dir()]
        mounted += [f"--volume={one}:{one}:ro" for one in local]
        config = folder / "pip.conf"
        config.write_text(pip_config(settings))
        return [*mounted, f"--volume={config}:/etc/pip.conf:ro"]

    def _has(self, name: str) -> bool:
        return name in self._names()

    def _names(self) -> set[str]:
        listed = json.loads(self._run("images", "--json") or "[]") or []
        return {name for one in listed for name in one.get("names") or ()}

    def _forget(self, kept: set[str]) -> None:
        """Remove what is not of these: each edit would leave some twenty megabytes."""
        old = sorted(self._names() - kept)
        if old:
            self._run("rmi", *old)
        self._run("rmi", "--prune", "--force")

    def _run(self, *words: str) -> str:
        return self._command(*self._buildah, *words)

    def _command(self, *words: str) -> str:
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-3000:]
            raise BuildError(f"`{_short(words)}` failed ({done.returncode}):\n{said}")
        return done.stdout

    def _said(self, *words: str) -> str:
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""


def overlays(folder: Path) -> bool:
    """Whether overlayfs works on the file system of a folder; tried in a mount namespace of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        low, high, work, top = (Path(temporary) / name for name in ("low", "high", "work", "top"))
        for made in (low, high, work, top):
            made.mkdir()
        options = f"lowerdir={low},upperdir={high},workdir={work}"
        command = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, str(top)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def newest(folder: Path, pattern: str, number: int = 3) -> list[Path]:
    """The newest of what a folder keeps, after removing all older: several clones on one machine share it."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in found[number:]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    return found[:number]


def pip_settings(listed: str) -> dict[str, str]:
    """What `pip config list` says of where packages come from; the strongest word of each."""
    found: dict[tuple[int, str], str] = {}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        level, _, option = name.rpartition(".")
        if equals and level in _LEVELS and (option in _PIP_OPTIONS or option == "cert"):
            found[_LEVELS.index(level), option] = str(ast.literal_eval(value))
    return {option: value for (_, option), value in sorted(found.items())}


def pip_config(settings: Mapping[str, str]) -> str:
    """A configuration file of pip."""
    lines = [f"{option} = {' '.join(value.split())}\n" for option, value in sorted(settings.items())]
    return "".join(["[global]\n", *lines])


def _name_of(archive: Path) -> str:
    return f"localhost/migd:{archive.stem.removeprefix('migd-')}"


def _files(root: Path) -> Iterator[Path]:
    """The sources in the image, in order, without what Python makes of them."""
    for name in SOURCES:
        path = root / name
        if path.is_file():
            yield path
        else:
            yield from sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _hashed(*parts: bytes) -> str:
    told = hashlib.sha256()
    for part in parts:
        told.update(len(part).to_bytes(8, "big"))
        told.update(part)
    return told.hexdigest()[:16]


def _short(words: Sequence[str]) -> str:
    return " ".join(word for word in words if not word.startswith(("--root=", "--runroot=", "--volume=")))[:300]
