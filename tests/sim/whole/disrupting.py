"""Who interferes with drains, and how: the acts of `drains.DRAIN_ACTS` that other stories do not have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fleet import Fleet

from migd.sim.cluster.fields import copied
from migd.sim.nodes.documents import owner_uid
from migd.sim.nodes.world import SimNode, SimulatedCluster
from whole.drains import budget, rules
from whole.drawing import Tale


class Disrupting:
    """Acts on pods, on what protects them, and on what a plan says of them."""

    tale: Tale
    fleet: Fleet
    cluster: SimulatedCluster

    def _later(self, dice: random.Random, least_s: float, most_s: float, undo: Callable[[], None]) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Who holds GPUs before there is a plan, and what protects them; each budget goes in its time."""
        for job in self.tale.jobs:
            self.cluster.run(job)
        for pod in self.tale.lonely:
            self.cluster.apply(pod)
        for document, leaves_s in self.tale.budgets:
            self.cluster.apply(document)
            if leaves_s is not None:
                self._later(random.Random(0), leaves_s, leaves_s, lambda document=document: self._ends(document))

    def _ends(self, budget: dict[str, Any]) -> None:
        metadata = budget["metadata"]
        self.cluster.delete("poddisruptionbudgets", metadata["name"], metadata["namespace"])

    def _users(self, node: SimNode) -> list[dict[str, Any]]:
        """The pods of people on a node."""
        return [pod for pod in self.cluster.pods(node.name) if pod["metadata"]["namespace"] == "default"]

    def _victim(self, dice: random.Random, node: SimNode) -> dict[str, Any] | None:
        """A pod that is asked to go, or else one of the node's."""
        users = self._users(node)
        asked = {pod.uid for one in self.fleet.partitions(node.name) for pod in one.status.victims}
        found = [pod for pod in users if pod["metadata"]["uid"] in asked] or users
        return dice.choice(found) if found else None

    def _budget_comes(self, dice: random.Random, _node: SimNode) -> None:
        apps = sorted({(pod["metadata"].get("labels") or {}).get("app", "") for pod in self.cluster.pods()} - {""})
        for app in dice.sample(apps, 1) if apps else ():
            self.cluster.apply(budget("late", app, dice.choice(("allows", "blocks", "blocks"))))
            if dice.random() < 0.6:
                self._later(dice, 5, 60, lambda: self.cluster.delete("poddisruptionbudgets", "late", "default"))

    def _budget_goes(self, dice: random.Random, _node: SimNode) -> None:
        found = self.cluster.all("poddisruptionbudgets")
        if found:
            self.cluster.delete("poddisruptionbudgets", dice.choice(found)["metadata"]["name"], "default")

    def _evictions_throttled(self, dice: random.Random, _node: SimNode) -> None:
        wait_s = dice.choice((1, 3, 10))
        self.cluster.cluster.busy = lambda request: wait_s if request.resource == "pods/eviction" else 0

        def over() -> None:
            self.cluster.cluster.busy = lambda _request: 0

        self._later(dice, 5, 60, over)

    def _pod_deleted(self, dice: random.Random, node: SimNode) -> None:
        pod = self._victim(dice, node)
        if pod is not None:
            self.cluster.admin.delete("pods", pod, dice.choice((None, 0)))

    def _pod_replaced(self, dice: random.Random, node: SimNode) -> None:
        """A pod goes at once, and another one has its name."""
        pod = self._victim(dice, node)
        if pod is None or not owner_uid(pod):
            return
        self.cluster.admin.delete("pods", pod, 0)
        metadata = {k: v for k, v in pod["metadata"].items() if k in ("name", "namespace", "labels", "annotations")}
        metadata["ownerReferences"] = pod["metadata"]["ownerReferences"]
        spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
        head = {"apiVersion": "v1", "kind": "Pod"}
        self.cluster.admin.create("pods", copied({**head, "metadata": metadata, "spec": spec}))

    def _disruption(self, dice: random.Random, _node: SimNode) -> None:
        """The plan evicts otherwise, or no more."""
        nothing = dict.fromkeys(("protect", "allow", "maxEvictions", "gracePeriodSeconds"))
        other = rules(dice) if dice.random() < 0.7 else {"policy": "WaitForIdle", "timeout": "1m"}
        if self.fleet.plan("plan"):
            self.fleet.edit("plan", disruption={**nothing, **other})
