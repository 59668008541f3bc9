"""The operator at work on a simulated API server: from plan to turn, and what becomes of it."""

from __future__ import annotations

from fleet_worlds import World, played

ONES = {"profile": "1g.10gb", "count": 7}
HALVES = {"profile": "3g.40gb", "count": 2}


def test_a_plan_is_previewed_then_carried_out_and_then_ready():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb", None)
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: world.said("p", "Ready") == ("True", "AsWished"))

    world = played(story)
    written = [(r.verb, r.resource) for r in world.requests() if r.code < 300]
    first = written.index(("patch", "gpupartitions"))
    assert ("patch", "gpupartitionplans/status") in written[:first]
    shown = next(r.body for r in world.requests() if r.resource == "gpupartitionplans/status")
    assert shown["status"]["preview"]["totals"] == {
        "nodes": 1, "gpus": 2, "destroy": 1, "create": 4, "modeChanges": 1, "resets": 1,
    }  # fmt: skip
    assert {p.labels["migd.dev/plan"] for p in world.partitions()} == {"p"}
