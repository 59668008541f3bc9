"""mig-parted files and ConfigMaps: strict, per config, with both entries named where two disagree.

Left out: what the wishes come to on a board (test_cases).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plans.boards import gpu, not_capable
from unit.plans.texts import migparted, refusal

from migd.plans.matching import match
from migd.plans.migparted import MigParted, UnknownConfig, conflicts, name_from, to_plan
from migd.plans.plan import Plan, document_of
from migd.plans.problems import BadInput
from migd.plans.reading import read
from migd.plans.wishes import Wish, resolve

A100, DISPLAY = "0x20B210DE", "0x1FB010DE"
OFF: dict[str, Any] = {"mig-enabled": False}
SEVEN: dict[str, Any] = {"mig-enabled": True, "mig-devices": {"1g.10gb": 7}}
PAIR: dict[str, Any] = {"mig-enabled": True, "mig-devices": {"3g.40gb": 2}}


def config(*entries: dict[str, Any]) -> MigParted:
    return migparted(json.dumps({"version": "v1", "mig-configs": {"it": list(entries)}}))


def refused(*entries: dict[str, Any]) -> list[str]:
    with pytest.raises(BadInput) as caught:
        to_plan(config(*entries), "it")
    return [str(p) for p in caught.value.problems]


def rules(plan: Plan) -> list[dict[str, Any]]:
    spec = document_of(plan)["spec"]
    assert isinstance(spec, dict)
    return list(spec["rules"])


def config_map(data: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "mig", "namespace": "gpu"},
        "data": data,
        **more,
    }


FILE = 'version: v1\nmig-configs:\n  it:\n  - devices: all\n    mig-enabled: true\n    mig-devices: {"1g.10gb": 7}\n'


@pytest.mark.parametrize(
    ("entry", "path", "said"),
    [
        ({**SEVEN}, "devices", "is required (devices: all, or a list of indices)"),
        ({"devices": "all", "mig-devices": {}}, "mig-enabled", "is required"),
        ({"devices": [], **OFF}, "devices", "not an empty list"),
        ({"devices": "7", **OFF}, "devices", "(write [7])"),
        ({"devices": "some", **OFF}, "devices", 'must be all, or a list of indices such as [0, 1], not "some"'),
        ({"devices": [0, "1"], **OFF}, "devices", '[1] is "1"'),
        ({"devices": [True], **OFF}, "devices", "[0] is true"),
        ({"devices": [-1], **OFF}, "devices", "[0] is -1"),
        ({"devices": [2, 2], **OFF}, "devices", "GPU index 2 is named twice: at [0] and [1]"),
        ({"devices": "all", "mig-enabled": "true"}, "mig-enabled", "must be true or false"),
        ({"devices": "all", "mig-enabled": True}, "", "mig-devices is required where mig-enabled is true"),
        ({"devices": "all", **OFF, "mig-devices": {"1g.5gb": 1}}, "", "must be left out where mig-enabled is false"),
        (
            {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 0}},
            "mig-devices",
            "names only counts of 0",
        ),
        ({"devices": "all", "mig-enabled": True, "mig-devices": ["1g.5gb"]}, "mig-devices", "must be a mapping"),
        ({"devices": "all", **SEVEN, "device-filter": "0x20B2"}, "device-filter", "is not an NVIDIA PCI device id"),
        ({"devices": "all", **SEVEN, "device-filter": [None]}, "device-filter", "must be a device id or a list"),
        ({"devices": "all", **SEVEN, "device-filter": [{}]}, "device-filter", "must be a device id or a list"),
        ({"devices": "all", **SEVEN, "device-filter": []}, "device-filter", "must be a device id or a list"),
        ({"devices": "all", **SEVEN, "device-filter": [A100, "20b210de"]}, "device-filter", "names a device id twice"),
    ],
)
def test_a_wrong_entry_is_refused_at_its_path(entry, path, said):
    (found,) = refused({"devices": [0], **OFF}, entry)
    assert found.startswith("mig-configs.it[1]" + (f".{path}: " if path else ": "))
    assert said in found


@pytest.mark.parametrize(
    ("count", "said"), [(-1, "at least 0"), (65, "at most 64"), (True, "whole number"), ("7", "whole")]
)
def test_a_wrong_count_is_refused_at_its_profile(count, said):
    (found,) = refused({"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": count}})
    assert found.startswith('mig-configs.it[0].mig-devices["1g.5gb"]: ')
    assert said in found


def test_a_compute_part_is_refused_with_the_sentence():
    (found,) = refused({"devices": "all", "mig-enabled": True, "mig-devices": {"1c.3g.40gb": 1}})
    assert "not in v1alpha1: 1c.3g.40gb" in found


def test_counts_of_zero_beside_others_are_dropped():
    plan, _ = to_plan(config({"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 2, "3g.20gb": 0}}), "it")
    assert rules(plan) == [{"gpus": {"all": True}, "instances": [{"profile": "1g.5gb", "count": 2}]}]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"version": "v2"}, "version"),
        ({"version": 1}, "version"),
        ({"extra": 1}, "extra"),
        ({"mig-configs": {}}, "mig-configs"),
        ({"mig-configs": []}, "mig-configs"),
    ],
)
def test_a_wrong_top_level_is_refused_whatever_the_config(change, path):
    with pytest.raises(BadInput) as caught:
        migparted(json.dumps({"version": "v1", "mig-configs": {"it": [{"devices": "all", **OFF}]}} | change))
    assert [p.path for p in caught.value.problems] == [path]


def test_a_file_without_a_version_is_refused():
    with pytest.raises(BadInput, match="version: must be v1"):
        migparted(json.dumps({"mig-configs": {"it": [{"devices": "all", **OFF}]}}))


@pytest.mark.parametrize("entries", [None, [], {}, "all", 3])
def test_a_config_is_a_list_of_entries(entries):
    file = migparted(json.dumps({"version": "v1", "mig-configs": {"it": entries, "good": [{"devices": "all", **OFF}]}}))
    assert to_plan(file, "good")
    with pytest.raises(BadInput, match=r"mig-configs\.it: must be a list of at least one entry"):
        to_plan(file, "it")


def test_the_only_config_needs_no_name_and_of_several_one_must_be_chosen():
    assert to_plan(config({"devices": "all", **OFF}), None)[0].name == "it"
    file = migparted(json.dumps({"version": "v1", "mig-configs": {n: [{"devices": "all", **OFF}] for n in ("b", "a")}}))
    with pytest.raises(UnknownConfig, match="b, a") as caught:
        to_plan(file, None)
    assert caught.value.names == ("b", "a")


def test_a_filter_and_devices_must_both_match():
    plan, _ = to_plan(config({"device-filter": [A100, DISPLAY], "devices": [4], **SEVEN}), "it")
    assert rules(plan)[0]["gpus"] == {"indices": [4], "pciDeviceIds": [A100, DISPLAY]}


@pytest.mark.parametrize(
    ("one", "other", "on"),
    [
        ({"devices": [0, 1]}, {"devices": [1, 2]}, "GPU 1"),
        ({"devices": "all"}, {"devices": [3]}, "GPU 3"),
        ({"devices": "all"}, {"devices": "all"}, "the same GPUs"),
        ({"devices": "all", "device-filter": A100}, {"devices": [4], "device-filter": A100.lower()}, "GPU 4"),
        ({"devices": "all"}, {"devices": "all", "device-filter": A100}, "the same GPUs"),
        ({"devices": [1], "device-filter": A100}, {"devices": [0, 1]}, "GPU 1"),
    ],
)
def test_entries_that_surely_meet_and_disagree_are_refused_naming_both(one, other, on):
    (found,) = refused({**one, **SEVEN}, {**other, **PAIR})
    assert found == (
        f"mig-configs.it[1]: disagrees with mig-configs.it[0] on {on}: 2×3g.40gb here, 7×1g.10gb there "
        f"(name each GPU in one entry only)"
    )


def test_entries_that_disagree_only_on_some_nodes_are_refused_on_those():
    file = config({"devices": [0], **OFF}, {"device-filter": A100, "devices": "all", **SEVEN})
    assert to_plan(file, "it")
    a100 = [gpu(i, "NVIDIA A100-SXM4-80GB") for i in range(2)]
    (found,) = conflicts(file, "it", a100)
    assert found.path == "mig-configs.it[1]"
    assert found.message == "disagrees with mig-configs.it[0] on GPU 0: 7×1g.10gb here, MIG off there"
    assert conflicts(file, "it", [not_capable(0), a100[1]]) == ()


def test_entries_that_say_the_same_are_no_conflict():
    file = config(
        {"devices": [0, 1], **SEVEN}, {"devices": [1, 2], **SEVEN}, {"device-filter": A100, "devices": [0], **SEVEN}
    )
    plan, _ = to_plan(file, "it")
    assert [r["gpus"] for r in rules(plan)] == [{"indices": [0, 1]}, {"indices": [2]}]


def test_an_entry_covered_by_a_later_equal_one_is_left_to_that():
    plan, _ = to_plan(config({"devices": [0], **SEVEN}, {"devices": "all", **SEVEN}), "it")
    assert [r["gpus"] for r in rules(plan)] == [{"all": True}]


ENTRIES = st.builds(
    lambda devices, ids, content: {"devices": devices, **({"device-filter": ids} if ids else {}), **content},
    st.just("all") | st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    st.sampled_from([None, A100, DISPLAY, [A100, DISPLAY]]),
    st.sampled_from([OFF, SEVEN]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ENTRIES, min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_plan_wishes_on_every_gpu_what_the_entries_wish_there(entries, capable):
    """Wherever no conflict is found on the node, each GPU's rule means what each of its entries means."""
    file = config(*entries)
    node = [
        gpu(i, "NVIDIA A100-SXM4-80GB") if can else not_capable(i, "Display", DISPLAY) for i, can in enumerate(capable)
    ]
    bad = refusal(lambda: to_plan(file, "it"))
    if bad is not None:
        assert all("disagrees" in str(p) for p in bad.problems)
        return
    plan, _ = to_plan(file, "it")
    if conflicts(file, "it", node):
        return
    (read_config,) = file.configs
    for seen, rule in zip(node, match(plan, node).rules, strict=True):
        entry = next((e for e in read_config.entries if e.takes(seen)), None)
        assert (rule is None) == (entry is None)
        if rule is not None and entry is not None and seen.board is not None:
            assert resolve(plan.spec.rules[rule], seen) == Wish(entry.mig_enabled, entry.mig_devices)


