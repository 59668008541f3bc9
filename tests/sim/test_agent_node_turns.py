"""Whole turns of the node's agent on simulated nodes: from a wish to what is advertised, through what goes wrong."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest
from agent_nodes import Switched, with_machine
from agent_stations import Crashing, Station, away, play

from migd.agent.node.looping import HungAgentError
from migd.agent.store import RecordError
from migd.nvml.errors import GpuError, HungError
from migd.sim.cluster.faults import Chances, Trouble
from migd.sim.faults import Fault
from migd.sim.nodes.documents import pod_document
from migd.sim.nodes.world import NodeSpec

SMALL, THREE, GPU = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb", "nvidia.com/gpu"
CUT = {
    "summary": "3g.40gb 2×1g.10gb",
    "instances": [{"profile": "3g.40gb", "count": 1}, {"profile": "1g.10gb", "count": 2}],
}
SEVEN = {"summary": "7g.80gb", "instances": [{"profile": "7g.80gb", "count": 1}]}
OFF = {"summary": "off", "mig": "Disabled", "instances": []}
NO_PODS = ("agent", "pods", "delete")
ONE, TWO = "1111111111111111", "2222222222222222"


def node(style: str = "helm", gpus: str = "2xa100-80gb", **options) -> NodeSpec:
    return NodeSpec("n1", gpus, style=style, **options)


GOAL = {SMALL: 2, THREE: 1, "nvidia.com/mig-7g.80gb": 1}


async def done(station: Station, within_s: float = 3600) -> None:
    """The wish of these stories has come true, and nothing is left behind."""
    await station.world.until(lambda: station.ready() and station.advertised() == GOAL, within_s)
    station.in_order()


@pytest.mark.parametrize("style", ["helm", "operator", "helm-tolerant"])
def test_a_wish_becomes_what_is_advertised_and_leaves_nothing_behind(style):
    """A plugin that tolerates our taint cannot be paused, so the mode must be as wished already."""

    async def story(station: Station) -> None:
        adopt = {"foreignInstances": "Adopt"} if style == "helm-tolerant" else {}
        station.wish(ONE, CUT | adopt, SEVEN | adopt)
        await done(station, 120)
        assert station.labels["migd.dev/mig-1g.10gb.count"] == "2"
        assert station.status()["lastTransition"]["result"] == "Succeeded"
        await asyncio.sleep(10)
        name = station.partitions[0]["metadata"]["name"]
        events = sorted(
            (e for e in station.world.all("events") if e["regarding"]["name"] == name), key=lambda e: e["eventTime"]
        )
        assert [(e["type"], e["action"], e["note"].partition(" ")[0]) for e in events] == [
            ("Normal", "Change", "changing"),
            ("Normal", "Change", "changed"),
        ]
        assert events[1]["reason"] == "AsWished"
        text = station.metrics.text().decode()
        assert 'migd_agent_transitions_total{result="Succeeded"} 2.0' in text
        assert 'migd_agent_state_seconds{state="closed"} 0.0' in text
        assert 'migd_agent_states_seconds_total{state="closed"} 0.0' not in text
        since, saves = len(station.world.cluster.requests), station.store.saves
        await asyncio.sleep(3600)
        assert station.writes(since) == []
        await station.end()
        station.start()
        await asyncio.sleep(3600)
        assert station.writes(since) == []
        assert station.store.saves == saves

    play(story, node(style, layout={0: ["7g.80gb"], 1: ["4g.40gb"]} if style == "helm-tolerant" else {}))


def test_a_node_that_is_cut_already_and_gets_its_labels_later_needs_no_change():
    """The agent is there before feature discovery, and MIG was on before migd was."""

    async def story(station: Station) -> None:
        assert station.phases() == ["Idle", "Idle"]
        assert station.status()["observed"]["summary"] == "3g.40gb 2×1g.10gb"
        station.wish(ONE, CUT | {"foreignInstances": "Adopt"}, SEVEN | {"foreignInstances": "Adopt"})
        await done(station, 300)
        requests = [
            r for r in station.world.cluster.requests if r.user == "agent" and r.writes and r.resource == "nodes"
        ]
        assert not any("taints" in str(r.body) for r in requests), "it was never closed"
        station.world.admin.merge("nodes", "n1", {"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}})
        await asyncio.sleep(300)
        assert station.ready()

    play(story, node(layout={0: ["3g.40gb", "1g.10gb", "1g.10gb"], 1: ["7g.80gb"]}))


def test_where_the_right_to_stop_the_plugin_is_missing_that_is_found_out_before_the_node_is_closed():
    """Seen with the component helm-plugin of deploy/ left out: closed, refused and opened again at every try."""

    async def story(station: Station) -> None:
        cluster = station.world.cluster
        cluster.policy = lambda r: "agents delete no pods" if (r.user, r.resource, r.verb) == NO_PODS else ""
        since = len(cluster.requests)
        station.wish(ONE, CUT, SEVEN)
        await station.world.until(lambda: station.status().get("reason") == "NoPermission")
        await asyncio.sleep(3600)
        assert station.phases() == ["Blocked", "Blocked"]
        assert "stop pod" in station.status()["message"]
        assert "agents delete no pods" in station.status()["message"]
        assert not [r for r in cluster.requests[since:] if r.user == "agent" and "taints" in str(r.body)]
        cluster.policy = lambda _request: ""
        await done(station)

    play(story, node("helm"))


def test_a_node_is_not_closed_before_all_that_must_go_is_idle():
    async def story(station: Station) -> None:
        world = station.world
        world.admin.create("pods", pod_document("p", {GPU: 1}, annotations={"sim.migd.dev/lasts-s": 900}))
        await world.until(lambda: (world.get("pods", "p", "default").get("status") or {}).get("phase") == "Running")
        started_s = asyncio.get_running_loop().time()
        since = len(world.cluster.requests)
        station.wish(ONE, CUT, SEVEN)
        await world.until(lambda: "WaitingForIdle" in station.phases())
        await asyncio.sleep(600)
        assert not [w for w in station.world.cluster.requests[since:] if w.user == "agent" and "taints" in str(w.body)]
        assert len(station.writes(since)) < 20
        await done(station)
        assert asyncio.get_running_loop().time() - started_s > 900 - 5
        assert (
            world.get("pods", "p", "default") is None
            or world.get("pods", "p", "default")["status"]["phase"] == "Succeeded"
        )

    play(story, node("operator"))


SINGLE = "a100-80gb"


async def cut_and_open(station: Station) -> None:
    await station.world.until(lambda: station.ready() and station.advertised() == {SMALL: 2, THREE: 1}, 3600)
    station.in_order()


def calls_of(style: str) -> list[str]:
    """What an agent does from its start until a wish has come true, each call that can be its last."""
    clean = Crashing()

    async def story(station: Station) -> None:
        station.wish(ONE, CUT)
        await cut_and_open(station)

    play(story, node(style, SINGLE), change=clean)
    return clean.calls


@pytest.mark.parametrize(("style", "after"), [("helm", False), ("helm", True), ("operator", False), ("operator", True)])
def test_killed_at_any_call_it_comes_to_the_same_end(style, after):
    """Each call of NVML, the record, the signals and the device files, and each write, of a quarter of them a run."""
    calls = calls_of(style)
    assert {"gpus.perform", "store.save", "cluster.change_node", "cluster.apply", "devices.refresh"} <= set(calls)
    assert ("cluster.delete" in calls) == (style == "helm")
    for nth in range(1 + (style == "helm") + 2 * after, len(calls) + 1, 4):
        crashing = Crashing(nth, after)

        async def story(station: Station, nth: int = nth) -> None:
            station.wish(ONE, CUT)
            await cut_and_open(station)
            await asyncio.sleep(30)  # the last report comes after all is done
            await cut_and_open(station)
            assert station.crashes == 1, f"{calls[nth - 1]}, call {nth}"

        play(story, node(style, SINGLE), change=crashing)


@pytest.mark.parametrize("trouble", [Trouble.REFUSED, Trouble.HANGS])
def test_an_api_server_that_goes_away_at_any_call_leaves_a_whole_node_in_the_end(trouble):
    calls = calls_of("operator")
    for nth in range(2 + 4 * (trouble is Trouble.HANGS), len(calls) + 1, 8):
        leaving = Crashing()
        play(partial(_goes_away, leaving, trouble, nth), node("operator", SINGLE), change=leaving)


async def _goes_away(leaving: Crashing, trouble: Trouble, nth: int, station: Station) -> None:
    """From the nth call on there is no API server for four minutes."""
    faults = station.world.cluster.faults
    assert isinstance(faults, Switched)
    leaving.nth = len(leaving.calls) + nth
    leaving.instead = lambda: setattr(faults, "away", trouble)
    station.wish(ONE, CUT)
    await asyncio.sleep(240)
    faults.away = None
    await cut_and_open(station)


def test_a_pause_is_short_whatever_the_api_server_does():
    async def story(station: Station) -> None:
        station.wish(ONE, CUT, SEVEN)
        await station.world.until(lambda: station.node.host.snapshot().gpus[0].pending)
        async with away(station, Trouble.HANGS):
            await asyncio.sleep(100)
            now = station.node.host.snapshot()
            assert [len(gpu.instances) for gpu in now.gpus] == [3, 1], "hardware first"
        await done(station)

    play(story, node("operator"))


def test_ended_by_sigterm_half_way_the_next_one_goes_on():
    async def story(station: Station) -> None:
        station.wish(ONE, CUT, SEVEN)
        await station.world.until(lambda: station.node.host.snapshot().gpus[0].instances)
        await station.end()
        assert station.world.get("nodes", "n1")["spec"]["taints"]
        await asyncio.sleep(30)
        station.start()
        await done(station)

    play(story, node("operator"))


def _failing(switch: dict[str, Exception], what: str):
    """Ports whose record cannot be saved, or whose GPUs cannot be looked at, while `switch` holds an error for it."""

    def change(ports):
        store, gpus = ports.machine.store, ports.machine.gpus

        class Store:
            load = staticmethod(store.load)

            def save(self, record):
                if "store" in switch:
                    raise switch["store"]
                store.save(record)

        class Gpus:
            close, perform = staticmethod(gpus.close), staticmethod(gpus.perform)

            def look(self, *args):
                if "gpus" in switch:
                    raise switch["gpus"]
                return gpus.look(*args)

            def look_at(self, uuid):
                if "gpus" in switch:
                    raise switch["gpus"]
                return gpus.look_at(uuid)

        return with_machine(ports, **({"store": Store()} if what == "store" else {"gpus": Gpus()}))

    return change


UNDECIDED = [
    ("store", RecordError("cannot write the record: no space left on device")),
    ("gpus", GpuError("nvmlInit", "", 9)),
    ("gpus", HungError("nvmlDeviceGetCount", "", None)),
]


@pytest.mark.parametrize(("what", "error"), UNDECIDED)
def test_a_node_where_nothing_can_be_decided_any_more_is_opened_in_time(what, error):
    """A full disk, a driver that is gone and one that hangs are no reason to keep pods away and clients paused."""
    switch: dict[str, Exception] = {}

    async def story(station: Station) -> None:
        station.wish(ONE, CUT, SEVEN)
        await station.world.until(lambda: station.node.host.snapshot().gpus[0].pending)
        switch[what] = error
        for _ in range(10):  # one whose driver hangs ends, and is started anew
            await asyncio.sleep(40)
            if station.ended_by(HungAgentError):
                station.start(_failing(switch, what))
        station.in_order()
        since = len(station.world.cluster.requests)
        for _ in range(10):
            await asyncio.sleep(40)
            if station.ended_by(HungAgentError):
                station.start(_failing(switch, what))
        written = [r for r in station.world.cluster.requests[since:] if r.user == "agent" and r.writes]
        assert not [r for r in written if r.resource == "nodes"], "it is not closed again meanwhile"
        switch.clear()
        if station.ended_by(HungAgentError):
            station.start(_failing(switch, what))
        await done(station)

    play(story, node("operator"), change=_failing(switch, what))


def test_device_nodes_that_are_not_made_are_told_and_made_later():
    async def story(station: Station) -> None:
        station.node.host.inject(Fault("devices.refresh", "error", times=4))
        station.wish(ONE, CUT, SEVEN)
        await done(station)

    play(story, node("operator"))


def test_a_lost_gpu_is_told_and_does_not_hold_up_the_other():
    async def story(station: Station) -> None:
        station.wish(ONE, CUT, {})
        await station.world.until(station.ready, 300)
        station.node.host.lose_gpu(1)
        await station.world.until(lambda: station.phases()[1] == "Lost")
        names = [p["metadata"]["name"] for p in station.partitions]
        station.wish(TWO, SEVEN, {})
        await station.world.until(lambda: station.status()["observed"]["summary"] == "7g.80gb", 600)
        assert [p["metadata"]["name"] for p in station.partitions] == names
        assert any(e["note"].startswith("Lost") for e in station.world.all("events"))
        station.node.host.find_gpu(1)
        await station.world.until(lambda: station.phases()[1] != "Lost")

    play(story, node("operator"))


def test_after_a_reboot_the_accepted_wish_is_made_again():
    async def story(station: Station) -> None:
        station.wish(ONE, CUT, SEVEN)
        await done(station)
        await station.end()
        station.world.reboot("n1", 60)
        await asyncio.sleep(90)
        station.start()
        await done(station)

    play(story, node("operator", "2xh100-sxm-80gb"))


@pytest.mark.parametrize("seed", range(12))
def test_through_every_trouble_by_seed_the_wish_comes_true(seed):
    async def story(station: Station) -> None:
        dice = random.Random(seed)
        for _ in range(4):
            call = dice.choice(
                ["nvmlDeviceCreateGpuInstance*", "nvmlGpuInstanceCreate*", "record.save", "devices.refresh"]
            )
            action = dice.choice(["error", "crash", "delay"])
            when = dice.choice(["before", "after"])
            station.node.host.inject(Fault(call, action, code=19, when=when, nth=dice.randint(1, 4), delay_s=5.0))
        station.wish(ONE, CUT, SEVEN)
        await asyncio.sleep(1200)
        faults = station.world.cluster.faults
        faults.calm()
        await done(station, 4 * 3600)
        await asyncio.sleep(1900)  # until every watch was begun anew
        since = len(station.world.cluster.requests)
        await asyncio.sleep(600)
        assert station.writes(since) == []

    play(story, node(("operator", "helm")[seed % 2]), seed, Chances(request=0.1, watch=0.05))
