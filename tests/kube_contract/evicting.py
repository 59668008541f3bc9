"""Evicting: who goes and who does not, and what the API server answers in each case."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kube_contract.objects import pod
from kube_contract.worlds import Json, Side, World
from migd.kube.budgets import BUDGETS, selects
from migd.kube.errors import (
    BudgetError,
    ConflictError,
    DeniedError,
    EndingError,
    MissingError,
    RefusedError,
    UnavailableError,
)
from migd.kube.pods import PODS, may_not_go
from migd.kube.stored import Interner, Stored, Where
from migd.plans.plan import LabelSelector

ME = "migd-operator"
IN = "default"
PODS_AT = f"/api/v1/namespaces/{IN}/pods"
BUDGETS_AT = f"/apis/policy/v1/namespaces/{IN}/poddisruptionbudgets"


async def running(
    world: World, name: str, app: str, *, phase: str = "Running", ready: bool = True, bound: bool = True, **spec: Any
) -> None:
    """A pod as its kubelet tells of it."""
    document = pod(name, world.name("node") if bound else "", labels={"app": app}, **spec.pop("metadata", {}))
    document["spec"] |= {"terminationGracePeriodSeconds": 30, **({} if bound else {"schedulerName": "none"}), **spec}
    await world.admin.create(PODS_AT, document)
    told: Json = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    await world.admin.merge(f"{PODS_AT}/{name}/status", {"status": told})


async def budget(world: World, app: str, least: Any = 1, **more: Any) -> str:
    """A budget over the pods of an app, once its controller has counted them."""
    name = world.name("budget")
    spec = {"minAvailable": least, "selector": {"matchLabels": {"app": app}}, **more}
    document = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": spec}
    await world.admin.create(BUDGETS_AT, document)
    await counted(world, name, lambda status: status.get("observedGeneration"))
    return name


async def counted(world: World, name: str, holds: Any) -> Json:
    """The status of a budget, once it holds what is waited for."""
    async with asyncio.timeout(20):
        while True:
            status: Json = (await world.admin.get(f"{BUDGETS_AT}/{name}")).get("status") or {}
            if holds(status):
                return status
            await asyncio.sleep(0.05)


async def seen(cluster: Any, name: str) -> Stored[Any]:
    found = await cluster.get(PODS, name, IN)
    assert found is not None
    return found


async def metadata_of(world: World, name: str) -> Json:
    found: Json = (await world.admin.get(f"{PODS_AT}/{name}"))["metadata"]
    return found


def test_an_eviction_that_is_accepted_has_the_pod_going_with_its_own_grace(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        async with world.cluster(ME) as cluster:
            found = await seen(cluster, name)
            assert not found.deleting
            await cluster.evict(found, None)
            assert (await seen(cluster, name)).deleting
            await cluster.evict(found, None)  # of a pod that is going: well too
        document = await world.admin.get(f"{PODS_AT}/{name}")
        assert document["metadata"]["deletionGracePeriodSeconds"] == 30
        target = next(c for c in document["status"]["conditions"] if c["type"] == "DisruptionTarget")
        assert (target["status"], target["reason"]) == ("True", "EvictionByEvictionAPI")
        wrote = world.writes(ME, name)
        assert [(w.verb, w.resource, w.code) for w in wrote] == [("create", "pods/eviction", 201)] * 2
        assert wrote[0].body["deleteOptions"] == {"preconditions": {"uid": found.uid}}

    side.run(test)


def test_a_grace_may_be_longer_than_the_pods_own_and_later_only_shorter(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        async with world.cluster(ME) as cluster:
            found = await seen(cluster, name)
            for asked, is_then in ((100, 100), (200, 100), (7, 7), (None, 7), (8, 7)):
                await cluster.evict(found, asked)
                assert (await metadata_of(world, name))["deletionGracePeriodSeconds"] == is_then
            await cluster.evict(found, 0)
            assert await cluster.get(PODS, name, IN) is None
            with pytest.raises(MissingError):
                await cluster.evict(found, None)

    side.run(test)


def test_another_pod_of_the_name_is_not_evicted(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        async with world.cluster(ME) as cluster:
            before = await seen(cluster, name)
            await world.admin.delete(f"{PODS_AT}/{name}", before.uid)
            await cluster.evict(before, 0)
            await running(world, name, name)
            with pytest.raises(ConflictError, match="UID"):
                await cluster.evict(before, None)
            assert not (await seen(cluster, name)).deleting

    side.run(test)


def test_a_budget_that_allows_none_refuses_names_itself_and_asks_for_no_wait(side: Side):
    async def test(world: World) -> None:
        name, app = world.name("pod"), world.name("app")
        await running(world, name, app)
        blocks = await budget(world, app)
        async with world.cluster(ME) as cluster:
            found = await seen(cluster, name)
            with pytest.raises(BudgetError) as refused:
                await cluster.evict(found, None)
            assert (refused.value.code, refused.value.several) == (429, False)
            assert refused.value.message == f"The disruption budget {blocks} needs 1 healthy pods and has 1 currently"
            other = Stored(name, IN, world.mark, "1", 0, False, {}, {}, found.value)
            with pytest.raises(BudgetError):
                await cluster.evict(other, None)  # the budget is looked at before the uid
            assert not (await seen(cluster, name)).deleting

    side.run(test)


def test_a_budget_lets_one_go_after_the_other_and_is_used_up_by_a_call_for_another_pod(side: Side):
    async def test(world: World) -> None:
        app = world.name("app")
        first, second, third = (world.name("pod") for _ in range(3))
        for name in (first, second, third):
            await running(world, name, app)
        lets = await budget(world, app, 1)
        assert (await counted(world, lets, lambda s: s["disruptionsAllowed"] == 2))["expectedPods"] == 3
        async with world.cluster(ME) as cluster:
            await cluster.evict(await seen(cluster, first), None)
            await counted(world, lets, lambda s: s["disruptionsAllowed"] == 1 and not s.get("disruptedPods"))
            found = await seen(cluster, second)
            other = Stored(second, IN, world.mark, "1", 0, False, {}, {}, found.value)
            with pytest.raises(ConflictError):
                await cluster.evict(other, None)
            used = await counted(world, lets, lambda s: s["currentHealthy"] == 1)
            assert used["disruptionsAllowed"] == 0
            assert set(used["disruptedPods"]) == {second}
            with pytest.raises(BudgetError):
                await cluster.evict(found, None)
            await cluster.evict(await seen(cluster, first), None)  # that is going needs no budget

    side.run(test)


def test_two_budgets_on_a_pod_refuse_it_whatever_they_allow(side: Side):
    async def test(world: World) -> None:
        name, app = world.name("pod"), world.name("app")
        await running(world, name, app)
        both = {await budget(world, app, 0), await budget(world, app, 0)}
        async with world.cluster(ME) as cluster:
            found = await seen(cluster, name)
            with pytest.raises(BudgetError) as refused:
                await cluster.evict(found, None)
            assert (refused.value.code, refused.value.several) == (500, True)
            listed = await cluster.list(BUDGETS, Where(namespace=IN))
            assert {b.name for b in listed if selects(b.value, found.value.labels)} == both

    side.run(test)


def test_a_budget_that_was_not_counted_yet_refuses_too(side: Side):
    async def test(world: World) -> None:
        name, app = world.name("pod"), world.name("app")
        await running(world, name, app)
        lets = await budget(world, app, 0)
        async with world.cluster(ME) as cluster:
            found = await seen(cluster, name)
            edited = {"spec": {"minAvailable": 1}}
            await world.admin.merge(f"{BUDGETS_AT}/{lets}", edited)
            with pytest.raises(BudgetError):  # by its controller's count or without it
                await cluster.evict(found, None)

    side.run(test)


@pytest.mark.parametrize(
    ("phase", "bound", "stays"), [("Pending", True, True), ("Pending", False, False), ("Succeeded", True, False)]
)
def test_pods_that_do_not_run_need_no_budget(side: Side, phase: str, bound: bool, stays: bool):
    async def test(world: World) -> None:
        name, app = world.name("pod"), world.name("app")
        await running(world, name, app, phase=phase, ready=False, bound=bound)
        await budget(world, app, 5)
        async with world.cluster(ME) as cluster:
            await cluster.evict(await seen(cluster, name), None)
            after = await cluster.get(PODS, name, IN)
            assert (after is not None and after.deleting) == stays

    side.run(test)


@pytest.mark.parametrize(("policy", "goes"), [(None, False), ("IfHealthyBudget", False), ("AlwaysAllow", True)])
def test_h13_b31_a_pod_that_crashes_over_and_over_is_held_by_its_budget_unless_that_always_lets_it(
    side: Side, policy: str | None, goes: bool
):
    async def test(world: World) -> None:
        app = world.name("app")
        crashing, well = world.name("pod"), world.name("pod")
        await running(world, crashing, app, ready=False)
        await running(world, well, app)
        holds = await budget(world, app, 2, **({"unhealthyPodEvictionPolicy": policy} if policy else {}))
        async with world.cluster(ME) as cluster:
            found = await seen(cluster, crashing)
            if goes:
                await cluster.evict(found, None)
            else:
                with pytest.raises(BudgetError, match=f"{holds} needs 2 healthy pods and has 1"):
                    await cluster.evict(found, None)
            assert (await seen(cluster, crashing)).deleting == goes

    side.run(test)


def test_a_crashing_pod_whose_siblings_are_enough_goes_and_uses_up_nothing(side: Side):
    async def test(world: World) -> None:
        app = world.name("app")
        crashing, well = world.name("pod"), world.name("pod")
        await running(world, crashing, app, ready=False)
        await running(world, well, app)
        holds = await budget(world, app, 1)
        async with world.cluster(ME) as cluster:
            await cluster.evict(await seen(cluster, crashing), None)
            status = await counted(world, holds, lambda s: s["currentHealthy"] == 1)
            assert not status.get("disruptedPods")
            with pytest.raises(BudgetError):
                await cluster.evict(await seen(cluster, well), None)

    side.run(test)


def test_a_share_of_pods_without_a_controller_allows_none(side: Side):
    async def test(world: World) -> None:
        name, app = world.name("pod"), world.name("app")
        await running(world, name, app)
        await budget(world, app, "50%")
        async with world.cluster(ME) as cluster:
            with pytest.raises(BudgetError, match="does not allow evicting pods currently"):
                await cluster.evict(await seen(cluster, name), None)

    side.run(test)


def test_a_share_is_of_what_the_controller_wants(side: Side):
    async def test(world: World) -> None:
        app = world.name("app")
        names = [world.name("pod") for _ in range(3)]
        for name in names:
            await running(world, name, app)
        path = f"/apis/apps/v1/namespaces/{IN}/replicasets"
        owner = await world.admin.create(path, replicas(app, 3))  # a real controller adopts the three by itself
        reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": app, "uid": owner["metadata"]["uid"]}
        for name in names:
            owned = {"ownerReferences": [{**reference, "controller": True, "blockOwnerDeletion": True}]}
            await world.admin.merge(f"{PODS_AT}/{name}", {"metadata": owned})
        holds = await budget(world, app, "60%")  # two of three
        status = await counted(world, holds, lambda s: s["disruptionsAllowed"])
        assert (status["expectedPods"], status["desiredHealthy"], status["currentHealthy"]) == (3, 2, 3)
        async with world.cluster(ME) as cluster:
            await cluster.evict(await seen(cluster, names[0]), None)
            with pytest.raises(BudgetError):
                await cluster.evict(await seen(cluster, names[1]), None)
        await world.admin.delete(f"{path}/{app}", owner["metadata"]["uid"])

    side.run(test)


def replicas(app: str, number: int) -> Json:
    """A ReplicaSet whose pods nobody schedules."""
    spec = pod("x")["spec"] | {"schedulerName": "none"}
    template = {"metadata": {"labels": {"app": app}}, "spec": spec}
    wanted = {"replicas": number, "selector": {"matchLabels": {"app": app}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": app}, "spec": wanted}


def test_in_a_namespace_that_is_being_deleted_nobody_can_be_evicted(side: Side):
    async def test(world: World) -> None:
        namespace, name = world.name("namespace"), world.name("pod")
        await world.admin.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        document = pod(name, world.name("node"), finalizers=["example.com/hold"])
        document["metadata"]["namespace"] = namespace
        path = f"/api/v1/namespaces/{namespace}"
        await until_made(world, f"{path}/pods", document)
        async with world.cluster(ME) as cluster:
            found = await cluster.get(PODS, name, namespace)
            assert found is not None
            await world.admin.delete(path, (await world.admin.get(path))["metadata"]["uid"])
            with pytest.raises(EndingError):
                await cluster.evict(found, None)
        await world.admin.merge(f"{path}/pods/{name}", {"metadata": {"finalizers": None}})

    side.run(test)


async def until_made(world: World, path: str, document: Json) -> None:
    """A real namespace takes pods once its ServiceAccount is there."""
    async with asyncio.timeout(20):
        while True:
            try:
                await world.admin.create(path, document)
            except DeniedError:
                await asyncio.sleep(0.1)
            else:
                return


def test_a_pod_with_a_finalizer_is_gone_only_without_it(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name, metadata={"finalizers": ["example.com/hold"]})
        async with world.cluster(ME) as cluster:
            await cluster.evict(await seen(cluster, name), 0)
            assert (await seen(cluster, name)).deleting
            await world.admin.merge(f"{PODS_AT}/{name}", {"metadata": {"finalizers": None}})
            assert await cluster.get(PODS, name, IN) is None

    side.run(test)


def test_who_has_no_rights_is_told_so_and_evicts_nobody(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        async with world.cluster(ME) as admin:
            found = await seen(admin, name)
        async with world.cluster(transport=await world.side.powerless()) as cluster:
            with pytest.raises(DeniedError) as denied:
                await cluster.evict(found, None)
            assert not isinstance(denied.value, EndingError)
        assert "deletionTimestamp" not in await metadata_of(world, name)

    side.run(test)


def test_b33_a_busy_api_server_is_no_budget_and_says_when_to_come_again(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        meddling = await world.meddling(ME)
        async with world.cluster(ME, transport=meddling) as cluster:
            found = await seen(cluster, name)
            meddling.answers = [(429, {"Retry-After": "7"}, {"message": "Too many requests, please try again later."})]
            with pytest.raises(UnavailableError) as busy:
                await cluster.evict(found, None)
            assert (busy.value.code, busy.value.retry_after_s) == (429, 7.0)
            await cluster.evict(found, None)
        assert [w.code for w in world.writes(ME, name)] == [201]

    side.run(test)


def test_an_eviction_whose_answer_is_lost_is_asked_for_once(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        meddling = await world.meddling(ME)
        async with world.cluster(ME, transport=meddling) as cluster:
            found = await seen(cluster, name)
            meddling.lost = 1
            with pytest.raises(UnavailableError):
                await cluster.evict(found, None)
            assert (await seen(cluster, name)).deleting
        assert [w.code for w in world.writes(ME, name)] == [201]

    side.run(test)


def test_an_eviction_that_makes_no_sense_is_refused(side: Side):
    async def test(world: World) -> None:
        name = world.name("pod")
        await running(world, name, name)
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "other", "namespace": IN}}
        with pytest.raises(RefusedError, match="name in URL"):
            await world.admin.create(f"{PODS_AT}/{name}/eviction", body)

    side.run(test)


def test_who_may_go_is_read_from_the_pod_as_the_api_server_has_it(side: Side):
    async def test(world: World) -> None:
        bare, owned, scratch = (world.name("pod") for _ in range(3))
        kept = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": world.mark, "controller": True}
        blocking = {**kept, "blockOwnerDeletion": True}
        document = pod(scratch, "", ownerReferences=[kept])
        document["spec"]["volumes"] = [{"name": "s", "emptyDir": {"sizeLimit": "1Gi"}}]
        gilded = pod(owned, "", ownerReferences=[blocking], labels={"tier": "gold"})
        # as the answer has them: of an owner that is not there, the garbage collector takes them away at once
        made = [await world.admin.create(PODS_AT, one) for one in (pod(bare, ""), gilded, document)]
        values = {one["metadata"]["name"]: PODS.parse(one, Interner()) for one in made}
        gold = LabelSelector(matchLabels={"tier": "gold"})
        assert "Unmanaged" in may_not_go(values[bare], None, ())
        assert may_not_go(values[bare], gold, ("Unmanaged",)) == ""
        assert values[owned].owner_uid == world.mark
        assert may_not_go(values[owned], None, ()) == ""
        assert "protect" in may_not_go(values[owned], gold, ())
        assert "EmptyDir" in may_not_go(values[scratch], None, ())
        assert may_not_go(values[scratch], None, ("EmptyDir",)) == ""

    side.run(test)


@pytest.mark.parametrize(
    "selector",
    [
        {},
        {"matchLabels": {"app": "a"}},
        {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}]},
        {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["b"]}]},
        {"matchExpressions": [{"key": "tier", "operator": "Exists"}]},
        {"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}], "matchLabels": {"app": "a"}},
    ],
)
def test_a_budget_has_the_pods_that_we_say_it_has(side: Side, selector: Json):
    """By what its controller counts: we only name it."""

    async def test(world: World) -> None:
        namespace = world.name("namespace")
        await world.admin.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        labelled: list[Json] = [{"app": "a"}, {"app": "b", "tier": "1"}, {"tier": "2"}, {}]
        for number, labels in enumerate(labelled):
            document = pod(f"p{number}", world.name("node"), labels=labels)
            document["metadata"]["namespace"] = namespace
            await until_made(world, f"/api/v1/namespaces/{namespace}/pods", document)
        at = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
        spec = {"minAvailable": 1, "selector": selector}
        document = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "b"}, "spec": spec}
        await world.admin.create(at, document)
        async with world.cluster(ME) as cluster:
            found = await cluster.get(BUDGETS, "b", namespace)
            assert found is not None
            ours = sum(selects(found.value, labels) for labels in labelled)
            async with asyncio.timeout(20):
                while (await world.admin.get(f"{at}/b")).get("status", {}).get("expectedPods") != ours:
                    await asyncio.sleep(0.05)
        path = f"/api/v1/namespaces/{namespace}"
        await world.admin.delete(path, (await world.admin.get(path))["metadata"]["uid"])

    side.run(test)
