"""The models that can be simulated: every figure is the table's or marked invented, and machines are named clearly."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import yaml

from migd.sim import SimHost, SpecError, parse_spec, write_spec
from migd.sim.catalog import DATA, ENGINE_KINDS, models, not_simulable
from migd.sim.machine import GpuInstance, Machine
from migd.sim.placing import free_places

TABLE = yaml.load((DATA / "mig-profiles.yaml").read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
ROWS = [(g["key"], row) for g in TABLE["gpus"] for row in g.get("gpu_instance_profiles") or () if g["key"] in models()]
MIG_MODELS = [m for m in models().values() if m.mig]


def test_every_model_with_known_placements_can_be_simulated():
    rows = {g["key"]: g.get("gpu_instance_profiles") or () for g in TABLE["gpus"]}
    known = {k for k, v in rows.items() if v and all(r["placements"] and r["profile_id"] is not None for r in v)}
    assert {m.key for m in MIG_MODELS} == known
    assert {g["key"] for g in TABLE["gpus"]} - known <= set(not_simulable())


@pytest.mark.parametrize(("key", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value["name"])
def test_a_figure_is_the_tables_or_marked_as_invented(key, row):
    profile = next(p for p in models()[key].profiles if p.name == row["name"])
    engines = tuple(row["engines"][kind] for kind in ENGINE_KINDS)
    for field, mine, known in (
        ("memory_mib", profile.memory_mib, row["memory_size_mb"]),
        ("sm", profile.sm, row["multiprocessor_count"]),
        ("engines", profile.engines, None if None in engines else engines),
    ):
        assert (field in profile.invented) == (known is None)
        assert isinstance(mine, (int, tuple))
        assert known in (None, mine)
    assert [(p.start, p.size) for p in profile.places] == [tuple(p) for p in row["placements"]]


@pytest.mark.parametrize("model", MIG_MODELS, ids=lambda m: m.key)
def test_memory_figures_reproduce_the_profile_names_by_the_published_rule(model):
    total_gib = math.ceil(Fraction(model.fb_total_mib, 1024))
    for profile in model.profiles:
        eighths = math.ceil(Fraction(profile.memory_mib, model.fb_total_mib) * 8)
        gigabytes = math.floor(Fraction(eighths, 8) * total_gib + Fraction(1, 2))
        assert f".{gigabytes}gb" in profile.name


@pytest.mark.parametrize("model", [m for m in MIG_MODELS if m.engine_pool is None], ids=lambda m: m.key)
def test_a_model_without_a_known_pool_has_no_engine_limit(model):
    machine = Machine.of(parse_spec(model.key))
    assert machine.gpus[0].instances == []
    double = next((p for p in model.profiles if p.enum == 9), None)
    for profile in filter(None, (model.profiles[0], double)):
        assert len(free_places(model, [], profile)) == profile.count_max


@pytest.mark.parametrize(
    ("key", "names", "sets"),
    [
        ("a100-40gb", {"1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}, 298),
        ("h200", {"1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"}, 723),
        ("a100-80gb", None, 2319),
        ("a30", None, 76),
        ("rtx-pro-6000-blackwell", None, 717),
    ],
)
def test_there_are_as_many_layouts_as_counted_elsewhere(key, names, sets):
    """Every set of instances that placement, counts and engine pool allow; the figures are planning's own."""
    model = models()[key]
    pairs = [
        GpuInstance(0, 0, p.profile_id, x.start, x.size, [])
        for p in model.profiles
        if names is None or p.name in names
        for x in p.places
    ]
    by_id = model.by_id()

    def count(held, rest):
        total = 1
        for at, pair in enumerate(rest):
            if any(x.start == pair.start for x in free_places(model, held, by_id[pair.profile_id])):
                total += count([*held, pair], rest[at + 1 :])
        return total

    assert count([], pairs) == sets


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("8xa100-80gb,2xh200", "8xa100-80gb,2xh200"),
        ("a100-80gb, a100-80gb", "2xa100-80gb"),
        ('2x "NVIDIA A100-PCIE-40GB"', '2x"NVIDIA A100-PCIE-40GB"'),
        ("nvidia h200", "1xh200"),
        ("A100-PCIE-40GB", '1x"NVIDIA A100-PCIE-40GB"'),
        ("L40S,2xT4,NVIDIA A40", "1xl40s,2xt4,1xa40"),
    ],
)
def test_a_specification_has_one_canonical_form(text, canonical):
    assert write_spec(parse_spec(text)) == canonical
    assert parse_spec(canonical) == parse_spec(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xa100", "did you mean a100-40gb or a100-80gb"),
        ("4xh100", "did you mean h100-sxm-80gb or h100-pcie-80gb"),
        ("", "write for example"),
        ("h200,,h200", "write for example"),
        ("0xh200", "1 to 64 GPUs"),
        ("65xh200", "1 to 64 GPUs"),
        ("ax800", "cannot be simulated"),
        ("zzz", "known: a100-40gb"),
    ],
)
def test_a_wrong_specification_says_what_may_have_been_meant(text, says):
    with pytest.raises(SpecError, match=says):
        parse_spec(text)


def test_a_fresh_machine_is_empty_and_its_uuids_depend_on_model_and_index_alone():
    host = SimHost.fresh("2xa100-80gb,t4")
    nvml = host.nvml()
    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(3)]
    assert [nvml.nvmlDeviceGetMinorNumber(g) for g in gpus] == [0, 1, 2]
    assert nvml.nvmlDeviceGetMigMode(gpus[0]) == [0, 0]
    assert [hex(nvml.nvmlDeviceGetPciInfo(g).pciDeviceId) for g in gpus] == ["0x20b210de", "0x20b210de", "0x1eb810de"]
    buses = [nvml.nvmlDeviceGetPciInfo(g).busId for g in gpus]
    assert [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByPciBusId(b)) for b in buses] == list(host.gpu_uuids())
    assert host.gpu_uuids()[:2] == SimHost.fresh("3xa100-80gb").gpu_uuids()[:2]
    assert len(set(host.gpu_uuids())) == 3
    assert set(SimHost.fresh("2xa100-80gb,t4", seed="node-7").gpu_uuids()).isdisjoint(host.gpu_uuids())
