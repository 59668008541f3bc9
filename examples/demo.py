"""The whole system in one process and in virtual time, on simulated nodes: `make demo`.

Operator and agents are the real ones; API server, kubelets, NVIDIA's stack, pods and GPUs are simulated. Every figure
that is printed is read from the objects of the run. Whatever is not as told ends the demo with exit code 1.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

import yaml
from columns import age, found, short
from demo_drain import drained, held_up
from fleet import Fleet
from storytelling import (
    LATEST_S,
    MOMENT,
    PARTITIONS,
    PLAN,
    WIDTH,
    Devices,
    Json,
    Story,
    UntoldError,
    did,
    expect,
    kubectl,
    some,
    tell,
)

from migd.kube.owed import OWED
from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.nodes import documents
from migd.sim.nodes.world import NodeSpec, OverdueError, Workload

PLANS: Final = Path(__file__).resolve().parent / "plans"

NODES: Final = (
    NodeSpec(
        "gpu-a100-01",
        "2xa100-80gb",
        style="operator",
        labels={"pool": "inference"},
        layout={0: ["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"], 1: ["3g.40gb@0", "3g.40gb@4"]},
    ),
    NodeSpec(
        "gpu-a100-02",
        "2xa100-80gb",
        labels={"pool": "inference"},
        layout={0: ["7g.80gb"], 1: ["2g.20gb@0", "2g.20gb@2", "3g.40gb@4"]},
    ),
    NodeSpec("gpu-h100-01", "2xh100-sxm-80gb", labels={"pool": "inference"}),
)
PODS: Final = (
    Workload("chat-api", {"nvidia.com/mig-1g.10gb": 1}, pods=2),
    Workload(
        "reranker", {"nvidia.com/mig-3g.40gb": 1}, spec={"nodeSelector": {"kubernetes.io/hostname": "gpu-a100-02"}}
    ),
    Workload("nightly-train", {"nvidia.com/mig-7g.80gb": 1}, lasts_s=(420.0, 420.0), pause_s=(LATEST_S, LATEST_S)),
)
WAITING: Final = Workload("embedder", {"nvidia.com/mig-1g.10gb": 1}, pods=12)


async def main() -> None:
    """The story."""
    async with Fleet(NODES) as fleet:
        story = Story(fleet)
        before = await _begin(story)
        _refused(story)
        await fleet.until(lambda: not fleet.plan("infeasible"))
        await _previewed(story)
        said, existed = story.plan(".status.preview.totals"), story.migs()
        await _carried_out(story)
        _ended(story, before, said, existed)
        await held_up(story)
        await drained(story)
        _goodbye()


async def _begin(story: Story) -> Devices:
    cluster = story.cluster
    for workload in PODS:
        cluster.run(workload)
    await story.fleet.until(lambda: all(len(story.running(workload)) == workload.pods for workload in PODS))
    cluster.run(WAITING)
    gpus = sum(len(node.host.snapshot().gpus) for node in story.fleet.nodes)
    await story.fleet.until(lambda: len([p for p in cluster.all(PARTITIONS) if found(p, ".status.phase")]) == gpus)
    await cluster.quiet(30)
    print("migd in a cluster of simulated nodes, in one process and in virtual time. Operator and agents are the real")
    print("programs; tables are as kubectl prints them, with long names cut.")
    tell("1. Three nodes, cut by hand long ago. Some slices are at work, and pods wait for small ones.")
    kubectl(f"get {PARTITIONS}")
    story.show(PARTITIONS, story.partitions())
    print()
    story.pods()
    waiting = WAITING.pods - len(story.running(WAITING))
    print(f"Besides, {waiting} of {WAITING.pods} pods of {WAITING.name} wait: no node has a slice left for them.")
    expect(waiting, "pods that wait for slices")
    held = story.devices()
    _apply(story, "infeasible")
    await story.fleet.until(lambda: story.plan(".status.preview.totals.refused", "infeasible"))
    return held


def _refused(story: Story) -> None:
    tell(
        "2. A wish that cannot be, though 3 + 3 + 1 = 7: it is refused before anything is touched, with what would fit."
    )
    kubectl("apply -f examples/plans/infeasible.yaml")
    story.show("gpupartitionplans", [story.fleet.plan("infeasible")])
    groups = story.plan(".status.preview.groups", "infeasible")
    (message,) = {group["message"].split(": ", 1)[1] for group in groups if group["reason"] == "Infeasible"}
    print("\n".join(textwrap.wrap(f"Infeasible: {message}", WIDTH, subsequent_indent="  ")))
    expect("Nearest that fits" in message, "the nearest layouts that fit")
    expect(not any(p["spec"].get("assignment") for p in story.partitions()), "no node that begins")
    kubectl("delete gpp infeasible")
    story.cluster.delete("gpupartitionplans", "infeasible")


async def _previewed(story: Story) -> None:
    tell("3. One that can: a half and four small ones on every GPU. It is paused: what would it do?")
    kubectl("apply -f examples/plans/pool.yaml; kubectl get gpp pool -o yaml    # the preview in its status:")
    _apply(story, PLAN)
    await story.fleet.until(lambda: story.plan(".status.preview.groups"))
    await story.cluster.quiet(10)
    story.preview()
    expect(not any(p["spec"].get("assignment") for p in story.partitions()), "a paused plan that moves nothing")


async def _carried_out(story: Story) -> None:
    tell("4. Go. One node at a time is closed, for seconds; a slice in use is waited for, with its node open.")
    kubectl("""patch gpp pool --type=merge -p '{"spec":{"paused":false}}'""")
    story.fleet.edit(PLAN, paused=False)
    print(MOMENT.format("AFTER", "NODE", "IS", "ITS GPUS ARE", "NODES READY", "LAYOUTS"))
    await story.until_it_waits()
    kubectl(f"get {PARTITIONS}")
    story.show(PARTITIONS, story.partitions())
    for one in story.partitions():
        for by in found(one, ".status.blockers") or ():
            print(
                f"{short(one['metadata']['name'])} waits: {by['instance']} is held by pod"
                f" {by['pod']['namespace']}/{by['pod']['name']}, pid {by.get('pid')}"
            )
    expect(not story.closed(), "a node that stays open while it waits")
    print()
    await story.until_ready()


def _ended(story: Story, before: Devices, said: Json, existed: set[str]) -> None:
    tell("5. All is as wished. The pods that could stay have their MIG devices still, and those that waited run.")
    kubectl(f"get {PARTITIONS}")
    story.show(PARTITIONS, story.partitions())
    print()
    story.pods(before)
    print()
    story.labels()
    there = story.migs()
    done = {"keep": len(there & existed), "destroy": len(existed - there), "create": len(there - existed)}
    running = len(story.running(WAITING))
    print(f"\n{running} of {WAITING.pods} pods of {WAITING.name} run now.")
    print(f"The preview said: {did(said)}. By the UUIDs of MIG devices it was: {did({**said, **done})}.")
    limit = story.plan(".spec.rollout.maxUnavailable")
    print(
        f"Closed at the same time: {some(story.closed_at_once, 'node')} (maxUnavailable: {limit}),"
        f" none for longer than {age(story.longest_closed_s + 1)}."
    )
    now = story.devices()
    stay = {name: uuid for name, uuid in before.items() if not name.startswith(PODS[-1].name)}
    expect(stay.items() <= now.items(), "pods that keep their MIG devices")
    expect({key: said.get(key, 0) for key in done} == done, "a preview that is true")
    expect(1 <= story.closed_at_once <= limit, f"at most {limit} node closed at a time")
    expect(running == WAITING.pods, f"{WAITING.pods} pods of {WAITING.name} that run")
    expect(
        not any(documents.annotation(node, OWED) for node in story.cluster.all("nodes")), "nodes that are owed nothing"
    )


def _goodbye() -> None:
    print(
        "\nGo on: `make cluster` starts such a cluster with a real API server to play with, `make demo-node` shows\n"
        "one machine without Kubernetes, docs/plans.md says what a plan can say, docs/install.md how migd is installed."
    )


def _apply(story: Story, name: str) -> None:
    story.fleet.apply(yaml.safe_load((PLANS / f"{name}.yaml").read_text()))


if __name__ == "__main__":
    try:
        run_virtually(main())
    except (UntoldError, OverdueError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
