"""The simulated libnvidia-ml.so.1 for a test, or why it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from migd.sim.cface.building import NotBuiltError, library


def library_or_skip(what: str) -> Path:
    """The library, built where it is not yet; where it cannot be, the test is skipped: "WHAT is not tried: …"."""
    try:
        return library()
    except NotBuiltError as missing:
        pytest.skip(f"{what} is not tried: {missing}")
