"""Reading: caches that know all there is, whatever happens on the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kube_contract.objects import API, BOARD, NOW, OBSERVED, UID, condition, desired, partition, plan, pod
from kube_contract.worlds import QUICK, Side, World
from migd.kube.errors import DeniedError, KubeError, UnavailableError
from migd.kube.partitions import PARTITIONS, PLANS
from migd.kube.pods import PODS, on_node
from migd.kube.stored import Where
from migd.mig.geometry import GpuInstance, Layout
from migd.mig.profiles import Placement
from migd.plans.conditions import Condition
from migd.plans.partitions import Assignment, Pod
from migd.plans.plan import InstanceRule
from migd.plans.statuses import PlanStatus

AT = "/apis/migd.dev/v1alpha1/gpupartitions"
PODS_AT = "/api/v1/namespaces/default/pods"


def nowhere(_change: object) -> None:
    """Changes are not listened to."""


class Heard:
    """What a listener was told, as (key, before?, after?), of the names that the test made."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all: list[tuple[str, bool, bool]] = []
        self.lists = 0

    def changed(self, change) -> None:
        self.all.append((change.key, change.before is not None, change.after is not None))

    def listed(self) -> None:
        self.lists += 1

    def of(self, name: str) -> list[str]:
        words = {(False, True): "appeared", (True, True): "changed", (True, False): "vanished"}
        return [words[before, after] for key, before, after in self.all if key == name]


def test_a_cache_has_what_is_there_and_hears_of_what_comes_changes_and_goes(side: Side):
    async def test(world: World) -> None:
        there, comes = world.gpu(), world.gpu()
        await world.admin.create(AT, partition(there))
        heard = Heard(world)
        async with world.cluster() as cluster:
            following = cluster.follow(PARTITIONS, heard.changed, heard.listed)
            await following.wait_synced()
            assert following.cache.synced
            assert heard.of(there) == ["appeared"]
            assert heard.lists == 1
            await world.admin.create(AT, partition(comes, "node-b"))
            await world.until(lambda: following.cache.get(comes))
            assert following.cache.get(comes).value.spec.node_name == "node-b"
            await world.admin.apply(f"{AT}/{comes}", partition(comes, "node-b", desired=desired()), "somebody", True)
            await world.until(lambda: following.cache.get(comes).value.spec.desired)
            await world.admin.delete(f"{AT}/{there}", following.cache.get(there).uid)
            await world.until(lambda: following.cache.get(there) is None)
            assert heard.of(comes) == ["appeared", "changed"]
            assert heard.of(there) == ["appeared", "vanished"]
            assert following.trouble == ""

    side.run(test)


@pytest.mark.parametrize("page", [1, 2, 3, 500])
def test_a_list_is_complete_whatever_its_pages(side: Side, page: int):
    async def test(world: World) -> None:
        node = world.name("node")
        names = {world.gpu() for _ in range(5)}
        for name in names:
            await world.admin.create(AT, partition(name, node))
        where = Where(fields=f"spec.nodeName={node}")
        async with world.cluster(timing=replace(QUICK, page=page)) as cluster:
            following = cluster.follow(PARTITIONS, nowhere, where=where)
            await following.wait_synced()
            assert set(following.cache.objects) == names
            assert [s.name for s in await cluster.list(PARTITIONS, where)] == sorted(names)

    side.run(test)


def test_a_selector_keeps_others_out_and_what_leaves_it_vanishes(side: Side):
    async def test(world: World) -> None:
        label = world.name("l")
        ours, other = world.gpu(), world.gpu()
        body = partition(ours)
        body["metadata"]["labels"] = {"test": label}
        await world.admin.create(AT, body)
        await world.admin.create(AT, partition(other))
        async with world.cluster() as cluster:
            following = cluster.follow(PARTITIONS, nowhere, where=Where(labels=f"test={label}"))
            await following.wait_synced()
            assert set(following.cache.objects) == {ours}
            await world.admin.merge(f"{AT}/{other}", {"metadata": {"labels": {"test": label}}})
            await world.until(lambda: following.cache.get(other))
            await world.admin.merge(f"{AT}/{ours}", {"metadata": {"labels": None}})
            await world.until(lambda: following.cache.get(ours) is None)

    side.run(test)


