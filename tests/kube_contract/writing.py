"""Writing: what differs and nothing else, what is ours and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from kube_contract.objects import API, BOARD, NOW, OBSERVED, condition, desired, partition
from kube_contract.reading import AT, nowhere
from kube_contract.worlds import Side, World
from migd.kube.errors import ConflictError, DeniedError, MissingError, RefusedError, UnavailableError
from migd.kube.partitions import PARTITIONS, PLANS
from migd.plans.plan import LabelSelector

ME, OTHER = "migd-operator", "migd-agent"
WISH = {"spec": {"desired": desired(), "assignment": {"id": "0123456789abcdef", "gpus": 2}}}
NO_WISH = {"spec": {}}


async def made(world: World) -> str:
    name = world.gpu()
    await world.admin.apply(f"{AT}/{name}", partition(name), OTHER, True)
    return name


def test_an_apply_makes_an_object_and_an_equal_one_writes_nothing_even_after_a_restart(side: Side):
    async def test(world: World) -> None:
        name = world.gpu()
        body = {"spec": partition(name)["spec"], "metadata": {"labels": {"migd.dev/node": "node-a"}}}
        async with world.cluster(OTHER) as cluster:
            stored = await cluster.apply(PARTITIONS, name, body, None)
            again = await cluster.apply(PARTITIONS, name, body, stored)
        assert again is stored
        assert len(world.writes(OTHER, name)) == 1
        async with world.cluster(OTHER) as restarted:
            seen = await restarted.get(PARTITIONS, name)
            await restarted.apply(PARTITIONS, name, body, seen)
            following = restarted.follow(PARTITIONS, nowhere)
            await following.wait_synced()
            await restarted.apply(PARTITIONS, name, body, following.cache.get(name))
        assert len(world.writes(OTHER, name)) == 1

    side.run(test)


def test_a_whole_wish_and_a_whole_status_are_known_again_after_a_restart(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        status = {
            "status": {
                "phase": "Ready",
                "board": BOARD,
                "observed": OBSERVED,
                "conditions": [condition("Ready"), condition("Drained", reason="NotNeeded")],
                "victims": [{"namespace": "default", "name": "p", "uid": "u"}],
            }
        }
        answer = {"podUID": "u", "code": 429, "podDisruptionBudgets": ["x", "y"], "at": NOW}
        answers = {"status": {"evictions": [answer], "conditions": [condition("Assigned")]}}
        for manager, body, subresource, writes in (
            (ME, WISH, "", 1),
            (OTHER, status, "status", 1),
            (ME, answers, "status", 2),
        ):
            for _ in range(2):
                async with world.cluster(manager) as cluster:
                    seen = await cluster.get(PARTITIONS, name)
                    await cluster.apply(PARTITIONS, name, body, seen, subresource)
                assert len(world.writes(manager, name)) == writes

    side.run(test)


def test_the_agents_victims_and_the_operators_answers_stand_side_by_side(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        victims = {"victims": [{"namespace": "default", "name": f"p-{uid}", "uid": uid} for uid in ("a", "b")]}
        refused = {"podUID": "a", "code": 429, "reason": "DrainBlocked", "podDisruptionBudgets": ["x"], "at": NOW}
        going = [{"podUID": uid, "code": 201, "at": NOW} for uid in ("a", "b")]
        async with world.cluster(OTHER) as agent, world.cluster(ME) as operator:
            await agent.apply(PARTITIONS, name, {"status": victims}, await agent.get(PARTITIONS, name), "status")
            seen = await operator.get(PARTITIONS, name)
            for answers in ([refused], going, going[1:]):
                said = {"evictions": answers, "conditions": [condition("Assigned")]}
                seen = await operator.apply(PARTITIONS, name, {"status": said}, seen, "status")
                assert [(e.pod_uid, e.code) for e in seen.value.status.evictions] == [
                    (answer["podUID"], answer["code"]) for answer in answers
                ]
                assert [pod.uid for pod in seen.value.status.victims] == ["a", "b"]
            fewer = {"status": {"victims": victims["victims"][1:]}}
            told = await agent.apply(PARTITIONS, name, fewer, await agent.get(PARTITIONS, name), "status")
            assert [pod.uid for pod in told.value.status.victims] == ["b"]
            assert [answer.pod_uid for answer in told.value.status.evictions] == ["b"]

    side.run(test)


def test_what_is_left_out_goes_and_what_others_own_stays(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        async with world.cluster(ME) as cluster:
            seen = await cluster.apply(PARTITIONS, name, WISH, await cluster.get(PARTITIONS, name))
            assert seen.value.spec.assignment is not None
            assert seen.generation == 2
            without_turn = {"spec": {"desired": desired()}}
            seen = await cluster.apply(PARTITIONS, name, without_turn, seen)
            assert (seen.value.spec.assignment, seen.value.spec.desired.summary) == (None, "3g.40gb 2×1g.10gb")
            seen = await cluster.apply(PARTITIONS, name, NO_WISH, seen)
            assert (seen.value.spec.desired, seen.value.spec.node_name, seen.generation) == (None, "node-a", 4)
            writes = len(world.writes(ME, name))
            await cluster.apply(PARTITIONS, name, NO_WISH, seen)
            assert len(world.writes(ME, name)) == writes

    side.run(test)


def test_what_somebody_else_wrote_over_ours_is_seen_and_taken_back(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        async with world.cluster(ME) as cluster:
            await cluster.apply(PARTITIONS, name, WISH, await cluster.get(PARTITIONS, name))
            patch = [{"op": "replace", "path": "/spec/assignment/gpus", "value": 7}]
            await world.admin.patch(f"{AT}/{name}", patch)
            seen = await cluster.get(PARTITIONS, name)
            assert seen.value.spec.assignment.gpus == 7
            seen = await cluster.apply(PARTITIONS, name, WISH, seen)
            assert seen.value.spec.assignment.gpus == 2

    side.run(test)


def test_two_managers_share_one_status_without_force(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        agents = {"status": {"phase": "Ready", "conditions": [condition("Ready"), condition("Applied")]}}
        operators = {"status": {"conditions": [condition("Assigned", reason="Valid"), condition("AgentAlive")]}}
        async with world.cluster(OTHER) as agent, world.cluster(ME) as operator:
            seen = await agent.get(PARTITIONS, name)
            await agent.apply(PARTITIONS, name, agents, seen, "status", force=False)
            seen = await operator.get(PARTITIONS, name)
            seen = await operator.apply(PARTITIONS, name, operators, seen, "status", force=False)
            assert {c.type for c in seen.value.status.conditions} == {"Ready", "Applied", "Assigned", "AgentAlive"}
            fewer = {"status": {"conditions": [condition("Assigned", reason="Valid")]}}
            seen = await operator.apply(PARTITIONS, name, fewer, seen, "status", force=False)
            assert {c.type for c in seen.value.status.conditions} == {"Ready", "Applied", "Assigned"}
            assert (seen.value.status.phase, seen.generation) == ("Ready", 1)
            theirs = {"status": {"conditions": [condition("Ready", "False", "InUse")]}}
            with pytest.raises(ConflictError, match="conflict"):
                await operator.apply(PARTITIONS, name, theirs, seen, "status", force=False)
            seen = await agent.get(PARTITIONS, name)
            writes = len(world.writes(OTHER, name))
            await agent.apply(PARTITIONS, name, agents, seen, "status", force=False)
            assert len(world.writes(OTHER, name)) == writes, "the operator's entries are no difference for the agent"

    side.run(test)


def test_a_status_does_not_touch_the_spec_nor_a_spec_the_status(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        async with world.cluster(OTHER) as cluster:
            seen = await cluster.get(PARTITIONS, name)
            both = {"spec": {"nodeName": "elsewhere"}, "status": {"phase": "Idle"}}
            await world.admin.apply(
                f"{AT}/{name}/status",
                {"apiVersion": API, "kind": "GPUPartition", "metadata": {"name": name}, **both},
                "x",
                True,
            )
            seen = await cluster.get(PARTITIONS, name)
            assert (seen.value.spec.node_name, seen.value.status.phase, seen.generation) == ("node-a", "Idle", 1)
            await world.admin.merge(f"{AT}/{name}", {"status": {"phase": "Lost"}})
            assert (await cluster.get(PARTITIONS, name)).value.status.phase == "Idle"

    side.run(test)


def test_an_object_that_went_or_is_another_is_not_made_again(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(PARTITIONS, name)
            await world.admin.delete(f"{AT}/{name}", seen.uid)
            for subresource, body in (("", WISH), ("status", {"status": {"phase": "Idle"}})):
                with pytest.raises((ConflictError, MissingError)):
                    await cluster.apply(PARTITIONS, name, body, seen, subresource)
            assert await cluster.get(PARTITIONS, name) is None
            await world.admin.create(AT, partition(name))
            for subresource, body in (("", WISH), ("status", {"status": {"phase": "Idle"}})):
                with pytest.raises(ConflictError):
                    await cluster.apply(PARTITIONS, name, body, seen, subresource)
            await cluster.delete(PARTITIONS, seen)
            found = await cluster.get(PARTITIONS, name)
            assert (found.value.spec.desired, found.value.status.phase) == (None, "Idle"), (
                "a status's uid is not looked at"
            )
            await cluster.delete(PARTITIONS, found, dry_run=True)
            assert await cluster.get(PARTITIONS, name) == found, "it was only asked whether it would be done"
            await cluster.delete(PARTITIONS, found)
            assert await cluster.get(PARTITIONS, name) is None
            await cluster.delete(PARTITIONS, found)  # gone is well

    side.run(test)


def test_our_own_write_is_in_the_cache_before_the_watch_tells_of_it(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        meddling = await world.meddling(ME)
        meddling.gate.clear()
        async with world.cluster(ME, transport=meddling) as cluster:
            told: list[str] = []
            following = cluster.follow(PARTITIONS, lambda change: told.append(change.key))
            await following.wait_synced()
            told.clear()
            await cluster.apply(PARTITIONS, name, WISH, following.cache.get(name))
            assert following.cache.get(name).value.spec.desired.plan.name == "inference"
            assert told == [name]
            meddling.gate.set()
            await world.admin.merge(f"{AT}/{name}", {"metadata": {"labels": {"x": "y"}}})
            await world.until(lambda: len(told) >= 2)
            assert told == [name, name], "the watch tells of our write again, and that is no change"

    side.run(test)


def test_what_the_api_server_will_never_take_says_so(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(PARTITIONS, name)
            with pytest.raises(RefusedError, match="assignment goes with desired"):
                await cluster.apply(
                    PARTITIONS, name, {"spec": {"assignment": {"id": "0123456789abcdef", "gpus": 1}}}, seen
                )
            with pytest.raises(RefusedError, match="nodeName"):
                await cluster.apply(PARTITIONS, world.gpu(), {"spec": {"nodeUID": "u"}}, None)
        async with world.cluster("nobody", transport=await side.powerless()) as cluster:
            with pytest.raises(DeniedError):
                await cluster.apply(PARTITIONS, name, WISH, seen)

    side.run(test)


def test_a_write_whose_answer_was_lost_is_found_done_and_not_written_again(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        meddling = await world.meddling(ME)
        async with world.cluster(ME, transport=Deaf(meddling)) as cluster:
            seen = await cluster.get(PARTITIONS, name)
            with pytest.raises(UnavailableError):
                await cluster.apply(PARTITIONS, name, WISH, seen)
            seen = await cluster.get(PARTITIONS, name)
            await cluster.apply(PARTITIONS, name, WISH, seen)
        assert len(world.writes(ME, name)) == 1

    side.run(test)


class Deaf:
    """A transport that loses the answers to writes."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.watch = inner.watch

    async def request(self, method, path, query, body, content_type):
        answer = await self._inner.request(method, path, query, body, content_type)
        if method != "GET":
            raise ConnectionResetError("connection reset by peer")
        return answer


