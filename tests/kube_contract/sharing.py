"""What is shared with others: nodes, leases, events."""

from __future__ import annotations

import asyncio

import pytest

from kube_contract.objects import node, partition
from kube_contract.reading import AT, nowhere
from kube_contract.worlds import Side, World
from migd.kube.errors import ConflictError, KubeError
from migd.kube.events import Note, Regarding
from migd.kube.events import path as events_path
from migd.kube.leases import LEASES, Claim, Held, HeldBy
from migd.kube.nodes import NODES, NodeChange
from migd.kube.partitions import PARTITIONS
from migd.kube.stored import Stored, Where

ME = "migd-agent"
NODES_AT = "/api/v1/nodes"
CLOSE = NodeChange(
    labels={"migd.dev/state": "changing", "nvidia.com/gpu.deploy.device-plugin": "paused-for-mig-change"},
    annotations={"migd.dev/owed": '{"taint":true}'},
    closed=True,
)
OPEN = NodeChange(
    labels={"migd.dev/state": "ready", "nvidia.com/gpu.deploy.device-plugin": "true"},
    annotations={"migd.dev/owed": None},
    closed=False,
)


async def changed(cluster, name: str, change: NodeChange) -> Stored:
    """As a caller does it: look, change, and look again where somebody was faster."""
    for _ in range(20):
        seen = await cluster.get(NODES, name)
        try:
            return await cluster.change_node(seen, change)
        except ConflictError:
            await asyncio.sleep(0.05)
    raise AssertionError("somebody was faster twenty times")


def foreign(document: dict) -> dict:
    """What of a node is not ours."""
    metadata = document["metadata"]

    def kept(found: dict | None) -> dict:
        # the controllers of the cluster write keys of kubernetes.io on their own
        mine = ("migd.dev/", "nvidia.com/")
        return {k: v for k, v in (found or {}).items() if not k.startswith(mine) and "kubernetes.io/" not in k}

    return {
        "labels": kept(metadata.get("labels")),
        "annotations": kept(metadata.get("annotations")),
        "taints": [t for t in document["spec"].get("taints") or () if kept({t["key"]: t})],
        "unschedulable": document["spec"].get("unschedulable"),
    }


@pytest.mark.parametrize("bare", [False, True], ids=["full", "bare"])
def test_a_node_is_closed_and_opened_by_one_request_each_and_nothing_foreign_changes(side: Side, bare: bool):
    async def test(world: World) -> None:
        name = world.name("node")
        body = node(name)
        if not bare:
            body["metadata"] |= {"labels": {"pool": "a"}, "annotations": {"example.com/x": "y"}}
            body["spec"] = {
                "unschedulable": True,
                "taints": [
                    {"key": "example.com/theirs", "value": "v", "effect": "NoExecute"},
                    {"key": "x", "effect": "NoSchedule"},
                ],
            }
        await world.admin.create(NODES_AT, body)
        before = foreign(await world.admin.get(f"{NODES_AT}/{name}"))
        async with world.cluster(ME) as cluster:
            closed = await changed(cluster, name, CLOSE)
            assert closed.value.closed
            assert closed.value.labels["migd.dev/state"] == "changing"
            assert closed.annotations == {"migd.dev/owed": '{"taint":true}'}
            assert foreign(await world.admin.get(f"{NODES_AT}/{name}")) == before
            assert closed.value.unschedulable is not bare
            done = [w for w in world.writes(ME, name) if w.code == 200]
            assert len(done) == 1, "labels, annotation and taint go in one request"
            opened = await changed(cluster, name, OPEN)
            assert (opened.value.closed, opened.annotations) == (False, {})
            document = await world.admin.get(f"{NODES_AT}/{name}")
            assert foreign(document) == before
            assert "migd.dev/changing" not in str(document["spec"])
            writes = len(world.writes(ME, name))
            assert await cluster.change_node(opened, OPEN) is opened
            assert len(world.writes(ME, name)) == writes, "nothing differs, nothing is written"
            again = await changed(cluster, name, CLOSE)
            assert again.value.closed, "what was taken off whole can be put on again"
            assert foreign(await world.admin.get(f"{NODES_AT}/{name}")) == before
        for wrote in world.writes(ME, name):
            paths = [op["path"] for op in wrote.body if op["op"] != "test"]
            assert all("migd.dev" in p or "nvidia.com" in p or "taints" in p or p.count("/") == 2 for p in paths), paths

    side.run(test)


