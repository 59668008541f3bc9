"""The GPUPartition: one physical GPU as the API server has it, as strict frozen values, and the GPU that it tells of.

Source of names, bounds and meanings: crds/migd.dev_gpupartitions.yaml.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from migd.mig.geometry import Counts, Geometry, GpuInstance, Layout
from migd.mig.observed import MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.profiles import Placement
from migd.plans.boards import BoardDoc, PlaceDoc, board_of
from migd.plans.conditions import Condition, Phase, Reason, Time, find
from migd.plans.fields import Duration, Natural, Tuple, Value
from migd.plans.plan import API_VERSION, InstanceRule, LabelSelector, Permission
from migd.plans.problems import BadInput, problems_of, wrong

KIND: Final = "GPUPartition"
PODS_MAX: Final = 256
"""So many victims and evictions at most has one GPU."""
BUDGETS_MAX: Final = 16
"""So many disruption budgets at most are named of one pod."""
Switch = Literal["Enabled", "Disabled"]
NotGoing = Literal["DrainBlocked", "EvictionBudget", "NoPermission", "Waiting"]
"""Why a pod that must go does not go now."""


class PlanRef(Value):
    """The plan that decides: a new plan of the same name has another uid."""

    name: str
    uid: str
    generation: Annotated[int, Field(ge=1)]


class DesiredDisruption(Value):
    """How gently, as far as the agent's choice of what goes depends on it; see `migd.plans.plan.Disruption`."""

    policy: Literal["WaitForIdle", "Evict"]
    timeout_s: Duration = Field(alias="timeout")
    protect: LabelSelector | None = None
    allow: Annotated[tuple[Permission, ...], Tuple] = ()


class Desired(Value):
    """What the GPU should be, and whose wish that is; instances as the plan's rule has them."""

    summary: str
    mig: Switch
    allow_empty: bool = Field(False, alias="allowEmpty")
    instances: Annotated[tuple[InstanceRule, ...], Tuple] = ()
    plan: PlanRef
    disruption: DesiredDisruption
    on_failure: Literal["Rollback", "Hold"] = Field("Rollback", alias="onFailure")
    drift: Literal["Correct", "Observe"] = "Correct"
    foreign_instances: Literal["Refuse", "Adopt"] = Field("Refuse", alias="foreignInstances")

    @model_validator(mode="after")
    def _instances_with_mig(self) -> Self:
        if self.mig == "Disabled" and self.instances:
            raise wrong("instances go with mig Enabled only")
        if self.mig == "Enabled" and not self.instances and not self.allow_empty:
            raise wrong("mig is Enabled without instances", "allowEmpty: true says it is meant")
        return self


class Assignment(Value):
    """The node's turn. id: a hash of the node's whole wish; gpus: how many GPUs of the node carry it."""

    id: Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]
    gpus: Annotated[int, Field(ge=1)]


class ModeDoc(Value):
    """The MIG mode: now, and after a reset or reboot."""

    current: Switch
    pending: Switch


class InstanceDoc(Value):
    """One GPU instance that is there."""

    profile: str
    placement: PlaceDoc
    gi: Natural
    ci: Natural | None = None
    mig_uuid: str | None = Field(None, alias="migUUID")
    in_use: bool | None = Field(None, alias="inUse")
    foreign: bool | None = None


class Observed(Value):
    """How the GPU is now."""

    summary: str
    in_use: str = Field("", alias="inUse")
    mig: ModeDoc | None = None
    busy: bool | None = None
    instances: Annotated[tuple[InstanceDoc, ...], Tuple] = ()


class Pod(Value):
    """A pod by name and uid."""

    namespace: str
    name: str
    uid: str


class BlockerDoc(Value):
    """One holder of what must go."""

    reason: Reason
    instance: str | None = None
    pod: Pod | None = None
    pid: int | None = None
    command: str | None = None
    daemon: str | None = None
    pod_disruption_budgets: Annotated[tuple[str, ...], Tuple] = Field((), alias="podDisruptionBudgets")


