"""A real `migd apply` process, killed with SIGKILL at every point that matters; the next command converges.

Kill points are not listed by hand: each story is played once without a kill, and every save of the record, every
mutating call, before and after it, and one read after each kind of operation becomes a point. An operation of the
agent's without a kill point fails the suite. Left out: crashes in combination, which test_crashes.py has.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, get_args

import pytest
from forked import Forked, forking
from worlds import World, orphans, serials

from migd.agent.effects import Pause
from migd.agent.running import Progress, look, run
from migd.agent.store import FileStore, decode
from migd.cli.exits import Exit
from migd.cli.inputs import Given, ordered
from migd.cli.machines import beside
from migd.cli.main import run as command
from migd.mig.operations import Operation
from migd.plans.plan import Plan
from migd.plans.reading import read
from migd.sim.faults import Fault
from migd.sim.host import SimHost

MUTATING: Final = ("record.save", "reset", "nvmlDeviceSetMigMode", "Create", "Destroy")


@dataclass(frozen=True)
class Story:
    """A machine cut by `first`, what holds it, and the plan whose apply is killed. ends: the exit code unkilled."""

    name: str
    spec: str
    first: str
    then: str
    held: tuple[tuple[int, int], ...] = ()
    vm: bool = False
    ends: Exit = Exit.DONE


def plan_text(*rules: str) -> str:
    body = "\n".join(f"  - {rule}" for rule in rules)
    return (
        "apiVersion: migd.dev/v1alpha1\nkind: GPUPartitionPlan\nmetadata: {name: killed}\n"
        f"spec:\n  nodeSelector: {{}}\n  rules:\n{body}\n"
    )


def cut(gpus: str, **counts: int) -> str:
    wanted = ", ".join(f"{{profile: {name.replace('_', '.')[1:]}, count: {n}}}" for name, n in counts.items())
    return f"{{gpus: {{{gpus}}}, instances: [{wanted}]}}"


OFF: Final = "{gpus: {all: true}, mig: Disabled}"
STORIES: Final = (
    Story("enable", "a100-40gb", plan_text(OFF), plan_text(cut("all: true", _3g_20gb=1, _1g_5gb=1))),
    Story(
        "recut around a busy instance",
        "a100-40gb",
        plan_text(cut("all: true", _3g_20gb=1, _2g_10gb=1, _1g_5gb=2)),
        plan_text(cut("all: true", _1g_5gb=7)),
        held=((0, 3),),
    ),
    Story("disable", "h100-sxm-80gb", plan_text(cut("all: true", _3g_40gb=2)), plan_text(OFF)),
    Story(
        "two GPUs",
        "2xa30",
        plan_text(cut("indices: [0]", _2g_12gb=2), OFF),
        plan_text(cut("indices: [0]", _1g_6gb=2, _2g_12gb=1), cut("indices: [1]", _4g_24gb=1)),
    ),
    Story(
        "a virtual machine that needs a reboot",
        "a100-40gb",
        plan_text(OFF),
        plan_text(cut("all: true", _7g_40gb=1)),
        vm=True,
        ends=Exit.BLOCKED,
    ),
)


class Point(NamedTuple):
    """Where a process is killed: the nth call of this name, before or after its effect. during: the operation."""

    story: Story
    call: str
    nth: int
    when: str
    during: str

    def __str__(self) -> str:
        return f"{self.story.name}: {self.when} {self.call} {self.nth}".replace(" ", "-")


def prepared(story: Story, host: SimHost, world: World) -> None:
    """Bring a fresh machine to where the story begins, without faults."""
    assert world.attempt(order_of(story.first, world)) == "done"
    for gpu, start in story.held:
        host.start_process(gpu, start)
    host.switch("vm", story.vm)
    world.end()


def order_of(text: str, world: World):  # type: ignore[no-untyped-def]
    plan = read(text)
    assert isinstance(plan, Plan)
    return ordered(Given(plan, "story", ()), world.seen())[0]


@cache
def unkilled(story: Story) -> tuple[tuple[Point, ...], frozenset[type]]:
    """The kill points of a story, and the kinds of operations it takes, from playing it once as `apply` does."""
    host = SimHost.fresh(story.spec)
    world = World(host)
    prepared(story, host, world)
    order = order_of(story.then, world)
    machine = world.machine()  # the last one: an NVML session left open would block a mode change
    begun = len(host.calls)
    kinds: set[type] = set()
    spans: list[tuple[int, str, type]] = []

    def listen(step: Progress) -> None:
        if not step.done and not isinstance(step.effect, Pause):
            kinds.add(type(step.effect))
            spans.append((len(host.calls), str(step.effect), type(step.effect)))

    look(machine)
    run(machine, order, listen)
    names = [call.name.removesuffix(":before") for call in list(host.calls)[begun:]]
    return tuple(_points(story, names, [(at - begun, op, kind) for at, op, kind in spans])), frozenset(kinds)


def _points(story: Story, names: list[str], spans: list[tuple[int, str, type]]) -> Iterator[Point]:
    counted: dict[str, int] = {}
    read_after: set[type] = set()
    current, kind, changed = "", object, False
    starts = {at: (op, of) for at, op, of in spans}
    for at, name in enumerate(names):
        if at in starts:
            (current, kind), changed = starts[at], False
        if name.endswith(":after"):
            continue  # a save is logged twice
        counted[name] = counted.get(name, 0) + 1
        if any(word in name for word in MUTATING) and "ProfileInfo" not in name and "Placements" not in name:
            changed = True
            yield Point(story, name, counted[name], "before", current)
            yield Point(story, name, counted[name], "after", current)
        elif changed and kind not in read_after:
            read_after.add(kind)
            yield Point(story, name, counted[name], "before", current)


POINTS: Final = tuple(point for story in STORIES for point in unkilled(story)[0])


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file for each story, at its beginning, with the record beside it."""
    files = {}
    for story in STORIES:
        path = tmp_path_factory.mktemp("story") / "machine.json"
        host = SimHost.open(path, story.spec, clock="virtual")
        world = World(host)
        prepared(story, host, world)
        beside(path).mkdir()
        (beside(path) / "record.json").write_text(world.store.text or "")
        files[story.name] = path
    return files


