"""How GPUs, instances and numbers are written for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from migd.cli.tables import GLUE
from migd.mig.geometry import GpuInstance, by_start
from migd.mig.observed import SeenGpu
from migd.plans.matching import ranges

UNKNOWN: str = "-"


def numbered(indices: Iterable[int]) -> str:
    """GPUs by index: "GPU 3", "GPU 0–3, 5"."""
    return f"GPU {ranges(indices)}"


def count(number: int, thing: str) -> str:
    """A number of things: "1 GPU", "3 instances"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def model(gpu: SeenGpu) -> str:
    """A GPU's name, in a table never wrapped; its UUID where it has none."""
    return (gpu.model or gpu.uuid).replace(" ", GLUE)


def places(instances: Iterable[GpuInstance]) -> str:
    """Instances with their places, in order of start, those of one profile together: "1g.10gb@0,1,2 3g.40gb@4"."""
    starts: dict[str, list[str]] = {}
    for instance in by_start(instances):
        starts.setdefault(instance.profile, []).append(str(instance.placement.start))
    return " ".join(f"{profile}@{','.join(at)}" for profile, at in starts.items()) or UNKNOWN


def room(gpu: SeenGpu, free: Mapping[str, int]) -> str:
    """How many more of each profile fit, widest first: "3g.40gb 2×2g.20gb 4×1g.10gb"."""
    if gpu.board is None:
        return UNKNOWN
    ordered = sorted(gpu.board.profiles, key=lambda p: (-p.memory_slices, -p.compute_slices, p.name))
    fitting = ((p.name, free.get(p.name, 0)) for p in ordered)
    return " ".join(name if n == 1 else f"{n}×{name}" for name, n in fitting if n) or UNKNOWN


def together(rows: Iterable[tuple[int, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """One row for all GPUs that read the same, in order of the first of them, with their indices in front."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, cells in rows:
        alike.setdefault(cells, []).append(index)
    return [(ranges(indices), *cells) for cells, indices in alike.items()]


def said_once(texts: Iterable[tuple[int, str]], link: str = " ") -> list[str]:
    """What is to be said of GPUs, each sentence once, after the GPUs it is about: "GPU 0–7 refused: …"."""
    alike: dict[str, list[int]] = {}
    for index, text in texts:
        alike.setdefault(text, []).append(index)
    return [f"{numbered(indices)}{link}{text}" for text, indices in alike.items()]


def seconds(number: float) -> str:
    """A duration that was measured: "0.12 s", "7.3 s", "2 min 5 s"."""
    if number < 1:
        return f"{number:.2f} s"
    if number < 60:
        return f"{number:.1f} s"
    return f"{int(number) // 60} min {int(number) % 60} s"
