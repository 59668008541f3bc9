"""The command line under test: commands run in process, on a simulated machine in a file, in virtual time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from migd.cli.main import run
from migd.sim.host import SimHost

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Ran:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs commands; those on a machine work on the file `state`, where `machine` was called before."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder
        self.state = folder / "machine.json"

    def machine(self, spec: str, **switches: object) -> SimHost:
        """A fresh machine in the file, in virtual time, NVML behind its back."""
        return SimHost.open(self.state, spec, clock="virtual", **switches)

    @property
    def host(self) -> SimHost:
        return SimHost.open(self.state)

    def bare(self, *words: str) -> Ran:
        """A command as it is written."""
        self._capsys.readouterr()
        code = run([str(word) for word in words])
        told = self._capsys.readouterr()
        return Ran(code, told.out, told.err)

    def __call__(self, *words: str) -> Ran:
        """A command on the machine in the file."""
        return self.bare(*words, "--state", str(self.state))

    def plan(self, *rules: str, name: str = "plan.yaml", **spec: object) -> str:
        """The name of a file with a plan of these rules, written as flow YAML."""
        path = self.folder / name
        more = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in spec.items())
        path.write_text(
            "apiVersion: migd.dev/v1alpha1\nkind: GPUPartitionPlan\nmetadata: {name: test}\nspec:\n"
            + ("" if "nodeSelector" in spec else "  nodeSelector: {}\n")
            + more
            + "  rules:\n"
            + "".join(f"  - {rule}\n" for rule in rules)
        )
        return str(path)


def cut(wanted: str, gpus: str = "all: true") -> str:
    """A rule: "2×3g.40gb 1g.10gb" on these GPUs."""
    items = []
    for word in wanted.split():
        number, times, profile = word.rpartition("×")
        items.append(f"{{profile: {profile}, count: {number if times else 1}}}")
    return f"{{gpus: {{{gpus}}}, instances: [{', '.join(items)}]}}"


OFF = "{gpus: {all: true}, mig: Disabled}"


def schema(name: str) -> Draft202012Validator:
    """The JSON Schema of this name that the distribution has."""
    found = json.loads(files("migd.plans").joinpath(f"schemas/{name}.json").read_text())
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


PLAN, GPUS, APPLY = schema("plan"), schema("gpus"), schema("apply")
