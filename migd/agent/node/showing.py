"""Parts of a GPUPartition's status: the board, what is observed, the last transition, the layout to go back to."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Final, Literal

from migd.agent.node.moments import work_of
from migd.agent.records import Record
from migd.kube.stored import Stored
from migd.mig.boards import Board
from migd.mig.geometry import Geometry, GpuInstance, Layout, by_start
from migd.mig.observed import SeenGpu, SeenInstance
from migd.plans.boards import BoardDoc, EnginesDoc, PlaceDoc, ProfileDoc, shared_profiles
from migd.plans.conditions import cut
from migd.plans.partitions import (
    InstanceDoc,
    LastTransition,
    ModeDoc,
    Observed,
    Partition,
    PartitionStatus,
    PlacedDoc,
    Previous,
    Step,
    Switch,
)

_LAYOUT_MAX: Final = 1024


def board_doc(gpu: SeenGpu, driver: str) -> BoardDoc:
    """What a GPU is by nature. A board that an older driver lists only while MIG is on is told only then."""
    return BoardDoc(
        index=gpu.index,
        uuid=gpu.uuid,
        model=gpu.model,
        pci_device_id=gpu.pci_device_id,
        memory_mib=gpu.memory_mib,
        driver=driver,
        mig_capable=gpu.mode is not None,
        mode_change_resets=not gpu.resetless if gpu.mode is not None else None,
        trouble=cut(gpu.trouble, _LAYOUT_MAX),
        profiles=_profiles(gpu.board) if gpu.board is not None else (),
    )


def observed_doc(gpu: SeenGpu, owned: Geometry) -> Observed:
    """How a GPU is now. What pods hold counts as in use."""
    used = sum(i.in_use for i in gpu.instances)
    return Observed(
        summary=cut(str(gpu.layout), _LAYOUT_MAX),
        in_use=f"{used}/{len(gpu.instances)}" if gpu.instances else "",
        mig=ModeDoc(current=_switch(gpu.mode.current), pending=_switch(gpu.mode.pending)) if gpu.mode else None,
        busy=gpu.in_use,
        instances=tuple(_instance(i, i.instance not in owned) for i in gpu.instances),
    )


def previous_doc(layout: Layout | None) -> Previous | None:
    """The layout to go back to."""
    if layout is None:
        return None
    placed = tuple(PlacedDoc(profile=i.profile, placement=_place(i)) for i in by_start(layout.instances))
    return Previous(summary=cut(str(layout), _LAYOUT_MAX), mig=_switch(layout.mig), instances=placed)


def transition_doc(
    record: Record, partition: Stored[Partition], gpu: SeenGpu | None, was: LastTransition | None
) -> LastTransition | None:
    """The last change of this GPU, or the one under way; what was told before where this one does not change it."""
    work, desired = work_of(record), partition.value.spec.desired
    uuid = gpu.uuid if gpu is not None else partition.name
    if uuid not in work.before or not work.steps:
        return _closed(was, record, uuid)
    over = work.stage in ("Rest", "Waiting") and bool(work.ended_at)
    result = _result(record, uuid) if over else None
    # as wished without a change of ours: somebody else's hand was there first, so what is there is where it led to
    there = str(gpu.layout) if result == "Succeeded" and gpu is not None and not gpu.out_of_reach else ""
    return LastTransition(
        id=cut(work.turn or (was.id if was is not None else "recovery"), 64),
        generation=desired.plan.generation if desired is not None else None,
        from_layout=cut(work.before[uuid], _LAYOUT_MAX),
        to=cut(work.after.get(uuid, there), _LAYOUT_MAX),
        started_at=datetime.fromisoformat(work.began_at),
        finished_at=datetime.fromisoformat(work.ended_at) if over else None,
        result=result,
        steps=tuple(_step(s.name, s.at, s.milliseconds) for s in work.steps),
    )


@lru_cache(maxsize=1024)
def _step(name: str, at: str, milliseconds: int | None) -> Step:
    """A step stays as it is for as long as its change is told."""
    return Step(name=name, started_at=datetime.fromisoformat(at), milliseconds=milliseconds)


def _closed(was: LastTransition | None, record: Record, uuid: str) -> LastTransition | None:
    """What was told of an earlier change, with its end where that was not told before the agent died.

    One that had no target yet was never begun: what the GPU is now, it is by another.
    """
    work = work_of(record)
    if was is None or was.finished_at is not None or work.stage != "Rest" or not work.ended_at:
        return was
    return was.model_copy(
        update={
            "finished_at": datetime.fromisoformat(work.ended_at),
            "result": _result(record, uuid) if was.to else "BackedOut",
        }
    )


def same_but_use(was: PartitionStatus, now: PartitionStatus) -> bool:
    """Whether two statuses differ at most in who uses what."""
    return _without_use(was) == _without_use(now)


def _without_use(status: PartitionStatus) -> PartitionStatus:
    observed = status.observed
    if observed is not None:
        instances = tuple(i.model_copy(update={"in_use": None}) for i in observed.instances)
        observed = observed.model_copy(update={"in_use": "", "busy": None, "instances": instances})
    # a pod that shares a GPU by MPS comes and goes as any job does, also while its node waits for a turn
    waits = status.phase in ("WaitingForIdle", "Blocked") and status.reason in ("InUse", "NeverIdle", "MPSInUse")
    waits |= status.phase in ("Idle", "Pending") and status.reason in ("", "Waiting", "MPSInUse")
    unsaid = {"reason": "Waiting", "message": ""}
    conditions = tuple(c.model_copy(update=unsaid) for c in status.conditions) if waits else status.conditions
    return status.model_copy(
        update={
            "observed": observed,
            "blockers": (),
            "blockers_left_out": 0,
            "reason": "" if waits else status.reason,
            "message": "" if waits else status.message,
            "conditions": conditions,
        }
    )


def _result(record: Record, uuid: str) -> Literal["Succeeded", "RolledBack", "BackedOut", "Failed", "Held"]:
    """How it ended. Without an outcome nothing was begun on it."""
    outcome = record.gpu(uuid).outcome
    if outcome is None:
        return "BackedOut"
    if outcome.phase == "Ready":
        return "Succeeded"
    if outcome.phase == "Held":
        return "Held"
    whole = record.gpu(uuid).transaction is None and not outcome.changed
    return "RolledBack" if whole and outcome.phase in ("Blocked", "Failed") else "Failed"


@lru_cache(maxsize=64)
def _profiles(board: Board) -> tuple[ProfileDoc, ...]:
    """The same object as is read back, so that comparing them costs nothing."""
    found = tuple(
        ProfileDoc(
            name=p.name,
            id=p.profile_id,
            compute_slices=p.compute_slices,
            memory_mib=p.memory_mib,
            instances_max=p.instance_count_max,
            engines=EnginesDoc(
                copy_engines=p.engines.copy, decoder=p.engines.decoder, encoder=p.engines.encoder,
                jpeg=p.engines.jpeg, ofa=p.engines.ofa,
            ),
            placements=tuple(PlaceDoc(start=place.start, size=place.size) for place in p.placements),
        )
        for p in board.profiles
    )  # fmt: skip
    return shared_profiles(found)


def _instance(there: SeenInstance, foreign: bool) -> InstanceDoc:
    whole = there.compute_instances[0] if there.whole else None
    return InstanceDoc(
        profile=there.instance.profile,
        placement=_place(there.instance),
        gi=there.gi_id,
        ci=whole.ci_id if whole else None,
        mig_uuid=whole.mig_uuid if whole else None,
        in_use=there.in_use,
        foreign=foreign,
    )


def _place(instance: GpuInstance) -> PlaceDoc:
    return PlaceDoc(start=instance.placement.start, size=instance.placement.size)


def _switch(on: bool) -> Switch:
    return "Enabled" if on else "Disabled"
