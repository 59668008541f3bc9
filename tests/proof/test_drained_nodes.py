"""No pod too many: whole drains of random nodes, by the agent's own decisions, against brute force.

Each node runs its transaction from the wish to its end in the small world: closed, victims published, evicted by a
stand-in for the operator, changed, opened. Compared with brute force are who was evicted, that the others run on the
very instances that they had, and that nobody is evicted where something that may not go keeps the node from its wish.
Left out: pods that hold a GPU as a whole, which tests/unit/agent has. Ten times as many nodes with --soak.
"""

from __future__ import annotations

import random
from itertools import count

import pytest
from boards import board
from proof.drains import Gpu, brute, some_node, twin_of
from toy_node import ToyNode, ToyPod

from migd.mig.geometry import Counts, GpuInstance, counts_of
from migd.mig.profiles import Placement

SHARES, NODES = 8, 260


@pytest.mark.parametrize("share", range(SHARES))
def test_on_random_nodes_just_as_many_pods_are_evicted_as_must_go(share: int, soak: int, first_seed: int) -> None:
    dice = random.Random(f"drains {first_seed} {share}")
    evicting = stuck = 0
    for number in range(NODES * soak):
        gpus = _feasible(dice)
        theirs, node = brute(gpus), _node(gpus, number)
        devices = {name: pod.devices for name, pod in node.pods.items() if pod.resource}
        able = all(theirs.able)
        node.run(400 if able else 200)
        assert node.wrong == [], gpus
        assert sorted(node.evicted) == sorted(theirs.pods if able else ()), (gpus, theirs, node.reasons())
        there = {device for gpu in node.gpus for device in gpu.ids()}
        for name in devices.keys() - set(node.evicted):
            assert set(devices[name]) <= there, (gpus, name)
        if able:
            assert set(node.phases()) == {"Ready"}, (gpus, node.phases(), node.reasons())
            for gpu, now in zip(gpus, node.layouts(), strict=True):
                assert (now.mig, counts_of(now.instances)) == (gpu.wish is not None, gpu.wish or ()), gpus
        evicting += bool(node.evicted)
        stuck += not able
    assert min(evicting, stuck) > NODES * soak / 50, "the nodes are too easy to prove anything"


def test_enough_nodes_are_drained() -> None:
    assert SHARES * NODES >= 2_000


def _feasible(dice: random.Random) -> list[Gpu]:
    """A random node whose wishes can be met, if only everybody went, and whose pods hold instances."""
    for _ in count():
        gpus = some_node(dice)
        if not any(gpu.whole or (gpu.wish is not None and not twin_of(gpu.kind).ranked(gpu.wish)) for gpu in gpus):
            return gpus
    raise AssertionError("endless")


def _node(gpus: list[Gpu], seed: int) -> ToyNode:
    """The same node in the small world, with what must stay used by processes of the host."""
    node = ToyNode([""] * len(gpus), "Helm", seed)
    holding: dict[str, list[str]] = {}
    for gpu, toy in zip(gpus, node.gpus, strict=True):
        toy.board = board(*gpu.kind)
        toy.made = {_instance(place): next(node.serial) for place in sorted(gpu.there)}
        ids = {instance: device for device, instance in toy.ids().items()}
        toy.used = {_instance(place) for place in gpu.fixed}
        for place, pods in sorted(gpu.held.items()):
            for pod in pods:
                holding.setdefault(pod, []).append(ids[_instance(place)])
    for name, devices in sorted(holding.items()):
        node.pods[name] = ToyPod(name, name, "", "nvidia.com/mig", "Running", devices[0], tuple(devices[1:]))
    node.own_by_hand()
    node.enumerate()
    node.pass_time(10.0)
    disruption = {"policy": "Evict", "timeout": "3m"}
    wishes = {k: None if gpu.wish is None else _texts(gpu.wish) for k, gpu in enumerate(gpus)}
    node.wish("aaaaaaaa", wishes, disruption=disruption)
    return node


def _texts(wish: Counts) -> list[str]:
    return [f"{number}x{name}" for name, number in wish]


def _instance(place: tuple[str, int, int]) -> GpuInstance:
    name, start, size = place
    return GpuInstance(name, Placement(start, size))