def test_a_node_without_anything_else_on_it_is_closed_again_and_again(side: Side):
    async def test(world: World) -> None:
        name = world.name("node")
        await world.admin.create(NODES_AT, node(name))
        async with world.cluster(ME) as cluster:
            for _ in range(2):
                closed = await changed(cluster, name, NodeChange(annotations={"migd.dev/owed": "x"}, closed=True))
                assert closed.value.closed
                opened = await changed(cluster, name, NodeChange(annotations={"migd.dev/owed": None}, closed=False))
                assert not opened.value.closed
        document = await world.admin.get(f"{NODES_AT}/{name}")
        left = document["metadata"].get("annotations", {"of": "a controller"})  # real ones annotate nodes as they come
        assert left, "no empty map is kept"
        assert "migd.dev/owed" not in left

    side.run(test)


def test_a_key_that_somebody_changed_since_is_a_conflict_and_nothing_of_the_request_is_done(side: Side):
    async def test(world: World) -> None:
        name = world.name("node")
        await world.admin.create(NODES_AT, node(name, labels={"migd.dev/state": "ready"}))
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(NODES, name)
            await world.admin.merge(f"{NODES_AT}/{name}", {"metadata": {"labels": {"migd.dev/state": "unknown"}}})
            with pytest.raises(ConflictError):
                await cluster.change_node(seen, CLOSE)
            found = await cluster.get(NODES, name)
            assert (found.value.labels["migd.dev/state"], found.value.closed, found.annotations) == (
                "unknown",
                False,
                {},
            )

    side.run(test)


def test_a_key_that_appeared_since_is_a_conflict_too(side: Side):
    async def test(world: World) -> None:
        name = world.name("node")
        await world.admin.create(NODES_AT, node(name, labels={"x": "y"}))
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(NODES, name)
            await world.admin.merge(f"{NODES_AT}/{name}", {"metadata": {"labels": {"migd.dev/state": "failed"}}})
            with pytest.raises(ConflictError):
                await cluster.change_node(seen, NodeChange(labels={"migd.dev/state": "ready"}))

    side.run(test)


def test_a_taint_that_somebody_added_since_is_a_conflict_and_stays(side: Side):
    async def test(world: World) -> None:
        name = world.name("node")
        await world.admin.create(NODES_AT, node(name))
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(NODES, name)
            theirs = {"key": "example.com/theirs", "effect": "NoSchedule"}
            await world.admin.merge(f"{NODES_AT}/{name}", {"spec": {"taints": [theirs]}})
            with pytest.raises(ConflictError):
                await cluster.change_node(seen, NodeChange(closed=True))
            closed = await changed(cluster, name, NodeChange(closed=True))
            assert {"example.com/theirs", "migd.dev/changing"} <= {t.key for t in closed.value.taints}

    side.run(test)


def test_what_others_do_to_their_own_keys_is_no_conflict(side: Side):
    async def test(world: World) -> None:
        name = world.name("node")
        await world.admin.create(NODES_AT, node(name, labels={"pool": "a"}, annotations={"example.com/x": "1"}))
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(NODES, name)
            theirs = {"metadata": {"labels": {"pool": "b"}, "annotations": {"example.com/x": "2"}}}
            await world.admin.merge(f"{NODES_AT}/{name}", theirs)
            stored = await cluster.change_node(seen, NodeChange(labels={"migd.dev/state": "ready"}))
            assert (stored.value.labels["pool"], stored.value.labels["migd.dev/state"]) == ("b", "ready")

    side.run(test)


def test_a_new_node_of_the_same_name_is_not_touched(side: Side):
    async def test(world: World) -> None:
        name = world.name("node")
        await world.admin.create(NODES_AT, node(name))
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(NODES, name)
            await world.admin.delete(f"{NODES_AT}/{name}", seen.uid)
            with pytest.raises(KubeError):
                await cluster.change_node(seen, NodeChange(labels={"migd.dev/state": "ready"}))
            await world.admin.create(NODES_AT, node(name))
            with pytest.raises(ConflictError):
                await cluster.change_node(seen, NodeChange(labels={"migd.dev/state": "ready"}))

    side.run(test)


def test_what_a_node_owns_goes_with_it(side: Side):
    async def test(world: World) -> None:
        name, gpu = world.name("node"), world.gpu()
        made = await world.admin.create(NODES_AT, node(name))
        body = partition(gpu, name)
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": made["metadata"]["uid"]}
        ours = {"metadata": {"ownerReferences": [owner]}, "spec": body["spec"]}
        async with world.cluster(ME) as cluster:
            stored = await cluster.apply(PARTITIONS, gpu, ours, None)
            assert await cluster.apply(PARTITIONS, gpu, ours, stored) is stored
            following = cluster.follow(PARTITIONS, nowhere)
            await following.wait_synced()
            await world.admin.delete(f"{NODES_AT}/{name}", owner["uid"])
            await world.until(lambda: following.cache.get(gpu) is None, 30)

    side.run(test)


