"""Fixtures of the simulated host: a machine for each test, and the real library instead with --hardware."""

from __future__ import annotations

import contextlib

import pynvml as pynvml_module
import pytest
from c_built import library_or_skip
from c_clients import served
from commands import Cli

from migd.nvml.errors import text_of
from migd.sim import SimHost


def pytest_addoption(parser):
    with contextlib.suppress(ValueError):  # a conftest above may have it already
        parser.addoption("--hardware", action="store_true", help="run the read-only rows on this machine's real GPUs")


def pytest_configure(config):
    if config.getoption("hardware", default=False):
        _need_a_driver()
    config.addinivalue_line("markers", "machine(spec, **switches): the simulated machine that the test runs on")
    config.addinivalue_line("markers", "readonly: changes nothing, so that it may run on a real driver with --hardware")


def _need_a_driver():
    try:
        pynvml_module.nvmlInit()
        pynvml_module.nvmlShutdown()
    except pynvml_module.NVMLError as error:
        raise pytest.UsageError(f"--hardware needs a machine with NVIDIA's driver: {text_of(error.value)}") from error


def pytest_generate_tests(metafunc):
    if "library" in metafunc.fixturenames:
        real = metafunc.config.getoption("hardware", default=False)
        libraries = [pytest.param("driver", marks=pytest.mark.hardware)] if real else ["fake", "c"]
        metafunc.parametrize("library", libraries, ids=["driver"] if real else ["fake", "c"], indirect=True)


@pytest.fixture
def library(request):
    """Which library the test runs on: "fake" in process, "c" the simulated libnvidia-ml.so.1, or "driver"."""
    if request.param == "driver" and request.node.get_closest_marker("readonly") is None:
        pytest.skip("changes the GPU: only on a simulated one")
    if request.param == "c":
        library_or_skip("the C face")
    return request.param


@pytest.fixture
def boxed(library, tmp_path):
    """Makes simulated machines: boxed(spec, **switches) is a SimHost, whose clients are on the library under test."""
    with contextlib.ExitStack() as stack:

        def make(spec, **switches):
            host = SimHost.fresh(spec, **switches)
            return stack.enter_context(served(host, tmp_path)) if library == "c" else host

        yield make


@pytest.fixture
def box(request, library, boxed):
    """The simulated machine round the library: reboots, holders, switches. None on real hardware."""
    if library == "driver":
        return None
    marker = request.node.get_closest_marker("machine")
    spec = marker.args[0] if marker else "a100-40gb"
    return boxed(spec, **(marker.kwargs if marker else {}))


@pytest.fixture
def pynvml(library, box):
    """pynvml, initialised: the module itself on hardware, else a client of the box."""
    module = pynvml_module if library == "driver" else box.nvml()
    module.nvmlInit()
    yield module
    with contextlib.suppress(module.NVMLError):
        module.nvmlShutdown()


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    """Runs commands in process, on a simulated machine in a file, for a reader that is no terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    return Cli(capsys, tmp_path)


@pytest.fixture
def c_library():
    """The simulated libnvidia-ml.so.1; where it cannot be built the test is skipped, and says what is missing."""
    return library_or_skip("the C face")
