"""The one patch of a node, as operations; what the API server makes of it is in the contract."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migd.kube.caches import Reader
from migd.kube.nodes import NODES, NodeChange, operations
from migd.kube.stored import Interner
from migd.sim.cluster.patches import PatchError, patched

OURS = {"key": "migd.dev/changing", "effect": "NoSchedule"}


def node(labels=None, annotations=None, taints=None):
    metadata = {"name": "n", "uid": "u", "resourceVersion": "1"}
    metadata |= {"labels": labels} if labels else {}
    metadata |= {"annotations": annotations} if annotations else {}
    return {"metadata": metadata, "spec": {"taints": taints} if taints else {}}


def read(document):
    return Reader(NODES, "me", Interner()).read(document)


@pytest.mark.parametrize("key", ["pool", "nvidia.com/gpu.product", "kubernetes.io/hostname", "nvidia.com/mig.config"])
def test_a_foreign_label_cannot_even_be_asked_for(key: str):
    with pytest.raises(AssertionError, match="not ours to write"):
        NodeChange(labels={key: "x"})


def test_a_foreign_annotation_cannot_even_be_asked_for():
    with pytest.raises(AssertionError, match="not ours to write: example.com/x"):
        NodeChange(annotations={"example.com/x": None})


def test_a_label_is_written_only_where_its_old_value_still_holds():
    found = operations(
        read(node({"migd.dev/state": "ready", "pool": "a"})), NodeChange(labels={"migd.dev/state": "failed"})
    )
    assert found == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "test", "path": "/metadata/labels/migd.dev~1state", "value": "ready"},
        {"op": "add", "path": "/metadata/labels/migd.dev~1state", "value": "failed"},
    ]


def test_a_taint_is_added_behind_the_ones_of_others_and_only_where_they_are_as_seen():
    theirs = {"key": "x", "value": "y", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
    found = operations(read(node(taints=[theirs])), NodeChange(closed=True))
    assert found[1:] == [
        {"op": "test", "path": "/spec/taints", "value": [theirs]},
        {"op": "add", "path": "/spec/taints/-", "value": OURS},
    ]


SOFT = {"key": "migd.dev/changing", "effect": "PreferNoSchedule"}


def test_a_taint_of_our_name_with_another_effect_closes_no_node_and_is_left_to_whoever_set_it():
    """Seen: a node was taken to be closed, and changed, while the scheduler still placed pods there."""
    seen = read(node(taints=[SOFT]))
    assert not seen.value.closed
    shut = patched(node(taints=[SOFT]), operations(seen, NodeChange(closed=True)))
    assert shut["spec"]["taints"] == [SOFT, OURS]
    assert patched(shut, operations(read(shut), NodeChange(closed=False)))["spec"]["taints"] == [SOFT]


KEYS = st.sampled_from(["migd.dev/state", "migd.dev/owed", "migd.dev/mig-1g.10gb.count"])
FOREIGN = st.dictionaries(st.sampled_from(["pool", "a/b"]), st.sampled_from(["x", "y"]))
VALUES = st.dictionaries(KEYS, st.sampled_from(["1", "2"]))
CHANGES = st.builds(
    NodeChange,
    st.dictionaries(KEYS, st.sampled_from(["1", "2", None])),
    st.dictionaries(KEYS, st.sampled_from(["1", "2", None])),
    st.sampled_from([True, False, None]),
)
TAINTS = st.lists(
    st.sampled_from(
        [OURS, SOFT, {"key": "x", "effect": "NoSchedule"}, {"key": "y", "value": "z", "effect": "NoExecute"}]
    ),
    unique_by=str,
)


@st.composite
def nodes(draw):
    labels, annotations = ({**draw(VALUES), **draw(FOREIGN)} for _ in range(2))
    return node(labels, annotations, draw(TAINTS))


@given(nodes(), CHANGES)
def test_a_change_does_what_it_says_and_nothing_else(document, change):
    seen = read(document)
    patch = operations(seen, change)
    after = patched(document, patch)
    for part, wanted in (("labels", change.labels), ("annotations", change.annotations)):
        before = document["metadata"].get(part, {})
        kept = {k: v for k, v in {**before, **wanted}.items() if v is not None}
        assert after["metadata"].get(part, {}) == kept
    closed = read(document).value.closed if change.closed is None else change.closed
    assert read(after).value.closed is closed
    theirs = [t for t in document["spec"].get("taints", []) if t != OURS]
    assert [t for t in after["spec"].get("taints", []) if t != OURS] == theirs
    assert operations(read(after), change) == [], "done once, nothing differs"


@given(nodes(), nodes(), CHANGES)
def test_a_patch_decided_on_an_old_look_never_overwrites_what_is_newer(old, new, change):
    patch = operations(read(old), change)
    try:
        after = patched(new, patch)
    except PatchError:
        return
    undone = copy.deepcopy(after)
    for part, wanted in (("labels", change.labels), ("annotations", change.annotations)):
        for key in wanted:
            was, saw = new["metadata"].get(part, {}).get(key), old["metadata"].get(part, {}).get(key)
            assert was == saw or after["metadata"].get(part, {}).get(key) == was
            undone["metadata"].get(part, {}).pop(key, None)
        for key, value in new["metadata"].get(part, {}).items():
            assert key in wanted or undone["metadata"][part][key] == value
