"""The API server away for a minute in the middle of transactions: agents end what they are at, and all converges."""

from __future__ import annotations

from controlplane.clusters import Cluster
from controlplane.processes import until
from integration.acting import EVERY_S, HALF, SMALL, WITHIN_S, apply, edit, introduced, labels, plan, quiet, ready
from integration.promises import Machines, Promise

NODES = ("o0", "o1", "o2", "o3")
CLUSTER = {"nodes": NODES, "spec": "a100-80gb"}
AWAY_S = 60.0


def answers(cluster: Cluster) -> bool:
    """Whether the API server answers."""
    try:
        return cluster.plane.admin.get("/readyz").ok
    except OSError:
        return False


def test_an_api_server_away_for_a_minute_in_the_middle_of_transactions_leaves_nothing_behind(cluster: Cluster):
    introduced(cluster, *NODES)
    first = Promise(cluster, "away", NODES)
    first.said(apply(cluster, plan("away", NODES, SMALL, rollout={"maxUnavailable": "100%"})))
    ready(cluster, "away")
    first.kept()
    before = Machines.seen(cluster, NODES)
    promise = Promise(cluster, "away", NODES)
    promise.said(edit(cluster, "away", rules=[HALF]))

    def begun() -> int:
        machines = {name: cluster.nodes[name].machine().snapshot().gpus[0].instances for name in NODES}
        return sum(len(instances) != 7 for instances in machines.values())

    assert until(lambda: begun() > 0, WITHIN_S, EVERY_S)
    cluster.plane.api_server.stop()
    assert not until(lambda: answers(cluster), AWAY_S, 1.0)
    assert Machines.seen(cluster, NODES) != before, "what was begun on hardware is ended without an API server"
    cluster.plane.api_server.start()
    cluster.plane.wait_ready(60.0)
    ready(cluster, "away")
    promise.kept()
    quiet(cluster, *NODES)
    for name in NODES:
        assert until(lambda name=name: labels(cluster, name)["migd.dev/state"] == "ready", WITHIN_S, EVERY_S)
        assert cluster.allocatable(name) == {
            "nvidia.com/gpu": 0,
            "nvidia.com/mig-1g.10gb": 3,
            "nvidia.com/mig-3g.40gb": 1,
        }
