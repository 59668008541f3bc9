"""What nvml.h declares: its functions with their arguments, and its structures that say their own version.

The header comes with the package nvidia-nvml-dev, under NVIDIA's licence: it is read at each build, never kept.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

PACKAGE: Final = "nvidia-nvml-dev"
VERSION: Final = "13.5.37"
PLAIN: Final = "-DNVML_NO_UNVERSIONED_FUNC_DEFS=1"
"""Without this the header renames nvmlInit to nvmlInit_v2, and so on; with it both are declared."""

_FUNCTION: Final = re.compile(r"\b(nvmlReturn_t|const char\s*\*)\s*(nvml[A-Z]\w*)\s*\(([^()]*)\)\s*;")
_STRUCT: Final = re.compile(r"\btypedef\s+struct\s*\w*\s*\{")
_ALIAS: Final = re.compile(r"\btypedef\s+(nvml\w+)\s+(nvml\w+)\s*;")
_MACRO: Final = re.compile(r"^#define\s+(nvml\w+)\s+NVML_STRUCT_VERSION\(\w+,\s*\d+\)", re.MULTILINE)


class NoHeaderError(Exception):
    """There is no nvml.h, or nothing to read it with; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a function. type: as C writes it, one space between words, "*" at the end of a pointer's."""

    type: str
    name: str

    @property
    def pointee(self) -> str | None:
        """What it points to, without const; None where it is a value (a handle is one)."""
        return self.type.removesuffix("*").strip().removeprefix("const ") if self.type.endswith("*") else None


@dataclass(frozen=True, slots=True)
class Function:
    """One function. result: nvmlReturn_t, or const char * for nvmlErrorString."""

    name: str
    result: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """nvml.h as values. versioned: structures that begin with their version; versions: macros of such words."""

    path: Path
    functions: tuple[Function, ...]
    versioned: frozenset[str]
    versions: tuple[str, ...]


def find_header() -> Path:
    """Where nvml.h lies; NoHeaderError, with the command that installs it, where it does not."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvml.h" and (found := Path(str(file.locate()))).exists():
            return found
    raise NoHeaderError(
        f"nvml.h is not here: it comes with the Python package {PACKAGE}, which only builds need; "
        f"run `pip install {PACKAGE}=={VERSION}`, or `make test` once in a clone"
    )


def find_compiler() -> str:
    """The C compiler gcc; NoHeaderError, with what to do, where there is none."""
    found = shutil.which("gcc")
    if found is None:
        raise NoHeaderError(
            "gcc is not here, which builds the simulated libnvidia-ml.so.1: run `apt-get install gcc libc6-dev`"
        )
    return found


def read_header(path: Path | None = None) -> Header:
    """The header of the installed package, or the one at path."""
    path = path or find_header()
    done = subprocess.run([find_compiler(), "-E", "-P", PLAIN, str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoHeaderError(f"gcc cannot read {path}:\n{done.stderr[-2000:]}")
    return parse(path, done.stdout, path.read_text(encoding="utf-8", errors="replace"))


def parse(path: Path, preprocessed: str, source: str) -> Header:
    """The header, from what the preprocessor makes of it and from its own text, which alone has the macros."""
    functions = tuple(
        Function(name, " ".join(result.split()), _arguments(arguments))
        for result, name, arguments in _FUNCTION.findall(preprocessed)
    )
    return Header(path, functions, _versioned(preprocessed), tuple(_MACRO.findall(source)))


def _arguments(text: str) -> tuple[Argument, ...]:
    text = " ".join(text.split())
    if text in ("", "void"):
        return ()
    return tuple(_argument(part.strip()) for part in text.split(","))


def _argument(text: str) -> Argument:
    kind, name = re.fullmatch(r"(.*?)\s*(\w+)", text).groups()  # type: ignore[union-attr]
    if kind.endswith("*"):
        kind = kind.removesuffix("*").strip() + " *"
    return Argument(kind, name)


def _versioned(text: str) -> frozenset[str]:
    found = set()
    for start in _STRUCT.finditer(text):
        end = _closing(text, start.end())
        name = re.match(r"\}\s*(\w+)\s*;", text[end:])
        if name and re.match(r"\s*unsigned int\s+version\s*;", text[start.end() :]):
            found.add(name[1])
    for old, new in _ALIAS.findall(text):
        if old in found:
            found.add(new)
    return frozenset(found)


def _closing(text: str, at: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1
