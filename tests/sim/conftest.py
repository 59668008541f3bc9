"""Fixtures of the simulated host: a machine for each test, and the real library instead with --hardware."""

from __future__ import annotations

import contextlib

import pytest
from commands import Cli

from migd.sim import SimHost


def pytest_addoption(parser):
    with contextlib.suppress(ValueError):  # a conftest above may have it already
        parser.addoption("--hardware", action="store_true", help="run the read-only rows on this machine's real GPUs")


def pytest_configure(config):
    config.addinivalue_line("markers", "machine(spec, **switches): the simulated machine that the test runs on")
    config.addinivalue_line("markers", "readonly: changes nothing, so that it may run on a real driver with --hardware")


def pytest_generate_tests(metafunc):
    if "library" in metafunc.fixturenames:
        real = metafunc.config.getoption("hardware", default=False)
        which = pytest.param("driver", marks=pytest.mark.hardware) if real else "fake"
        metafunc.parametrize("library", [which], ids=["driver" if real else "fake"], indirect=True)


@pytest.fixture
def library(request):
    """Which library the test runs on: "fake" or "driver"."""
    if request.param == "driver" and request.node.get_closest_marker("readonly") is None:
        pytest.skip("changes the GPU: only on a simulated one")
    return request.param


@pytest.fixture
def box(request, library):
    """The simulated machine round the library: reboots, holders, switches. None on real hardware."""
    if library == "driver":
        return None
    marker = request.node.get_closest_marker("machine")
    spec = marker.args[0] if marker else "a100-40gb"
    return SimHost.fresh(spec, **(marker.kwargs if marker else {}))


@pytest.fixture
def pynvml(library, box):
    """pynvml, initialised: the module itself on hardware, else the face of the box."""
    if library == "driver":
        import pynvml as module
    else:
        module = box.nvml()
    module.nvmlInit()
    yield module
    with contextlib.suppress(module.NVMLError):
        module.nvmlShutdown()


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    """Runs commands in process, on a simulated machine in a file, for a reader that is no terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    return Cli(capsys, tmp_path)
