"""Situations from public reports, as far as a plan and a preview decide them; each named by its number.

Left out: what happens on the hardware afterwards.
"""

from __future__ import annotations

import pytest
import yaml
from unit.plans.boards import (
    A30_NAME,
    A100_40,
    A100_40_NAME,
    A100_80_NAME,
    A100_80_ROUNDED,
    GB200_NAME,
    gpu,
    not_capable,
)
from unit.plans.texts import case, document, everywhere, migparted, plan

from migd.mig.geometry import counts, counts_of
from migd.mig.profiles import smallest_enough
from migd.plans.migparted import UnknownConfig, conflicts, to_plan
from migd.plans.plan import plan_of
from migd.plans.preview import Preview, preview
from migd.plans.problems import BadInput

EIGHT_40 = [gpu(i, A100_40_NAME) for i in range(8)]
EIGHT_80 = [gpu(i, A100_80_NAME) for i in range(8)]


def of_file(name: str, config: str, gpus: list) -> Preview:
    file = migparted(case(name))
    found, _ = to_plan(file, config)
    assert conflicts(file, config, gpus) == ()
    return preview(found, gpus, {})


def layouts(found: Preview) -> list[str | None]:
    return [None if g.refused else str(g.target) for g in found.gpus]


def test_h01_every_config_is_valid_on_eight_a100_40gb():
    file = migparted(case("h01"))
    assert file.names == ("all-disabled", "all-1g.5gb", "all-1g.5gb.me", "all-1g.10gb", "all-balanced", "custom-config")
    for name in file.names:
        found = of_file("h01", name, EIGHT_40)
        assert [g.refused for g in found.gpus] == [None] * 8
        assert found.problems == ()
        assert found.notes == ()
    assert layouts(of_file("h01", "custom-config", EIGHT_40)) == [
        *["MIG off"] * 4,
        "7×1g.5gb",
        "3×2g.10gb",
        "2×3g.20gb",
        "3g.20gb 2g.10gb 2×1g.5gb",
    ]


def test_h01_the_media_profile_is_matched_by_its_attribute():
    found = of_file("h01", "all-1g.5gb.me", EIGHT_40)
    assert layouts(found) == ["1g.5gb+me"] * 8


def test_h02_and_b03_only_the_config_that_does_not_fit_is_refused():
    for name in migparted(case("h02")).names:
        found = of_file("h02", name, EIGHT_80)
        assert [g.refused is not None for g in found.gpus] == [name == "all-3g.40gb"] * 8


def test_b03_a_refusal_names_the_model_and_what_is_left_over_and_what_fits():
    busy = gpu(0, A100_80_NAME, "3g.40gb@4 2g.20gb@0 1g.10gb@2", busy="3g.40gb@4 2g.20gb@0 1g.10gb@2")
    (found,) = preview(plan(everywhere({"3g.40gb": 2, "1g.10gb": 1})), [busy], {}).gpus
    assert found.refused is not None
    assert found.refused.reason == "Infeasible"
    assert "A100-SXM4-80GB" in found.refused.message
    assert "2×3g.40gb" in found.refused.message
    assert found.refused.left_over == (("1g.10gb", 1),)
    assert (("3g.40gb", 2),) in found.refused.nearest
    assert (found.destroy, found.create, found.mode_change, found.blocked) == ((), (), None, None)


def test_h03_and_b70_a_bare_index_is_read_as_one_index_with_a_note():
    found, warnings = to_plan(migparted(case("h03")), None)
    assert warnings == ('mig-configs["all-1g.5gb"][0].devices: 7 is read as one index; write [7]',)
    assert [g.rule for g in preview(found, EIGHT_40, {}).gpus] == [None] * 7 + [0]


def test_h04_and_b72_misspelt_keys_are_refused_with_what_was_meant_and_never_read_as_mig_off():
    file = migparted(case("h04"))
    for name in ("all-1g.10gb", "all-3g.40gb"):
        with pytest.raises(BadInput) as caught:
            to_plan(file, name)
        assert [(p.path, p.hint) for p in caught.value.problems] == [
            (f'data["config.yaml"].mig-configs["{name}"][0].migenabled', "did you mean mig-enabled?"),
            (f'data["config.yaml"].mig-configs["{name}"][0].migdevices', "did you mean mig-devices?"),
        ]
    assert layouts(of_file("h04", "all-disabled", EIGHT_80)) == ["MIG off"] * 8


