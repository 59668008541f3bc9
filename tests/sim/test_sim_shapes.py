"""The face has pynvml's own signatures, and the page on the simulator names all there is to switch and to inject."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pynvml
import pytest

from migd.sim.face.monitor import Nvml
from migd.sim.faults import ACTIONS
from migd.sim.switches import PLACEMENTS, GpuSwitches, Switches

FUNCTIONS = [name for name in dir(Nvml) if name.startswith("nvml")]
PAGE = (Path(__file__).parent.parent.parent / "docs" / "simulator.md").read_text("utf-8")


def shape(function, drop):
    """How a function may be called: (positions, how many of them have defaults)."""
    parameters = [p for p in list(inspect.signature(function).parameters.values())[drop:] if p.name != "_"]
    return len(parameters), sum(p.default is not p.empty for p in parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_called_as_pynvmls_is(name):
    assert shape(getattr(Nvml, name), drop=1) == shape(getattr(pynvml, name), drop=0)


@pytest.mark.parametrize(
    "word", [*(f.name for f in fields(Switches)), *(f.name for f in fields(GpuSwitches)), *ACTIONS, *PLACEMENTS]
)
def test_the_page_names_it(word):
    assert f"`{word}`" in PAGE or f'"{word}"' in PAGE