class EvictionDoc(Value):
    """What has come of one victim. code: the HTTP status of its eviction, None where none was asked for.

    reason: why it does not go now, None where it goes or is gone.
    """

    pod_uid: str = Field(alias="podUID")
    code: int | None = None
    reason: NotGoing | None = None
    pod_disruption_budgets: Annotated[tuple[str, ...], Tuple] = Field((), alias="podDisruptionBudgets")
    message: str = ""
    at: Time


class Step(Value):
    """One step of a transaction."""

    name: str
    started_at: Time = Field(alias="startedAt")
    milliseconds: Natural | None = None


class LastTransition(Value):
    """The last change of this GPU, or the one under way. generation: the plan's."""

    id: str
    generation: Natural | None = None
    from_layout: str = Field("", alias="from")
    to: str = ""
    started_at: Time = Field(alias="startedAt")
    finished_at: Time | None = Field(None, alias="finishedAt")
    result: Literal["Succeeded", "RolledBack", "BackedOut", "Failed", "Held"] | None = None
    steps: Annotated[tuple[Step, ...], Tuple] = ()


class PlacedDoc(Value):
    """One instance and its place."""

    profile: str
    placement: PlaceDoc


class Previous(Value):
    """The layout to roll back to."""

    summary: str = ""
    mig: Switch
    instances: Annotated[tuple[PlacedDoc, ...], Tuple] = ()


class PartitionStatus(Value):
    """What the GPU is, and what becomes of the wish."""

    observed_generation: Natural | None = Field(None, alias="observedGeneration")
    phase: Phase | None = None
    reason: str = ""
    message: str = ""
    conditions: Annotated[tuple[Condition, ...], Tuple] = ()
    board: BoardDoc | None = None
    observed: Observed | None = None
    blockers: Annotated[tuple[BlockerDoc, ...], Tuple] = ()
    blockers_left_out: Natural = Field(0, alias="blockersLeftOut")
    victims: Annotated[tuple[Pod, ...], Tuple] = ()
    evictions: Annotated[tuple[EvictionDoc, ...], Tuple] = ()
    last_transition: LastTransition | None = Field(None, alias="lastTransition")
    previous: Previous | None = None


class PartitionSpec(Value):
    """Where the GPU is, and what it should be; without desired it is left alone."""

    node_name: str = Field(alias="nodeName")
    node_uid: str = Field(alias="nodeUID")
    desired: Desired | None = None
    assignment: Assignment | None = None

    @model_validator(mode="after")
    def _turn_with_wish(self) -> Self:
        if self.assignment is not None and self.desired is None:
            raise wrong("assignment goes with desired only")
        return self


class Partition(Value):
    """One GPUPartition. gpu: the GPU that its status tells of, None before the agent has written it."""

    name: str
    uid: str = ""
    generation: Natural = 0
    labels: dict[str, str] = Field({})
    annotations: dict[str, str] = Field({})
    spec: PartitionSpec
    status: PartitionStatus = PartitionStatus()
    _gpu: SeenGpu | None = PrivateAttr(None)
    _owned: Geometry = PrivateAttr(frozenset())

    def model_post_init(self, context: Any, /) -> None:
        """Read the GPU once; deciding asks for it at every turn."""
        self._gpu = _gpu_of(self.status)
        observed = self.status.observed
        self._owned = frozenset(_placed(i) for i in observed.instances if not i.foreign) if observed else frozenset()

    @property
    def gpu(self) -> SeenGpu | None:
        """The GPU, or None where nobody has told of it yet."""
        return self.__pydantic_private__["_gpu"]  # type: ignore[index,no-any-return]  # pydantic looks it up slowly

    @property
    def owned(self) -> Geometry:
        """The instances in the node's record; all others are foreign."""
        return self._owned

    def says(self, kind: str) -> Condition | None:
        """The condition of this type, or None."""
        return find(self.status.conditions, kind)