def test_the_pods_of_a_node_are_followed_by_themselves(side: Side):
    async def test(world: World) -> None:
        node, ours, other = world.name("node"), world.name("pod"), world.name("pod")
        await world.admin.create(PODS_AT, pod(ours, node, gpus=2))
        await world.admin.create(PODS_AT, pod(other, world.name("node")))
        async with world.cluster() as cluster:
            following = cluster.follow(PODS, nowhere, where=on_node(node))
            await following.wait_synced()
            assert set(following.cache.objects) == {f"default/{ours}"}
            seen = following.cache.get(ours, "default").value
            assert (seen.node_name, seen.gpus, seen.terminal) == (node, (("nvidia.com/mig-1g.10gb", 2),), False)
            assert (seen.containers, seen.owner, seen.claims, seen.mirror) == (("main",), "", False, False)
            assert [s.name for s in await cluster.list(PODS, on_node(node))] == [ours]
            await world.admin.merge(f"{PODS_AT}/{ours}/status", {"status": {"phase": "Succeeded"}})
            await world.until(lambda: following.cache.get(ours, "default").value.terminal)

    side.run(test)


def test_history_that_is_forgotten_is_listed_anew_and_deletes_are_found(side: Side):
    async def test(world: World) -> None:
        gone, stays, remade = world.gpu(), world.gpu(), world.gpu()
        for name in (gone, stays, remade):
            await world.admin.create(AT, partition(name))
        meddling = await world.meddling()
        meddling.gate.clear()
        heard = Heard(world)
        async with world.cluster(transport=meddling) as cluster:
            following = cluster.follow(PARTITIONS, heard.changed)
            await following.wait_synced()
            for name in (gone, remade):
                await world.admin.delete(f"{AT}/{name}", following.cache.get(name).uid)
            await world.admin.create(AT, partition(remade, "node-b"))
            meddling.watch_from = ["1"]  # the API server answers 410 by itself
            meddling.gate.set()
            await world.until(lambda: following.cache.get(gone) is None)
            assert meddling.lists == 2
            assert heard.of(gone) == ["appeared", "vanished"]
            assert heard.of(remade) == ["appeared", "vanished", "appeared"]
            assert heard.of(stays) == ["appeared"]
            assert following.cache.get(remade).value.spec.node_name == "node-b"

    side.run(test)


def test_a_silent_connection_is_left_and_nothing_is_missed(side: Side):
    async def test(world: World) -> None:
        comes = world.gpu()
        meddling = await world.meddling()
        meddling.silent = 1
        async with world.cluster(timing=replace(QUICK, silence_s=0.5), transport=meddling) as cluster:
            following = cluster.follow(PARTITIONS, nowhere)
            await following.wait_synced()
            await world.until(lambda: meddling.watches == 1)
            await world.admin.create(AT, partition(comes))
            await world.until(lambda: following.cache.get(comes))
            assert meddling.lists == 1

    side.run(test)


def test_a_watch_that_never_begins_is_left_too(side: Side):
    async def test(world: World) -> None:
        comes = world.gpu()
        meddling = await world.meddling()
        meddling.stuck = 1
        async with world.cluster(timing=replace(QUICK, answer_s=0.5), transport=meddling) as cluster:
            following = cluster.follow(PARTITIONS, nowhere)
            await following.wait_synced()
            await world.admin.create(AT, partition(comes))
            await world.until(lambda: following.cache.get(comes))
            assert (meddling.watches, meddling.lists) == (2, 1)

    side.run(test)


def test_a_server_that_says_when_to_come_again_is_not_asked_before(side: Side):
    async def test(world: World) -> None:
        meddling = await world.meddling()
        meddling.answers = [(429, {"Retry-After": "1.5"}, {"message": "too many requests"})]
        loop = asyncio.get_running_loop()
        async with world.cluster(transport=meddling) as cluster:
            began = loop.time()
            await cluster.follow(PARTITIONS, nowhere).wait_synced()
            assert 1.5 <= loop.time() - began < 5.0

    side.run(test)


