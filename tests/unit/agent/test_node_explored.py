"""The node's transaction in a small world that is late, busy and fails, with an agent that dies anywhere.

Each seed is a story: pods come and go, wishes are given, edited and taken back, operations are refused, the kubelet
does not answer, GPU clients do not stop, the machine reboots. A failure prints its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from toy_node import DEPLOY, Crash, ToyNode

from migd.agent.node.bounds import CLIENTS_MAX_S, CLOSED_MAX_S, PAUSE_MAX_S, SETTLE_S
from migd.agent.records import Cause
from migd.mig.geometry import counts_of
from migd.mig.operations import CreateComputeInstance, CreateGpuInstance, DestroyGpuInstance, SetMode

SEEDS = 40
WISHES: list[list[str] | None] = [None, ["4x1g.6gb"], ["2x2g.12gb"], ["1x2g.12gb", "2x1g.6gb"], ["1x4g.24gb"]]
STARTS = [None, "", "1g@0 1g@1 1g@2 1g@3", "2g@0 2g@2", "2g@2 1g@0"]
RESOURCES = ["nvidia.com/gpu", "nvidia.com/mig-1g.6gb", "nvidia.com/mig-2g.12gb"]
DRAIN_S = 120.0
"""What a plan gives a drain here."""
AWAY_S = 40.0
"""The longest that an agent which died is away here."""


def _dies(random: Random, likely: float) -> Callable[[str], None]:
    def crash(where: str) -> None:
        if random.random() < likely:
            raise Crash(where)

    return crash


def _wish(node: ToyNode, random: Random, turn: int) -> None:
    wishes = {g.index: random.choice(WISHES) for g in node.gpus if random.random() < 0.8}
    policy = random.choice(("WaitForIdle", "Evict", "Evict"))
    plan = {"name": "p", "uid": "uid-p", "generation": turn + 1}
    node.wish(f"{turn:08x}", wishes, plan=plan, disruption={"policy": policy, "timeout": f"{DRAIN_S:.0f}s"})


def _occupy(node: ToyNode, random: Random) -> None:
    """Pods that run for good on some of what is there."""
    for gpu in node.gpus:
        for instance in sorted(gpu.made):
            if random.random() < 0.5:
                resource = f"mig-{instance.profile}"
                place = f"{instance.profile.partition('.')[0]}@{instance.placement.start}"
                name = f"pod-{gpu.index}-{instance.placement.start}"
                node.run_pod(name, resource, gpu.index, place, again=random.random() < 0.3)


def _disturb(node: ToyNode, random: Random, turn: int) -> None:
    """One thing that happens by itself."""
    gpu = random.choice(node.gpus)
    match random.randrange(14):
        case 0 | 1 | 2:
            node.submit(f"job-{turn}", random.choice(RESOURCES), random.choice((5.0, 60.0, 400.0)))
        case 3 | 4:
            _wish(node, random, turn)
        case 5:
            node.withdraw(keep_wish=random.random() < 0.5)
        case 6:
            kind = random.choice((CreateGpuInstance, CreateComputeInstance, DestroyGpuInstance, SetMode))
            gpu.refuses[kind] = Cause(random.choice(("InUse", "NVMLError")), "refused")
        case 7:
            gpu.refuses.clear()
        case 8:
            node.kubelet_answers = not node.kubelet_answers
        case 9:
            node.clients_stay = not node.clients_stay
        case 10:
            node.refresh_fails = not node.refresh_fails
        case 11:
            node.annotate(gpu.index, "migd.dev/retry")
        case 12 | 13:
            for pod in [p for p in node.pods.values() if p.resource]:
                pod.budget = random.choice(("", "", "budget"))
                pod.again, tolerates = random.random() < 0.3, random.random() < 0.2
                pod.tolerates = pod.tolerates if pod.bound else tolerates
                pod.grace_s = random.choice((1.0, 30.0, 300.0))


def _reboot(node: ToyNode) -> None:
    """Instances are gone, pods begin anew, the clock begins at another place."""
    node.boot += "+"
    for gpu in node.gpus:
        gpu.made, gpu.bare, gpu.used = {}, set(), set()
    node.pods, node.offers, node.timers = {}, {}, []
    node.allocatable = dict.fromkeys(node.allocatable, 0)
    node.closed_since = node.paused_since = None
    node.restart()
    node._daemons()


def _run(node: ToyNode, seconds: float, crash: Callable[[str], None]) -> None:
    end = node.now_s + seconds
    while node.now_s < end:
        try:
            if node.run(end - node.now_s, crash):
                return
        except Crash:
            node.pass_time(node.random.choice((0.0, 1.0, AWAY_S)))
            node.restart()


@pytest.mark.parametrize("install", ["Operator", "Helm", "Tolerant", "None"])
def test_whatever_happens_nothing_forbidden_is_done_and_the_node_comes_to_rest(
    install: str, soak: int, first_seed: int
) -> None:
    evicted = 0
    for seed in range(first_seed, first_seed + SEEDS * soak):
        random = Random(f"{install} {seed}")
        starts = [random.choice(STARTS) for _ in range(random.choice((1, 2)))]
        node = ToyNode(starts, install, seed)
        if random.random() < 0.7:
            node.own_by_hand()
            _occupy(node, random)
        node.cordoned = random.random() < 0.1
        if install == "Operator" and random.random() < 0.3:
            node.labels[f"{DEPLOY}dcgm"] = "false"
        labels, taints, cordoned = dict(node.labels), node.taints, node.cordoned
        crash = _dies(random, random.choice((0.0, 0.01, 0.05)))
        where = f"{install}, seed {seed}"
        _wish(node, random, 0)
        for turn in range(1, 12):
            _disturb(node, random, turn)
            _run(node, random.choice((1.0, 10.0, 30.0, 300.0)), crash)
            if random.random() < 0.04:
                _reboot(node)
        for gpu in node.gpus:
            gpu.refuses.clear()
        node.kubelet_answers, node.clients_stay, node.refresh_fails = True, False, False
        for pod in [p for p in node.pods.values() if p.deleting]:
            node._gone(pod)
        node.wish("ffffffff", {gpu.index: ["4x1g.6gb"] for gpu in node.gpus}, foreignInstances="Adopt")
        _run(node, 900.0, crash)
        for pod in [p for p in node.pods.values() if p.resource and p.phase == "Running"]:
            node.finish(pod.name)
        for name in [p.name for p in node.pods.values() if p.resource]:
            del node.pods[name]
        _run(node, 5000.0, lambda where: None)
        assert node.wrong == [], where
        assert node.untouched(), where
        kept = {k: v for k, v in node.labels.items() if not k.startswith("migd.dev/")}
        assert (kept, node.taints, node.cordoned) == (labels, taints, cordoned), where
        wished = [(True, (("1g.6gb", 4),))] * len(node.gpus)
        assert [(layout.mig, counts_of(layout.instances)) for layout in node.layouts()] == wished, where
        expected = "Failed" if install == "None" else "Ready"
        assert node.phases() == [expected] * len(node.gpus), f"{where}: {node.reasons()}"
        longest = CLOSED_MAX_S + CLIENTS_MAX_S + PAUSE_MAX_S + SETTLE_S
        assert node.longest_closed <= longest + DRAIN_S + 12 * AWAY_S, where
        evicted += len(node.evicted)
    assert evicted, "these stories are also about drains"
