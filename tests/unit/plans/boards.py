"""Boards and GPUs for the tests of plans, from the figures of real ones, built by hand."""

from __future__ import annotations

from collections.abc import Iterable

from migd.mig.boards import Board
from migd.mig.geometry import Geometry, GpuInstance
from migd.mig.observed import Holder, MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.profiles import Engines, Placement, Profile

ONES = tuple((k, 1) for k in range(7))
DOUBLES = ((0, 2), (2, 2), (4, 2), (6, 2))
TWOS = ((0, 2), (2, 2), (4, 2))
THREES = ((0, 4), (4, 4))


def profile(
    name: str, number: int, memory_mib: int, places: Iterable[tuple[int, int]], most: int, engines: tuple[int, ...]
) -> Profile:
    """One profile; engines: copy, decoder, encoder, JPEG, OFA."""
    slices = int(name.split("g")[0])
    return Profile(name, number, slices, memory_mib, Engines(*engines), most, tuple(Placement(*p) for p in places))


def seven_slices(names: str, memory: tuple[int, ...]) -> Board:
    """A board of the A100 kind; names: of 1g, 1g+me, double 1g, 2g, 3g, 4g and 7g."""
    one, media, double, two, three, four, seven = names.split()
    return Board.of(
        [
            profile(one, 19, memory[0], ONES, 7, (1, 0, 0, 0, 0)),
            profile(media, 20, memory[0], ONES, 1, (1, 1, 0, 1, 1)),
            profile(double, 15, memory[1], DOUBLES, 4, (1, 1, 0, 0, 0)),
            profile(two, 14, memory[1], TWOS, 3, (2, 1, 0, 0, 0)),
            profile(three, 9, memory[2], THREES, 2, (3, 2, 0, 0, 0)),
            profile(four, 5, memory[2], ((0, 4),), 1, (4, 2, 0, 0, 0)),
            profile(seven, 0, memory[3], ((0, 8),), 1, (7, 5, 0, 1, 1)),
        ]
    )


A100_40 = seven_slices("1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb", (4864, 9856, 19968, 40192))
A100_80 = seven_slices("1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb", (9984, 19968, 40448, 80896))
A100_80_ROUNDED = seven_slices(
    "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.39gb 4g.39gb 7g.79gb", (9728, 19968, 40192, 80896)
)
GB200 = seven_slices("1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb", (22528, 46592, 93184, 186368))
A30 = Board.of(
    [
        profile("1g.6gb", 14, 5952, [(k, 1) for k in range(4)], 4, (1, 1, 0, 0, 0)),
        profile("1g.6gb+me", 21, 5952, [(k, 1) for k in range(4)], 1, (1, 1, 0, 1, 1)),
        profile("2g.12gb", 5, 11968, ((0, 2), (2, 2)), 2, (2, 2, 0, 0, 0)),
        profile("2g.12gb+me", 6, 11968, ((0, 2), (2, 2)), 1, (2, 2, 0, 1, 1)),
        profile("4g.24gb", 0, 24000, ((0, 4),), 1, (4, 4, 0, 1, 1)),
    ]
)
MODELS = {
    "NVIDIA A100-SXM4-40GB": (A100_40, "0x20B010DE", 40960),
    "NVIDIA A100-SXM4-80GB": (A100_80, "0x20B210DE", 81920),
    "NVIDIA GB200": (GB200, "0x294110DE", 189471),
    "NVIDIA A30": (A30, "0x20B710DE", 24576),
}
A100_40_NAME, A100_80_NAME, GB200_NAME, A30_NAME = MODELS


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012x}"


def at(text: str, board: Board) -> GpuInstance:
    """An instance from how it is shown: "3g.20gb@4"."""
    name, start = text.split("@")
    place = next(p for p in board.profile(name).placements if p.start == int(start))
    return GpuInstance(name, place)


def geometry(text: str, board: Board) -> Geometry:
    """A geometry from "3g.20gb@4 2g.10gb@0"."""
    return frozenset(at(one, board) for one in text.split())


def there(instance: GpuInstance, pid: int | None = None, compute: str = "whole") -> SeenInstance:
    """An instance that exists, held by a pid; compute: whole, none or narrow."""
    parts = {
        "whole": (SeenComputeInstance(0, True, f"MIG-{instance}"),),
        "none": (),
        "narrow": (
            SeenComputeInstance(0, False, f"MIG-{instance}-0"),
            SeenComputeInstance(1, False, f"MIG-{instance}-1"),
        ),
    }[compute]
    holders = () if pid is None else (Holder(pid, "python train.py"),)
    return SeenInstance(instance, 7 + instance.placement.start, parts, pid is not None, holders)


def gpu(
    index: int = 0,
    model: str = A100_40_NAME,
    instances: str | tuple[SeenInstance, ...] | None = None,
    *,
    busy: str = "",
    resetless: bool = False,
    **changes: object,
) -> SeenGpu:
    """One GPU. instances None: MIG off; else MIG on, with these; those in `busy` are held by pid 100 + start."""
    board, device, memory = MODELS[model]
    held = geometry(busy, board)
    if isinstance(instances, str):
        found = sorted(geometry(instances, board), key=lambda i: i.placement)
        instances = tuple(there(i, 100 + i.placement.start if i in held else None) for i in found)
    on = instances is not None
    values: dict[str, object] = {
        "uuid": uuid(index),
        "index": index,
        "model": model,
        "pci_device_id": device,
        "memory_mib": memory,
        "mode": MigMode(on, on),
        "resetless": resetless,
        "board": board,
        "instances": instances or (),
        **changes,
    }
    return SeenGpu(**values)  # type: ignore[arg-type]


def not_capable(index: int = 0, model: str = "NVIDIA A40", device: str = "0x223510DE") -> SeenGpu:
    return SeenGpu(uuid(index), index, model, device, 46068, None)
