"""The GPUPartitionPlan: what an admin wishes, as strict frozen values, and how a document becomes one.

A field that does nothing yet is not here. Source of names, defaults and meanings: docs/plans.md.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from migd.plans.fields import (
    TIMEOUT_MAX_S,
    Count,
    Duration,
    Glob,
    Index,
    LabelKey,
    LabelValue,
    Named,
    PciDeviceId,
    PlanName,
    ProfileText,
    Tuple,
    Uuid,
    Value,
    most,
    once,
    only_true,
    pci_key,
    some,
    sorted_labels,
    unavailable_nodes,
)
from migd.plans.problems import BadInput, problems_of, wrong

API_VERSION: Final = "migd.dev/v1alpha1"
KIND: Final = "GPUPartitionPlan"
_RULES: Final = "a list of {gpus, instances} or {gpus, mig: Disabled}"


class LabelExpression(Value):
    """One requirement of a label selector, as Kubernetes has it."""

    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: Annotated[tuple[LabelValue, ...], most(64, "values"), Tuple] = ()

    @model_validator(mode="after")
    def _values_where_due(self) -> Self:
        if self.operator in ("In", "NotIn") and not self.values:
            raise wrong(f"operator {self.operator} needs values", "values: [...]")
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise wrong(f"operator {self.operator} takes no values", "leave values out")
        return self


class LabelSelector(Value):
    """Labels that must all match; empty matches everything."""

    match_labels: Annotated[dict[str, str], most(64, "labels"), AfterValidator(sorted_labels)] = Field(
        {}, alias="matchLabels"
    )
    match_expressions: Annotated[tuple[LabelExpression, ...], most(64, "expressions"), Tuple] = Field(
        (), alias="matchExpressions"
    )

    def __hash__(self) -> int:
        """Equal for equal selectors: caches share the wishes of a fleet, and a mapping alone has none."""
        return hash((tuple(sorted(self.match_labels.items())), self.match_expressions))


class GpuSelector(Value):
    """Which GPUs of a node a rule is for; a GPU must pass every part that is given.

    all: every GPU. indices: NVML indices over all NVIDIA GPUs of the node. uuids: as NVML writes them, any case.
    models: globs on the NVML name. pci_device_ids: device then vendor, "0x20B210DE", any case, with or without 0x.
    """

    every: Annotated[Literal[True] | None, BeforeValidator(only_true)] = Field(None, alias="all")
    indices: Annotated[tuple[Index, ...], once("GPU index"), Named, Tuple] | None = None
    uuids: Annotated[tuple[Uuid, ...], most(128, "UUIDs"), once("GPU", str.lower), Named, Tuple] | None = None
    models: Annotated[tuple[Glob, ...], most(64, "models"), once("model"), Named, Tuple] | None = None
    pci_device_ids: (
        Annotated[tuple[PciDeviceId, ...], most(32, "ids"), once("device id", pci_key), Named, Tuple] | None
    ) = Field(None, alias="pciDeviceIds")

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
    instances: Annotated[tuple[InstanceRule, ...], most(32, "kinds of instance"), Tuple] | None = None
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


Permission = Literal["EmptyDir", "Unmanaged"]
"""Pods that may be evicted although something is lost: an emptyDir's data; a pod that nobody makes again."""


class Disruption(Value):
    """How gently: when instances in use may be touched, and which pods may go."""

    policy: Literal["WaitForIdle", "Evict"] = "WaitForIdle"
    timeout_s: Duration = Field(1800, alias="timeout")
    grace_period_s: Annotated[int, Field(ge=1, le=TIMEOUT_MAX_S)] | None = Field(None, alias="gracePeriodSeconds")
    max_evictions: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(None, alias="maxEvictions")
    protect: LabelSelector | None = None
    allow: Annotated[tuple[Permission, ...], once("permission"), Tuple] = ()


class Rollout(Value):
    """How many nodes at once (a number, or a percentage), and whether a failure stops the rest."""

    max_unavailable: Annotated[int | str, BeforeValidator(unavailable_nodes)] = Field(1, alias="maxUnavailable")
    pause_on_failure: bool = Field(True, alias="pauseOnFailure")


class PlanSpec(Value):
    """The wish itself. The first rule that matches a GPU decides; a GPU that no rule matches is left alone."""

    node_selector: LabelSelector = Field(
        alias="nodeSelector", description="nodeSelector: {} is every node; a single machine ignores it"
    )
    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)] = 0
    rules: Annotated[tuple[Rule, ...], most(256, "rules"), some(_RULES), Tuple] = Field(description=_RULES)
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
    generate_name: object = Field(None, alias="generateName")


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
