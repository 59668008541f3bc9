"""Random nodes full of pods, and who must go from them by brute force: every set of pods tried, small ones first.

Like the twin, whose rules it goes by, it shares no code with the planner and imports nothing of migd. Instances are
places (profile, start, size); pods are words.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

from boards import DOUBLE, ME, listings, rows
from proof.twin import Place, Twin, Wish

PODS_MAX = 9
"""On one node, so that all sets of them can be tried."""

KINDS = [
    *((key, ()) for key in listings()),
    ("a100-40gb", ME + DOUBLE),
    ("h200", ME + DOUBLE),
    ("a100-80gb", ME),
    ("a30", ME),
]
"""Every model of the catalog with all that it lists, and some with less."""


@lru_cache(maxsize=len(KINDS))
def twin_of(kind: tuple[str, tuple[str, ...]]) -> Twin:
    return Twin(rows(*kind))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node. wish: None where everything goes. fixed: what must stay. whole: pods that must go anyway."""

    kind: tuple[str, tuple[str, ...]]
    there: frozenset[Place]
    wish: Wish | None
    fixed: frozenset[Place]
    held: Mapping[Place, frozenset[str]]
    whole: frozenset[str] = frozenset()
    _known: dict[frozenset[Place], tuple[int, int] | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def pods(self) -> frozenset[str]:
        return self.whole.union(*self.held.values())

    def without(self, gone: frozenset[str]) -> tuple[int, int] | None:
        """How few instances are destroyed once these pods are gone, and the rank of the layout; None: it is no use."""
        if not self.whole <= gone:
            return None
        staying = self.fixed.union(place for place, pods in self.held.items() if not pods <= gone)
        if staying not in self._known:
            self._known[staying] = self._around(staying)
        return self._known[staying]

    def _around(self, staying: frozenset[Place]) -> tuple[int, int] | None:
        if self.wish is None:
            return None if staying else (len(self.there), 0)
        twin = twin_of(self.kind)
        layouts = [frozenset(twin.members(bits)) for bits in twin.ranked(self.wish)]
        ways = [(len(self.there - layout), rank) for rank, layout in enumerate(layouts) if staying <= layout]
        return min(ways, default=None)


@dataclass(frozen=True, slots=True)
class Fewest:
    """What brute force found. able: which GPUs can be cut as wished at all. destroyed: of each, None where not able.

    pods: those that go. So many sets of as few pods would do: `equally_few`. apart: how many pods go when each GPU
    takes the fewest by itself.
    """

    pods: frozenset[str]
    able: tuple[bool, ...]
    destroyed: tuple[int | None, ...]
    equally_few: int
    apart: int


def brute(node: Sequence[Gpu]) -> Fewest:
    """Try no pod, each pod, each two, …; of the first that will do, the one with fewest destroyed, then best ranks."""
    able = [gpu for gpu in node if gpu.without(gpu.pods) is not None]
    pods, _, ways = _smallest(able)
    return Fewest(
        pods,
        tuple(gpu in able for gpu in node),
        tuple(told[0] if gpu in able and (told := gpu.without(pods)) else None for gpu in node),
        ways,
        len(frozenset().union(*(_smallest([gpu])[0] for gpu in able))),
    )


def _smallest(gpus: Sequence[Gpu]) -> tuple[frozenset[str], tuple[int, list[int]], int]:
    everyone = sorted(frozenset[str]().union(*(gpu.pods for gpu in gpus)))
    for size in range(len(everyone) + 1):
        found = []
        for gone in map(frozenset, combinations(everyone, size)):
            told = [gpu.without(gone) for gpu in gpus]
            ways = [way for way in told if way is not None]
            if len(ways) == len(gpus):
                found.append(((sum(lost for lost, _ in ways), [rank for _, rank in ways]), gone))
        if found:
            cost, pods = min(found, key=lambda one: (one[0], sorted(one[1])))
            return pods, cost, len(found)
    raise AssertionError("without all pods every GPU can be cut as wished, or it is not able")


def some_node(dice: random.Random) -> list[Gpu]:
    """One to four GPUs, mostly of one kind, with up to nine pods; some of them on several instances and GPUs."""
    if dice.random() < 0.4:
        return _tangled(dice)
    kind = dice.choice(KINDS)
    pods = [f"pod-{k}" for k in range(dice.randint(1, PODS_MAX))]
    near = dice.random() < 0.4  # then a pod mostly stays on one GPU
    homes: dict[str, int] = {}
    number = dice.randint(1, 4)
    return [
        _some_gpu(dice, kind if dice.random() < 0.9 else dice.choice(KINDS), _on(dice, k, pods, homes, near))
        for k in range(number)
    ]


def _tangled(dice: random.Random) -> list[Gpu]:
    """Two to four GPUs cut small, with a pod on each instance, most of which could stay: which ones is the question."""
    kind = dice.choice(KINDS)
    twin = twin_of(kind)
    many = max(map(int.bit_count, twin.sets))
    pods = [f"pod-{k}" for k in range(dice.randint(4, PODS_MAX))]
    node = []
    for _ in range(dice.randint(2, 4)):
        there = twin.members(dice.choice([bits for bits in twin.sets if bits.bit_count() >= many - 1]))
        held = {place: frozenset([dice.choice(pods)]) for place in there if dice.random() < 0.95}
        staying = [name for name, _, _ in dice.sample(there, dice.randint(1, len(there) - 1))]
        wish = tuple(sorted((name, staying.count(name)) for name in set(staying)))
        node.append(Gpu(kind, frozenset(there), wish, frozenset(), held))
    return node


def _on(dice: random.Random, gpu: int, pods: list[str], homes: dict[str, int], near: bool) -> list[str]:
    """The pods that may be on this GPU."""
    if not near:
        return pods
    here = [pod for pod in pods if homes.get(pod, gpu) == gpu or dice.random() < 0.1]
    here = dice.sample(here, dice.randint(1, min(4, len(here)))) if here else []
    homes.update((pod, homes.get(pod, gpu)) for pod in here)
    return here


def _some_gpu(dice: random.Random, kind: tuple[str, tuple[str, ...]], pods: list[str]) -> Gpu:
    twin = twin_of(kind)
    there = set(twin.members(max(dice.choices(twin.sets, k=dice.randint(1, 30)), key=int.bit_count)))
    if dice.random() < 0.03:
        there.add(_unlisted(dice, twin))
    fixed, held = set(), {}
    for place in sorted(there):
        luck = dice.random()
        if luck < 0.03:
            fixed.add(place)
        elif luck < 0.85 and pods:
            held[place] = frozenset(dice.sample(pods, min(len(pods), dice.choice((1, 1, 1, 1, 2)))))
    luck = dice.random()
    wish = None if luck < 0.04 else _near(dice, twin, there) if luck < 0.8 else dice.choice(sorted(twin.by_wish))
    whole = frozenset(dice.sample(pods, 1)) if pods and dice.random() < 0.04 else frozenset[str]()
    return Gpu(kind, frozenset(there), wish, frozenset(fixed), held, whole)


def _near(dice: random.Random, twin: Twin, there: set[Place]) -> Wish:
    """A multiset with some of what is there and a little else, so that who stays is a question."""
    for _ in range(5):
        kept = dice.sample(sorted(there), dice.randint(0, len(there)))
        names = [name for name, _, _ in kept] + dice.choices(sorted(twin.rows), k=dice.randint(0, 2))
        wish = tuple(sorted((name, names.count(name)) for name in set(names)))
        if wish in twin.by_wish or dice.random() < 0.01:
            return wish
    return dice.choice(sorted(twin.by_wish))


def _unlisted(dice: random.Random, twin: Twin) -> Place:
    """An instance at a place that the board does not list."""
    name = dice.choice(sorted(twin.rows))
    starts = [start for start, _ in twin.rows[name]["placements"]]
    return name, max(starts) + 1, twin.rows[name]["placements"][0][1]
