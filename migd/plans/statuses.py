"""The status of a GPUPartitionPlan, as strict frozen values. Source: crds/migd.dev_gpupartitionplans.yaml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from migd.plans.conditions import Condition, Reason, Time
from migd.plans.fields import Natural, Tuple, Value
from migd.plans.partitions import written
from migd.plans.problems import BadInput, problems_of


class NodeCounts(Value):
    """The nodes of a plan by state."""

    summary: str = ""
    matched: Natural = 0
    ready: Natural = 0
    changing: Natural = 0
    waiting: Natural = 0
    blocked: Natural = 0
    failed: Natural = 0
    unknown: Natural = 0


class GpuCounts(Value):
    """The GPUs of a plan by phase; a GPU whose agent has not answered yet counts as pending."""

    summary: str = ""
    matched: Natural = 0
    idle: Natural = 0
    pending: Natural = 0
    waiting_for_idle: Natural = Field(0, alias="waitingForIdle")
    draining: Natural = 0
    changing: Natural = 0
    verifying: Natural = 0
    rolling_back: Natural = Field(0, alias="rollingBack")
    ready: Natural = 0
    blocked: Natural = 0
    reboot_required: Natural = Field(0, alias="rebootRequired")
    failed: Natural = 0
    held: Natural = 0
    lost: Natural = 0


class Totals(Value):
    """What a plan has still to do, over all its nodes.

    nodes and gpus are always written: where all that was applied in a mapping goes and an empty one is applied, the API
    server makes it null, and then refuses that. Seen on kube-apiserver 1.37.2.
    """

    nodes: Natural = 0
    gpus: Natural = 0
    unchanged: Natural = 0
    refused: Natural = 0
    blocked: Natural = 0
    keep: Natural = 0
    destroy: Natural = 0
    create: Natural = 0
    evict: Natural = 0
    mode_changes: Natural = Field(0, alias="modeChanges")
    resets: Natural = 0

    @model_serializer(mode="wrap")
    def _never_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, int]:
        written: dict[str, int] = handler(self)
        return {"nodes": self.nodes, "gpus": self.gpus, **written}


class ProfileCount(Value):
    """How many instances of one profile."""

    profile: str
    count: Annotated[int, Field(ge=1)]


class Group(Value):
    """GPUs for which the same is done. keep, destroy and create are of each GPU; evict is over all of them: instances
    in use that go.
    """

    model: str
    from_layout: str = Field(alias="from")
    to: str
    nodes: Annotated[int, Field(ge=1)]
    gpus: Annotated[int, Field(ge=1)]
    example_nodes: Annotated[tuple[str, ...], Tuple] = Field((), alias="exampleNodes")
    keep: Annotated[tuple[ProfileCount, ...], Tuple] = ()
    destroy: Annotated[tuple[ProfileCount, ...], Tuple] = ()
    create: Annotated[tuple[ProfileCount, ...], Tuple] = ()
    evict: Natural = 0
    mode_change: Literal["Enable", "Disable"] | None = Field(None, alias="modeChange")
    reset: bool = False
    reason: Reason | None = None
    message: str = ""


class PlanPreview(Value):
    """What a plan will do. digest: names exactly this preview; see `migd_operator.previewing`."""

    digest: Annotated[str, Field(pattern="^[0-9a-f]{16,64}$")]
    observed_generation: Natural = Field(alias="observedGeneration")
    totals: Totals
    groups: Annotated[tuple[Group, ...], Tuple] = ()
    groups_left_out: Natural = Field(0, alias="groupsLeftOut")


class PlanEvictions(Value):
    """The pods that one generation of a plan has evicted; all of them count for maxEvictions.

    evicted: whose eviction was accepted. pending: by uid, whose eviction may have been asked for and is not answered
    yet: written before the call, so that none is forgotten.
    """

    generation: Annotated[int, Field(ge=1)]
    evicted: Natural = 0
    pending: Annotated[tuple[str, ...], Tuple] = ()


class HistoryEntry(Value):
    """One generation of the plan, carried out or not."""

    generation: Natural
    started_at: Time = Field(alias="startedAt")
    finished_at: Time | None = Field(None, alias="finishedAt")
    result: Literal["Running", "Succeeded", "Failed", "Superseded"]
    nodes: Natural = 0
    gpus: Natural = 0
    evicted: Natural = 0
    message: str = ""


class PlanStatus(Value):
    """What has become of a plan."""

    observed_generation: Natural = Field(0, alias="observedGeneration")
    reason: str = ""
    message: str = ""
    conditions: Annotated[tuple[Condition, ...], Tuple] = ()
    nodes: NodeCounts = NodeCounts()
    gpus: GpuCounts = GpuCounts()
    preview: PlanPreview | None = None
    evictions: PlanEvictions | None = None
    history: Annotated[tuple[HistoryEntry, ...], Tuple] = ()


def plan_status_of(document: object, source: str = "gpupartitionplan") -> PlanStatus:
    """The status that a parsed document is; nothing reads as an empty one; BadInput where it is none."""
    try:
        return PlanStatus.model_validate({} if document is None else document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise BadInput(source, problems_of(error, PlanStatus, ("status",))) from None


def plan_status_document(status: PlanStatus) -> dict[str, Any]:
    """The status as a document that `plan_status_of` reads back equal; defaults are left out, totals never."""
    found = written(status)
    if status.preview is not None:
        found["preview"].setdefault("totals", {})
    return found