def test_h05_and_b74_a_name_not_in_the_file_is_refused_with_the_names_that_are():
    file = migparted(case("h05"))
    with pytest.raises(UnknownConfig, match=r'has no config "all-1g.5gb"; it has: mig-on, mig-off') as caught:
        to_plan(file, "all-1g.5gb")
    assert caught.value.names == ("mig-on", "mig-off")
    assert layouts(of_file("h05", "mig-on", EIGHT_40)) == ["7×1g.5gb"] * 8


STATION = [
    *(gpu(i, A100_80_NAME) for i in range(3)),
    not_capable(3, "NVIDIA DGX Display", "0x1FB010DE"),
    gpu(4, A100_80_NAME),
]


def test_h06_and_b77_indices_are_node_wide_and_the_display_gpu_never_gets_mig():
    found = of_file("h06", "balanced-station", STATION)
    assert layouts(found) == ["MIG off", "2×3g.40gb", "3×2g.20gb 1g.10gb", "MIG off", "7×1g.10gb"]
    assert [g.rule for g in found.gpus] == [0, 1, 2, 4, 3]
    assert not found.gpus[3].changes
    assert found.notes == ()


def test_h06_mig_on_with_an_empty_set_is_imported_with_a_warning():
    _, warnings = to_plan(migparted(case("h06")), "all-enabled-station")
    assert len(warnings) == 1
    found = of_file("h06", "all-enabled-station", STATION)
    assert layouts(found) == [*["MIG on, empty"] * 3, "MIG off", "MIG on, empty"]
    assert [g.mode_change for g in found.gpus] == ["Enable", "Enable", "Enable", None, "Enable"]


def test_b77_both_filter_forms_work_and_one_that_matches_nothing_is_reported():
    for form in ("0x20B210DE", ["0x20b210de"], ["0x20B210DE", "0x20B510DE"]):
        text = yaml.dump(
            {"version": "v1", "mig-configs": {"a": [{"device-filter": form, "devices": [4], "mig-enabled": False}]}}
        )
        found, _ = to_plan(migparted(text), None)
        assert [g.rule for g in preview(found, STATION, {}).gpus] == [None, None, None, None, 0]
        assert preview(found, EIGHT_40, {}).notes == ("spec.rules[0] decides on no GPU of this machine",)


def test_b77_mig_on_the_display_gpu_is_refused_as_not_capable():
    text = 'version: v1\nmig-configs:\n  a:\n  - {devices: [3], mig-enabled: true, mig-devices: {"1g.10gb": 1}}\n'
    found = preview(to_plan(migparted(text), None)[0], STATION, {}).gpus[3]
    assert found.refused is not None
    assert found.refused.message == "NVIDIA DGX Display is not MIG-capable"


@pytest.mark.parametrize(
    ("mib", "profile"),
    [
        (5000, "1g.5gb"),
        (5120, "1g.5gb"),
        (5121, "2g"),
        (10240, "2g"),
        (20480, "3g.20gb"),
        (40960, "7g.40gb"),
        (40961, None),
    ],
)
def test_h14_and_b78_equal_fits_and_one_mib_more_goes_to_the_next_size(mib, profile):
    data = yaml.safe_load(case("h14"))
    assert mib in data["requests_mib"]
    known = {item["name"] for layout in data["knownMigGeometries"][0]["allowedGeometries"] for item in layout}
    found = smallest_enough(mib, [p for p in A100_40.profiles if p.name in known])
    assert (found.name if found else None) == ({"2g": "2g.10gb"}.get(profile, profile) if profile else None)


def test_b78_a_plan_that_needs_gb_gets_the_same_sizes():
    needs = {5: "1g.5gb", 6: "1g.10gb", 10: "1g.10gb", 20: "3g.20gb", 40: "7g.40gb"}
    for gb, name in needs.items():
        rule = {"gpus": {"all": True}, "instances": [{"memoryGB": gb}]}
        assert layouts(preview(plan(rule), [gpu(0)], {})) == [name]
    (refused,) = preview(plan({"gpus": {"all": True}, "instances": [{"memoryGB": 41}]}), [gpu(0)], {}).gpus
    assert refused.refused is not None
    assert "no profile is large enough for 41 GB" in refused.refused.message


