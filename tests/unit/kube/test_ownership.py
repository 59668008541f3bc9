"""What a manager applied, as digests: compared with the simulated server-side apply, field by field."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from migd.kube.ownership import NOTHING_APPLIED, applied, wanted
from migd.sim.cluster import fields
from migd.sim.cluster.fields import Owner

MAPS = {("status", "conditions"): ("type",), ("status", "evictions"): ("podUID", "transaction")}
ME, OTHER = Owner("me", "Apply", "status"), Owner("other", "Apply", "status")

ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["Ready", "Assigned"])}, optional={"status": st.sampled_from(["True", "False"])}
    ),
    unique_by=lambda item: item["type"],
    max_size=2,
)
EVICTIONS = st.lists(
    st.fixed_dictionaries(
        {"podUID": st.sampled_from(["p", "q"]), "transaction": st.just("t"), "code": st.sampled_from([201, 429])}
    ),
    unique_by=lambda item: item["podUID"],
    max_size=2,
)
STATUS = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Idle", "Ready"]),
        "conditions": ITEMS,
        "evictions": EVICTIONS,
        "list": st.lists(st.integers(0, 2), max_size=2),
        "deep": st.fixed_dictionaries({}, optional={"x": st.integers(0, 1), "y": st.integers(0, 1)}),
    },
)


def put(document, owners, status, me):
    done = fields.apply(document, owners, {"status": status}, me, True, MAPS)
    assert isinstance(done, fields.Taken)
    return done.document, done.owners


def shown(document, owners):
    return {**document, "metadata": {"managedFields": fields.managed_fields(owners, "v1")}}


def digest_of(document, owners):
    return applied(shown(document, owners), "me").get("status", NOTHING_APPLIED)


@given(st.lists(st.tuples(st.sampled_from([ME, OTHER]), STATUS), max_size=5), STATUS)
def test_equal_digests_mean_that_an_apply_changes_nothing_and_other_ones_that_it_does(before, status):
    document, owners = {}, {}
    for who, body in before:
        document, owners = put(document, owners, body, who)
    after, owners_after = put(document, owners, status, ME)
    same = digest_of(document, owners) == wanted({"status": status}, MAPS)
    hollow = {"f:deep", "f:status"}  # a mapping without fields says nothing: that it is owned is no difference
    solid = {k: {p for p in v if p[-1] not in hollow} for k, v in owners.items()}
    solid_after = {k: {p for p in v if p[-1] not in hollow} for k, v in owners_after.items()}
    changed = _bare(document) != _bare(after) or solid.get(ME, set()) != solid_after.get(ME, set())
    assert same is not changed
    assert digest_of(after, owners_after) == wanted({"status": status}, MAPS)


def _bare(value):
    """A document without empty mappings."""
    if isinstance(value, dict):
        return {k: bare for k, v in value.items() if (bare := _bare(v)) != {}}
    return [_bare(v) for v in value] if isinstance(value, list) else value


def test_a_body_without_fields_is_what_was_applied_by_nobody():
    assert (
        wanted({"apiVersion": "v1", "kind": "X", "metadata": {"name": "n", "uid": "u"}, "spec": {}}, {})
        == NOTHING_APPLIED
    )


def test_a_value_that_another_overwrote_shows():
    document, owners = put({}, {}, {"phase": "Ready"}, ME)
    ours = digest_of(document, owners)
    changed = fields.merged(document, {("f:status", "f:phase"): "Lost"})
    assert digest_of(changed, fields.updated(document, owners, changed, Owner("edit", "Update"), MAPS)) != ours


def test_the_order_of_keys_and_of_merged_items_is_no_difference():
    first = {"status": {"phase": "x", "conditions": [{"type": "A", "status": "1"}, {"type": "B"}]}}
    other = {"status": {"conditions": [{"type": "B"}, {"status": "1", "type": "A"}], "phase": "x"}}
    assert wanted(first, MAPS) == wanted(other, MAPS)
    assert wanted({"status": {"list": [1, 2]}}, MAPS) != wanted({"status": {"list": [2, 1]}}, MAPS)