async def planned(world: World) -> str:
    name = world.name("plan")
    rules = [{"gpus": {"all": True}, "mig": "Disabled"}]
    document = {
        "apiVersion": API,
        "kind": "GPUPartitionPlan",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {}, "rules": rules},
    }
    await world.admin.create("/apis/migd.dev/v1alpha1/gpupartitionplans", document)
    return name


def test_a_plan_status_is_written_once(side: Side):
    async def test(world: World) -> None:
        name = await planned(world)
        ready = {**condition("Ready"), "observedGeneration": 1}
        body = {"status": {"observedGeneration": 1, "conditions": [ready]}}
        for _ in range(2):
            async with world.cluster(ME) as cluster:
                seen = await cluster.get(PLANS, name)
                seen = await cluster.apply(PLANS, name, body, seen, "status")
                assert seen.value.status.observed_generation == 1
        assert len(world.writes(ME, name)) == 1

    side.run(test)


def test_writes_at_once_all_arrive(side: Side):
    async def test(world: World) -> None:
        names = [await made(world) for _ in range(5)]
        async with world.cluster(ME) as cluster:
            seen = [await cluster.get(PARTITIONS, name) for name in names]
            done = await asyncio.gather(
                *(cluster.apply(PARTITIONS, n, WISH, s) for n, s in zip(names, seen, strict=True))
            )
            assert all(stored.value.spec.assignment.gpus == 2 for stored in done)

    side.run(test)


