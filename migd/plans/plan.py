"""The GPUPartitionPlan: what an admin wishes, as strict frozen values, and how a document becomes one.

A field that does nothing yet is not here. Source of names, defaults and meanings: docs/plans.md.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from migd.mig.profiles import ProfileName
from migd.plans.problems import BadInput, problems_of, shown, wrong

API_VERSION: Final = "migd.dev/v1alpha1"
KIND: Final = "GPUPartitionPlan"
COUNT_MAX: Final = 64
"""More instances than this on one GPU is a slip of the hand: no GPU holds even 16."""
INDEX_MAX: Final = 1023
TIMEOUT_MAX_S: Final = 7 * 24 * 3600


class Value(BaseModel):
    """A frozen value: unknown keys, strings for numbers and bools for ints are all refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)


def _profile(text: str) -> str:
    name = ProfileName.parse(text)
    if name is None:
        plain = text.strip().lower().removeprefix("mig ").removeprefix("mig-").removeprefix("nvidia.com/mig-")
        plain = re.sub(r"\.me\b", "+me", plain)
        hint = (
            f"did you mean {plain}?" if ProfileName.parse(plain) else "a profile name looks like 3g.40gb or 1g.10gb+me"
        )
        raise wrong(f"{shown(text)} is not a profile name", hint)
    if name.compute_part is not None:
        whole = text.split(".", 1)[1]
        raise wrong(
            f"compute instances smaller than their GPU instance are not in v1alpha1: {text}",
            f"{whole} is the whole one",
        )
    return text


_DURATION: Final = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")


def seconds_of(text: str) -> int | None:
    """A duration such as 30m, 90s or 1h30m in seconds, or None where the text is none."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def duration_of(seconds: int) -> str:
    """Seconds as a duration: 5400 is 1h30m."""
    parts = ((seconds // 3600, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def _seconds(value: object) -> object:
    if isinstance(value, str):
        seconds = seconds_of(value)
        if seconds is None:
            raise wrong(f"{shown(value)} is not a duration", "write it as 30m, 90s or 1h30m")
        if not 1 <= seconds <= TIMEOUT_MAX_S:
            raise wrong(f"must be between 1s and {duration_of(TIMEOUT_MAX_S)}, not {shown(value)}")
        return seconds
    raise wrong(f"must be a duration, not {shown(value)}", "write it as 30m, 90s or 1h30m")


def _unavailable(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,3}%", value) and int(value[:-1]) <= 100:
        return value
    raise wrong(f"must be a number of nodes from 0 on, or a percentage from 0% to 100%, not {shown(value)}")


def _uuid(text: str) -> str:
    if not re.fullmatch(r"(?i)gpu-[0-9a-z-]{1,64}", text):
        mig = text.upper().startswith("MIG-")
        raise wrong(
            f"{shown(text)} is not a GPU's UUID",
            "that is a MIG device; name the GPU it lies on" if mig else "it looks like GPU-5c89852c-…; see migd gpus",
        )
    return text


def check_pci(value: object) -> object:
    """A validator: a PCI device id as text, "0x20B210DE", is taken as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise wrong("must be text, not a number", f'write "0x{value:08X}" in quotes' if 0 <= value < 1 << 32 else "")
    if isinstance(value, str) and not re.fullmatch(r"(?i)(0x)?[0-9a-f]{4}10de", value):
        raise wrong(
            f"{shown(value)} is not an NVIDIA PCI device id", 'device, then vendor 10DE, in hexadecimal: "0x20B210DE"'
        )
    return value


def pci_key(device_id: str) -> str:
    """A PCI device id without what does not matter in it: 0x and case."""
    return device_id.lower().removeprefix("0x")


def _glob(text: str) -> str:
    if not text.strip():
        raise wrong("must not be empty", 'a pattern for the model name, such as "*A100*80GB*"')
    return text


def _some(what: str) -> AfterValidator:
    """Refuses an empty list; not by a length bound, which would also speak where all items are bad."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise wrong("must not be empty", what)
        return values

    return AfterValidator(check)


def _once(what: str, key: Any = lambda value: value) -> AfterValidator:
    """Refuses a list that names one thing twice, and says where both are."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: dict[object, int] = {}
        for at, value in enumerate(values):
            if key(value) in seen:
                raise wrong(f"{what} {value} is named twice: at [{seen[key(value)]}] and [{at}]", "name it once")
            seen[key(value)] = at
        return values

    return AfterValidator(check)


