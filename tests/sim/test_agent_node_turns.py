"""Whole turns of the node's agent on simulated nodes: from a wish to what the kubelet advertises, through what goes wrong."""

from __future__ import annotations

import asyncio

import pytest
from agent_stations import Crashing, Station, away, play

from migd.sim.cluster_faults import Chances, Trouble
from migd.sim.faults import Fault
from migd.sim.node_documents import pod_document
from migd.sim.node_world import NodeSpec

SMALL, THREE, GPU = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb", "nvidia.com/gpu"
CUT = {"summary": "3g.40gb 2×1g.10gb", "instances": [{"profile": "3g.40gb", "count": 1}, {"profile": "1g.10gb", "count": 2}]}
SEVEN = {"summary": "7g.80gb", "instances": [{"profile": "7g.80gb", "count": 1}]}
OFF = {"summary": "off", "mig": "Disabled", "instances": []}
ONE, TWO = "1111111111111111", "2222222222222222"


def node(style: str = "helm", gpus: str = "2xa100-80gb", **options) -> NodeSpec:
    return NodeSpec("n1", gpus, style=style, **options)


@pytest.mark.parametrize("style", ["helm", "operator", "helm-tolerant"])
def test_a_wish_becomes_what_is_advertised_and_leaves_nothing_behind(style):
    async def story(station: Station) -> None:
        station.wish(ONE, CUT, SEVEN)
        await station.world.until(station.ready, 600)
        assert station.world.allocatable("n1") == {SMALL: 2, THREE: 1, "nvidia.com/mig-7g.80gb": 1, GPU: 0} or {
            k: v for k, v in station.world.allocatable("n1").items() if v
        } == {SMALL: 2, THREE: 1, "nvidia.com/mig-7g.80gb": 1}
        station.in_order()
        labels = station.world.get("nodes", "n1")["metadata"]["labels"]
        assert labels["migd.dev/state"] == "ready"
        assert labels["migd.dev/mig-1g.10gb.count"] == "2"
        assert station.status()["lastTransition"]["result"] == "Succeeded"
        events = station.world.all("events")
        assert {e["action"] for e in events} == {"Change"}
        told = [e["note"] for e in events if e["regarding"]["name"] == station.partitions[0]["metadata"]["name"]]
        assert any(note.startswith("changing from") for note in told)
        assert any(note.startswith("changed from") for note in told)
        text = station.metrics.text().decode()
        assert 'migd_agent_transitions_total{result="Succeeded"} 2.0' in text
        since, saves = len(station.world.cluster.requests), station.store.saves
        await asyncio.sleep(3600)
        assert station.writes(since) == []
        await station.end()
        station.start()
        await asyncio.sleep(3600)
        assert station.writes(since) == []
        assert station.store.saves == saves

    play(story, node(style))
