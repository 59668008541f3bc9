"""mig-parted files: named configs of entries, read strictly, and turned into plans.

A file may hold good and bad configs; only the chosen one must be good. Where two entries disagree on one GPU,
mig-parted applies one after the other and can never be satisfied; we refuse and name both.
Source: NVIDIA/mig-parted, api/spec/v1; docs/import.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from migd.mig.geometry import Counts, counts
from migd.mig.observed import SeenGpu
from migd.mig.transition import say
from migd.plans.fields import COUNT_MAX, INDEX_MAX, ProfileText, Value, check_pci, pci_key
from migd.plans.plan import GpuSelector, InstanceRule, LabelSelector, Plan, PlanSpec, Rule
from migd.plans.problems import BadInput, Problem, did_you_mean, path_of, problems_of, shown, unknown_key, wrong

EMPTY_WARNING: Final = (
    "MIG on with nothing in it: imported as allowEmpty: true; the stock device plugin may fail on such a GPU "
    "with the MIG strategy single"
)

Devices = Literal["all"] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a config: which GPUs, and what they should be.

    path: where it is in the file. device_filter: PCI device ids as written; empty takes every model.
    devices: "all", or indices over all NVIDIA GPUs of the node. content: MIG on or off, and the counts.
    """

    path: str
    device_filter: tuple[str, ...]
    devices: Devices
    mig_enabled: bool
    mig_devices: Counts

    @property
    def content(self) -> tuple[bool, Counts]:
        """What the GPUs should be, without which GPUs."""
        return (self.mig_enabled, self.mig_devices)

    @property
    def filter_keys(self) -> frozenset[str]:
        """The device ids without case and 0x."""
        return frozenset(map(pci_key, self.device_filter))

    def takes(self, gpu: SeenGpu) -> bool:
        """Whether a GPU passes the filter and the devices."""
        passes = not self.device_filter or pci_key(gpu.pci_device_id) in self.filter_keys
        return passes and (self.devices == "all" or gpu.index in self.devices)

    def __str__(self) -> str:
        return say(self.mig_devices) if self.mig_devices else "MIG on, empty" if self.mig_enabled else "MIG off"


