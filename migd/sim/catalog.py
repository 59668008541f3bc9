"""The models that can be simulated: the shipped facts, and the overlay's invented figures where there are none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

DATA: Final = Path(__file__).parent / "data"
ENGINE_KINDS: Final = ("copy", "decoder", "encoder", "jpeg", "ofa")


class Place(NamedTuple):
    """One legal place of a profile, in memory slices of the GPU or compute slices of the GPU instance; and its mask."""

    start: int
    size: int
    mask: int


def place(start: int, size: int) -> Place:
    """The place of this start and size."""
    return Place(start, size, ((1 << size) - 1) << start)


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """A compute instance profile inside a GPU instance of one width; id is the enum value. Places in compute slices."""

    profile_id: int
    slices: int
    count_max: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class SimProfile:
    """One GPU instance profile as the simulated driver reports it.

    enum: what the profile query takes; profile_id: what every other call takes. memory_mib: memorySizeMB.
    engines: copy, decoder, encoder, JPEG, OFA. ci_sm: compute slices -> multiprocessors.
    memory_variants: other drivers' memorySizeMB for the same profile. invented: the field names with no source.
    """

    name: str
    enum: int
    profile_id: int
    slices: int
    count_max: int
    sm: int
    memory_mib: int
    engines: tuple[int, ...]
    places: tuple[Place, ...]
    ci_sm: Mapping[int, int]
    memory_variants: tuple[int, ...] = ()
    invented: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Model:
    """One model of GPU. profiles is empty, and mig False, for a board that cannot do MIG.

    names: NVML names, the default first; pci_ids: NVML name -> pciDeviceId (device << 16 | vendor).
    gi_ids: (start, size) of the physical span -> GPU instance id. engine_pool: None where not known (then no limit).
    resetless: a mode change takes effect without a GPU reset. positions: every (profile id, place mask).
    """

    key: str
    names: tuple[str, ...]
    pci_ids: Mapping[str, int]
    arch: int
    compute_capability: tuple[int, int]
    fb_total_mib: int
    mig: bool = False
    memory_slices: int = 0
    compute_slices: int = 0
    max_mig_devices: int = 0
    resetless: bool = False
    engine_pool: tuple[int, ...] | None = None
    profiles: tuple[SimProfile, ...] = ()
    gi_ids: Mapping[tuple[int, int], int] | None = None
    invented: frozenset[str] = frozenset()

    def by_id(self) -> dict[int, SimProfile]:
        """Numeric profile id -> profile."""
        return {p.profile_id: p for p in self.profiles}


@cache
def models() -> Mapping[str, Model]:
    """Every model that can be simulated, by key: those of the table with known placements, then boards without MIG."""
    table, overlay = _read("mig-profiles.yaml"), _read("overlay.yaml")
    found = {}
    for entry in table["gpus"]:
        model = _model(entry, table, overlay["invented"])
        if model is not None:
            found[model.key] = model
    for board in overlay["boards_without_mig"]:
        key = re.sub(r"[^a-z0-9]+", "-", board["name"].lower().removeprefix("nvidia ").removeprefix("tesla "))
        found[key] = Model(
            key=key,
            names=(board["name"],),
            pci_ids={board["name"]: int(board["packed"], 16)},
            arch=board["arch"],
            compute_capability=_capability(board["compute_capability"]),
            fb_total_mib=board["fb_total_mib"],
        )
    return found


@cache
def not_simulable() -> Mapping[str, str]:
    """Models of the table that cannot be simulated: every name they have -> why."""
    return {
        name.lower(): "no listing of its profiles and placements is known"
        for entry in _read("mig-profiles.yaml")["gpus"]
        if entry["key"] not in models()
        for name in (entry["key"], *(entry.get("nvml_names") or ()))
    }


@cache
def compute_profiles(gpu_slices: int) -> tuple[ComputeProfile, ...]:
    """The compute instance profiles of a GPU instance with so many compute slices, narrowest first."""
    facts = _read("mig-profiles.yaml")["compute_instance_profiles_by_gi_slices"]
    made_up = _read("overlay.yaml")["invented"]["compute_placements"].get(gpu_slices, {})
    return tuple(
        ComputeProfile(
            profile_id=facts["profile_id_by_slices"][row["slices"]],
            slices=row["slices"],
            count_max=row["instance_count_max"],
            places=tuple(place(*p) for p in row["placements"] or made_up[row["slices"]]),
        )
        for row in facts[gpu_slices]
    )


@cache
def compute_profiles_by_id(gpu_slices: int) -> Mapping[int, ComputeProfile]:
    """As `compute_profiles`, by numeric profile id."""
    return {profile.profile_id: profile for profile in compute_profiles(gpu_slices)}


@cache
def durations() -> Mapping[str, float]:
    """Seconds of the operations with no published figure: mode changes and reset. Invented."""
    found: dict[str, float] = _read("overlay.yaml")["invented"]["durations_s"]
    return found


@cache
def auto_placement() -> tuple[Mapping[str, Any], ...]:
    """The public creation sequences that the default placement policy must reproduce."""
    return tuple(_read("mig-profiles.yaml")["auto_placement"]["checked_sequences"])


def with_variant(model: Model, names: Mapping[str, str], memory: int, dropped: frozenset[str]) -> Model:
    """The model as another driver or board shows it.

    names: profile name -> name shown instead. memory: 1 takes each profile's first memory variant, 2 its second.
    dropped: "profile@start" places that this board does not have.
    """
    if not (names or memory or dropped):
        return model
    profiles = tuple(
        replace(
            p,
            name=names.get(p.name, p.name),
            memory_mib=p.memory_variants[memory - 1] if 0 < memory <= len(p.memory_variants) else p.memory_mib,
            places=tuple(x for x in p.places if f"{p.name}@{x.start}" not in dropped),
        )
        for p in model.profiles
    )
    return replace(model, profiles=profiles)


@cache
def _read(name: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((DATA / name).read_bytes(), Loader=loader)  # noqa: S506  (a safe loader, in C where there is one)


def _model(entry: Mapping[str, Any], table: Mapping[str, Any], invented: Mapping[str, Any]) -> Model | None:
    rows = entry.get("gpu_instance_profiles")
    if not rows or any(row["profile_id"] is None or row["placements"] is None for row in rows):
        return None
    key, geometry = entry["key"], table["geometries"][entry["geometry"]]
    extra = invented["models"].get(key, {})
    names = [*(entry.get("nvml_names") or ()), *(entry.get("same_table_names") or ())] or [extra["name"]]
    pci: dict[str, int] = {}
    for device in entry.get("pci_devices", ()):
        for name in (device["name"] or names[0]).split(" / "):
            pci.setdefault(name, int(device["packed"], 16))
    for name in names:
        pci.setdefault(name, next(iter(pci.values())))
    total = entry.get("fb_total_mib") or extra["fb_total_mib"]
    slices = entry["memory_slices"]
    spans = geometry["gpu_instance_ids"]["physical"].items()
    pool = entry.get("engine_pool")
    return Model(
        key=key,
        names=tuple(names),
        pci_ids=pci,
        arch=entry["nvml_device_arch"],
        compute_capability=_capability(entry["compute_capability"]),
        fb_total_mib=total,
        mig=True,
        memory_slices=slices,
        compute_slices=entry["compute_slices"],
        max_mig_devices=entry["max_mig_devices"],
        resetless=not entry["mig_toggle"]["gpu_reset_required"],
        engine_pool=tuple(pool[kind] for kind in ENGINE_KINDS) if pool else None,
        profiles=tuple(_profile(row, total, slices, invented["rules"]) for row in rows),
        gi_ids={(int(a), int(b)): gi_id for (a, b), gi_id in ((s.split(":"), i) for s, i in spans)},
        invented=frozenset(
            what
            for what, known in (("name", entry.get("nvml_names")), ("fb_total_mib", entry.get("fb_total_mib")))
            if not known
        ),
    )


def _profile(row: Mapping[str, Any], total_mib: int, gpu_slices: int, rules: Mapping[str, Any]) -> SimProfile:
    places = tuple(place(*p) for p in row["placements"])
    slices, invented = row["slice_count"], set()
    sm, memory = row["multiprocessor_count"], row["memory_size_mb"]
    engines = tuple(row["engines"][kind] for kind in ENGINE_KINDS)
    if sm is None:
        invented.add("sm")
        sm = slices * rules["multiprocessors_per_slice"]
    if memory is None:
        invented.add("memory_mib")
        share = total_mib * places[0].size / gpu_slices * rules["memory_share_of_its_eighths"]
        memory = int(share // 64) * 64
    if None in engines:
        invented.add("engines")
        media = int("+me" in row["name"] or places[0].size == gpu_slices)
        engines = (slices * rules["copy_per_slice"], slices * rules["decoder_per_slice"], 0, media, media)
    narrow = {n: count or n * sm // slices for n, count in row["ci_multiprocessor_count"].items()}
    if None in row["ci_multiprocessor_count"].values():
        invented.add("ci_sm")
    narrow[slices] = narrow.get(slices) or sm
    return SimProfile(
        name=row["name"],
        enum=row["nvml_enum"],
        profile_id=row["profile_id"],
        slices=slices,
        count_max=row["instance_count_max"],
        sm=sm,
        memory_mib=memory,
        engines=engines,
        places=places,
        ci_sm=narrow,
        memory_variants=tuple(v["memory_size_mb"] for v in row.get("memory_variants", ())),
        invented=frozenset(invented),
    )


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
