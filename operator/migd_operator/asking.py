"""`migd-operator preview PLAN`: what a plan would do, GPU by GPU. It reads the cluster and writes nothing."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from migd.kube.cluster import ApiCluster, Identity
from migd.kube.connecting import ConnectError, HttpTransport
from migd.kube.errors import KubeError
from migd.kube.nodes import NODES
from migd.kube.partitions import PARTITIONS, PLANS
from migd.kube.ports import Reads
from migd.mig.geometry import Counts
from migd.mig.transition import say
from migd.plans.plan import Plan
from migd.plans.problems import BadInput
from migd.plans.reading import read
from migd_operator.claims import node_wish
from migd_operator.facts import NodeFacts, PlanFacts
from migd_operator.judging import Judge, Judged
from migd_operator.previewing import told_of

DONE, FAILED, USAGE, REFUSED, CHANGES = 0, 1, 2, 3, 5
"""Exit codes, as `migd plan` has them."""
_HEADS: Final = ("NODE", "GPU", "FROM", "KEEP", "DESTROY", "CREATE", "EVICT", "MIG", "REASON", "MESSAGE")


class AskingError(Exception):
    """What was asked for cannot be told; the text says why."""


@dataclass(frozen=True, slots=True)
class Detail:
    """What a plan would do on one GPU of a node. gpu: its index, None where its agent has not told of it yet."""

    node: str
    gpu: int | None
    judged: Judged


async def details(cluster: Reads, name: str, given: Plan | None = None) -> tuple[Detail, ...]:
    """Each GPU that a plan decides on, or is in conflict over, by node and index, as the cluster is now.

    given: taken in place of what is stored under that name. AskingError where there is no such plan or it is not
    valid; KubeError. Who else owns a node, and whose turn it is, is not looked at: see the conditions `Assigned`.
    """
    stored = {one.name: one for one in await cluster.list(PLANS) if not one.deleting}
    plans = {n: PlanFacts(o.value.plan, o.uid, o.generation) for n, o in stored.items() if o.value.plan is not None}
    if given is not None:
        before = plans.get(name)
        plans[name] = PlanFacts(given, before.uid if before else "not stored", before.generation if before else 1)
    elif name not in plans:
        why = f"is not valid: {stored[name].value.invalid}" if name in stored else "is not there: see `kubectl get gpp`"
        raise AskingError(f"plan {name} {why}")
    partitions = [one.value for one in await cluster.list(PARTITIONS) if not one.deleting]
    found: list[Detail] = []
    ordered, judge = [plans[n] for n in sorted(plans)], Judge()
    for node in await cluster.list(NODES):
        annotations = {**node.annotations, **node.value.others}
        facts = NodeFacts(node.name, node.uid, node.value.labels, annotations)
        mine = [p for p in partitions if p.spec.node_uid == node.uid]
        for claim in node_wish(facts, ordered, mine, judge, {}).claims:
            if any(plan.name == name for plan in claim.plans):
                gpu = claim.partition.gpu
                found.append(Detail(node.name, gpu.index if gpu else None, told_of(claim)))
    return tuple(found)


def table(found: Sequence[Detail]) -> str:
    """A line for each GPU, with aligned columns."""
    rows = [_HEADS, *(_row(one) for one in found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADS))]
    return "".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def exit_code(found: Sequence[Detail]) -> int:
    """REFUSED where it can never be on one of the GPUs, else CHANGES where there is something to do, else DONE."""
    if any(one.judged.refused for one in found):
        return REFUSED
    return CHANGES if any(one.judged.changes for one in found) else DONE


def main(words: Sequence[str]) -> int:
    """The command, told without its name; its exit code."""
    parser = argparse.ArgumentParser(
        prog="migd-operator preview",
        description="Tells what a plan would do, GPU by GPU. Changes nothing.",
        epilog="Exit codes: 0 nothing to do, 5 changes, 3 refused on a GPU, 2 bad input, 1 the API server.",
    )
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="the plan's name; with -f it may be left out")
    parser.add_argument(
        "-f", "--filename", type=Path, metavar="FILE", help="the plan in this file in place of the stored"
    )
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
    options = parser.parse_args(words)
    try:
        given = None if options.filename is None else _plan_in(options.filename)
        name = options.plan or (given.name if given else "")
        if not name or (given is not None and given.name != name):
            parser.error("name a plan, or give one with -f FILE; both must have the same name")
        kubeconfig = options.kubeconfig or Path(os.environ.get("KUBECONFIG") or Path("~/.kube/config").expanduser())
        found = asyncio.run(_asked(kubeconfig, name, given))
    except (AskingError, BadInput, ConnectError, OSError) as error:
        sys.stderr.write(f"migd-operator preview: {error}\n")
        return USAGE
    except KubeError as error:
        sys.stderr.write(f"migd-operator preview: {error}\n")
        return FAILED
    sys.stdout.write(table(found) if found else f"plan {name} decides on no GPU\n")
    return exit_code(found)


async def _asked(kubeconfig: Path, name: str, given: Plan | None) -> tuple[Detail, ...]:
    identity = Identity("migd-preview", "migd.dev/preview", socket.gethostname())
    async with (
        await HttpTransport.connect("migd-preview", kubeconfig) as transport,
        ApiCluster(transport, identity, lambda: datetime.now(UTC)) as cluster,
    ):
        return await details(cluster, name, given)


def _plan_in(path: Path) -> Plan:
    found = read(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(found, Plan):
        raise AskingError(f"{path} holds no GPUPartitionPlan: `migd import` makes one of a mig-parted file")
    return found


def _row(one: Detail) -> tuple[str, ...]:
    judged = one.judged
    reset = " reset" if judged.reset else ""
    return (
        one.node,
        "" if one.gpu is None else str(one.gpu),
        judged.from_layout,
        *(_counts(part) for part in (judged.keep, judged.destroy, judged.create)),
        str(judged.evict or ""),
        f"{judged.mode_change or ''}{reset}",
        judged.reason or "",
        judged.message,
    )


def _counts(counts: Counts) -> str:
    return say(counts) if counts else ""
