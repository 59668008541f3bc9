"""What a GPU is by nature, as a GPUPartition tells it: one object for all boards that are alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Annotated, Final

from pydantic import AfterValidator, Field, WrapValidator

from migd.mig.boards import Board
from migd.mig.profiles import Engines, Placement, Profile
from migd.plans.fields import Natural, Tuple, Value, once
from migd.plans.problems import wrong


class PlaceDoc(Value):
    """A run of memory slices."""

    start: Natural
    size: Annotated[int, Field(ge=1)]


class EnginesDoc(Value):
    """Engines of a profile."""

    copy_engines: Natural = Field(0, alias="copy")
    decoder: Natural = 0
    encoder: Natural = 0
    jpeg: Natural = 0
    ofa: Natural = 0


class ProfileDoc(Value):
    """One kind of GPU instance that the board offers."""

    name: str
    id: Natural
    compute_slices: Annotated[int, Field(ge=1)] = Field(alias="computeSlices")
    memory_mib: Natural = Field(alias="memoryMiB")
    instances_max: Natural = Field(0, alias="instancesMax")
    engines: EnginesDoc = EnginesDoc()
    placements: Annotated[tuple[PlaceDoc, ...], Tuple]


def _ids_once(profiles: tuple[ProfileDoc, ...]) -> tuple[ProfileDoc, ...]:
    if len({p.id for p in profiles}) != len(profiles):
        raise wrong("profiles names one id twice")
    return profiles


class Profiles(tuple[ProfileDoc, ...]):
    """The profiles of a board: one object for all that are equal, which is hashed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=256)
def shared_profiles(profiles: tuple[ProfileDoc, ...]) -> Profiles:
    """The one object for all profiles that are equal to these: a fleet has few models."""
    return Profiles(profiles)


def _read_once(given: object, read: Callable[[object], tuple[ProfileDoc, ...]]) -> Profiles:
    """What is told of every GPU, at each change of any, is read once; its text says whether it is the same."""
    if type(given) is Profiles:
        return given
    if not isinstance(given, list):
        return shared_profiles(read(given))
    text = repr(given)
    known = _READ.get(text)
    if known is None:
        known = shared_profiles(read(given))
        if len(_READ) >= _READ_MAX:
            _READ.clear()
        _READ[text] = known
    return known


_READ: Final[dict[str, Profiles]] = {}
_READ_MAX: Final = 256


class BoardDoc(Value):
    """What the GPU is by nature, as NVML tells."""

    index: Natural
    uuid: str
    model: str
    architecture: str = ""
    pci_device_id: str = Field("", alias="pciDeviceId")
    memory_mib: Natural = Field(0, alias="memoryMiB")
    driver: str = ""
    mig_capable: bool | None = Field(None, alias="migCapable")
    mode_change_resets: bool | None = Field(None, alias="modeChangeResets")
    trouble: str = ""
    profiles: Annotated[
        tuple[ProfileDoc, ...],
        once("profile", lambda p: p.name),
        AfterValidator(_ids_once),
        Tuple,
        WrapValidator(_read_once),
    ] = ()


@lru_cache(maxsize=256)
def board_of(profiles: tuple[ProfileDoc, ...]) -> Board:
    """One board for all GPUs that tell the same: a fleet has few models."""
    return Board.of(
        Profile(
            p.name,
            p.id,
            p.compute_slices,
            p.memory_mib,
            Engines(p.engines.copy_engines, p.engines.decoder, p.engines.encoder, p.engines.jpeg, p.engines.ofa),
            p.instances_max,
            tuple(sorted(Placement(place.start, place.size) for place in p.placements)),
        )
        for p in profiles
    )
