"""What is there becomes a plan that would change nothing, and a text that reads back equal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plans.boards import A30_NAME, A100_40, gpu, not_capable, uuid
from unit.plans.texts import plan

from migd.mig.observed import SeenGpu
from migd.mig.table import table_of
from migd.plans.export import dump, plan_from
from migd.plans.plan import document_of
from migd.plans.preview import preview
from migd.plans.problems import BadInput
from migd.plans.reading import read

NODE = [
    gpu(0, instances="3g.20gb@4 1g.5gb@0"),
    gpu(1),
    gpu(2, instances="1g.5gb@3 3g.20gb@4"),
    gpu(3, instances=""),
    gpu(4, A30_NAME, instances="2g.12gb@0"),
    not_capable(5),
    SeenGpu(uuid(6), 6, "", "", 0, None, lost=True),
]


def test_gpus_with_equal_counts_share_a_rule_and_those_without_mig_are_left_out():
    assert document_of(plan_from(NODE, "here"))["spec"] == {
        "nodeSelector": {},
        "rules": [
            {"gpus": {"indices": [0, 2]}, "instances": [{"profile": "1g.5gb"}, {"profile": "3g.20gb"}]},
            {"gpus": {"indices": [1]}, "mig": "Disabled"},
            {"gpus": {"indices": [3]}, "instances": [], "allowEmpty": True},
            {"gpus": {"indices": [4]}, "instances": [{"profile": "2g.12gb"}]},
        ],
    }


def test_gpus_can_be_named_by_uuid():
    first = plan_from(NODE, by="uuids").spec.rules[0]
    assert first.gpus.uuids == (uuid(0), uuid(2))


def test_a_machine_without_mig_has_nothing_to_export():
    with pytest.raises(BadInput, match="no GPU of this machine can do MIG"):
        plan_from([not_capable(0)])


def test_the_text_reads_back_equal_and_leaves_defaults_out():
    for wanted in (plan_from(NODE), plan_from(NODE, by="uuids")):
        text = dump(wanted)
        assert read(text) == wanted
        assert "disruption" not in text


@pytest.mark.parametrize("text", ["1e3", "no", "010", "1:30", "0x10", "null", "~", "2020-01-01", "1.5", "true", "y"])
def test_a_text_that_looks_like_something_else_is_quoted(text):
    selector = {"matchLabels": {"a": text if text.isalnum() else "x"}}
    wanted = plan({"gpus": {"all": True, "models": [text, "*"]}, "mig": "Disabled"}, nodeSelector=selector)
    assert read(dump(wanted)) == wanted


def test_labels_in_another_order_give_the_same_text():
    one, two = (
        plan({"gpus": {"all": True}, "mig": "Disabled"}, nodeSelector={"matchLabels": labels})
        for labels in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    )
    assert dump(one) == dump(two)


SETS = st.sampled_from(table_of(A100_40).sets)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | SETS, min_size=1, max_size=5))
def test_an_exported_plan_changes_nothing_where_it_was_taken(layouts):
    table = table_of(A100_40)
    node = [
        gpu(i, instances=None if s is None else " ".join(map(str, table.geometry(s.bits))))
        for i, s in enumerate(layouts)
    ]
    found = preview(plan_from(node), node, {})
    assert [g.changes or bool(g.refused) or bool(g.blocked) for g in found.gpus] == [False] * len(node)