@pytest.fixture(scope="session")
def migd() -> Iterator[Forked]:
    """Runs a command as a process of its own; its exit code, negative for a signal."""
    with forking() as forked:
        yield forked


def checked(path: Path, story: Story, held: dict[tuple[str, int], tuple[int, ...]], layouts: set[str]) -> None:
    """The machine and its record at rest: nothing in use touched, nothing half made, one of these layouts."""
    host = SimHost.open(path)
    world = World(host)
    seen = world.seen()
    world.end()
    assert held.items() <= serials(host).items()
    assert orphans(seen) == []
    assert {" | ".join(str(gpu.layout) for gpu in seen)} <= layouts
    record = FileStore(beside(path)).load()
    assert record is not None
    assert record.open == ()


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_next_command_converges_after_a_kill(
    point: Point, machines: dict[str, Path], migd: Forked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story, path, plan = point.story, tmp_path / "machine.json", tmp_path / "plan.yaml"
    shutil.copy(machines[story.name], path)
    shutil.copytree(beside(machines[story.name]), beside(path))
    plan.write_text(story.then)
    host = SimHost.open(path)
    held = {place: serial for place, serial in serials(host).items() if _is_held(host, story, place)}
    begins, ends = _layouts(story)
    host.inject(Fault(point.call, "kill", when=point.when, nth=point.nth))

    assert migd("apply", "-f", str(plan), "--state", str(path)) == -9, "the kill point was not reached"
    record = (beside(path) / "record.json").read_text()
    steps = {found.transaction.step for found in decode(record).gpus.values() if found.transaction}
    assert point.call == "record.save" or point.during in steps, f"killed during {steps}, not {point.during}"

    undone, undone_path = tmp_path / "undone", tmp_path / "undone" / "machine.json"
    undone.mkdir()
    shutil.copy(path, undone_path)
    shutil.copytree(beside(path), beside(undone_path))

    assert command(["apply", "-f", str(plan), "--state", str(path)]) == story.ends
    checked(path, story, held, {ends})
    # Where nothing had been begun there may be no earlier layout, or a holder in the way of it.
    ends_well = (Exit.DONE,) if steps and not story.vm else (Exit.DONE, Exit.BLOCKED, Exit.FAILED)
    assert command(["rollback", "--state", str(undone_path)]) in ends_well
    checked(undone_path, story, held, {begins, ends, _first(story)})
    capsys.readouterr()


def _is_held(host: SimHost, story: Story, place: tuple[str, int]) -> bool:
    return any(host.gpu_uuids()[gpu] == place[0] and start == place[1] for gpu, start in story.held)


@cache
def _layouts(story: Story) -> tuple[str, str]:
    """All GPUs' layouts at the beginning of a story and at its end."""
    host = SimHost.fresh(story.spec)
    world = World(host)
    prepared(story, host, world)
    begins = " | ".join(str(gpu.layout) for gpu in world.seen())
    world.attempt(order_of(story.then, world))
    return begins, " | ".join(str(gpu.layout) for gpu in world.seen())


def _first(story: Story) -> str:
    """What a rollback leads to where the kill came before anything was begun: the layout before the story's first."""
    return " | ".join("MIG off" for _ in SimHost.fresh(story.spec).gpu_uuids())


def test_every_operation_of_the_agent_has_kill_points_before_and_after_it() -> None:
    performed = frozenset[type]().union(*(unkilled(story)[1] for story in STORIES))
    assert performed == frozenset(get_args(Operation))
    for story in STORIES:
        points, _ = unkilled(story)
        during = {point.during for point in points if point.during}
        for operation in during:
            whens = {p.when for p in points if p.during == operation and p.call != "record.save"}
            assert whens >= {"before", "after"}, f"{story.name}: {operation}"


def test_every_story_has_a_read_that_is_a_kill_point() -> None:
    for story in STORIES:
        assert any(p.call.startswith("nvml") and "Get" in p.call for p in unkilled(story)[0]), story.name


def test_a_second_command_while_one_is_at_work_is_told_who_works(
    machines: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story, path, plan = STORIES[0], tmp_path / "machine.json", tmp_path / "plan.yaml"
    shutil.copy(machines[story.name], path)
    plan.write_text(story.then)
    host = SimHost.open(path)
    host.use_clock("real")
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "hang"))
    arguments = ["apply", "-f", str(plan), "--state", str(path)]
    with subprocess.Popen([sys.executable, "-m", "migd", *arguments], stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "MIG mode on" in line:
                break
        assert command(arguments) == Exit.BLOCKED
        assert f"process {first.pid} holds" in capsys.readouterr().err
        first.kill()
    assert command(arguments) == Exit.DONE
