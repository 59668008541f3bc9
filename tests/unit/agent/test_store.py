"""The record on disk: read back equal, never half written, never guessed at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migd.agent.records import (
    AwaitingReboot,
    Cause,
    GpuRecord,
    NodeWork,
    Outcome,
    PodRef,
    Record,
    StepTime,
    Transaction,
)
from migd.agent.store import FileStore, RecordError, decode, encode
from migd.mig.geometry import GpuInstance, Layout
from migd.mig.profiles import Placement

instances = st.builds(
    GpuInstance, st.sampled_from(["1g.5gb", "3g.20gb"]), st.builds(Placement, st.integers(0, 7), st.integers(1, 8))
)
geometries = st.frozensets(instances, max_size=7)
layouts = st.just(Layout(False)) | st.builds(Layout, st.just(True), geometries)
causes = st.builds(Cause, st.sampled_from(["InUse", "NVMLError"]), st.text(max_size=20))
transactions = st.builds(
    Transaction,
    order_id=st.text(max_size=8),
    before=layouts,
    target=st.none() | layouts,
    hold=st.booleans(),
    back=st.booleans(),
    cause=st.none() | causes,
    step=st.text(max_size=8),
    tries=st.integers(0, 9),
    error=st.none() | causes,
    resets=st.integers(0, 2),
    touched=st.booleans(),
    turns=st.integers(0, 200),
    not_before_s=st.floats(0, 1e9),
    parked=st.booleans(),
)
gpus = st.builds(
    GpuRecord,
    geometries,
    st.none() | layouts,
    st.none() | transactions,
    st.none() | st.builds(AwaitingReboot, st.text(max_size=5), st.text(max_size=5), st.booleans()),
    st.none() | st.builds(Outcome, st.sampled_from(["Ready", "Blocked", "Held"]), causes, st.booleans()),
    st.none() | layouts,
)
steps = st.builds(StepTime, st.text(max_size=8), st.text(max_size=8), st.floats(0, 1e9), st.none() | st.integers(0, 9))
texts = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
pods = st.lists(st.builds(PodRef, *[st.text(max_size=5)] * 3), max_size=2).map(tuple)
works = st.builds(
    NodeWork,
    turn=st.text(max_size=8),
    stage=st.sampled_from(["Rest", "Draining", "Settling", "Applying"]),
    since_s=st.floats(0, 1e9),
    closed_s=st.none() | st.floats(0, 1e9),
    pause=st.sampled_from(["", "Labels"]),
    why=st.none() | causes,
    refresh=st.none() | causes,
    unadvertised=st.none() | causes,
    tries=st.integers(0, 9),
    at_once=st.booleans(),
    steps=st.lists(steps, max_size=2).map(tuple),
    before=texts,
    after=texts,
    accepted=st.dictionaries(st.text(max_size=5), layouts, max_size=2),
    victims=st.dictionaries(st.text(max_size=5), pods, max_size=2),
    asked=pods,
    gone_s=st.none() | st.floats(0, 1e9),
    spent=st.lists(st.text(max_size=8), max_size=2).map(tuple),
    spent_why=st.none() | causes,
)
records = st.builds(
    Record,
    st.text(max_size=9),
    st.text(max_size=9),
    st.dictionaries(st.text(max_size=9), gpus, max_size=3),
    st.none() | works,
)


@given(records)
def test_a_record_reads_back_equal(record: Record) -> None:
    assert decode(encode(record)) == record


def test_a_record_that_was_written_before_there_were_nodes_is_read() -> None:
    text = '{"version": 1, "bootId": "a", "orderId": "b", "gpus": {}}'
    assert decode(text) == Record("a", "b")
    assert '"version": 3' in encode(decode(text))


def test_a_record_that_was_written_before_there_were_drains_is_read() -> None:
    body = json.loads(encode(Record("a", "b", node=NodeWork(turn="t", stage="Settling"))))
    for key in ("victims", "asked", "gone_s", "stuck_s", "spent", "spent_why"):
        del body["node"][key]
    assert decode(json.dumps(body | {"version": 2})) == Record("a", "b", node=NodeWork(turn="t", stage="Settling"))


def test_there_is_no_record_at_first(tmp_path: Path) -> None:
    assert FileStore(tmp_path).load() is None


def test_what_was_saved_last_is_loaded(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.save(Record("one"))
    store.save(Record("two"))
    assert store.load() == Record("two")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_record_of_a_newer_migd_is_left_to_that(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"version": 4, "gpus": []}')
    with pytest.raises(RecordError, match="version 4, which a newer migd wrote") as caught:
        FileStore(tmp_path).load()
    assert "move the file away" not in str(caught.value)
    assert path.read_text() == '{"version": 4, "gpus": []}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 0}',
        '{"version": 1}',
        '{"version": 2, "bootId": "a", "orderId": "", "gpus": {}}',
        '{"version": 2, "bootId": "a", "orderId": "", "gpus": {}, "node": {"stage": "Resting"}}',
        '{"version": 1, "bootId": "a", "orderId": "", "gpus": {"g": {}}}',
    ],
)
def test_a_damaged_record_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="record.json is damaged"):
        FileStore(tmp_path).load()
    assert path.read_text() == text


def test_a_record_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="cannot read"):
        FileStore(tmp_path).load()


def test_a_failed_save_leaves_the_old_record(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.save(Record("old"))
    (tmp_path / "record.new").mkdir()  # the place to write to is taken
    with pytest.raises(RecordError, match="cannot write"):
        store.save(Record("new"))
    assert store.load() == Record("old")
