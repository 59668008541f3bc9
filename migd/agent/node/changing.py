"""Changing GPUs, one after the other, while their clients are paused; then device nodes, and the node is open again."""

from __future__ import annotations

from dataclasses import replace

from migd.agent.deciding import under_way
from migd.agent.driving import backwards, drive, parked
from migd.agent.effects import LookAgain as Look
from migd.agent.effects import Pause, Seen
from migd.agent.node.bounds import FORWARD_MAX_S, NUDGE_S, PAUSE_MAX_S, POLL_S, REFRESHES_MAX
from migd.agent.node.clients import plugins
from migd.agent.node.effects import LookAgain, RefreshDevices, Wait
from migd.agent.node.moments import Decided, View, enter, in_debt, pay, work_of
from migd.agent.records import Cause, Outcome, Record


def apply(record: Record, view: View) -> Decided:
    """One turn of one GPU's transaction, lowest index first, until all have ended, well or not.

    Within the bound of a pause: late ones go back, and what is not back by then rests as it is.
    """
    work = work_of(record)
    paused_s = view.now_s - (work.since_s if work.paused_s is None else work.paused_s)
    if paused_s > FORWARD_MAX_S:
        record = _late(record, over=paused_s > PAUSE_MAX_S)
    # With nothing on offer nobody can have got anything since all was seen idle, whether or not the kubelet answers.
    blind, sealed = view.seen.devices is None, view.seen.node.value.closed and work.pause != "None"
    if blind and not sealed and under_way(record) and paused_s <= FORWARD_MAX_S:
        return record, Wait(POLL_S, f"who holds devices is not known: {view.seen.kubelet_trouble}")
    gpus = view.seen.gpus if blind and sealed else view.held.gpus
    index = {gpu.uuid: gpu.index for gpu in gpus}
    ours = view.turn.orders if view.turn is not None and view.turn.id == work.turn else {}
    for uuid in sorted(under_way(record), key=lambda uuid: (index.get(uuid, len(index)), uuid)):
        record, effect = drive(record, uuid, Seen(view.seen.boot_id, view.now_s, gpus, ours.get(uuid)))
        if isinstance(effect, Pause):
            return record, Wait(effect.seconds, effect.why)
        return record, LookAgain() if effect is None or isinstance(effect, Look) else effect
    outcomes = [record.gpu(uuid).outcome for uuid in work.before]
    if any(outcome is not None and outcome.touched for outcome in outcomes):
        return enter(record, "Refreshing", view, refreshed=False, refresh=None, refresh_tries=0), LookAgain()
    return _onwards(record, view), LookAgain()


def refresh(record: Record, view: View) -> Decided:
    """Device nodes and CDI, after creation and before the plugin starts, or containers could not.

    Tried again only within the bound of a pause; later without one.
    """
    work = work_of(record)
    late = work.paused_s is not None and view.now_s - work.paused_s > PAUSE_MAX_S
    if not work.refreshed and work.refresh_tries < (1 if late else REFRESHES_MAX):
        gpus = tuple(sorted(gpu.uuid for gpu in view.held.gpus if not gpu.out_of_reach))
        return record, RefreshDevices(gpus)
    return _onwards(record, view), LookAgain()


def open_node(record: Record, view: View) -> Decided:
    """Our taint goes and the clients come back, in one request: with nothing advertised nothing can land between."""
    if in_debt(view):
        return record, pay(view)
    return enter(record, "Verifying", view, nudges=0, nudged_s=view.now_s, closed_s=None, paused_s=None), LookAgain()


def _onwards(record: Record, view: View) -> Record:
    """Open; but a plugin that runs on, as it could not be stopped or need not, looks again first."""
    work = work_of(record)
    if plugins(view.seen) and work.pause in ("None", ""):
        return enter(record, "Verifying", view, nudges=0, nudged_s=view.now_s - NUDGE_S)
    return enter(record, "Opening", view)


def _late(record: Record, over: bool) -> Record:
    """What is not done in time goes back; what is not even back by the end of the pause rests as it is."""
    for uuid in under_way(record):
        gpu = record.gpu(uuid)
        assert gpu.transaction is not None, "it is under way"
        why = gpu.transaction.cause or gpu.transaction.error or Cause("NVMLError", "")
        said = f"GPU clients must not be paused for longer than {PAUSE_MAX_S:.0f} s. {why.message}".strip()
        if over:
            outcome = Outcome("Failed", Cause(why.reason, f"{said} The GPU is left half done"), True, True)
            record = record.with_gpu(uuid, parked(gpu, gpu.transaction, outcome))
        elif not gpu.transaction.back:
            turned = backwards(gpu.transaction, Cause(why.reason, said))
            record = record.with_gpu(uuid, replace(gpu, transaction=turned))
    return record