def claim_of(world: World, holder: str, name: str, duration_s: int = 2) -> Claim:
    return Claim(name, "default", holder, duration_s)


def test_a_lease_is_taken_renewed_and_given_up(side: Side):
    async def test(world: World) -> None:
        name = world.name("lease")
        ours, theirs = claim_of(world, "a", name), claim_of(world, "b", name)
        loop = asyncio.get_running_loop()
        async with world.cluster(ME) as cluster, world.cluster("migd-other") as other:
            held = await cluster.claim(ours)
            assert isinstance(held, Held)
            assert loop.time() < held.until_s <= loop.time() + 2
            refused = await other.claim(theirs)
            assert isinstance(refused, HeldBy)
            assert refused.holder == "a"
            first = await cluster.get(LEASES, name, "default")
            await asyncio.sleep(0.01)
            assert isinstance(await cluster.claim(ours), Held)
            second = await cluster.get(LEASES, name, "default")
            assert second.value.renewed > first.value.renewed
            assert second.value.acquired == first.value.acquired
            await cluster.release(ours)
            assert isinstance(await other.claim(theirs), Held)
            third = await other.get(LEASES, name, "default")
            assert (third.value.holder, third.value.transitions) == ("b", 1)
            await cluster.release(ours)  # not ours any more: nothing happens
            assert (await other.get(LEASES, name, "default")).value.holder == "b"

    side.run(test)


def test_a_lease_whose_holder_is_silent_expires_by_the_observers_clock_and_no_sooner(side: Side):
    async def test(world: World) -> None:
        name = world.name("lease")
        async with world.cluster(ME) as cluster, world.cluster("migd-other") as other:
            assert isinstance(await cluster.claim(claim_of(world, "a", name, 1)), Held)
            await asyncio.sleep(1.2)
            seen = await other.claim(claim_of(world, "b", name, 1))
            assert isinstance(seen, HeldBy), "another one who just started has to watch it first"
            assert seen.until_s > asyncio.get_running_loop().time()
            await asyncio.sleep(1.1)
            assert isinstance(await other.claim(claim_of(world, "b", name, 1)), Held)
            lost = await cluster.claim(claim_of(world, "a", name, 1))
            assert isinstance(lost, HeldBy)
            assert lost.holder == "b"

    side.run(test)


def test_of_many_who_ask_at_once_one_gets_the_lease(side: Side):
    async def test(world: World) -> None:
        name = world.name("lease")
        async with world.cluster(ME) as cluster:
            answers = await asyncio.gather(*(cluster.claim(claim_of(world, str(i), name, 30)) for i in range(6)))
        assert sum(isinstance(answer, Held) for answer in answers) == 1

    side.run(test)


def test_leases_are_followed_like_everything(side: Side):
    async def test(world: World) -> None:
        name = world.name("lease")
        async with world.cluster(ME) as cluster:
            following = cluster.follow(LEASES, nowhere, where=Where(namespace="default"))
            await following.wait_synced()
            await cluster.claim(claim_of(world, "a", name))
            assert following.cache.get(name, "default").value.holder == "a"

    side.run(test)


def test_an_event_is_posted_once_and_an_equal_one_is_not_posted_again(side: Side):
    async def test(world: World) -> None:
        name = world.gpu()
        made = await world.admin.create(AT, partition(name))
        about = Regarding("migd.dev/v1alpha1", "GPUPartition", name, made["metadata"]["uid"])
        note = Note(about, "Warning", "InUse", "Waiting", "held by " + "x" * 2000)
        async with world.cluster(ME) as cluster:
            assert await cluster.tell(note)
            assert not await cluster.tell(note)
            other = Note(about, "Normal", "AsWished", "Verifying", "done")
            assert await cluster.tell(other)
        answer = await world.admin.get(events_path("default"))
        found = {e["reason"]: e for e in answer["items"] if e["regarding"].get("name") == name}
        assert set(found) == {"InUse", "AsWished"}
        event = found["InUse"]
        assert (event["type"], event["action"], event["reportingController"]) == (
            "Warning",
            "Waiting",
            "migd.dev/migd-agent",
        )
        assert len(event["note"].encode()) <= 1024
        assert event["regarding"]["uid"] == made["metadata"]["uid"]

    side.run(test)


def test_an_event_that_cannot_be_posted_stops_nothing(side: Side):
    async def test(world: World) -> None:
        about = Regarding("migd.dev/v1alpha1", "GPUPartition", "gpu-x", "u")
        async with world.cluster("nobody", transport=await side.powerless()) as cluster:
            assert not await cluster.tell(Note(about, "Normal", "AsWished", "Verifying", "done"))

    side.run(test)