def test_a_connection_that_is_cut_goes_on_where_it_was(side: Side):
    async def test(world: World) -> None:
        first, second = world.gpu(), world.gpu()
        meddling = await world.meddling()
        async with world.cluster(transport=meddling) as cluster:
            following = cluster.follow(PARTITIONS, nowhere)
            await following.wait_synced()
            await world.admin.create(AT, partition(first))
            await world.until(lambda: following.cache.get(first))
            meddling.gate.clear()
            meddling.cut.set()
            await world.until(lambda: following.trouble)
            await world.admin.create(AT, partition(second))
            meddling.gate.set()
            await world.until(lambda: following.cache.get(second))
            assert meddling.lists == 1
            assert meddling.versions[-1] == following.cache.get(first).resource_version

    side.run(test)


def test_a_server_in_every_kind_of_trouble_ends_nothing(side: Side):
    async def test(world: World) -> None:
        name = world.gpu()
        await world.admin.create(AT, partition(name))
        meddling = await world.meddling()
        meddling.answers = [
            (429, {"Retry-After": "1"}, {"message": "too many requests"}),
            (500, {}, {"message": "leader changed"}),
            (403, {}, {"message": "not yet"}),
            ConnectionRefusedError("refused"),
            60.0,
        ]
        meddling.refused = [{"code": 429, "message": "too many watches"}, {"code": 500, "message": "unwell"}]
        async with world.cluster(timing=replace(QUICK, answer_s=0.5), transport=meddling) as cluster:
            following = cluster.follow(PARTITIONS, nowhere)
            await world.until(lambda: following.trouble)
            assert "429" in following.trouble
            await following.wait_synced()
            await world.until(lambda: meddling.watches >= 3)
            await world.until(lambda: not meddling.refused)
            late = world.gpu()
            await world.admin.create(AT, partition(late))
            await world.until(lambda: following.cache.get(late))

    side.run(test)


def test_all_is_listed_again_from_time_to_time_even_if_nothing_seems_wrong(side: Side):
    async def test(world: World) -> None:
        meddling = await world.meddling()
        heard = Heard(world)
        async with world.cluster(timing=replace(QUICK, resync_s=0.5), transport=meddling) as cluster:
            following = cluster.follow(PARTITIONS, heard.changed, heard.listed)
            await following.wait_synced()
            await world.until(lambda: heard.lists >= 3)
            assert meddling.lists >= 3

    side.run(test)


def test_a_partition_is_read_whole(side: Side):
    async def test(world: World) -> None:
        name = world.gpu()
        spec = {"desired": desired(), "assignment": {"id": "0123456789abcdef", "gpus": 8}}
        await world.admin.create(AT, partition(name, **spec))
        status = {
            "phase": "WaitingForIdle",
            "reason": "InUse",
            "message": "held",
            "observedGeneration": 1,
            "board": BOARD,
            "observed": OBSERVED,
            "conditions": [condition("Ready", "False", "InUse")],
            "victims": [{"namespace": "default", "name": "p", "uid": "u"}],
            "blockers": [{"reason": "InUse", "pid": 7}],
            "blockersLeftOut": 2,
            "lastTransition": {"id": "t1", "startedAt": NOW, "result": "RolledBack"},
        }
        body = {"apiVersion": API, "kind": "GPUPartition", "metadata": {"name": name}, "status": status}
        await world.admin.apply(f"{AT}/{name}/status", body, "agent", True)
        async with world.cluster() as cluster:
            seen = await cluster.get(PARTITIONS, name)
        value, said = seen.value, seen.value.status
        wish = value.spec.desired
        place = GpuInstance("3g.40gb", Placement(4, 4))
        assert (seen.name, seen.generation, seen.deleting) == (name, 1, False)
        assert (value.name, value.uid, value.generation) == (name, seen.uid, 1)
        assert (value.spec.node_name, value.spec.node_uid) == ("node-a", UID)
        assert wish.instances == (InstanceRule(profile="3g.40gb"), InstanceRule(memory_gb=10, count=2))
        assert (wish.plan.generation, wish.on_failure, wish.drift) == (4, "Rollback", "Correct")
        assert value.spec.assignment == Assignment(id="0123456789abcdef", gpus=8)
        assert (said.phase, said.reason, said.message) == ("WaitingForIdle", "InUse", "held")
        assert ([b.pid for b in said.blockers], said.blockers_left_out) == ([7], 2)
        assert said.victims == (Pod(namespace="default", name="p", uid="u"),)
        assert (said.last_transition.id, said.last_transition.result) == ("t1", "RolledBack")
        assert said.board.driver == "570.86.15"
        assert value.says("Ready") == Condition(**condition("Ready", "False", "InUse"))
        assert value.says("Assigned") is None
        assert value.owned == frozenset()
        assert (value.gpu.index, value.gpu.model, value.gpu.resetless) == (3, "NVIDIA A100-SXM4-80GB", False)
        assert value.gpu.layout == Layout(True, frozenset({place}))
        assert value.gpu.busy == {place}
        assert value.gpu.board.profile("3g.40gb").placements == (Placement(0, 4), Placement(4, 4))

    side.run(test)


