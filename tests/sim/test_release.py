"""`migd release`: what a dead agent owes a node is given back, and a living one is left to do it by itself."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from commands import Cli

from migd.agent.node.releasing import AgentAliveError, NodeMissingError, release
from migd.kube.cluster import ApiCluster, Identity
from migd.kube.leases import micro_time
from migd.kube.nodes import NODES, TAINT, NodeChange
from migd.kube.owed import OWED, PAUSED, pausing
from migd.sim.cluster.server import Policy, SimCluster, SimRequest
from migd.sim.cluster.virtual_time import run_virtually

NAMESPACE = "migd-system"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
DCGM = "nvidia.com/gpu.deploy.dcgm"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"


class World:
    """A cluster with one node, which an agent closed and paused before it died."""

    def __init__(self, policy: Policy = lambda _request: "") -> None:
        self.server = SimCluster(policy=policy)
        labels = {PLUGIN: "true", DCGM: "true", "pool": "a"}
        taint = {"key": "theirs", "effect": "NoSchedule"}
        metadata = {"name": "node-a", "labels": labels}
        self.ask("POST", "/api/v1/nodes", {"kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}})

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        code, _, found = self.server.answer("admin", method, path, {}, body, kind)
        assert code < 300, found
        return found

    @property
    def node(self) -> Any:
        return self.ask("GET", "/api/v1/nodes/node-a")

    def label(self, key: str, value: str) -> None:
        body = {"metadata": {"labels": {key: value}}}
        self.ask("PATCH", "/api/v1/nodes/node-a", body, "application/merge-patch+json")

    def taints(self) -> list[str]:
        return [taint["key"] for taint in self.node["spec"].get("taints") or ()]

    def renew(self, holder: str = "migd-agent-x") -> None:
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 180, "renewTime": micro_time(self.server.now())}
        if self.server.answer("admin", "GET", f"{LEASES}/node-a", {}, None, "")[0] == 404:
            self.ask("POST", LEASES, {"kind": "Lease", "metadata": {"name": "node-a"}, "spec": spec})
        else:
            self.ask("PATCH", f"{LEASES}/node-a", {"spec": spec}, "application/merge-patch+json")

    def cluster(self, who: str) -> ApiCluster:
        known = Identity(who, f"migd.dev/{who}", who)
        return ApiCluster(self.server.transport(who), known, self.server.now, dice=random.Random(1))

    async def closed(self) -> None:
        async with self.cluster("agent") as cluster:
            seen = await cluster.get(NODES, "node-a")
            assert seen is not None
            await cluster.change_node(seen, pausing(seen, "turn-1", (PLUGIN, DCGM)))

    async def release(self, node: str = "node-a", force: bool = False) -> NodeChange | None:
        self.waits: list[float] = []
        async with self.cluster("admin-program") as cluster:
            return await release(cluster, node, NAMESPACE, force, self.waits.append)


def test_a_node_gets_back_its_labels_and_loses_our_taint_alone_once_the_lease_has_expired_before_our_eyes():
    async def story() -> None:
        world = World()
        await world.closed()
        world.renew()
        world.label(DCGM, "false")
        assert world.taints() == ["theirs", TAINT]
        began_s = asyncio.get_running_loop().time()
        done = await world.release()
        assert asyncio.get_running_loop().time() - began_s >= 180
        assert world.waits == [180]
        assert done is not None
        assert done.labels == {PLUGIN: "true"}
        labels = world.node["metadata"]["labels"]
        assert labels == {PLUGIN: "true", DCGM: "false", "pool": "a"}, "what somebody changed since is theirs"
        assert world.taints() == ["theirs"]
        assert OWED not in (world.node["metadata"].get("annotations") or {})
        assert await world.release() is None
        assert world.waits == [], "nothing is owed, so nobody is looked for"

    run_virtually(story())


def test_a_living_agent_is_left_to_do_it_unless_forced():
    async def story() -> None:
        world = World()
        await world.closed()
        world.renew()
        asyncio.get_running_loop().call_later(60, world.renew)
        with pytest.raises(AgentAliveError, match="migd-agent-x has just renewed"):
            await world.release()
        assert world.node["metadata"]["labels"][PLUGIN] == PAUSED
        assert TAINT in world.taints()
        assert await world.release(force=True) is not None
        assert world.waits == []
        assert world.taints() == ["theirs"]

    run_virtually(story())


@pytest.mark.parametrize("lease", ["none", "given up"])
def test_where_nobody_holds_the_lease_nobody_is_waited_for(lease: str):
    async def story() -> None:
        world = World()
        await world.closed()
        if lease == "given up":
            world.renew(holder="")
        assert await world.release() is not None
        assert world.waits == []

    run_virtually(story())


def test_a_node_that_somebody_changes_meanwhile_is_looked_at_again():
    async def story() -> None:
        tries = []

        def meanwhile(request: SimRequest) -> str:
            if request.user == "admin-program" and request.writes:
                tries.append(request)
                if len(tries) == 1:
                    world.label(DCGM, "false")
            return ""

        world = World(meanwhile)
        await world.closed()
        assert await world.release() is not None
        assert len(tries) == 2
        assert world.node["metadata"]["labels"] == {PLUGIN: "true", DCGM: "false", "pool": "a"}

    run_virtually(story())


def test_a_node_that_is_not_there_is_named():
    async def story() -> None:
        with pytest.raises(NodeMissingError, match="no node node-b"):
            await World().release("node-b")

    run_virtually(story())


def test_the_command_says_which_kubeconfig_it_could_not_use(cli: Cli):
    ran = cli.bare("release", "node-a", "--kubeconfig", str(cli.folder / "none"))
    assert ran.code == 2
    assert str(cli.folder / "none") in ran.err