_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_DNS: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


def _label_key(text: str) -> str:
    prefix, slash, name = text.rpartition("/")
    if not _LABEL_NAME.fullmatch(name) or (slash and not (len(prefix) <= 253 and _DNS.fullmatch(prefix))):
        raise wrong(f"{shown(text)} is not a label's name", "such as pool or example.com/pool")
    return text


def _label_value(text: str) -> str:
    if text and not _LABEL_NAME.fullmatch(text):
        raise wrong(f"{shown(text)} is not a label's value", "up to 63 letters, digits, '-', '_' or '.'")
    return text


def _plan_name(text: str) -> str:
    if len(text) > 253 or not _DNS.fullmatch(text):
        raise wrong(f"{shown(text)} is not a valid name", "lower-case letters, digits, '-' and '.', at most 253")
    return text


def _labels(values: dict[str, str]) -> dict[str, str]:
    for key, value in values.items():
        _label_key(key)
        _label_value(value)
    return values


Tuple = Field(strict=False)
"""Marks a list: a YAML list becomes a tuple; what is in it stays strict."""
Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
ProfileText = Annotated[str, AfterValidator(_profile)]
Duration = Annotated[int, BeforeValidator(_seconds), PlainSerializer(duration_of)]
Index = Annotated[int, Field(ge=0, le=INDEX_MAX)]
Uuid = Annotated[str, AfterValidator(_uuid)]
Glob = Annotated[str, AfterValidator(_glob)]
PciDeviceId = Annotated[str, BeforeValidator(check_pci)]
_NAMED = _some("name at least one, or leave it out")
_RULES: Final = "a list of {gpus, instances} or {gpus, mig: Disabled}"
PlanName = Annotated[str, AfterValidator(_plan_name)]
LabelKey = Annotated[str, AfterValidator(_label_key)]
LabelValue = Annotated[str, AfterValidator(_label_value)]


class LabelExpression(Value):
    """One requirement of a label selector, as Kubernetes has it."""

    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: Annotated[tuple[LabelValue, ...], Tuple] = ()

    @model_validator(mode="after")
    def _values_where_due(self) -> Self:
        if self.operator in ("In", "NotIn") and not self.values:
            raise wrong(f"operator {self.operator} needs values", "values: [...]")
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise wrong(f"operator {self.operator} takes no values", "leave values out")
        return self


class LabelSelector(Value):
    """Labels that must all match; empty matches everything."""

    match_labels: Annotated[dict[str, str], AfterValidator(_labels)] = Field({}, alias="matchLabels")
    match_expressions: Annotated[tuple[LabelExpression, ...], Tuple] = Field((), alias="matchExpressions")


