"""A board: what one GPU offers to be cut into, built only from what that GPU reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from migd.mig.profiles import Profile


@dataclass(frozen=True, slots=True)
class Board:
    """What one GPU can be cut into: its profiles with their placements, and its engines.

    profiles: in order of profile name; names and numeric ids are unique, else ValueError.
    Two GPUs of one model under one driver have equal boards, so tables are shared between them.
    """

    profiles: tuple[Profile, ...]
    _by_name: dict[str, Profile] = field(init=False, repr=False, compare=False)
    _by_id: dict[int, Profile] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names, ids = {p.name: p for p in self.profiles}, {p.profile_id: p for p in self.profiles}
        if not len(self.profiles) == len(names) == len(ids):
            raise ValueError("a board's profile names and ids must be unique: " + ", ".join(sorted(names)))
        object.__setattr__(self, "_by_name", names)
        object.__setattr__(self, "_by_id", ids)
        object.__setattr__(self, "_hash", hash(self.profiles))

    def __hash__(self) -> int:
        return self._hash  # boards are keys of the table cache and looked up at every turn

    @classmethod
    def of(cls, profiles: Iterable[Profile]) -> Board:
        """The board of these profiles, in whatever order they were reported; equal ones are one object."""
        return _shared(tuple(sorted(profiles, key=lambda p: p.name)))

    def profile(self, name: str) -> Profile:
        """The profile of this exact name; KeyError where the board does not offer it."""
        return self._by_name[name]

    def offers(self, name: str) -> bool:
        """Whether this exact profile name is offered."""
        return name in self._by_name

    def by_id(self, profile_id: int) -> Profile | None:
        """The profile with this numeric NVML id, or None."""
        return self._by_id.get(profile_id)

    @property
    def memory_slices(self) -> int:
        """Memory slices of the whole GPU: the end of its furthest placement."""
        return max((place.end for p in self.profiles for place in p.placements), default=0)

    @property
    def engine_pool(self) -> tuple[int, ...]:
        """Engines of each kind on the whole GPU: copy, decoder, encoder, JPEG, OFA.

        NVML reports no pool. It is the most that any profile alone can take: its count times its engines. A count
        above what the placements allow is cut to that, since drivers have been seen to report wrong ones (A30).
        """
        uses = [[_count(p) * engines for engines in p.engines.kinds()] for p in self.profiles if p.placements]
        return tuple(max(column) for column in zip(*uses, strict=True)) if uses else (0, 0, 0, 0, 0)


@lru_cache(maxsize=256)
def _shared(profiles: tuple[Profile, ...]) -> Board:
    """One board for all GPUs that are alike: comparing it with itself costs nothing."""
    return Board(profiles)


def _count(profile: Profile) -> int:
    """How many instances of one profile fit: the reported count, at most as many as do not overlap."""
    free_from = 0
    disjoint = 0
    for place in sorted(profile.placements, key=lambda place: (place.end, place.start)):
        if place.start >= free_from:
            disjoint += 1
            free_from = place.end
    return min(profile.instance_count_max, disjoint)