def test_an_empty_set_becomes_allow_empty_with_a_warning():
    plan, warnings = to_plan(config({"devices": "all", "mig-enabled": True, "mig-devices": {}}), "it")
    assert rules(plan) == [{"gpus": {"all": True}, "instances": [], "allowEmpty": True}]
    assert len(warnings) == 1
    assert "stock device plugin may fail" in warnings[0]


def test_the_plan_takes_the_given_name_and_refuses_a_bad_one():
    file = config({"devices": "all", **OFF})
    assert to_plan(file, "it", "mine")[0].name == "mine"
    with pytest.raises(BadInput, match="is not a valid name"):
        to_plan(file, "it", "Not A Name")


@given(st.text(max_size=300))
def test_every_config_name_gives_a_plan_name(text):
    to_plan(config({"devices": "all", **OFF}), "it", name_from(text))


def test_a_config_map_gives_the_file_under_whatever_key():
    for text in (
        json.dumps(config_map({"other": "x", "my.yaml": FILE})),
        f"kind: Namespace\n---\n{json.dumps(config_map({'a': FILE}))}\n",
    ):
        assert migparted(text).names == ("it",)


def test_a_list_of_config_maps_is_looked_through():
    assert migparted(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [config_map({"config.yaml": FILE})]})
    ).names