class GpuSelector(Value):
    """Which GPUs of a node a rule is for; a GPU must pass every part that is given.

    all: every GPU. indices: NVML indices over all NVIDIA GPUs of the node. uuids: as NVML writes them, any case.
    models: globs on the NVML name. pci_device_ids: device then vendor, "0x20B210DE", any case, with or without 0x.
    """

    every: Literal[True] | None = Field(None, alias="all", description="leave it out to select by something else")
    indices: Annotated[tuple[Index, ...], _once("GPU index"), _NAMED, Tuple] | None = None
    uuids: Annotated[tuple[Uuid, ...], _once("GPU", str.lower), _NAMED, Tuple] | None = None
    models: Annotated[tuple[Glob, ...], _once("model"), _NAMED, Tuple] | None = None
    pci_device_ids: Annotated[tuple[PciDeviceId, ...], _once("device id", pci_key), _NAMED, Tuple] | None = Field(
        None, alias="pciDeviceIds"
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self == GpuSelector.model_construct():
            raise wrong("selects nothing", "give all: true, or indices, uuids, models or pciDeviceIds")
        return self

    @property
    def parts(self) -> frozenset[str]:
        """The names of the parts that narrow the selection; empty for all alone."""
        return frozenset(n for n in ("indices", "uuids", "models", "pci_device_ids") if getattr(self, n) is not None)


class InstanceRule(Value):
    """How many of one kind of instance: by profile name, or by need.

    memory_gb: whole GB as in a profile's name; the smallest profile that is enough is taken. compute_slices: at least.
    """

    profile: ProfileText | None = None
    memory_gb: Annotated[int, Field(ge=1, le=10_000)] | None = Field(None, alias="memoryGB")
    compute_slices: Count | None = Field(None, alias="computeSlices")
    count: Count = 1

    @model_validator(mode="after")
    def _name_or_need(self) -> Self:
        if (self.profile is None) == (self.memory_gb is None):
            raise wrong("needs exactly one of profile and memoryGB", "profile: 3g.40gb, or memoryGB: 40")
        if self.profile is not None and self.compute_slices is not None:
            raise wrong("computeSlices goes with memoryGB only", "a profile's name says how many it has")
        return self

    @property
    def kind(self) -> tuple[str | None, int | None, int | None]:
        """What is asked for, without how many."""
        return (self.profile, self.memory_gb, self.compute_slices)

    def __str__(self) -> str:
        if self.profile is not None:
            return self.profile
        slices = f" and {self.compute_slices} compute slices" if self.compute_slices else ""
        return f"{self.memory_gb} GB{slices}"


class Rule(Value):
    """A wish for the GPUs it matches: exactly one of instances and `mig: Disabled`.

    allow_empty: MIG on with nothing in it is meant; the stock device plugin may fail on such a GPU.
    """

    gpus: GpuSelector = Field(description="gpus: {all: true} is every GPU")
    instances: Annotated[tuple[InstanceRule, ...], Tuple] | None = None
    mig: Literal["Disabled"] | None = Field(None, description="mig: Disabled; MIG is on where instances are given")
    allow_empty: bool = Field(False, alias="allowEmpty")

    @model_validator(mode="after")
    def _one_wish(self) -> Self:
        if (self.instances is None) == (self.mig is None):
            raise wrong("needs exactly one of instances and mig: Disabled")
        if self.mig and self.allow_empty:
            raise wrong("allowEmpty goes with instances only", "leave it out where mig is Disabled")
        if self.instances == () and not self.allow_empty:
            raise wrong(
                "instances is empty: MIG on with nothing in it makes the stock device plugin fail",
                "mig: Disabled turns MIG off; allowEmpty: true says it is meant",
            )
        first: dict[object, int] = {}
        for at, item in enumerate(self.instances or ()):
            if item.kind in first:
                raise wrong(f"{item} is named twice: instances[{first[item.kind]}] and instances[{at}]", "add them up")
            first[item.kind] = at
        return self


class Disruption(Value):
    """How gently: when instances in use may be touched, and which pods may go."""

    policy: Literal["WaitForIdle", "Evict"] = "WaitForIdle"
    timeout_s: Duration = Field(1800, alias="timeout")
    grace_period_s: Annotated[int, Field(ge=1, le=TIMEOUT_MAX_S)] | None = Field(None, alias="gracePeriodSeconds")
    max_evictions: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(None, alias="maxEvictions")
    protect: LabelSelector | None = None
    allow: Annotated[tuple[Literal["EmptyDir", "Unmanaged"], ...], _once("permission"), Tuple] = ()


class Rollout(Value):
    """How many nodes at once (a number, or a percentage), and whether a failure stops the rest."""

    max_unavailable: Annotated[int | str, BeforeValidator(_unavailable)] = Field(1, alias="maxUnavailable")
    pause_on_failure: bool = Field(True, alias="pauseOnFailure")


class PlanSpec(Value):
    """The wish itself. The first rule that matches a GPU decides; a GPU that no rule matches is left alone."""

    node_selector: LabelSelector = Field(
        alias="nodeSelector", description="nodeSelector: {} is every node; a single machine ignores it"
    )
    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)] = 0
    rules: Annotated[tuple[Rule, ...], _some(_RULES), Tuple] = Field(description=_RULES)
    disruption: Disruption = Disruption()
    rollout: Rollout = Rollout()
    approval: Literal["Automatic", "Manual"] = "Automatic"
    paused: bool = False
    on_failure: Literal["Rollback", "Hold"] = Field("Rollback", alias="onFailure")
    drift: Literal["Correct", "Observe"] = "Correct"
    foreign_instances: Literal["Refuse", "Adopt"] = Field("Refuse", alias="foreignInstances")
    owner: Literal["Refuse", "TakeOver"] = "Refuse"

    @model_validator(mode="after")
    def _every_rule_can_decide(self) -> Self:
        for later, rule in enumerate(self.rules):
            for earlier, before in enumerate(self.rules[:later]):
                why = _shadowed(before.gpus, rule.gpus)
                if why:
                    raise wrong(
                        f"rules[{later}] can never decide on {why}: rules[{earlier}] has it already, and the first "
                        f"rule that matches decides",
                        f"put rules[{later}] first, or name each GPU once",
                    )
        return self


