"""The operator at work on a simulated API server: what becomes of plans, in which order, and who is told."""

from __future__ import annotations

import asyncio

from fleet_worlds import API, World, played
from unit.migd_operator.fleets import gpu_name

ONES = {"profile": "1g.10gb", "count": 7}
HALVES = {"profile": "3g.40gb", "count": 2}
WHOLE = {"profile": "7g.80gb"}


def ready(world: World, *plans: str) -> bool:
    return all(world.said(name, "Ready") == ("True", "AsWished") for name in plans or ("p",))


def test_a_plan_is_previewed_then_carried_out_and_then_ready():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb", None)
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: ready(world))

    world = played(story)
    written = [(r.verb, r.resource) for r in world.requests() if r.code < 300]
    first = written.index(("patch", "gpupartitions"))
    assert ("patch", "gpupartitionplans/status") in written[:first]
    shown = next(r.body for r in world.requests() if r.resource == "gpupartitionplans/status")
    assert shown["status"]["preview"]["totals"] == {
        "nodes": 1, "gpus": 2, "destroy": 1, "create": 4, "modeChanges": 1, "resets": 1,
    }  # fmt: skip
    assert {p.labels["migd.dev/plan"] for p in world.partitions()} == {"p"}
    assert {p.labels["migd.dev/node"] for p in world.partitions()} == {"n1"}
    assert [(kind, reason, note.partition(":")[0]) for kind, reason, note in world.events()] == [
        ("Normal", "Valid", "accepted"),
        ("Normal", "Assigned", "node n1 has its turn"),
        ("Normal", "AsWished", "finished"),
    ]


def test_a_plan_whose_status_cannot_be_written_starts_nothing_and_stops_no_other():
    async def story(world: World) -> None:
        world.server.policy = lambda r: "no" if (r.resource, r.name) == ("gpupartitionplans/status", "bad") else ""
        for node, pool in (("n1", "bad"), ("n2", "good")):
            world.add_node(node, "7g.80gb", labels={"pool": pool})
            world.plan(pool, HALVES, nodeSelector={"matchLabels": {"pool": pool}})
        async with world.operator():
            await world.until(lambda: ready(world, "good"))
            await asyncio.sleep(60)
            assert world.started() == {"n2"}
            tried = [r for r in world.requests() if r.name == "bad"]
            assert 2 <= len(tried) <= 6  # every 30 s
            world.server.policy = lambda _request: ""
            await world.until(lambda: ready(world, "bad"), 60)

    played(story)


def test_a_restart_of_everything_writes_nothing_beyond_leases():
    async def story(world: World) -> None:
        for k in range(4):
            world.add_node(f"n{k}", "7g.80gb", None)
        world.plan("p", HALVES)
        world.plan("waits", ONES, priority=-1)
        async with world.operator("a"):
            await world.until(lambda: ready(world))
            await asyncio.sleep(5)
        world.kept.discard("n3")
        await asyncio.sleep(100)  # nobody watches meanwhile
        async with world.operator("b"):
            await asyncio.sleep(170)
        assert world.requests("b") == []
        assert world.requests("b", leases=True)

    played(story)


def test_a_paused_plan_shows_its_preview_and_backs_out_of_what_has_not_begun():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES, paused=True)
        async with world.operator():
            await world.until(lambda: world.said("p", "Progressing") == ("False", "Paused"))
            assert world.status("p")["preview"]["totals"]["create"] == 2
            assert world.assigned() == {gpu_name("n1", 0): ("False", "Paused")}
            world.phase = lambda _node: "WaitingForIdle"
            world.plan("p", HALVES, paused=False)
            await world.until(lambda: world.partitions()[0].status.phase == "WaitingForIdle")
            world.plan("p", HALVES, paused=True)
            await world.until(lambda: not world.started())
            world.plan("p", HALVES, paused=False)
            await world.until(lambda: world.partitions()[0].status.phase == "WaitingForIdle")
            world.phase = lambda _node: "Changing"
            await world.until(lambda: world.partitions()[0].status.phase == "Changing")
            world.plan("p", HALVES, paused=True)
            await asyncio.sleep(30)
            assert world.started() == {"n1"}  # after the first effect it finishes
            world.phase = lambda _node: "Ready"
            await world.until(lambda: world.partitions()[0].status.phase == "Ready")
            world.plan("p", HALVES, paused=False)
            await world.until(lambda: ready(world))
        taken = [note for _, reason, note in world.events() if reason == "Paused" and "its turn no more" in note]
        assert len(taken) == 1

    played(story)