def test_a_config_map_with_two_files_is_refused_naming_both():
    with pytest.raises(BadInput, match=r'data\.a of ConfigMap mig, data\["b.yaml"\] of ConfigMap mig'):
        read(json.dumps(config_map({"a": FILE, "b.yaml": FILE})))


def test_a_config_map_without_a_file_says_so():
    with pytest.raises(BadInput, match="no key of the ConfigMap holds a mig-parted file"):
        read(json.dumps(config_map({"config.yaml": "a: 1"})))


def test_a_broken_text_inside_a_config_map_is_named_by_key_and_line():
    with pytest.raises(BadInput, match=r'data\["config.yaml"\], line 3: key "it" is already given in line 2'):
        read(json.dumps(config_map({"config.yaml": "mig-configs:\n  it: []\n  it: []\n"})))


def test_what_is_neither_is_told_what_is_wanted():
    with pytest.raises(BadInput, match="did you mean GPUPartitionPlan"):
        read("apiVersion: v1\nkind: GpuPartitionPlans\n")
    with pytest.raises(BadInput, match="is empty"):
        read("# nothing\n")
    with pytest.raises(BadInput, match="neither a plan nor a mig-parted file"):
        read("just text")


def test_two_plans_in_one_text_are_refused():
    one = "apiVersion: migd.dev/v1alpha1\nkind: GPUPartitionPlan\n"
    with pytest.raises(BadInput, match="holds 2 things to apply"):
        read(f"{one}---\n{one}")


def test_a_filter_that_matches_nothing_is_told():
    plan, _ = to_plan(config({"device-filter": DISPLAY, "devices": "all", **OFF}), "it")
    assert match(plan, [gpu(0)]).notes == ("spec.rules[0] decides on no GPU of this machine",)
