"""Agents that fall silent: nothing starts there, their debts are paid in the end, and a deaf operator buries nobody."""

from __future__ import annotations

import asyncio
import json

from fleet_worlds import API, Cable, World, played
from unit.migd_operator.fleets import gpu_name

from migd_operator.probing import alive

HALVES = {"profile": "3g.40gb", "count": 2}
STATE = "migd.dev/state"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"


def close(world: World, node: str) -> None:
    """What an agent does before it changes hardware: our taint, the plugin paused, and what it owes for that."""
    owed = json.dumps({"turn": "t", "labels": {PLUGIN: "true"}})
    world.merge(
        f"/api/v1/nodes/{node}",
        {
            "metadata": {"annotations": {"migd.dev/owed": owed}, "labels": {PLUGIN: "paused-for-mig-change"}},
            "spec": {
                "taints": [
                    {"key": "example.com/theirs", "effect": "NoSchedule"},
                    {"key": "migd.dev/changing", "effect": "NoSchedule"},
                ]
            },
        },
    )


def test_a_silent_agents_node_is_unknown_after_three_minutes_and_paid_ten_minutes_later():
    async def story(world: World) -> None:
        loop = asyncio.get_running_loop()
        world.add_node("n0", "7g.80gb", labels={PLUGIN: "true"})
        world.plan("p", HALVES)
        async with world.operator():
            world.phase = lambda _node: "Changing"
            await world.until(lambda: world.partitions()[0].status.phase == "Changing")
            close(world, "n0")
            world.renew("n0")
            renewed, world.kept = loop.time(), set()
            await world.until(lambda: world.node("n0")["metadata"]["labels"].get(STATE) == "unknown")
            assert 180 <= loop.time() - renewed < 183
            alive = world.partitions()[0].says("AgentAlive")
            assert (alive.status, alive.reason) == ("False", "AgentSilent")
            assert world.status("p")["nodes"]["unknown"] == 1
            await asyncio.sleep(780 - 5 - (loop.time() - renewed))
            assert "migd.dev/owed" in world.node("n0")["metadata"]["annotations"]
            await world.until(lambda: "migd.dev/owed" not in world.node("n0")["metadata"].get("annotations", {}), 10)
            paid = world.node("n0")
            assert (paid["metadata"]["labels"][PLUGIN], paid["metadata"]["labels"][STATE]) == ("true", "unknown")
            assert paid["spec"]["taints"] == [{"key": "example.com/theirs", "effect": "NoSchedule"}]
            assert ("Warning", "AgentSilent") in {(kind, reason) for kind, reason, _ in world.events()}
            before = len(world.requests())
            await asyncio.sleep(600)
            assert len(world.requests()) == before
            world.phase, world.kept = lambda _node: "Ready", {"n0"}
            world.renew("n0")
            await world.until(lambda: world.said("p", "Ready") == ("True", "AsWished"))
            assert world.partitions()[0].says("AgentAlive").status == "True"

    played(story)


def test_a_node_whose_partitions_are_gone_as_well_as_its_agent_is_paid_all_the_same():
    """Seen: somebody took the agents away and deleted their objects, and a node stayed closed for ever."""

    async def story(world: World) -> None:
        loop = asyncio.get_running_loop()
        world.add_node("n0", "7g.80gb", labels={PLUGIN: "true"})
        async with world.operator():
            await asyncio.sleep(60)
            close(world, "n0")
            world.renew("n0")
            renewed, world.kept = loop.time(), set()
            world.ask("DELETE", f"{API}/gpupartitions/{gpu_name('n0', 0)}")
            await asyncio.sleep(780 - 5 - (loop.time() - renewed))
            assert "migd.dev/owed" in world.node("n0")["metadata"]["annotations"], "an agent may only be late"
            await world.until(lambda: "migd.dev/owed" not in world.node("n0")["metadata"].get("annotations", {}), 10)
            paid = world.node("n0")
            assert paid["metadata"]["labels"][PLUGIN] == "true"
            assert paid["spec"]["taints"] == [{"key": "example.com/theirs", "effect": "NoSchedule"}]

    played(story)


def test_a_node_without_an_agent_gets_no_turn_and_is_not_waited_for():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb", agent=False)
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: world.status("p").get("nodes", {}).get("ready") == 1)
            await world.until(lambda: world.assigned()[gpu_name("n0", 0)] == ("False", "AgentSilent"))
            assert world.started() == {"n1"}
            world.renew("n0")
            world.kept.add("n0")
            await world.until(lambda: world.said("p", "Ready") == ("True", "AsWished"), 30)

    played(story)


def test_an_agent_that_restarts_and_gives_its_lease_up_for_a_moment_is_no_news():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: world.said("p", "Ready") == ("True", "AsWished"))
            await asyncio.sleep(5)
            before = len(world.requests())
            world.kept.clear()
            spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": "2026-01-01T00:10:00.000000Z"}
            world.merge("/apis/coordination.k8s.io/v1/namespaces/migd-system/leases/n0", {"spec": spec})
            await asyncio.sleep(120)
            world.renew("n0")
            await asyncio.sleep(30)
            assert len(world.requests()) == before

    played(story)


def test_agents_that_could_not_renew_while_the_api_server_was_away_are_not_silent():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        world.plan("p", HALVES)
        through = Cable(world.server.transport("operator-a"))
        async with world.operator(transport=through) as operator:
            await world.until(lambda: world.said("p", "Ready") == ("True", "AsWished"))
            await asyncio.sleep(5)
            before = len(world.requests())
            kept, world.kept = world.kept, set()
            through.whole.clear()
            await asyncio.sleep(1200)
            assert not operator.health.leader
            assert alive(operator.health) != ""
            through.whole.set()
            await asyncio.sleep(100)  # the agents are back a little later than the API server
            world.kept = kept
            world.renew("n0")
            await asyncio.sleep(300)
            assert operator.health.leader
            assert alive(operator.health) == ""
            assert len(world.requests()) == before

    played(story)