def test_b05_names_that_another_driver_rounds_are_matched_and_shown_as_this_board_says():
    rounded = [gpu(i, A100_80_NAME, board=A100_80_ROUNDED) for i in range(2)]
    found = preview(
        plan(
            {"gpus": {"indices": [0]}, "instances": [{"profile": "7g.80gb"}]},
            {"gpus": {"indices": [1]}, "instances": [{"profile": "3g.40gb", "count": 2}]},
        ),
        rounded,
        {},
    )
    assert layouts(found) == ["7g.79gb", "2×3g.39gb"]


@pytest.mark.parametrize("other", ["5g.79gb", "7g.78gb", "7g.80gb+me", "2g.20gb+me"])
def test_b05_a_different_profile_is_never_put_in_its_place(other):
    (found,) = preview(plan(everywhere({other: 1})), [gpu(0, A100_80_NAME)], {}).gpus
    assert found.refused is not None
    assert found.refused.reason == "UnknownProfile"
    assert other in found.refused.message


def test_b07_a_name_this_board_does_not_have_is_refused_with_what_it_offers():
    (refused,) = preview(plan(everywhere({"1g.24gb": 7})), [gpu(0, GB200_NAME)], {}).gpus
    assert refused.refused is not None
    assert refused.refused.reason == "UnknownProfile"
    for name in ("1g.23gb", "1g.23gb+me", "1g.47gb", "2g.47gb", "7g.186gb"):
        assert name in refused.refused.message
    assert layouts(preview(plan(everywhere({"1g.23gb": 7})), [gpu(0, GB200_NAME)], {})) == ["7×1g.23gb"]


def test_b13_a_profile_of_a_smaller_card_is_refused_with_the_nearest_names():
    (found,) = preview(plan(everywhere({"1g.5gb": 7})), [gpu(0, A100_80_NAME)], {}).gpus
    assert found.refused is not None
    assert "1g.5gb is not offered (nearest: 1g.10gb" in found.refused.message


def test_b13_a_card_without_mig_is_refused_as_not_capable():
    found = preview(plan(everywhere({"1g.10gb": 1})), [not_capable(i) for i in range(3)], {})
    assert [g.refused.message if g.refused else "" for g in found.gpus] == ["NVIDIA A40 is not MIG-capable"] * 3


def test_b42_an_empty_set_is_refused_unless_it_is_allowed():
    rules = [
        {"gpus": {"indices": [0]}, "instances": [{"profile": "1g.10gb", "count": 7}]},
        {"gpus": {"indices": [1]}, "instances": []},
    ]
    with pytest.raises(BadInput, match=r"spec.rules\[1\]: instances is empty.*allowEmpty: true says it is meant"):
        plan_of(document(rules))
    rules[1]["allowEmpty"] = True
    assert layouts(preview(plan_of(document(rules)), EIGHT_80[:2], {})) == ["7×1g.10gb", "MIG on, empty"]


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"3g.20gb": 2, "1g.5gb": 1}, False),
        ({"4g.20gb": 1, "3g.20gb": 1}, True),
        ({"1g.5gb": 7}, True),
        ({"1g.5gb": 7, "1g.10gb": 1}, False),
    ],
)
def test_b108_memory_slices_and_compute_slices_both_count(wanted, fits):
    (found,) = preview(plan(everywhere(wanted)), [gpu(0)], {}).gpus
    assert (found.refused is None) == fits
    if fits:
        assert found.target is not None
        assert counts_of(found.target.instances) == counts(wanted)


def test_b62_a_profile_of_another_board_is_refused_before_anything_happens():
    (found,) = preview(plan(everywhere({"2g.10gb": 3})), [gpu(0, A100_80_NAME)], {}).gpus
    assert found.refused is not None
    assert not found.changes


def test_an_a30_is_cut_by_its_own_names():
    assert layouts(preview(plan(everywhere({"1g.6gb": 2, "2g.12gb": 1})), [gpu(0, A30_NAME)], {})) == [
        "2g.12gb 2×1g.6gb"
    ]
