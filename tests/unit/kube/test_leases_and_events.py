"""Leases by the observer's clock, and events that are counted rather than repeated."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from migd.kube.caches import Reader
from migd.kube.events import Count, Limits, Note, Post, Recorder, Regarding
from migd.kube.leases import LEASES, Claim, Expiry, Lease, claimed, released
from migd.kube.stored import Interner

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CLAIM = Claim(
    "node-a", "migd-system", "me", 180, owner=("node-a", "uid-a"), annotations={"migd.dev/duplicate": "gpu-x"}
)


def stored(document):
    metadata = {"uid": "u", "resourceVersion": "7", **document["metadata"]}
    return Reader(LEASES, "me", Interner()).read({**document, "metadata": metadata})


def test_a_lease_is_made_with_its_owner_and_microseconds():
    made = claimed(CLAIM, None, True, NOW)
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "uid-a"}
    ]
    assert made["metadata"]["annotations"] == {"migd.dev/duplicate": "gpu-x"}
    assert made["spec"] == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 180,
        "acquireTime": "2026-01-01T00:00:00.000000Z",
        "renewTime": "2026-01-01T00:00:00.000000Z",
        "leaseTransitions": 0,
    }


def test_a_renewal_keeps_when_it_was_acquired_and_is_bound_to_the_version_that_was_seen():
    seen = stored(claimed(CLAIM, None, True, NOW))
    renewed = claimed(CLAIM, seen, False, NOW + timedelta(seconds=60))
    assert renewed["spec"]["acquireTime"] == "2026-01-01T00:00:00.000000Z"
    assert renewed["spec"]["renewTime"] == "2026-01-01T00:01:00.000000Z"
    assert renewed["spec"]["leaseTransitions"] == 0
    assert renewed["metadata"]["resourceVersion"] == "7"


def test_somebody_elses_lease_is_taken_only_when_it_is_free():
    seen = stored(claimed(replace(CLAIM, holder="other"), None, True, NOW))
    assert claimed(CLAIM, seen, False, NOW) is None
    taken = claimed(CLAIM, seen, True, NOW)
    assert (taken["spec"]["holderIdentity"], taken["spec"]["leaseTransitions"]) == ("me", 1)


def test_a_lease_expires_when_the_observer_saw_no_renewal_for_its_duration():
    expiry, lease = Expiry(), Lease("other", 10, "", "t0", 0)
    assert not expiry.expired("a", lease, 100.0)
    assert not expiry.expired("a", lease, 109.9)
    assert expiry.expired("a", lease, 110.0)
    renewed = replace(lease, renewed="t1")
    assert not expiry.expired("a", renewed, 111.0)
    assert expiry.until_s("a", renewed, 115.0) == 121.0
    assert expiry.expired("a", replace(renewed, holder=""), 116.0), "given up"
    expiry.forget("a")
    assert not expiry.expired("a", renewed, 1000.0), "seen for the first time"


def test_a_lease_given_up_is_nobodys():
    given_up = released(CLAIM, stored(claimed(CLAIM, None, True, NOW)), NOW)
    assert (given_up["spec"]["holderIdentity"], given_up["spec"]["leaseDurationSeconds"]) == ("", 1)


ABOUT = Regarding("migd.dev/v1alpha1", "GPUPartition", "gpu-x", "uid-x")
NOTE = Note(ABOUT, "Warning", "InUse", "Waiting", "held by pid 7")


def recorder(**limits) -> Recorder:
    return Recorder("migd.dev/agent", "pod-a", Limits(**limits))


def test_an_equal_note_is_counted_and_written_once_a_while():
    found = recorder(quiet_s=60.0)
    first = found.record(NOTE, 0.0, NOW)
    assert isinstance(first, Post)
    assert [found.record(NOTE, t, NOW) for t in (1.0, 30.0, 59.0)] == [None, None, None]
    counted = found.record(NOTE, 60.0, NOW)
    assert isinstance(counted, Count)
    assert (counted.name, counted.patch["series"]["count"]) == (first.document["metadata"]["name"], 5)
    assert found.record(NOTE, 61.0, NOW) is None


def test_what_the_api_server_has_forgotten_is_told_anew():
    found = recorder(again_s=3000.0)
    first = found.record(NOTE, 0.0, NOW)
    second = found.record(NOTE, 3000.0, NOW + timedelta(seconds=3000))
    assert isinstance(second, Post)
    assert first.document["metadata"]["name"] != second.document["metadata"]["name"]


def test_a_chatty_object_is_cut_short_and_others_are_not():
    found = recorder(burst=3, refill_s=100.0)
    texts = [found.record(replace(NOTE, text=str(i)), 0.0, NOW) for i in range(5)]
    assert [isinstance(t, Post) for t in texts] == [True, True, True, False, False]
    assert found.left_out == 2
    other = replace(NOTE, regarding=replace(ABOUT, uid="uid-y"))
    assert isinstance(found.record(other, 0.0, NOW), Post)
    assert isinstance(found.record(replace(NOTE, text="later"), 100.0, NOW), Post)
    assert found.record(replace(NOTE, text="too soon"), 101.0, NOW) is None


def test_a_post_that_failed_is_tried_with_the_next_equal_note():
    found = recorder()
    assert isinstance(found.record(NOTE, 0.0, NOW), Post)
    found.failed(NOTE)
    assert isinstance(found.record(NOTE, 1.0, NOW), Post)


def test_memory_is_bounded():
    found = recorder(objects_max=10)
    for i in range(50):
        found.record(replace(NOTE, regarding=replace(ABOUT, uid=str(i))), 0.0, NOW)
    assert isinstance(found.record(replace(NOTE, regarding=replace(ABOUT, uid="0")), 1.0, NOW), Post), "forgotten"
    assert found.record(replace(NOTE, regarding=replace(ABOUT, uid="49")), 1.0, NOW) is None, "remembered"


def test_an_event_names_its_object_and_goes_to_its_namespace_or_default():
    post = recorder().record(NOTE, 0.0, NOW)
    assert post.namespace == "default"
    assert post.document["regarding"] == {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartition",
        "name": "gpu-x",
        "uid": "uid-x",
    }
    inside = replace(NOTE, regarding=Regarding("v1", "Pod", "p", "u", "team"))
    assert recorder().record(inside, 0.0, NOW).namespace == "team"
    long = recorder().record(replace(NOTE, text="ä" * 2000), 0.0, NOW)
    assert len(long.document["note"].encode()) <= 1024
