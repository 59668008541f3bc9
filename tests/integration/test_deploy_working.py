"""What migd writes in a whole transaction, by its own client and with its pods' tokens: every request passes.

The agent's and the operator's decisions are left out: what they write is put together here by the code that they use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TypeVar

import pytest
from integration.deploy_rows import LEASES
from integration.deployed import NAMESPACE
from integration.stage import Stage
from integration.texts import condition, desired, gpu_name
from kube_contract.worlds import QUICK

from migd.kube.cluster import ApiCluster, Identity
from migd.kube.connecting import HttpTransport
from migd.kube.errors import ConflictError, DeniedError
from migd.kube.events import Note, Regarding
from migd.kube.leases import Claim, Held
from migd.kube.nodes import NODES, Node, NodeChange
from migd.kube.owed import OWED, closing, owed_of, paid, pausing
from migd.kube.partitions import PARTITIONS, PLANS
from migd.kube.pods import PODS, on_node
from migd.kube.stored import Kind, Stored, Where

T = TypeVar("T")

PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
TURN = {"id": "0123456789abcdef", "gpus": 1}


@asynccontextmanager
async def cluster_of(stage: Stage, account: str, pod: str, node: str) -> AsyncIterator[ApiCluster]:
    """The cluster as the pod of a ServiceAccount on a node has it."""
    plane = stage.deployed.plane
    kubeconfig = plane.kubeconfig_of(f"{pod}.kubeconfig", token=stage.deployed.token(account, pod, node))
    identity = Identity(manager=account, controller=f"migd.dev/{account.removeprefix('migd-')}", instance=pod)
    async with (
        await HttpTransport.connect("migd-tests", kubeconfig) as transport,
        ApiCluster(transport, identity, lambda: datetime.now(UTC), QUICK) as cluster,
    ):
        yield cluster


async def sight(cluster: ApiCluster, kind: Kind[T], name: str) -> Stored[T]:
    """One object as it is now, by a list: the operator may not get a single GPUPartition, since it never does."""
    [found] = await cluster.list(kind, Where(fields=f"metadata.name={name}"))
    return found


async def change(cluster: ApiCluster, node: str, made: Callable[[Stored[Node]], NodeChange]) -> None:
    """Change a node as decided on a fresh look; its controllers write it too, so a conflict is looked at again."""
    for _ in range(20):
        seen = await sight(cluster, NODES, node)
        try:
            await cluster.change_node(seen, made(seen))
        except ConflictError:
            continue
        return
    pytest.fail("twenty conflicts")


def test_a_whole_transaction_passes(stage: Stage, name: str):
    stage.deployed.node(name, {PLUGIN: "true"}, {})
    gpu = gpu_name()

    async def main() -> None:
        async with (
            cluster_of(stage, "migd-agent", name, name) as agent,
            cluster_of(stage, "migd-operator", f"{name}-operator", name) as operator,
        ):
            node = await agent.get(NODES, name)
            assert node is not None
            owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid}
            following = agent.follow(PARTITIONS, lambda _: None)
            await following.wait_synced()
            lease = Claim(name, NAMESPACE, name, 180, (name, node.uid), {"migd.dev/duplicates": gpu})
            assert isinstance(await agent.claim(lease), Held)
            assert isinstance(await agent.claim(lease), Held)
            ours = {
                "metadata": {"labels": {"migd.dev/node": name}, "ownerReferences": [owner]},
                "spec": {"nodeName": name, "nodeUID": node.uid},
            }
            made = await agent.apply(PARTITIONS, gpu, ours, None)
            idle = {"status": {"phase": "Idle", "observedGeneration": 1, "conditions": [condition("Ready", "False")]}}
            made = await agent.apply(PARTITIONS, gpu, idle, made, "status")

            wish = {"metadata": {"labels": {"migd.dev/plan": "p"}}, "spec": {"desired": desired(), "assignment": TURN}}
            seen = await operator.apply(PARTITIONS, gpu, wish, await sight(operator, PARTITIONS, gpu))
            said = {"status": {"conditions": [condition("Assigned"), condition("AgentAlive")]}}
            await operator.apply(PARTITIONS, gpu, said, seen, "status")

            assert await agent.list(PODS, on_node(name))
            await change(agent, name, lambda n: closing(n, TURN["id"]))
            await change(agent, name, lambda n: pausing(n, TURN["id"], (PLUGIN,)))
            paused = await agent.get(NODES, name)
            assert paused is not None
            assert (paused.value.closed, owed_of(paused) is not None) == (True, True)
            ready = {"status": {"phase": "Ready", "observedGeneration": 2, "conditions": [condition("Ready")]}}
            now = await agent.get(PARTITIONS, gpu)
            now = await agent.apply(PARTITIONS, gpu, ready, now, "status")
            assert now is not None
            assert {c.type for c in now.value.status.conditions} == {"Ready", "Assigned", "AgentAlive"}
            await change(agent, name, paid)
            counts = {"migd.dev/state": "ready", "migd.dev/mig-3g.40gb.count": "1"}
            await change(agent, name, lambda _: NodeChange(labels=counts))
            note = Note(Regarding("v1", "Node", name, node.uid), "Normal", "AsWished", "Change", "done")
            assert await agent.tell(note)
            await agent.release(lease)

            await operator.apply(PARTITIONS, gpu, {"metadata": {"labels": {}}, "spec": {}}, now)
            gone = await sight(operator, PARTITIONS, gpu)
            assert gone.value.spec.desired is None
            await operator.delete(PARTITIONS, gone)
            assert await agent.get(PARTITIONS, gpu) is None

    asyncio.run(asyncio.wait_for(main(), 90))


def test_the_operator_pays_for_an_agent_that_died(stage: Stage, name: str):
    stage.deployed.node(name, {PLUGIN: "true", "nvidia.com/gpu.deploy.mig-manager": "true"}, {})

    async def main() -> None:
        async with (
            cluster_of(stage, "migd-agent", name, name) as agent,
            cluster_of(stage, "migd-operator", f"{name}-operator", name) as operator,
        ):
            await change(agent, name, lambda n: pausing(n, "t1", (PLUGIN,)))
            with pytest.raises(DeniedError, match=r"label nvidia.com/gpu.deploy.device-plugin"):
                await change(operator, name, lambda _: NodeChange(labels={PLUGIN: "true"}))
            await change(operator, name, paid)
            await change(operator, name, lambda _: NodeChange(labels={"migd.dev/state": "unknown"}))
            manager = "nvidia.com/gpu.deploy.mig-manager"
            taken = NodeChange(labels={manager: "false"}, annotations={"migd.dev/taken-over": "true"})
            await change(operator, name, lambda _: taken)
            given = NodeChange(labels={manager: "true"}, annotations={"migd.dev/taken-over": None})
            await change(operator, name, lambda _: given)
            with pytest.raises(DeniedError, match="removes the taint"):
                await change(operator, name, lambda _: NodeChange(closed=True))
            after = await agent.get(NODES, name)
            assert after is not None
            assert (after.value.closed, OWED in after.annotations) == (False, False)
            assert after.value.labels[PLUGIN] == "true"
            stage.deployed.admin.delete(f"{LEASES}/migd-operator")  # the stage's
            assert isinstance(await operator.claim(Claim("migd-operator", NAMESPACE, f"{name}-o", 15)), Held)
            plan = await sight(operator, PLANS, stage.names["plan"])
            told = {"status": {"observedGeneration": plan.generation}}
            await operator.apply(PLANS, plan.name, told, plan, "status")

    asyncio.run(asyncio.wait_for(main(), 90))
