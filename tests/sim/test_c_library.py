"""The simulated libnvidia-ml.so.1 as a file: what it is made from, what it exports, what it needs, who may build it."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pynvml
import pytest

from migd.sim.cface import building, shim
from migd.sim.cface.handlers import ARRAYS, CHANGING, COUNTED, HANDLERS, LISTENING, WAITING
from migd.sim.cface.header import Argument, Function, Header, find_header, parse, read_header

SMALL = """
typedef struct nvmlDevice_st* nvmlDevice_t;
typedef enum nvmlReturn_enum { NVML_SUCCESS = 0 } nvmlReturn_t;
typedef struct { unsigned int version; union { int a; struct { int b; } c; } d; } nvmlThing_v1_t;
typedef nvmlThing_v1_t nvmlThing_t;
typedef struct nvmlPlain_st { unsigned int size; } nvmlPlain_t;
const char* nvmlErrorString(nvmlReturn_t result);
nvmlReturn_t nvmlInit_v2(void);
__attribute__((deprecated)) nvmlReturn_t nvmlDeviceGetThing(nvmlDevice_t device,
    const char *name, nvmlThing_t * thing, unsigned int length);
"""


def test_functions_arguments_and_versioned_structures_are_read():
    header = parse(Path("nvml.h"), SMALL, "#define nvmlThing_v1 NVML_STRUCT_VERSION(Thing, 1) //!< words\n")
    assert header.functions == (
        Function("nvmlErrorString", "const char*", (Argument("nvmlReturn_t", "result"),)),
        Function("nvmlInit_v2", "nvmlReturn_t", ()),
        Function(
            "nvmlDeviceGetThing",
            "nvmlReturn_t",
            (
                Argument("nvmlDevice_t", "device"),
                Argument("const char *", "name"),
                Argument("nvmlThing_t *", "thing"),
                Argument("unsigned int", "length"),
            ),
        ),
    )
    assert (header.versioned, header.versions) == ({"nvmlThing_v1_t", "nvmlThing_t"}, ("nvmlThing_v1",))
    assert [a.pointee for a in header.functions[2].arguments] == [None, "char", "nvmlThing_t", None]


def test_a_function_that_the_header_lacks_cannot_be_simulated():
    with pytest.raises(ValueError, match="nvml.h has no nvmlDeviceGetMood"):
        shim.source(Header(Path("nvml.h"), (), frozenset(), ()), ["nvmlDeviceGetMood"], {}, {})


@pytest.fixture
def header(c_library):
    return read_header()


def test_every_function_of_the_header_is_exported(c_library, header):
    declared = set(re.findall(r"\b(nvml[A-Z]\w*)\s*\(", find_header().read_text(errors="replace")))
    functions = {f.name for f in header.functions}
    assert functions <= declared
    assert {"nvmlInit", "nvmlInit_v2", "nvmlDeviceGetComputeRunningProcesses", "nvmlErrorString"} <= functions
    loaded = ctypes.CDLL(str(c_library))
    assert [name for name in functions if not hasattr(loaded, name)] == []
    assert len(functions) > 400


def test_every_c_function_that_pynvml_knows_is_exported(c_library):
    told = Path(pynvml.__file__).read_text()
    wanted = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', told))
    loaded = ctypes.CDLL(str(c_library))
    newer = {name for name in wanted if not hasattr(loaded, name)}  # than the header: pynvml is 13.615, this 13.5
    assert len(wanted) > 300
    assert not newer & set(HANDLERS)
    assert len(newer) < 20, sorted(newer)


def test_it_needs_nothing_but_libc_and_is_never_unloaded(c_library):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing: it comes with binutils")
    told = subprocess.run(["readelf", "-dW", c_library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", told)
    assert [name for name in needed if not name.startswith(("libc.so", "ld-linux"))] == []
    assert "NODELETE" in told
    assert "[libnvidia-ml.so.1]" in told


def test_what_is_said_of_functions_is_said_of_ones_that_there_are(header):
    arguments = {(f.name, a.name) for f in header.functions for a in f.arguments}
    assert set(ARRAYS) <= arguments
    assert {name for name, _ in ARRAYS} | CHANGING | COUNTED | WAITING | LISTENING <= set(HANDLERS)
    assert all(len(f.arguments) <= shim.ARGUMENTS_MAX for f in header.functions if f.name in HANDLERS)


def test_it_is_built_once_whoever_asks_first(c_library, tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    with ThreadPoolExecutor() as pool:
        found = set(pool.map(lambda _: building.library(environment), range(3)))
    [built] = found
    first = built.stat().st_ino
    assert building.library(environment).stat().st_ino == first
    assert built.is_relative_to(tmp_path / "migd" / "nvml")


def test_without_a_compiler_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(building.NotBuiltError, match=r"gcc is not here.*apt-get install gcc"):
        building.library({"XDG_CACHE_HOME": str(tmp_path)})