def test_an_edit_is_carried_out_anew_and_a_deleted_plan_leaves_layouts_and_no_wish():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: ready(world))
            world.plan("p", ONES)
            await world.until(lambda: world.said("p", "Ready")[0] == "False")
            await world.until(lambda: ready(world))
            assert [e["generation"] for e in world.status("p")["history"]] == [2, 1]
            assert world.partitions()[0].status.observed.summary == "7×1g.10gb"
            world.delete_plan("p")
            await world.until(lambda: world.partitions()[0].spec.desired is None)
            await asyncio.sleep(10)
            (left,) = world.partitions()
            assert (left.spec.assignment, left.status.observed.summary) == (None, "7×1g.10gb")
            assert "migd.dev/plan" not in left.labels

    played(story)


def test_what_cannot_be_is_refused_with_the_nearest_that_fits_and_told_once():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", {"profile": "3g.40gb", "count": 3})
        async with world.operator():
            await world.until(lambda: world.said("p", "Accepted") == ("False", "Infeasible"))
            await asyncio.sleep(10)
        assert not world.started()
        assert world.said("p", "Stalled") == ("True", "Infeasible")
        assert "2×3g.40gb" in world.status("p")["message"]
        told = [(kind, reason) for kind, reason, _ in world.events()]
        assert told == [("Warning", "Infeasible")]

    played(story)


def test_plans_of_equal_priority_conflict_on_their_gpu_only():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb", "7g.80gb")
        first = {"gpus": {"indices": [0]}, "instances": [HALVES]}
        world.plan("a", rules=[first])
        world.plan("b", HALVES)
        async with world.operator():
            await world.until(lambda: world.assigned().get(gpu_name("n1", 1)) == ("True", "Assigned"))
            assert world.assigned()[gpu_name("n1", 0)] == ("False", "Conflict")
            await world.until(lambda: world.said("a", "Stalled") == ("True", "Conflict"))
            world.plan("b", HALVES, priority=1)
            await world.until(lambda: ready(world, "b"))
            assert world.said("a", "Ready") == ("False", "Waiting")

    played(story)


def test_a_plan_that_is_stored_but_not_valid_is_told_so_and_moves_nothing():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: ready(world))
            before = world.partitions()[0].spec
            world.merge(f"{API}/gpupartitionplans/p", {"spec": {"disruption": {"policy": "Later"}}})
            await world.until(lambda: world.said("p", "Accepted") == ("False", "Invalid"))
            assert "Later" in world.status("p")["message"]
            await asyncio.sleep(30)
            assert world.partitions()[0].spec == before
            assert world.assigned() == {gpu_name("n1", 0): ("False", "Invalid")}
            world.merge(f"{API}/gpupartitionplans/p", {"spec": {"disruption": None}})
            await world.until(lambda: ready(world))

    played(story)


def test_a_meddled_spec_status_or_label_is_put_back():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: ready(world))
            (before,) = world.partitions()
            at = f"{API}/gpupartitions/{before.name}"
            world.merge(at, {"metadata": {"labels": {"migd.dev/plan": "other"}}, "spec": {"assignment": None}})
            world.merge(f"{API}/gpupartitionplans/p/status", {"status": {"reason": "Nonsense"}})
            await world.until(lambda: ready(world) and world.partitions()[0].spec == before.spec)
            assert world.partitions()[0].labels["migd.dev/plan"] == "p"
            assert "reason" not in world.status("p")

    played(story)
