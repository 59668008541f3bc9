"""Figures, log lines, probes and events of the node's agent."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import aiohttp
import pytest

from migd.agent.node.announcing import notes
from migd.agent.node.logs import logger, set_up
from migd.agent.node.metrics import Metrics
from migd.agent.node.serving import ListenError, application, served
from migd.kube.stored import Stored
from migd.plans.conditions import Condition
from migd.plans.partitions import LastTransition, Partition, PartitionSpec, PartitionStatus, Step

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def stream():
    """What the agent logs; the loggers are as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    found = io.StringIO()
    set_up("node-a", stream=found)
    yield found
    root.handlers[:], root.level = handlers, level


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_of_the_log_is_one_object_with_the_node_whoever_writes_it(stream):
    logger("migd.agent.node.x").info("begun", effect="GPU reset", umlaut="ü")
    logging.getLogger("migd.kube.following").warning("%s; again in %.1f s", "GET /x: 503", 1.5)
    ours, theirs = lines(stream)
    assert {"event": "begun", "effect": "GPU reset", "level": "info", "node": "node-a"}.items() <= ours.items()
    assert "ü" in stream.getvalue()
    assert theirs["event"] == "GET /x: 503; again in 1.5 s"
    assert (theirs["logger"], theirs["node"], theirs["level"]) == ("migd.kube.following", "node-a", "warning")
    assert theirs["timestamp"].endswith("Z")


def test_an_exception_is_one_line_and_a_request_log_is_silent(stream):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("failed")
    logging.getLogger("aiohttp.access").info("GET /healthz")
    (line,) = lines(stream)
    assert "ValueError: broken" in line["exception"]


def status(result=None, steps=(), ident="abc", phase="Changing", reason="Waiting", message=""):
    ready = Condition(
        type="Ready",
        status="False",
        observed_generation=1,
        last_transition_time=NOW,
        reason=reason,
        message=message,
    )
    change = LastTransition(
        id=ident,
        from_layout="7g.80gb",
        to="2×3g.40gb",
        started_at=NOW,
        finished_at=NOW if result else None,
        result=result,
        steps=tuple(steps),
    )
    return PartitionStatus(phase=phase, reason=reason, message=message, conditions=(ready,), last_transition=change)


def step(name, milliseconds=None):
    return Step(name=name, started_at=NOW, milliseconds=milliseconds)


def value(metrics, line):
    found = [text for text in metrics.text().decode().splitlines() if text.startswith(line + " ")]
    assert found, f"{line} is not in the text"
    return float(found[0].rpartition(" ")[2])


def test_each_step_and_each_end_is_counted_once():
    metrics = Metrics()
    told = [
        PartitionStatus(),
        status(steps=[step("Close", 400), step("Apply")]),
        status(steps=[step("Close", 400), step("Apply", 2000)]),
        status("Succeeded", steps=[step("Close", 400), step("Apply", 2000), step("Verify", 5000)], phase="Ready"),
        status("Succeeded", steps=[step("Close", 400), step("Apply", 2000), step("Verify", 5000)], phase="Ready"),
    ]
    for before, after in pairwise(told):
        metrics.told(before, after)
    for name, seconds in (("Close", 0.4), ("Apply", 2.0), ("Verify", 5.0)):
        assert value(metrics, f'migd_agent_step_seconds_count{{step="{name}"}}') == 1
        assert value(metrics, f'migd_agent_step_seconds_sum{{step="{name}"}}') == seconds
    assert value(metrics, 'migd_agent_transitions_total{result="Succeeded"}') == 1


def test_a_closed_node_shows_for_how_long_and_for_how_long_in_all():
    metrics = Metrics()
    for now_s, is_so in ((10.0, False), (20.0, True), (50.0, True), (60.0, False), (70.0, False)):
        metrics.state("closed", is_so, now_s)
        if now_s == 50.0:
            assert value(metrics, 'migd_agent_state_seconds{state="closed"}') == 30
    assert value(metrics, 'migd_agent_state_seconds{state="closed"}') == 0
    assert value(metrics, 'migd_agent_states_seconds_total{state="closed"}') == 40
    assert value(metrics, 'migd_agent_states_seconds_total{state="paused"}') == 0


