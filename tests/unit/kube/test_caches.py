"""The cache as a value machine: lists, events and answers in, changes out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from migd.kube.caches import Cache, Reader
from migd.kube.stored import Interner, Kind


def text_of(document, same):
    return document["spec"]["text"]


THINGS = Kind("test/v1", "Thing", "things", text_of)


def thing(name: str, version: int, text: Any = "", uid: str = "") -> dict:
    return {
        "metadata": {"name": name, "uid": uid or f"u-{name}", "resourceVersion": str(version)},
        "spec": {"text": text},
    }


def cache() -> Cache[str]:
    return Cache(Reader(THINGS, "me", Interner()))


def listed(found: Cache[str], documents, version: str):
    return found.listed([found.read(d) for d in documents], version)


def words(changes) -> list[str]:
    kinds = {(False, True): "+", (True, True): "~", (True, False): "-"}
    return [kinds[c.before is not None, c.after is not None] + c.key for c in changes]


def test_nothing_is_known_to_be_missing_before_the_first_list():
    found = cache()
    assert not found.synced
    assert words(listed(found, [thing("a", 3)], "5")) == ["+a"]
    assert found.synced
    assert [stored.value for stored in found] == [""]


def test_a_list_finds_what_came_changed_went_and_was_made_anew():
    found = cache()
    listed(found, [thing("same", 1), thing("changed", 2), thing("gone", 3), thing("anew", 4)], "5")
    changes = listed(
        found, [thing("same", 1), thing("changed", 7), thing("anew", 8, uid="other"), thing("new", 9)], "10"
    )
    assert words(changes) == ["-anew", "+anew", "~changed", "-gone", "+new"]
    assert sorted(found.objects) == ["anew", "changed", "new", "same"]


def test_an_event_of_what_is_known_already_is_no_change():
    found = cache()
    listed(found, [thing("a", 3)], "5")
    assert found.event("ADDED", thing("a", 3)) == ()
    assert found.event("BOOKMARK", thing("", 9)) == ()
    assert words(found.event("MODIFIED", thing("a", 11))) == ["~a"]
    assert words(found.event("DELETED", thing("a", 12))) == ["-a"]
    assert found.event("DELETED", thing("a", 12)) == ()


def test_an_answer_of_ours_counts_until_the_watch_knows_better():
    found = cache()
    listed(found, [thing("a", 3)], "5")
    assert words(found.noted(found.read(thing("a", 8, "ours")))) == ["~a"]
    assert found.event("MODIFIED", thing("a", 7, "older")) == ()
    assert found.get("a").value == "ours"
    assert found.event("MODIFIED", thing("a", 8, "ours")) == ()
    assert words(found.event("MODIFIED", thing("a", 9, "newer"))) == ["~a"]
    assert found.noted(found.read(thing("a", 8, "ours"))) == ()
    assert found.get("a").value == "newer"


def test_an_answer_does_not_bring_back_what_the_watch_saw_go():
    found = cache()
    listed(found, [thing("a", 3)], "5")
    found.event("DELETED", thing("a", 9))
    assert found.noted(found.read(thing("a", 8))) == ()
    assert found.get("a") is None


def test_a_list_that_began_before_our_write_does_not_undo_it():
    found = cache()
    listed(found, [thing("a", 3)], "5")
    found.noted(found.read(thing("a", 8, "ours")))
    found.noted(found.read(thing("b", 9, "ours")))
    assert listed(found, [thing("a", 3)], "7") == ()
    assert (found.get("a").value, found.get("b").value) == ("ours", "ours")
    assert words(listed(found, [thing("a", 8, "ours")], "10")) == ["-b"]


def test_an_api_server_that_was_restored_from_a_backup_is_believed():
    found = cache()
    listed(found, [thing("a", 300), thing("b", 301)], "500")
    assert words(listed(found, [thing("a", 3, "old")], "5")) == ["~a", "-b"]
    assert found.get("a").value == "old"
    assert words(found.event("MODIFIED", thing("a", 6, "new"))) == ["~a"]


def test_an_object_that_cannot_be_read_is_named_and_stops_nothing():
    found = cache()
    broken = thing("broken", 4)
    del broken["spec"]
    assert words(listed(found, [broken, thing("a", 3)], "5")) == ["+a"]
    assert found.unreadable == {"broken": "KeyError: 'spec'"}
    assert words(found.event("MODIFIED", thing("broken", 6))) == ["+broken"]
    assert found.unreadable == {}
    del (again := thing("broken", 7))["spec"]
    assert words(found.event("MODIFIED", again)) == ["-broken"], "what it says is not known any more"


NAMES = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.tuples(st.sampled_from(["put", "delete", "remake"]), NAMES)), st.data())
def test_whatever_is_missed_the_next_list_makes_it_good(steps, data):
    """Some events are heard, some answers are noted, then all is listed: equal to the truth, and the changes add up."""
    found, truth, version, told = cache(), {}, 1, {}
    heard_all = True
    listed(found, [], "1")

    def take(changes):
        for change in changes:
            assert told.get(change.key) == (change.before.resource_version if change.before else None)
            if change.after is None:
                del told[change.key]
            else:
                told[change.key] = change.after.resource_version

    for what, name in steps:
        version += 1
        if what == "put":
            uid = truth[name]["metadata"]["uid"] if name in truth else f"u{version}"
            truth[name] = thing(name, version, uid=uid)
        elif what == "remake":
            truth[name] = thing(name, version, uid=f"u{version}")
        else:
            truth.pop(name, None)
        how = data.draw(st.sampled_from(["heard", "noted", "missed"]))
        if how == "noted" and name in truth:
            take(found.noted(found.read(truth[name])))
        elif how == "heard" and heard_all:
            take(found.event("MODIFIED" if name in truth else "DELETED", truth.get(name) or thing(name, version)))
        else:
            heard_all = False  # a watch that missed something is over
        assert {key: stored.resource_version for key, stored in found.objects.items()} == told
    take(listed(found, list(truth.values()), str(version)))
    assert {name: d["metadata"]["resourceVersion"] for name, d in truth.items()} == told
