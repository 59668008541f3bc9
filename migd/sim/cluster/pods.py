"""What is asked of a pod through its subresources: to be bound to a node, and to be evicted.

Evictions answer as kube-apiserver 1.37.2 was seen to, in the order in which it looks: the namespace, the pod, the
budgets, and only then whether it is the pod that was meant. One thing is left out: there a wrong uid of a pod that
needs no budget is answered after ten seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from migd.sim.cluster.answers import Refusal, Target, status
from migd.sim.cluster.budgets import budgets_of, healthy
from migd.sim.cluster.deleting import text_of
from migd.sim.cluster.fields import Json, copied

if TYPE_CHECKING:
    from migd.sim.cluster.store import Store

_FREE: Final = ("Succeeded", "Failed", "Pending", "")
"""Phases in which a pod is evicted whatever a budget says."""


def done(code: int) -> Json:
    """A Status of success."""
    return status(code, "") | {"status": "Success"}


def bind(store: Store, target: Target, body: Json) -> Json:
    """Bind a pod to a node, which is how a scheduler does it."""
    pod = store.document(target)
    if pod["spec"].get("nodeName"):
        raise Refusal(409, f'pod {target.name} is already assigned to node "{pod["spec"]["nodeName"]}"')
    if "deletionTimestamp" in pod["metadata"]:
        raise Refusal(409, f"pod {target.name} is being deleted, cannot be assigned to a host")
    after = copied(pod)
    after["spec"]["nodeName"] = body["target"]["name"]
    store.rewrite(target, with_condition(after, {"type": "PodScheduled", "status": "True"}))
    return done(201)


def evict(store: Store, target: Target, body: Json) -> Json:
    """Have a pod evicted, if its budget lets it; Refusal with what the API server answers if not."""
    if (body.get("metadata") or {}).get("name") != target.name:
        raise Refusal(400, "name in URL does not match name in Eviction object")
    options = body.get("deleteOptions") or {}
    pod = store.document(target)
    if not _needs_no_budget(pod):
        _let_through(store, pod, bool(options.get("dryRun")))
    wanted, found = (options.get("preconditions") or {}).get("uid"), pod["metadata"]["uid"]
    if wanted not in (None, found):
        raise Refusal(
            409,
            f'Operation cannot be fulfilled on Pod "{target.name}": the UID in the precondition ({wanted}) does not '
            f"match the UID in record ({found}). The object might have been deleted and then recreated",
        )
    if not options.get("dryRun"):
        target_of_it = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        store.rewrite(target, with_condition(copied(pod), {**target_of_it, "message": "Eviction API: evicting"}))
        store.delete(target, options)
    return done(201)


def with_condition(pod: Json, condition: Json) -> Json:
    """A pod of one's own with a condition put in the place of the one of that type."""
    told = pod.setdefault("status", {}).get("conditions") or ()
    pod["status"]["conditions"] = [*(c for c in told if c["type"] != condition["type"]), condition]
    return pod


def _needs_no_budget(pod: Json) -> bool:
    return (pod.get("status") or {}).get("phase", "") in _FREE or "deletionTimestamp" in pod["metadata"]


def _let_through(store: Store, pod: Json, dry_run: bool) -> None:
    """Use up one of what the pod's budget allows; Refusal where it allows none."""
    budgets = budgets_of(pod, store.documents("poddisruptionbudgets"))
    if len(budgets) > 1:
        raise Refusal(
            500,
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
        )
    if not budgets:
        return
    budget = budgets[0]
    name, told = budget["metadata"]["name"], budget.get("status") or {}
    current, desired = told.get("currentHealthy", 0), told.get("desiredHealthy", 0)
    if not healthy(pod):
        always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
        if always or current >= desired > 0:
            return
    if told.get("observedGeneration", 0) < budget["metadata"]["generation"]:
        raise _refused(f"The disruption budget {name} is still being processed by the server.", retryAfterSeconds=10)
    allowed = told.get("disruptionsAllowed", 0)
    if not allowed:
        raise _refused(_why(name, told))
    if not dry_run:
        disrupted = {**(told.get("disruptedPods") or {}), pod["metadata"]["name"]: text_of(store.now())}
        after = {**told, "disruptionsAllowed": allowed - 1, "disruptedPods": disrupted}
        store.rewrite(store.at("poddisruptionbudgets", budget), {**budget, "status": after})


def _why(name: str, told: Json) -> str:
    current, desired = told.get("currentHealthy", 0), told.get("desiredHealthy", 0)
    if any(c["reason"] == "SyncFailed" for c in told.get("conditions") or ()):
        return f"The disruption budget {name} does not allow evicting pods currently because it failed sync: no scale"
    if current <= desired:
        return f"The disruption budget {name} needs {desired} healthy pods and has {current} currently"
    return f"The disruption budget {name} does not allow evicting pods currently"


def _refused(why: str, **details: Any) -> Refusal:
    said = "Cannot evict pod as it would violate the pod's disruption budget."
    return Refusal(429, said, causes=[{"reason": "DisruptionBudget", "message": why}], **details)
