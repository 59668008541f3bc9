"""Closed, before anything is changed: let the scheduler settle, pause GPU clients, look once more."""

from __future__ import annotations

from dataclasses import replace

from migd.agent.deciding import under_way
from migd.agent.driving import parked
from migd.agent.node.advertising import advertised
from migd.agent.node.backing import leaving
from migd.agent.node.bounds import (
    CLIENTS_MAX_S,
    CLOSED_MAX_S,
    KUBELET_LOOK_S,
    POLL_S,
    SETTLE_S,
)
from migd.agent.node.clients import (
    by_labels,
    client_labels,
    paused_still_there,
    stoppable,
    to_pause,
    to_stop,
)
from migd.agent.node.draining import drains
from migd.agent.node.effects import ChangeNode, Effect, LookAgain, StopPlugin, Wait
from migd.agent.node.holding import unadmitted
from migd.agent.node.moments import (
    Decided,
    Judged,
    View,
    back_out,
    begun,
    enter,
    judge,
    shut,
    work_of,
    working,
)
from migd.agent.records import Cause, Outcome, PauseKind, Record
from migd.kube import owed
from migd.kube.owed import owed_of


def close(record: Record, view: View) -> Decided:
    """Put our taint on the node, with the debt that says whose it is."""
    record, left = leaving(record, view)
    if left:
        return record, LookAgain()
    node = view.seen.node
    if not node.value.closed or owed_of(node) is None:
        return record, shut(view, work_of(record).turn)
    judged = judge(record, view)
    return enter(record, "Draining" if judged.busy and drains(judged) else "Settling", view), LookAgain()


def settle(record: Record, view: View) -> Decided:
    """Pods may still be bound for a moment. Go on when each that asks for devices has them, and all is idle."""
    record, left = leaving(record, view)
    if left:
        return record, LookAgain()
    if not view.seen.node.value.closed:
        return enter(record, "Closing", view), LookAgain()
    ready_s = work_of(record).since_s + SETTLE_S
    if view.now_s < ready_s:
        return record, Wait(ready_s - view.now_s, "the scheduler may still bind pods")
    judged = judge(record, view)
    if judged.busy and drains(judged):  # bound in the moment after the taint, or made anew: asked to go as the others
        return enter(record, "Draining", view), LookAgain()
    why = _not_yet(record, view, ready_s)
    if why is None:
        return enter(record, "Pausing", view, pause=_kind(view)), LookAgain()
    if view.now_s - work_of(record).since_s > CLOSED_MAX_S:
        return _given_up(record, view, why), LookAgain()
    return record, Wait(POLL_S, why.message)


def pause(record: Record, view: View) -> Decided:
    """Pause GPU clients, wait until they are gone and nothing can be handed out, look once more; then change."""
    record, left = leaving(record, view)
    if left:
        return record, LookAgain()
    if not view.seen.node.value.closed:
        return _given_up(record, view, Cause("ForeignOwner", "somebody else opened the node meanwhile")), LookAgain()
    work, judged = work_of(record), judge(record, view)
    effect = _next_pause(record, view, judged)
    late = view.now_s - work.since_s > CLIENTS_MAX_S
    if effect is not None and late:  # whoever was to pause them was away so long
        why = Cause("DrainTimeout", f"GPU clients were not paused within {CLIENTS_MAX_S:.0f} s, so nothing was changed")
        return _given_up(record, view, why), LookAgain()
    if effect is not None:
        paused_s = view.now_s if work.paused_s is None else work.paused_s
        return working(record, replace(work, paused_s=paused_s)), effect
    there = _still_there(view, work.pause)
    if there and late:
        why = Cause("DrainTimeout", f"{there} within {CLIENTS_MAX_S:.0f} s, so nothing was changed")
        return _given_up(record, view, why), LookAgain()
    if there:
        return record, Wait(KUBELET_LOOK_S, there)
    still = _not_yet(record, view, work.since_s)
    if still is None:
        return _begun(record, view, judged), LookAgain()
    if still.reason == "Waiting" and not late:
        return record, Wait(POLL_S, still.message)
    return _given_up(record, view, still), LookAgain()


