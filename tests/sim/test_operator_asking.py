"""`migd-operator preview`: GPU by GPU what the plan's status tells in groups, and nothing is written for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_worlds import World, played

from migd.kube.cluster import ApiCluster, Identity
from migd.mig.geometry import Counts
from migd.plans.plan import Plan, plan_of
from migd_operator.asking import CHANGES, DONE, REFUSED, USAGE, AskingError, Detail, details, exit_code, table
from migd_operator.program import main

HALVES = {"profile": "3g.40gb", "count": 2}
ONES = {"profile": "1g.10gb", "count": 7}


async def asked(world: World, name: str, given: Plan | None = None) -> tuple[Detail, ...]:
    before = len(world.server.requests)
    known = Identity("asking", "migd.dev/asking", "asking")
    async with ApiCluster(world.server.transport("asking"), known, world.server.now) as cluster:
        found = await details(cluster, name, given)
    assert not any(request.writes for request in world.server.requests[before:])
    return found


def number(counts: Counts) -> int:
    return sum(n for _, n in counts)


def test_the_details_add_up_to_the_preview_in_the_status():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb", "3g.40gb", None)
        world.add_node("n2", "3g.40gb 3g.40gb")
        world.plan("p", HALVES, paused=True, foreignInstances="Adopt")
        async with world.operator():
            await world.until(lambda: world.status("p").get("preview"))
        found = await asked(world, "p")
        assert [(one.node, one.gpu) for one in found] == [("n1", 0), ("n1", 1), ("n1", 2), ("n2", 0)]
        totals = world.status("p")["preview"]["totals"]
        assert totals["gpus"] == sum(one.judged.changes for one in found) == 3
        for part in ("keep", "destroy", "create"):
            assert totals[part] == sum(number(getattr(one.judged, part)) for one in found)
        heads, *rows = table(found).splitlines()
        assert heads.split() == [
            "NODE",
            "GPU",
            "FROM",
            "KEEP",
            "DESTROY",
            "CREATE",
            "EVICT",
            "MIG",
            "REASON",
            "MESSAGE",
        ]
        assert rows[0].split() == ["n1", "0", "7g.80gb", "7g.80gb", "2×3g.40gb"]
        assert rows[2].split() == ["n1", "2", "MIG", "off", "2×3g.40gb", "Enable", "reset"]
        assert exit_code(found) == CHANGES
        assert exit_code(found[3:]) == DONE

    played(story)


def test_a_plan_is_told_before_it_is_applied_and_so_is_what_it_would_clash_with():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES, paused=True)
        rules = [{"gpus": {"all": True}, "instances": [ONES]}]
        kind = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan"}

        def of(name: str, **spec: object) -> Plan:
            return plan_of({**kind, "metadata": {"name": name}, "spec": {"nodeSelector": {}, "rules": rules, **spec}})

        (edited,) = await asked(world, "p", of("p"))
        assert edited.judged.create == (("1g.10gb", 7),)
        (clash,) = await asked(world, "q", of("q"))
        assert clash.judged.reason == "Conflict"
        assert "plans p and q both want this GPU" in clash.judged.message
        (wins,) = await asked(world, "q", of("q", priority=1))
        assert wins.judged.create == (("1g.10gb", 7),)
        assert await asked(world, "p") != (wins,)

    played(story)


def test_what_can_never_be_is_refused_with_what_would_fit():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES, {"profile": "1g.10gb"})
        found = await asked(world, "p")
        assert exit_code(found) == REFUSED
        assert "Nearest that fits: 2×3g.40gb" in table(found)

    played(story)


def test_a_plan_that_is_not_there_is_named():
    async def story(world: World) -> None:
        with pytest.raises(AskingError, match="plan p is not there"):
            await asked(world, "p")

    played(story)


@pytest.mark.parametrize("words", [[], ["p", "-f", "{plan}"], ["--nonsense"]])
def test_the_command_asks_for_one_plan(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.yaml"
    path.write_text((Path(__file__).parents[2] / "examples/plans/inference.yaml").read_text())
    with pytest.raises(SystemExit) as ended:
        main(["preview", *(word.format(plan=path) for word in words)])
    assert ended.value.code == USAGE
    assert "migd-operator preview" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "none.yaml"), ("rules: [", "plan.yaml"), ("version: v1\nmig-configs: {a: []}\n", "holds no")],
)
def test_a_file_that_holds_no_plan_is_named(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / ("plan.yaml" if text else "none.yaml")
    if text:
        path.write_text(text)
    assert main(["preview", "-f", str(path), "--kubeconfig", str(tmp_path / "kubeconfig")]) == USAGE
    assert said in capsys.readouterr().err


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["preview", "p", "--kubeconfig", str(tmp_path / "kubeconfig")]) == USAGE
    assert str(tmp_path / "kubeconfig") in capsys.readouterr().err