class _Metadata(Value):
    name: str
    uid: str = ""
    generation: Natural = 0
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    resource_version: object = Field(None, alias="resourceVersion")
    creation_timestamp: object = Field(None, alias="creationTimestamp")
    deletion_timestamp: object = Field(None, alias="deletionTimestamp")
    deletion_grace_period_seconds: object = Field(None, alias="deletionGracePeriodSeconds")
    managed_fields: object = Field(None, alias="managedFields")
    owner_references: object = Field(None, alias="ownerReferences")
    finalizers: object = None
    self_link: object = Field(None, alias="selfLink")
    generate_name: object = Field(None, alias="generateName")


class _Document(Value):
    api_version: Literal["migd.dev/v1alpha1"] = Field(alias="apiVersion", description=f"apiVersion: {API_VERSION}")
    kind: Literal["GPUPartition"]
    metadata: _Metadata
    spec: PartitionSpec
    status: PartitionStatus = PartitionStatus()


def partition_of(document: object, source: str = "gpupartition") -> Partition:
    """The partition that a parsed document is; BadInput with every problem where it is none."""
    try:
        read = _Document.model_validate(document, by_alias=True, by_name=False)
        meta = read.metadata
        return Partition(
            name=meta.name,
            uid=meta.uid,
            generation=meta.generation,
            labels=meta.labels or {},
            annotations=meta.annotations or {},
            spec=read.spec,
            status=read.status,
        )
    except ValidationError as error:
        raise BadInput(source, problems_of(error, _Document)) from None


def partition_document(partition: Partition) -> dict[str, Any]:
    """The partition as a document that `partition_of` reads back equal; defaults are left out."""
    metadata = {
        "name": partition.name,
        "uid": partition.uid,
        "generation": partition.generation,
        "labels": dict(sorted(partition.labels.items())),
        "annotations": dict(sorted(partition.annotations.items())),
    }
    found = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {key: value for key, value in metadata.items() if value},
        "spec": written(partition.spec),
    }
    status = written(partition.status)
    return {**found, "status": status} if status else found


def written(value: Value) -> dict[str, Any]:
    """A value as it stands in a document: the API's names, defaults left out."""
    return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def layout_of(previous: Previous) -> Layout:
    """The layout that a rollback returns to."""
    return Layout(previous.mig == "Enabled", frozenset(_placed(i) for i in previous.instances))


def counts_doc(counts: Counts) -> list[dict[str, Any]]:
    """Counts as lists of the API have them: [{profile, count}], by name."""
    return [{"profile": name, "count": number} for name, number in counts]


def _gpu_of(status: PartitionStatus) -> SeenGpu | None:
    told, observed = status.board, status.observed
    if told is None or (observed is None and status.phase != "Lost"):
        return None
    lost = status.phase == "Lost"
    if lost or observed is None:
        return SeenGpu(told.uuid, told.index, told.model, told.pci_device_id, told.memory_mib, None, lost=True)
    capable = observed.mig is not None and told.mig_capable is not False
    return SeenGpu(
        uuid=told.uuid,
        index=told.index,
        model=told.model,
        pci_device_id=told.pci_device_id,
        memory_mib=told.memory_mib,
        mode=MigMode(observed.mig.current == "Enabled", observed.mig.pending == "Enabled")
        if capable and observed.mig
        else None,
        resetless=told.mode_change_resets is False,
        board=board_of(told.profiles) if told.profiles and capable else None,
        instances=tuple(_seen(i) for i in observed.instances),
        in_use=observed.busy is True,
        trouble=told.trouble,
    )


def _placed(told: InstanceDoc | PlacedDoc) -> GpuInstance:
    return _instance(told.profile, told.placement.start, told.placement.size)


@lru_cache(maxsize=1024)
def _instance(profile: str, start: int, size: int) -> GpuInstance:
    """One value for all GPUs that have the same there, as of boards."""
    return GpuInstance(profile, Placement(start, size))


def _seen(told: InstanceDoc) -> SeenInstance:
    whole = () if told.ci is None else (SeenComputeInstance(told.ci, True, told.mig_uuid),)
    return SeenInstance(_placed(told), told.gi, whole, in_use=told.in_use is not False)
