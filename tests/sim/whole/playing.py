"""Plays one story from its seed, and says what went wrong in it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from fleet import Fleet, plan

from migd.sim.cluster.server import SimRequest
from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.nodes.world import OverdueError
from whole.acting import PLAN, Acting, Strikes, Weather, act_out
from whole.drawing import Tale, tale
from whole.ending import check, settled
from whole.foretold import differing, everything, uncounted
from whole.watching import Watching

END_S = 3600.0
"""Until then everything must be over, once it is calm: backoffs grow to half an hour."""
REST_S = 600.0
"""So long nobody may write at the end, in one of sixteen stories: in the others QUIET_S has shown it already."""
QUIET_S = 65.0
"""Nobody writes for so long once it is over: an agent looks every 30 s, and tells of use not before 30 s more."""
HEARD_S = 45.0
"""And so much longer where a watch may be silent, which is noticed after 75 s."""


@dataclass(frozen=True)
class Played:
    """A story that was played. log: all that happened, to the byte the same for the same seed."""

    tale: Tale
    wrong: tuple[str, ...]
    reached: frozenset[str]
    log: str


def play(seed: int, story: Tale | None = None) -> Played:
    """Play the story of a seed, or one given."""
    logging.disable(logging.CRITICAL)
    try:
        return run_virtually(_play(story or tale(seed)))
    finally:
        logging.disable(logging.NOTSET)


async def _play(story: Tale) -> Played:
    weather, strikes = Weather(story.seed, story.chances), Strikes()
    watching = Watching(troubled=lambda: any(met.startswith("WatchTrouble") for met in weather.met))
    fleet = Fleet(
        story.nodes,
        story.seed,
        weather,
        strikes,
        watching.refit,
        story.absent,
        leases=False,
        policy=watching.policy,
    )
    watching.begin(fleet)
    acting = Acting(story, fleet, weather, strikes, watching.disturb)
    wrong: list[str] = []
    try:
        async with asyncio.timeout(4 * 3600):
            async with fleet:
                wrong = await _told(story, fleet, watching, acting)
    except Exception as error:
        wrong = [*watching.wrong, f"{type(error).__name__}: {error}"]
    reached = {*watching.reached, *acting.done, *weather.met, *strikes.struck}
    return Played(story, tuple(wrong), frozenset(reached), _log(fleet))


async def _told(story: Tale, fleet: Fleet, watching: Watching, acting: Acting) -> list[str]:
    acting.begin()
    if story.jobs or story.lonely:
        await asyncio.sleep(4)
    if story.quiet or story.evicts:
        await asyncio.sleep(15)  # so that all is known of the GPUs when the preview is made
    before = everything(fleet)
    fleet.apply(_plan(story))
    await act_out(story, acting)
    try:
        await _over(fleet, acting)
    except OverdueError as error:
        return [*check(fleet, watching, acting), f"it is never over: {str(error).partition(';')[0]}"]
    wrong = check(fleet, watching, acting)
    if story.quiet and not any(p.status.reason == "ResetRefused" for p in fleet.partitions()):
        if not story.jobs and not story.lonely:
            watching.reached.add("preview compared")
            wrong += differing(watching.previewed, before, everything(fleet))
        elif story.steady and all(p.status.phase == "Ready" for p in fleet.partitions()):
            watching.reached.add("preview's evictions compared")
            wrong += differing(watching.previewed, before, everything(fleet))
            wrong += uncounted(watching.previewed, len(watching.evictions.accepted))
    at, rests = len(fleet.cluster.cluster.requests), _at_rest(fleet)
    await asyncio.sleep(REST_S if story.seed % 16 == 0 else 0)
    fleet.check()
    if rests and _at_rest(fleet) and not acting.odd:
        wrong += [
            f"at rest {r.user} writes {r.resource} {r.name}" for r in fleet.cluster.cluster.requests[at:] if _ours(r)
        ]
    return wrong


async def _over(fleet: Fleet, acting: Acting) -> None:
    """Wait until all is settled, and stays so for a while."""
    ends_s = fleet.cluster.stage.now_s() + END_S
    while True:
        await fleet.until(lambda: settled(fleet, acting), max(1.0, ends_s - fleet.cluster.stage.now_s()))
        at = len(fleet.cluster.cluster.requests)
        await asyncio.sleep(QUIET_S + HEARD_S * ("WatchTrouble SILENT" in acting.weather.met))
        fleet.check()
        calm = not any(_ours(r) for r in fleet.cluster.cluster.requests[at:])
        if settled(fleet, acting) and (calm or not _at_rest(fleet)):
            return
        if fleet.cluster.stage.now_s() > ends_s:
            raise OverdueError("settled and unsettled")


def _at_rest(fleet: Fleet) -> bool:
    """Whether nobody has anything to try again."""
    return all(p.status.phase in ("Ready", "Idle", "Held", "Lost", "Pending") for p in fleet.partitions())


def _ours(request: SimRequest) -> bool:
    return request.writes and request.user.startswith("migd-") and request.resource != "leases"


def _plan(story: Tale) -> dict[str, object]:
    if story.wish is not None:
        return plan(PLAN, *story.wish, **story.spec)
    return plan(PLAN, **{**story.spec, "rules": [{"gpus": {"all": True}, "mig": "Disabled"}]})


def _log(fleet: Fleet) -> str:
    requests = (f"{r.user} {r.verb} {r.resource} {r.name} {r.code} {r.body}" for r in fleet.cluster.cluster.requests)
    return "\n".join([*fleet.cluster.log, *requests])
