"""The demo's drain: what a disruption budget does to it, what its timeout gives back, and who is evicted in the end."""

from __future__ import annotations

import textwrap
from typing import Final

from columns import found, short
from storytelling import MOMENT, PARTITIONS, PLAN, WIDTH, Json, Story, did, expect, kubectl, some, tell

from migd.kube.owed import OWED
from migd.sim.nodes import documents

BUDGET: Final[Json] = {
    "apiVersion": "policy/v1",
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "reranker", "namespace": "default"},
    "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "reranker"}}},
}


async def held_up(story: Story) -> None:
    """A budget does not allow the one eviction; at the timeout all is given back."""
    tell("6. Small ones everywhere, and what must go may be evicted. A disruption budget does not allow it, in time.")
    story.cluster.admin.create("poddisruptionbudgets", BUDGET)
    kubectl("""patch gpp pool --type=merge -p '{"spec":{"rules":[…7×1g.10gb…],"disruption":{"policy":"Evict",…}}}'""")
    wish = [{"gpus": {"all": True}, "instances": [{"profile": "1g.10gb", "count": 7}]}]
    story.fleet.edit(PLAN, rules=wish, disruption={"policy": "Evict", "timeout": "1m"})
    await story.fleet.until(lambda: story.plan(".status.preview.totals.evict") == 1)
    totals = story.plan(".status.preview.totals")
    print(f"The preview: {did(totals)}; {some(totals['evict'], 'pod')} of {len(story.devices())} to be evicted.")
    print(MOMENT.format("AFTER", "NODE", "IS", "ITS GPUS ARE", "NODES READY", "LAYOUTS"))
    await story.until_said("DrainBlocked")
    for blocker in (by for one in story.partitions() for by in found(one, ".status.blockers") or ()):
        budgets = ", ".join(blocker.get("podDisruptionBudgets") or ())
        print(f"{blocker['reason']}: pod {blocker['pod']['namespace']}/{blocker['pod']['name']}, budget {budgets}")
    held = story.devices()
    await story.until_said("DrainTimeout")
    late = next(one for one in story.partitions() if found(one, ".status.reason") == "DrainTimeout")
    print("\n".join(textwrap.wrap(f"DrainTimeout: {found(late, '.status.message')}", WIDTH, subsequent_indent="  ")))
    owed = [node for node in story.cluster.all("nodes") if documents.annotation(node, OWED)]
    expect(not owed and not story.closed(), "a node that is open again, with all that it was owed")
    expect(story.devices() == held, "pods that have not noticed anything")


async def drained(story: Story) -> None:
    """Without the budget, and asked to try again."""
    tell("7. The budget goes, and somebody says so: only the pod that must go is evicted.")
    before = story.devices()
    late = next(one for one in story.partitions() if found(one, ".status.reason") == "DrainTimeout")
    kubectl(f"delete pdb reranker; kubectl annotate gpart {short(late['metadata']['name'])} migd.dev/retry=now")
    story.cluster.delete("poddisruptionbudgets", "reranker", "default")
    retry = {"metadata": {"annotations": {"migd.dev/retry": "now"}}}
    story.cluster.admin.merge(PARTITIONS, late["metadata"]["name"], retry)
    await story.until_ready()
    now = story.devices()
    gone = sorted(before.keys() - now.keys())
    stayed = [name for name in before if now.get(name) == before[name]]
    evicted = story.plan(".status.evictions.evicted")
    print(f"\nEvicted: {', '.join(gone)}. The {len(stayed)} others have the MIG device that they had.")
    expect(evicted == len(gone) == 1, "one pod that is evicted, and counted")
    expect(len(stayed) == len(before) - 1, "pods that keep their MIG devices")
