"""Options of the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="ten times as many seeded runs, and other ones")
    parser.addoption("--seed", type=int, help="the first seed of the seeded runs; 0, or 1,000,000 to soak")


def pytest_configure(config: pytest.Config) -> None:
    """The same examples on every machine, so that a run tells of the code alone; other ones each time to soak."""
    settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    settings.register_profile("soak", derandomize=False, database=None, deadline=None, print_blob=True)
    settings.load_profile("soak" if config.getoption("--soak") else "repeatable")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> int:
    """How many times as many runs as usual."""
    return 10 if request.config.getoption("--soak") else 1


@pytest.fixture
def first_seed(request: pytest.FixtureRequest) -> int:
    """Where the seeds begin."""
    given = request.config.getoption("--seed")
    return int(given) if given is not None else 1_000_000 if request.config.getoption("--soak") else 0


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands under test write to no terminal: pytest-xdist tells of one, and so does readline, behind os.environ."""
    monkeypatch.delenv("COLUMNS", raising=False)
    os.unsetenv("COLUMNS")


@pytest.fixture(scope="module", autouse=True)
def _left_open() -> Iterator[None]:
    """What a module leaves open fails that module, and not whichever test is running when it becomes garbage."""
    yield
    gc.collect()


def pytest_collection_finish() -> None:
    """Look for garbage less often, and never again in what has been imported: simulated calls make a lot of values."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