def test_an_annotation_of_ours_is_taken_off_whoever_wrote_it_and_only_as_it_was_seen(side: Side):
    async def test(world: World) -> None:
        name, retry, path = await made(world), "migd.dev/retry", f"{AT}/{{}}"
        async with world.cluster(OTHER) as cluster:
            bare = await cluster.get(PARTITIONS, name)
            assert bare is not None
            assert await cluster.without_annotation(PARTITIONS, bare, retry) is bare
            await world.admin.merge(path.format(name), {"metadata": {"annotations": {retry: "1", "else": "x"}}})
            seen = await cluster.get(PARTITIONS, name)
            assert seen is not None
            await world.admin.merge(path.format(name), {"metadata": {"annotations": {retry: "2"}}})
            with pytest.raises(ConflictError):
                await cluster.without_annotation(PARTITIONS, seen, retry)
            again = await cluster.get(PARTITIONS, name)
            assert again is not None
            assert again.annotations[retry] == "2"
            after = await cluster.without_annotation(PARTITIONS, again, retry)
            assert retry not in after.annotations
        document = await world.admin.get(path.format(name))
        assert document["metadata"]["annotations"] == {"else": "x"}

    side.run(test)


def test_a_mapping_that_an_apply_empties_is_refused(side: Side):
    """It becomes null. One that was empty before is taken."""

    async def test(world: World) -> None:
        name = world.name("plan")
        spec = {"nodeSelector": {}, "rules": [{"gpus": {"all": True}, "mig": "Disabled"}]}
        document = {"apiVersion": API, "kind": "GPUPartitionPlan", "metadata": {"name": name}, "spec": spec}
        await world.admin.create("/apis/migd.dev/v1alpha1/gpupartitionplans", document)
        async with world.cluster(ME) as operator:
            seen = await operator.get(PLANS, name)
            for totals in ({}, {"gpus": 6}):
                seen = await operator.apply(PLANS, name, previewed(totals), seen, "status")
            with pytest.raises(RefusedError, match="null"):
                await operator.apply(PLANS, name, previewed({}), seen, "status")
            seen = await operator.apply(PLANS, name, previewed({"nodes": 0}), seen, "status")
            assert seen.value.status.preview.totals.gpus == 0

    side.run(test)


