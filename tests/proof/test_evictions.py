"""No fewer pods could go: the planner of evictions is right on random nodes, by comparing it with brute force.

Nodes have one to four GPUs of all models in the catalog, random legal geometries with some instances idle, some that
must stay and some held by pods, one or two an instance, of which some are on several GPUs; and random wishes. Compared
are who goes, how many instances are destroyed, and which GPUs cannot be cut as wished whoever goes. Then transitions
are asked for with what is still in use, as an agent does after a drain. Ten times as many nodes with --soak.
"""

from __future__ import annotations

import random

import pytest
from proof.drains import Gpu, brute, some_node
from proof.judge import instance_of, occupied

from migd.mig.evicting import Eviction, fewest
from migd.mig.geometry import Geometry
from migd.mig.transition import Refusal, Transition, transition

SHARES, NODES = 8, 400
"""In how many tests the nodes are dealt out, so that workers can share them, and how many each has."""


@pytest.mark.parametrize("share", range(SHARES))
def test_who_goes_is_what_brute_force_says(share: int, soak: int, first_seed: int) -> None:
    dice = random.Random(f"evictions {first_seed} {share}")
    evicting = choices = better_together = unable = 0
    for _ in range(NODES * soak):
        node = some_node(dice)
        found, theirs = fewest([occupied(gpu) for gpu in node]), brute(node)
        assert found.proven, node
        assert len(found.pods) == len(theirs.pods), (node, found.pods, theirs)
        assert found.destroyed == sum(lost or 0 for lost in theirs.destroyed), (node, found, theirs)
        assert found.pods == theirs.pods, (node, found.pods, theirs)
        assert tuple(freed is not None for freed in found.freed) == theirs.able, (node, found, theirs)
        for gpu, freed, lost in zip(node, found.freed, theirs.destroyed, strict=True):
            check_gpu(gpu, found, freed, lost)
        evicting += bool(found.pods)
        choices += theirs.equally_few > 1
        better_together += theirs.apart > len(theirs.pods)
        unable += not all(theirs.able)
    nodes = NODES * soak
    assert min(evicting, choices, better_together, unable) > nodes / 50, "the nodes are too easy to prove anything"


def test_enough_nodes_are_compared() -> None:
    assert SHARES * NODES >= 2_000


def check_gpu(gpu: Gpu, found: Eviction, freed: Geometry | None, lost: int | None) -> None:
    """What the search says of one GPU is what the transition does then, or why there is none."""
    seen, wanted = occupied(gpu), gpu.wish or ()
    if freed is None:
        refusal = transition(seen.board, seen.current, seen.fixed, wanted)
        assert isinstance(refusal, Refusal)
        assert set(refusal.blocked_by) <= seen.fixed
        return
    assert freed == frozenset(instance_of(place) for place, pods in gpu.held.items() if pods <= found.pods)
    way = transition(seen.board, seen.current, seen.busy - freed, wanted)
    assert isinstance(way, Transition), (gpu, found)
    assert len(way.destroy) == lost
