"""Puts the planner's answers next to the twin's, state by state, and fails at the first that differs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from boards import board, board_of
from proof.drains import Gpu
from proof.twin import Place, Twin, Wish

from migd.mig.evicting import Occupied
from migd.mig.geometry import Geometry, GpuInstance
from migd.mig.profiles import Placement
from migd.mig.transition import Refusal, Transition, transition

Case = tuple[int, int, Wish]
"""A set, the busy part of it, and the multiset that is wanted; sets as the twin's bits."""


class Judge:
    """One board, both ways: the planner asked through its public functions, the twin by brute force."""

    def __init__(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self.twin = Twin(rows)
        self.board = board_of(rows)
        self.demands = self.twin.demands()
        self._bit = {GpuInstance(n, Placement(start, size)): bit for (n, start, size), bit in self.twin.bit.items()}
        self._legal = frozenset(self.twin.sets)
        self._geometries = {bits: self._geometry(bits) for bits in self.twin.sets}
        self._wishes = {bits: self.twin.wish(bits) for bits in self.twin.sets}
        self._around: dict[int, set[Wish]] = {}
        self._spans: dict[int, int] = {}
        self._width = {name: row["placements"][0][1] for name, row in rows.items()}

    def _geometry(self, bits: int) -> Geometry:
        return frozenset(instance for instance, bit in self._bit.items() if bit & bits)

    def bits(self, instances: Iterable[GpuInstance]) -> int:
        """The twin's bits of the planner's instances; KeyError for one that the board cannot hold."""
        return sum(self._bit[instance] for instance in instances)

    @cached_property
    def _by_busy(self) -> list[tuple[int, list[int]]]:
        """Each set that may be busy with all sets that hold it, costly ones first."""
        every = [(busy, self.twin.around(busy)) for busy in self.twin.sets]
        return sorted(every, key=lambda pair: -len(pair[1]))

    def share(self, part: int, parts: int) -> list[tuple[int, list[int]]]:
        """Each set that may be busy with all sets that hold it: the part-th of so many shares.

        Dealt out back and forth, costly ones first, so that the shares take about as long.
        """
        there_and_back = (part, 2 * parts - 1 - part)
        return [one for k, one in enumerate(self._by_busy) if k % (2 * parts) in there_and_back]

    def check_share(self, part: int, parts: int, one_in: int = 1) -> int:
        """Check the states of a share against every wish, or one in so many; gives how many answers were compared.

        What is sampled is what is in use together with the wish; then all states with just that in use are checked.
        """
        dice = random.Random(f"{part} of {parts}")
        compared = 0
        for busy, states in self.share(part, parts):
            for wish in self.demands:
                if one_in == 1 or dice.randrange(one_in) == 0:
                    self.check(busy, states, wish)
                    compared += len(states)
        return compared

    def check(self, busy: int, states: Iterable[int], wish: Wish) -> None:
        """Compare the answers to one wish for all these states, each of which holds `busy`."""
        possible = [bits for bits in self.twin.ranked(wish) if busy & ~bits == 0]
        held = self._geometries[busy]
        judged: Refusal | None = None
        for current in states:
            answer = transition(self.board, self._geometries[current], held, wish)
            case = (current, busy, wish)
            if isinstance(answer, Transition):
                assert possible, self._say(case, "the planner found a way and brute force finds none")
                self._judge_way(answer, possible, case)
            elif answer is not judged:  # one wish is refused alike, and by the same value, in all states
                assert not possible, self._say(case, f"refused, although a way exists: {answer.message}")
                self._judge_refusal(answer, case)
                judged = answer

    def _judge_way(self, way: Transition, possible: list[int], case: Case) -> None:
        current, busy, wish = case
        target, keep = self.bits(way.target), self.bits(way.keep)
        destroy, create = self.bits(way.destroy), self.bits(way.create)
        assert target in self._legal, self._say(case, "the target is no legal set")
        assert self._wishes[target] == wish, self._say(case, "the target is another multiset than the wish")
        assert busy & ~keep == 0 == busy & destroy, self._say(case, "an instance in use is not kept")
        assert (keep, destroy, create) == (current & target, current & ~target, target & ~current), self._say(
            case, "the steps do not lead from the current set to the target"
        )
        fewest = min((current & ~bits).bit_count() for bits in possible)
        assert destroy.bit_count() == fewest, self._say(case, f"{fewest} destroyed would be enough")
        best = next(bits for bits in possible if (current & ~bits).bit_count() == fewest)
        assert target == best, self._say(case, f"{self.twin.members(best)} leaves more room, or starts lower")

    def _judge_refusal(self, refusal: Refusal, case: Case) -> None:
        _, busy, wish = case
        ever = self.twin.by_wish.get(wish, [])
        assert refusal.reason == ("InUse" if ever else "Infeasible"), self._say(case, "the reason is wrong")
        blocked_by = self.bits(refusal.blocked_by)
        assert blocked_by & ~busy == 0, self._say(case, "what is idle blocks nothing")
        fewest = min(((busy & ~bits).bit_count() for bits in ever), default=0)
        assert blocked_by.bit_count() == fewest, self._say(case, f"{fewest} would have to go, not {refusal.blocked_by}")
        if ever:
            least = min(self._span(busy & ~bits) for bits in ever if (busy & ~bits).bit_count() == fewest)
            assert self._span(blocked_by) == least, self._say(case, "narrower ones would do")
            rest = busy & ~blocked_by
            assert any(rest & ~bits == 0 for bits in ever), self._say(case, "their going would not make room")
        self._judge_room(refusal, case)

    def _judge_room(self, refusal: Refusal, case: Case) -> None:
        """What is left over and what would fit instead: around what is in use, or on the empty GPU."""
        _, busy, wish = case
        start = 0 if refusal.reason == "Infeasible" else busy
        if start not in self._around:
            self._around[start] = {self._wishes[bits] for bits in self.twin.around(start)}
        reachable = self._around[start]
        asked = dict(wish)
        most = max(sum(self._width[n] * min(k, asked.get(n, 0)) for n, k in fits) for fits in reachable)
        left = sum(self._width[n] * k for n, k in refusal.left_over)
        assert left == sum(self._width[n] * k for n, k in wish) - most, self._say(case, "left over is not the least")
        assert all(0 < k <= asked[n] for n, k in refusal.left_over), self._say(case, "left over was never asked for")
        assert set(refusal.nearest) <= reachable - {()}, self._say(case, "what is offered instead does not fit either")
        assert len(refusal.nearest) == min(3, len(reachable - {()})), self._say(case, "offers are missing")
        apart = [self._apart(asked, dict(fits)) for fits in reachable if fits]
        offered = [self._apart(asked, dict(fits)) for fits in refusal.nearest]
        assert offered == sorted(apart)[:3], self._say(case, "something nearer would fit")

    def _span(self, bits: int) -> int:
        """How many memory slices a set takes."""
        if bits not in self._spans:
            self._spans[bits] = len(self.twin.slices(bits))
        return self._spans[bits]

    def _apart(self, one: dict[str, int], other: dict[str, int]) -> int:
        return sum(wide * abs(one.get(n, 0) - other.get(n, 0)) for n, wide in self._width.items())

    def _say(self, case: Case, what: str) -> str:
        current, busy, wish = case
        there, held = self.twin.members(current), self.twin.members(busy)
        return f"{what}: there is {there}, in use {held}, wanted {wish}"


def occupied(gpu: Gpu) -> Occupied:
    """A GPU of a random node as the planner of evictions sees it."""
    return Occupied(
        board(*gpu.kind),
        frozenset(map(instance_of, gpu.there)),
        gpu.wish,
        frozenset(map(instance_of, gpu.fixed)),
        tuple((instance_of(place), pods) for place, pods in gpu.held.items()),
        gpu.whole,
    )


def instance_of(place: Place) -> GpuInstance:
    """The planner's instance of a twin's place."""
    name, start, size = place
    return GpuInstance(name, Placement(start, size))