def previewed(totals: dict[str, int]) -> dict[str, object]:
    """A plan's status with a preview that has these totals."""
    return {"status": {"preview": {"digest": "0" * 16, "observedGeneration": 1, "totals": totals}}}


def test_an_apply_that_names_the_version_it_was_decided_on_is_refused_for_any_other(side: Side):
    """So that a cache that is late cannot make a count smaller."""

    async def test(world: World) -> None:
        name = await planned(world)
        async with world.cluster(ME) as cluster:
            seen = await cluster.get(PLANS, name)
            status = {"observedGeneration": 1, "evictions": {"generation": 1, "evicted": 1, "pending": ["u", "v"]}}
            body = {"metadata": {"resourceVersion": seen.resource_version}, "status": status}
            counted = await cluster.apply(PLANS, name, body, seen, "status")
            assert counted.value.status.evictions.pending == ("u", "v")
            less = {**status, "evictions": {"generation": 1, "pending": ["w"]}}
            with pytest.raises(ConflictError):
                await cluster.apply(PLANS, name, {**body, "status": less}, seen, "status")
            body["metadata"] = {"resourceVersion": counted.resource_version}
            assert await cluster.apply(PLANS, name, body, counted, "status") is counted, "nothing differs"
            after = await cluster.get(PLANS, name)
        assert after.value.status.evictions.evicted == 1
        assert after.resource_version == counted.resource_version

    side.run(test)


def test_a_wish_that_protects_some_pods_is_known_again(side: Side):
    async def test(world: World) -> None:
        name = await made(world)
        wish = desired()
        wish["disruption"]["protect"] = {
            "matchLabels": {"tier": "gold", "app": "a"},
            "matchExpressions": [{"key": "keep", "operator": "In", "values": ["yes"]}],
        }
        for _ in range(2):
            async with world.cluster(ME) as cluster:
                seen = await cluster.get(PARTITIONS, name)
                await cluster.apply(PARTITIONS, name, {"spec": {"desired": wish}}, seen)
            assert len(world.writes(ME, name)) == 1
        async with world.cluster(ME) as cluster:
            for protect in ({"matchLabels": {"tier": "gold"}}, {}, {"matchLabels": {"tier": "tin"}}, None):
                wish = desired(generation=wish["plan"]["generation"] + 1)
                del wish["disruption"]["protect"]
                if protect is not None:
                    wish["disruption"]["protect"] = protect
                seen = await cluster.get(PARTITIONS, name)
                await cluster.apply(PARTITIONS, name, {"spec": {"desired": wish}}, seen)
                there = (await cluster.get(PARTITIONS, name)).value.spec.desired.disruption.protect
                assert there == (None if protect is None else LabelSelector.model_validate(protect))

    side.run(test)