@dataclass(frozen=True, slots=True)
class Config:
    """One named config: its good entries, what is wrong with the others, and what was read with a grain of salt."""

    name: str
    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MigParted:
    """A mig-parted file; source names it in messages."""

    source: str
    configs: tuple[Config, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its configs, in the file's order, bad ones included."""
        return tuple(c.name for c in self.configs)


class UnknownConfig(BadInput):
    """No config was chosen, or one that does not exist; names lists those that do."""

    def __init__(self, source: str, message: str, names: tuple[str, ...], hint: str = "") -> None:
        self.names = names
        super().__init__(source, [Problem("", message, hint)])


def choose(file: MigParted, name: str | None) -> Config:
    """The config of that name, or the only one; UnknownConfig or BadInput where it cannot be used."""
    listed = ", ".join(file.names)
    if name is None and len(file.configs) > 1:
        raise UnknownConfig(file.source, f"holds several configs: {listed}", file.names, "choose one with -c NAME")
    config = next((c for c in file.configs if name is None or c.name == name), None)
    if config is None:
        message = f"has no config {shown(name)}; it has: {listed}"
        raise UnknownConfig(file.source, message, file.names, did_you_mean(name or "", file.names))
    if config.problems:
        raise BadInput(file.source, config.problems)
    return config


def to_plan(file: MigParted, name: str | None, plan_name: str | None = None) -> tuple[Plan, tuple[str, ...]]:
    """The plan that a config means, and warnings about it.

    name: of the config; None where the file has only one. plan_name: the config's name where not given.
    Raises UnknownConfig, and BadInput where the config is bad or two entries surely disagree on a GPU. Whether
    entries with different filters disagree depends on the node: see `conflicts`.
    """
    config = choose(file, name)
    disagreeing = [
        _disagreement(one, other, "")
        for one, other in combinations(config.entries, 2)
        if one.content != other.content and _surely_meet(one, other)
    ]
    if disagreeing:
        raise BadInput(file.source, disagreeing)
    warnings = [*config.notes]
    warnings += [f"{e.path}: {EMPTY_WARNING}" for e in config.entries if e.mig_enabled and not e.mig_devices]
    try:
        spec = PlanSpec(node_selector=LabelSelector(), rules=tuple(_rule(e) for e in _distinct(config.entries)))
        return Plan(name=plan_name or name_from(config.name), spec=spec), tuple(warnings)
    except ValidationError as error:
        raise BadInput(file.source, problems_of(error, Plan)) from None


def conflicts(file: MigParted, name: str | None, gpus: Iterable[SeenGpu]) -> tuple[Problem, ...]:
    """On these GPUs of one node: every GPU on which entries of the config disagree, naming both entries."""
    entries = choose(file, name).entries
    return tuple(
        _disagreement(one, other, f"GPU {gpu.index}")
        for gpu in sorted(gpus, key=lambda g: (g.index, g.uuid))
        for one, other in combinations([e for e in entries if e.takes(gpu)], 2)
        if one.content != other.content
    )


def _disagreement(one: Entry, other: Entry, gpu: str) -> Problem:
    where = gpu or _common(one, other)
    return Problem(
        other.path,
        f"disagrees with {one.path} on {where}: {other} here, {one} there",
        "name each GPU in one entry only",
    )


def _common(one: Entry, other: Entry) -> str:
    narrow = one if one.devices != "all" else other
    wide = other if narrow is one else one
    if narrow.devices == "all":
        return "the same GPUs"
    return "GPU " + ", ".join(str(i) for i in narrow.devices if wide.devices == "all" or i in wide.devices)


def _surely_meet(one: Entry, other: Entry) -> bool:
    """Whether two entries meet on every node that has the GPUs they name.

    So it is with equal filters, and where all that one takes is taken by the other.
    """
    if one.filter_keys == other.filter_keys:
        return one.devices == "all" or other.devices == "all" or bool({*one.devices} & {*other.devices})
    return _covers(one, other) or _covers(other, one)


def _covers(wide: Entry, narrow: Entry) -> bool:
    """Whether all GPUs that `narrow` takes are taken by `wide`, whatever the node."""
    if not _filters_no_less(wide, narrow):
        return False
    return wide.devices == "all" or (narrow.devices != "all" and {*narrow.devices} <= {*wide.devices})


def _filters_no_less(wide: Entry, narrow: Entry) -> bool:
    """Whether every board that passes the filter of `narrow` passes that of `wide`."""
    return not wide.device_filter or (bool(narrow.device_filter) and narrow.filter_keys <= wide.filter_keys)


def _distinct(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries without those that only repeat what others say; entries that do not surely meet stay."""
    kept: list[Entry] = []
    for at, entry in enumerate(entries):
        later_covers = any(_covers(e, entry) and not _covers(entry, e) for e in entries[at + 1 :])
        left = _without(entry, kept)
        if not later_covers and left.devices and not any(_covers(e, left) for e in kept):
            kept.append(left)
    return tuple(kept)


def _without(entry: Entry, before: Sequence[Entry]) -> Entry:
    """An entry without the indices that earlier entries name already, with the same filter or a wider one."""
    if entry.devices == "all":
        return entry
    named = {i for e in before if e.devices != "all" and _filters_no_less(e, entry) for i in e.devices}
    devices = tuple(i for i in entry.devices if i not in named)
    return Entry(entry.path, entry.device_filter, devices, entry.mig_enabled, entry.mig_devices)


def _rule(entry: Entry) -> Rule:
    indices = None if entry.devices == "all" else entry.devices
    ids = entry.device_filter or None
    gpus = GpuSelector(every=True if indices is None and ids is None else None, indices=indices, pci_device_ids=ids)
    if not entry.mig_enabled:
        return Rule(gpus=gpus, mig="Disabled")
    wanted = tuple(InstanceRule(profile=name, count=number) for name, number in entry.mig_devices)
    return Rule(gpus=gpus, instances=wanted, allow_empty=not wanted)


def migparted_of(document: object, source: str = "config", prefix: tuple[str | int, ...] = ()) -> MigParted:
    """The mig-parted file that a parsed document is.

    BadInput for the version, the top level, or no configs at all; problems inside a config stay with that config.
    prefix: where the document lies inside its source, for paths.
    """
    if not isinstance(document, dict):
        raise BadInput(source, [Problem(path_of(prefix), f"must be a mapping, not {shown(document)}")])
    problems = [
        Problem(path_of((*prefix, key)), *unknown_key(key, ("version", "mig-configs")))
        for key in document
        if key not in ("version", "mig-configs")
    ]
    if document.get("version") != "v1":
        given = f", not {shown(document['version'])}" if "version" in document else ""
        problems.append(Problem(path_of((*prefix, "version")), f"must be v1{given}", "version: v1"))
    configs = document.get("mig-configs")
    if not isinstance(configs, dict) or not configs:
        problems.append(Problem(path_of((*prefix, "mig-configs")), "must map at least one name to a list of entries"))
    if problems or not isinstance(configs, dict):
        raise BadInput(source, problems)
    return MigParted(source, tuple(_config(n, e, (*prefix, "mig-configs", n)) for n, e in configs.items()))


def _config(name: str, entries: object, prefix: tuple[str | int, ...]) -> Config:
    if not isinstance(entries, list) or not entries:
        problem = Problem(path_of(prefix), f"must be a list of at least one entry, not {shown(entries)}")
        return Config(name, (), (problem,), ())
    good: list[Entry] = []
    problems: list[Problem] = []
    notes: list[str] = []
    for at, written in enumerate(entries):
        path = (*prefix, at)
        try:
            read = _Entry.model_validate(written, by_alias=True, by_name=False)
        except ValidationError as error:
            problems += problems_of(error, _Entry, path)
            continue
        good.append(
            Entry(path_of(path), read.device_filter, read.devices, read.mig_enabled, counts(read.mig_devices or {}))
        )
        if isinstance(written, dict) and isinstance(written.get("devices"), int):
            notes.append(
                f"{path_of((*path, 'devices'))}: {written['devices']} is read as one index; write {_one(written)}"
            )
    return Config(name, tuple(good), tuple(problems), tuple(notes))


def _one(written: dict[str, object]) -> str:
    return f"[{written['devices']}]"


def _filter(value: object) -> object:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise wrong(f"must be a device id or a list of them, not {shown(value)}", '"0x20B210DE"')
    for one in values:
        if not isinstance(check_pci(one), str):
            raise wrong(f"must be a device id or a list of them, not {shown(one)}", '"0x20B210DE"')
    keys = [pci_key(one) for one in values]
    if len(set(keys)) != len(keys):
        raise wrong("names a device id twice", "name it once")
    return tuple(values)


def _devices(value: object) -> object:
    """All, a list of indices, or one bare index, which mig-parted itself refuses."""
    forms = "all, or a list of indices such as [0, 1]"
    if value == "all" and isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list):
        digits = isinstance(value, str) and value.isdecimal()
        raise wrong(f"must be {forms}, not {shown(value)}", f"write [{value}]" if digits else "")
    for at, index in enumerate(value):
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= INDEX_MAX:
            raise wrong(f"must be {forms}; [{at}] is {shown(index)}")
        if index in value[:at]:
            raise wrong(f"GPU index {index} is named twice: at [{value.index(index)}] and [{at}]", "name it once")
    if not value:
        raise wrong(f"must be {forms}, not an empty list")
    return tuple(value)


def _some_above_zero(values: dict[str, int]) -> dict[str, int]:
    if values and not any(values.values()):
        raise wrong("names only counts of 0", "{} is MIG on with nothing in it")
    return values


class _Entry(Value):
    """An entry as it is written."""

    device_filter: Annotated[tuple[str, ...], BeforeValidator(_filter)] = Field((), alias="device-filter")
    devices: Annotated[Devices, BeforeValidator(_devices)] = Field(description="devices: all, or a list of indices")
    mig_enabled: bool = Field(alias="mig-enabled", description="mig-enabled: true or false")
    mig_devices: (
        Annotated[dict[ProfileText, Annotated[int, Field(ge=0, le=COUNT_MAX)]], AfterValidator(_some_above_zero)] | None
    ) = Field(None, alias="mig-devices")

    @model_validator(mode="after")
    def _devices_where_enabled(self) -> Self:
        if self.mig_enabled and self.mig_devices is None:
            raise wrong("mig-devices is required where mig-enabled is true", 'such as {"1g.10gb": 7}; {} is allowed')
        if not self.mig_enabled and self.mig_devices:
            raise wrong("mig-devices must be left out where mig-enabled is false")
        return self


def name_from(text: str) -> str:
    """A plan name made of a config's name: what a name may not hold becomes a dash."""
    plain = re.sub(r"[^a-z0-9.]+", "-", text.lower())
    parts = [part.strip("-") for part in plain.split(".")]
    return ".".join(part for part in parts if part)[:253].rstrip("-.") or "imported"