def _given_up(record: Record, view: View, why: Cause) -> Record:
    """Not in time. What a crash left half done on a GPU is parked, and tried again later."""
    for uuid in under_way(record):
        gpu = record.gpu(uuid)
        assert gpu.transaction is not None, "it is under way"
        touched = gpu.transaction.touched
        record = record.with_gpu(uuid, parked(gpu, gpu.transaction, Outcome("Failed", why, touched, touched)))
    return back_out(record, view, why)


def _not_yet(record: Record, view: View, listed_s: float) -> Cause | None:
    """Why the clients must not be paused yet, or nothing be changed yet. listed_s: pods must be listed since then.

    Reason Waiting where it is only a look that is missing.
    """
    seen = view.seen
    if seen.pods_listed_at_s is None or seen.pods_listed_at_s < listed_s:
        return Cause("Waiting", "the pods of this node are to be listed anew")
    if seen.devices is None:
        return Cause("InUse", f"who holds devices is not known: {seen.kubelet_trouble}")
    bound = unadmitted(seen)
    if bound:
        names = ", ".join(sorted(pod.key for pod in bound))
        return Cause("InUse", f"the kubelet has not given {names} its devices yet")
    if under_way(record):
        return None
    judged = judge(record, view)
    if judged.busy and judged.going is not None and judged.going.stuck is not None and judged.going.stuck.message:
        return Cause("InUse", judged.going.stuck.message)
    used = [judged.plans[uuid].blocked for uuid in judged.busy]
    return Cause("InUse", "; ".join(b.message for b in used if b is not None)) if used else None


def _kind(view: View) -> PauseKind:
    """How the device plugin is kept from handing out: one that tolerates our taint would come straight back."""
    if by_labels(view.seen.node):
        return "Labels"
    return "Pods" if to_stop(view.seen) else "None"


def _next_pause(record: Record, view: View, judged: Judged) -> Effect | None:
    """The next effect that pauses something; None once all is asked to stop."""
    node, work = view.seen.node, work_of(record)
    modes = any(judged.plans[uuid].mode_change for uuid in judged.changing) or bool(under_way(record))
    keys = to_pause(node.value, client_labels(modes))
    if keys:
        return ChangeNode(owed.pausing(node, work.turn, keys), "pause GPU clients")
    if work.pause == "Pods":
        for pod in stoppable(view.seen):
            if not pod.deleting:
                return StopPlugin(pod.namespace, pod.name, pod.uid)
    return None


def _still_there(view: View, kind: PauseKind) -> str:
    """What of the paused clients is still seen, in a sentence; "" for nothing."""
    there = paused_still_there(view.seen) or (stoppable(view.seen) if kind == "Pods" else ())
    if there:
        return f"GPU client {', '.join(sorted(pod.key for pod in there))} did not stop"
    shown = {} if kind == "None" else advertised(view.seen.node.value)
    names = ", ".join(f"{resource}: {number}" for resource, number in sorted(shown.items()))
    return f"the kubelet did not stop advertising {names}" if shown else ""


def _begun(record: Record, view: View, judged: Judged) -> Record:
    """Every GPU's transaction, on disk before the first operation."""
    record = begun(record, view, judged)
    before, after = {}, {}
    for uuid in under_way(record):
        transaction = record.gpu(uuid).transaction
        assert transaction is not None, "it is under way"
        before[uuid] = str(transaction.before)
        wished = view.turn.desired[uuid].summary if view.turn is not None and uuid in view.turn.desired else ""
        after[uuid] = str(transaction.target) if transaction.target is not None else wished
    return enter(record, "Applying", view, why=None, at_once=False, before=before, after=after)