def test_the_text_names_phases_errors_and_the_last_success():
    metrics = Metrics()
    metrics.turn({"gpu-a": "Ready", "gpu-b": "Ready", "gpu-c": "Lost"})
    metrics.nvml_error("InUse")
    metrics.api_error("UnavailableError")
    metrics.api_trouble(True)
    metrics.lease(True)
    metrics.succeeded(NOW + timedelta(seconds=1))
    assert value(metrics, 'migd_agent_gpus{phase="Ready"}') == 2
    assert value(metrics, 'migd_agent_gpus{phase="Lost"}') == 1
    assert value(metrics, 'migd_agent_gpus{phase="Failed"}') == 0
    assert value(metrics, 'migd_agent_nvml_errors_total{reason="InUse"}') == 1
    assert value(metrics, 'migd_agent_api_errors_total{kind="UnavailableError"}') == 1
    assert value(metrics, "migd_agent_api_trouble") == 1
    assert value(metrics, "migd_agent_lease_held") == 1
    assert value(metrics, "migd_agent_last_success_timestamp_seconds") == NOW.timestamp() + 1
    assert Metrics().registry is not metrics.registry


def test_probes_answer_with_what_is_wrong():
    wrong = {"ready": "the lease is not ours"}

    async def main():
        app = application(Metrics(), lambda: "", lambda: wrong["ready"])
        async with served(app, "127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
            found = {}
            for path in ("healthz", "readyz", "metrics"):
                async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
                    found[path] = answer.status, await answer.text(), answer.headers["Content-Type"]
            with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with served(application(Metrics(), str, str), "127.0.0.1", port):
                    pass
            return found

    found = asyncio.run(main())
    assert found["healthz"][:2] == (200, "ok\n")
    assert found["readyz"][:2] == (503, "the lease is not ours\n")
    assert found["metrics"][0] == 200
    assert "# HELP migd_agent_turns_total" in found["metrics"][1]
    assert found["metrics"][2].startswith("text/plain; version=0.0.4")


def stored():
    value = Partition(name="gpu-a", spec=PartitionSpec(node_name="node-a", node_uid="n"))
    return Stored("gpu-a", "", "u", "1", 1, False, {}, {}, value)


def test_a_change_is_announced_when_it_begins_and_when_it_ends():
    begun, over = status(), status("Succeeded", phase="Ready", reason="AsWished")
    first = notes(stored(), PartitionStatus(), begun)
    assert [(n.type, n.reason, n.action, n.text) for n in first] == [
        ("Normal", "Waiting", "Change", "changing from 7g.80gb to 2×3g.40gb")
    ]
    assert first[0].regarding.name == "gpu-a"
    assert notes(stored(), begun, status(steps=[step("Close")])) == ()
    assert [(n.type, n.reason, n.text) for n in notes(stored(), begun, over)] == [
        ("Normal", "AsWished", "changed from 7g.80gb to 2×3g.40gb")
    ]
    assert notes(stored(), over, over) == ()


def test_a_change_that_fails_or_gives_way_is_announced_once_with_its_reason():
    back = status("RolledBack", phase="Failed", reason="NVMLError", message="create: unknown error")
    (note,) = notes(stored(), status(), back)
    assert (note.type, note.reason, note.action) == ("Warning", "NVMLError", "RollBack")
    assert note.text.endswith("from 7g.80gb to 2×3g.40gb: create: unknown error")
    (note,) = notes(stored(), status(), status("BackedOut", phase="Pending", reason="InUse", message="pod a/b"))
    assert (note.type, note.reason, note.action) == ("Normal", "InUse", "BackOut")


def test_a_gpu_that_is_stuck_without_a_change_is_announced():
    was = PartitionStatus(phase="Ready")
    (note,) = notes(stored(), was, PartitionStatus(phase="Lost", message="it fell off the bus"))
    assert (note.type, note.action, note.text) == ("Warning", "Look", "Lost: it fell off the bus")
    assert notes(stored(), PartitionStatus(phase="Lost"), PartitionStatus(phase="Lost", message="still")) == ()