def test_equal_boards_of_different_gpus_are_one_object(side: Side):
    async def test(world: World) -> None:
        node, names = world.name("node"), [world.gpu(), world.gpu()]
        for name in names:
            await world.admin.create(AT, partition(name, node))
            body = {"apiVersion": API, "kind": "GPUPartition", "metadata": {"name": name}}
            body["status"] = {"board": BOARD, "observed": OBSERVED}
            await world.admin.apply(f"{AT}/{name}/status", body, "agent", True)
        async with world.cluster() as cluster:
            first, second = await cluster.list(PARTITIONS, Where(fields=f"spec.nodeName={node}"))
            assert first.value.gpu.board is second.value.gpu.board

    side.run(test)


def test_a_plan_is_read_as_the_file_would_be(side: Side):
    async def test(world: World) -> None:
        name = world.name("plan")
        body = plan(name, priority=3, paused=True)
        body["metadata"]["annotations"] = {"migd.dev/approved": "abc", "example.com/other": "x"}
        await world.admin.create("/apis/migd.dev/v1alpha1/gpupartitionplans", body)
        async with world.cluster() as cluster:
            seen = await cluster.get(PLANS, name)
        assert (seen.value.plan.name, seen.value.plan.spec.priority, seen.value.plan.spec.paused) == (name, 3, True)
        assert (seen.value.status, seen.annotations) == (PlanStatus(), {"migd.dev/approved": "abc"})

    side.run(test)


def test_what_is_not_there_is_none_and_what_cannot_be_asked_is_an_error(side: Side):
    async def test(world: World) -> None:
        async with world.cluster() as cluster:
            assert await cluster.get(PARTITIONS, world.gpu()) is None
        async with world.cluster(transport=await world.side.powerless()) as cluster:
            with pytest.raises(DeniedError, match="gpupartitions"):
                await cluster.get(PARTITIONS, "gpu-x")
        meddling = await world.meddling()
        meddling.answers = [ConnectionRefusedError("refused"), (429, {"Retry-After": "7"}, {"message": "later"}), 60.0]
        async with world.cluster(timing=replace(QUICK, answer_s=0.5), transport=meddling) as cluster:
            for said, retry_after_s in (("refused", 1.0), ("later", 7.0), ("no answer within 0.5 s", 1.0)):
                with pytest.raises(UnavailableError, match=said) as failed:
                    await cluster.list(PARTITIONS)
                assert failed.value.retry_after_s == retry_after_s
                assert isinstance(failed.value, KubeError)

    side.run(test)


def test_many_watches_leave_room_for_requests(side: Side):
    async def test(world: World) -> None:
        name = world.gpu()
        await world.admin.create(AT, partition(name))
        async with world.cluster() as cluster:
            for _ in range(30):
                await cluster.follow(PARTITIONS, nowhere).wait_synced()
            assert await cluster.get(PARTITIONS, name)

    side.run(test)
