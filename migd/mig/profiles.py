"""Profiles: the kinds of GPU instance one GPU offers, as that GPU reports them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MIB_PER_GB: Final = 1024
"""Where whole GB are compared with MiB, 1 GB is 1024 MiB."""


class Placement(NamedTuple):  # and no dataclass, because it is compared and hashed at every look
    """The run of memory slices that a GPU instance occupies on its GPU.

    start, size: in memory slices, from 0; an A100 or H100 has 8 of them, an A30 4.
    Source: nvml.h, nvmlGpuInstancePlacement_t.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first memory slice after the run."""
        return self.start + self.size

    @property
    def mask(self) -> int:
        """The run as a bit mask; bit k stands for memory slice k."""
        return ((1 << self.size) - 1) << self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


@dataclass(frozen=True, slots=True, order=True)
class Engines:
    """How many engines of each kind a GPU instance takes.

    Source: nvml.h, nvmlGpuInstanceProfileInfo_v2_t (copyEngineCount and so on).
    """

    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0

    def kinds(self) -> tuple[int, int, int, int, int]:
        """The counts in a fixed order: copy, decoder, encoder, JPEG, OFA."""
        return (self.copy, self.decoder, self.encoder, self.jpeg, self.ofa)


@dataclass(frozen=True, slots=True, order=True)
class ProfileName:
    """A profile's name taken apart: "1g.10gb+me" is 1 compute slice, 10 GB, ("+me",).

    compute_part is what stands before the name in "1c.3g.20gb": a compute instance narrower than its GPU instance.
    Source: the names NVML reports; go-nvlib's MigProfileInfo has the same grammar.
    """

    compute_slices: int
    memory_gb: int
    attributes: tuple[str, ...] = ()
    compute_part: int | None = None

    _PATTERN = re.compile(
        r"(?:(?P<c>[1-9]\d{0,2})c\.)?(?P<g>[1-9]\d{0,2})g\.(?P<gb>\d{1,5})gb(?P<attributes>(?:[+-][a-z][a-z.]*)*)",
        re.ASCII,  # else \d takes other scripts' digits, which no driver writes
    )

    @classmethod
    def parse(cls, text: str) -> ProfileName | None:
        """The parts of a name, or None where the text is no profile name."""
        found = cls._PATTERN.fullmatch(text)
        if found is None:
            return None
        attributes = tuple(re.findall(r"[+-][a-z.]+", found["attributes"]))
        part = int(found["c"]) if found["c"] else None
        return cls(int(found["g"]), int(found["gb"]), attributes, part)


@dataclass(frozen=True, slots=True, order=True)
class Profile:
    """One kind of GPU instance that one GPU offers.

    name: as the driver spells it ("3g.40gb"); stable for people, while profile_id differs by model.
    profile_id: the numeric id that NVML's create and list calls want; not the enum of the query.
    memory_mib: NVML's memorySizeMB, which counts MiB.
    instance_count_max: how many fit on an empty GPU, as reported; never what is left.
    placements: every legal place, ascending by start.
    Source: nvmlDeviceGetGpuInstanceProfileInfoV and nvmlDeviceGetGpuInstancePossiblePlacements_v2.
    """

    name: str
    profile_id: int
    compute_slices: int
    memory_mib: int
    engines: Engines
    instance_count_max: int
    placements: tuple[Placement, ...]

    @property
    def memory_slices(self) -> int:
        """The width of the profile's placements; 0 where none is known."""
        return self.placements[0].size if self.placements else 0

    @property
    def memory_gb(self) -> int:
        """The GB of the profile's name; where the name has none, the reported MiB in whole GB, rounded up."""
        parsed = ProfileName.parse(self.name)
        return parsed.memory_gb if parsed else -(-self.memory_mib // MIB_PER_GB)

    @property
    def attributes(self) -> tuple[str, ...]:
        """What the name carries after its GB: ("+me",), or nothing."""
        parsed = ProfileName.parse(self.name)
        return parsed.attributes if parsed else ()


def match_name(wanted: str, offered: Sequence[Profile]) -> tuple[Profile, ...]:
    """The profiles that a written name means: one where it is clear, several where not, none where unknown.

    The exact name wins. Otherwise slices and attributes must be equal and the GB within 1 GB and 3 %, because
    drivers round differently (7g.79gb or 7g.80gb); 1g.24gb is not 1g.23gb.
    """
    exact = tuple(p for p in offered if p.name == wanted)
    if exact:
        return exact
    name = ProfileName.parse(wanted)
    if name is None or name.compute_part is not None:
        return ()
    return tuple(p for p in offered if _nearly(name, ProfileName.parse(p.name)))


def _nearly(one: ProfileName, other: ProfileName | None) -> bool:
    if other is None or other.compute_part is not None:
        return False
    if (one.compute_slices, one.attributes) != (other.compute_slices, other.attributes):
        return False
    apart = abs(one.memory_gb - other.memory_gb)
    return apart <= 1 and apart * 100 <= 3 * max(one.memory_gb, other.memory_gb)


def smallest_enough(need_mib: int, offered: Iterable[Profile], compute_slices: int = 1) -> Profile | None:
    """The smallest profile whose GB are enough for need_mib and that has at least so many compute slices.

    need_mib: in MiB; a profile offers the GB of its name times 1024 MiB, and equal is enough.
    Ties: fewest compute slices, then fewest attributes, then the name. None where nothing is large enough.
    """
    enough = [
        p
        for p in offered
        if p.memory_gb * MIB_PER_GB >= need_mib and p.compute_slices >= compute_slices and p.placements
    ]
    return min(enough, key=lambda p: (p.memory_gb, p.compute_slices, len(p.attributes), p.name), default=None)


def nearest_names(wanted: str, offered: Iterable[Profile], most: int = 3) -> tuple[str, ...]:
    """Offered names that a mistaken name may have meant: same slices and attributes first, then near in GB."""
    name = ProfileName.parse(wanted)
    if name is None:
        return ()

    def distance(profile: Profile) -> tuple[bool, bool, int, int, str]:
        return (
            profile.attributes != name.attributes,
            profile.compute_slices != name.compute_slices,
            abs(profile.memory_gb - name.memory_gb),
            abs(profile.compute_slices - name.compute_slices),
            profile.name,
        )

    return tuple(p.name for p in sorted(offered, key=distance)[:most])