class Plan(Value):
    """A GPUPartitionPlan: a name and what is wished."""

    name: PlanName
    spec: PlanSpec


def _shadowed(before: GpuSelector, after: GpuSelector) -> str:
    """Which GPUs of a later selector an earlier one surely takes, or "" where that cannot be said."""
    if not before.parts:
        return "any GPU"
    if before.parts == {"indices"} and after.indices is not None:
        both = [i for i in after.indices if i in (before.indices or ())]
        if both and (after.parts == {"indices"} or len(both) == len(after.indices)):
            return "GPU index " + ", ".join(map(str, both))
    if before.parts == {"uuids"} and after.uuids is not None:
        taken = {u.lower() for u in before.uuids or ()}
        named = [u for u in after.uuids if u.lower() in taken]
        if named and (after.parts == {"uuids"} or len(named) == len(after.uuids)):
            return "GPU " + ", ".join(named)
    return ""


class _Metadata(Value):
    """Metadata as Kubernetes keeps it; only the name is read here."""

    name: PlanName
    labels: object = None
    annotations: object = None
    uid: object = None
    generation: object = None
    finalizers: object = None
    resource_version: object = Field(None, alias="resourceVersion")
    creation_timestamp: object = Field(None, alias="creationTimestamp")
    deletion_timestamp: object = Field(None, alias="deletionTimestamp")
    deletion_grace_period_seconds: object = Field(None, alias="deletionGracePeriodSeconds")
    managed_fields: object = Field(None, alias="managedFields")
    owner_references: object = Field(None, alias="ownerReferences")
    self_link: object = Field(None, alias="selfLink")


class _Document(Value):
    """A plan as a file or the API server has it; status is not ours to read."""

    api_version: Literal["migd.dev/v1alpha1"] = Field(alias="apiVersion", description=f"apiVersion: {API_VERSION}")
    kind: Literal["GPUPartitionPlan"]
    metadata: _Metadata = Field(description="metadata: {name: NAME}")
    spec: PlanSpec
    status: object = None


def plan_of(document: object, source: str = "plan") -> Plan:
    """The plan that a parsed document is; BadInput with every problem where it is none."""
    try:
        read = _Document.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise BadInput(source, problems_of(error, _Document)) from None
    return Plan(name=read.metadata.name, spec=read.spec)


def document_of(plan: Plan) -> dict[str, object]:
    """The plan as a document that `plan_of` reads back equal; defaults are left out."""
    spec = plan.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": plan.name}, "spec": spec}


def cluster_notes(plan: Plan) -> tuple[str, ...]:
    """For a single machine: one note that names the fields of this plan that mean nothing there; none where none do."""
    spec = plan.spec
    of_clusters = [
        ("nodeSelector", spec.node_selector != LabelSelector()),
        ("priority", spec.priority != 0),
        ("rollout", spec.rollout != Rollout()),
        ("approval", spec.approval != "Automatic"),
        ("drift", spec.drift != "Correct"),
        ("owner", spec.owner != "Refuse"),
        ("disruption.policy: Evict", spec.disruption.policy == "Evict"),
        ("disruption.gracePeriodSeconds", spec.disruption.grace_period_s is not None),
        ("disruption.maxEvictions", spec.disruption.max_evictions is not None),
        ("disruption.protect", spec.disruption.protect is not None),
        ("disruption.allow", bool(spec.disruption.allow)),
    ]
    ignored = [name for name, given in of_clusters if given]
    return (f"ignored on a single machine, they concern clusters: {', '.join(ignored)}",) if ignored else ()
