"""The JSON that `migd gpus` and `migd plan` print: a contract; its schemas lie in schemas/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from migd.mig.fragmentation import fragmentation, free
from migd.mig.geometry import EMPTY, Counts, GpuInstance, Layout, by_start
from migd.mig.observed import Holder, SeenGpu, SeenInstance
from migd.plans.preview import Blocker, GpuPreview, Preview, by_pid

Json = dict[str, Any]
FRAGMENTATION_DIGITS: Final = 4


def to_json(preview: Preview) -> Json:
    """A preview as `migd plan -o json` has it: every GPU of the node, by index."""
    return {"gpus": [_gpu_preview(gpu) for gpu in preview.gpus]}


def gpus_json(gpus: Sequence[SeenGpu], unfinished: Mapping[str, Any] | None) -> Json:
    """The GPUs of a node as `migd gpus -o json` has them, by index.

    unfinished: what a crash left, as its journal tells it; None for nothing. With MIG off `free` tells what would
    fit; it is empty where the GPU lists no profiles.
    """
    ordered = sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))
    return {"gpus": [_gpu(gpu) for gpu in ordered], "unfinished": None if unfinished is None else dict(unfinished)}


def json_text(value: Json) -> str:
    """One of the above as text: equal values give equal bytes."""
    return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def layout_json(layout: Layout) -> Json:
    """A layout: whether MIG is on, and the instances with their places, in order of start."""
    return {"mig": layout.mig, "instances": [_place(i) for i in by_start(layout.instances)]}


def _gpu(gpu: SeenGpu) -> Json:
    geometry = gpu.geometry if gpu.mig_on else EMPTY
    mode = gpu.mode
    measured = gpu.board is not None and gpu.mig_on
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "mig": {
            "capable": mode is not None,
            "current": None if mode is None else mode.current,
            "pending": None if mode is None else mode.pending,
        },
        "instances": [_instance(seen) for seen in sorted(gpu.instances, key=_by_start)],
        "free": dict(sorted(free(gpu.board, geometry).items())) if gpu.board is not None else {},
        "fragmentation": (
            round(fragmentation(gpu.board, geometry), FRAGMENTATION_DIGITS) if gpu.board and measured else None
        ),
    }


def _gpu_preview(gpu: GpuPreview) -> Json:
    there = {s.instance: s for s in gpu.seen.instances}
    refused = gpu.refused
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "matched": gpu.rule is not None,
        "keep": [_instance(there[i]) for i in gpu.keep],
        "destroy": [_instance(there[i]) for i in gpu.destroy],
        "create": [_place(i) for i in gpu.create],
        "modeChange": gpu.mode_change,
        "reset": gpu.reset,
        "blockedBy": [_blocker(b) for b in gpu.blocked_by],
        "refused": refused
        and {
            "reason": refused.reason,
            "message": refused.message,
            "leftOver": _counts(refused.left_over),
            "nearest": [_counts(n) for n in refused.nearest],
        },
    }


def _by_start(seen: SeenInstance) -> tuple[int, int, str]:
    place = seen.instance.placement
    return (place.start, -place.size, seen.instance.profile)


def _place(instance: GpuInstance) -> Json:
    place = instance.placement
    return {"profile": instance.profile, "placement": {"start": place.start, "size": place.size}}


def _instance(seen: SeenInstance) -> Json:
    """An instance that exists; ci and uuid are of its whole compute instance, else of its first, else null."""
    compute = sorted(seen.compute_instances, key=lambda c: (not c.whole, c.ci_id))
    first = compute[0] if compute else None
    return {
        **_place(seen.instance),
        "gi": seen.gi_id,
        "ci": first.ci_id if first else None,
        "uuid": first.mig_uuid if first else None,
        "inUse": seen.in_use,
        "holders": [_holder(h) for h in by_pid(seen.holders)],
    }


def _holder(holder: Holder) -> Json:
    return {"pid": holder.pid, "command": holder.command or None, "container": holder.container or None}


def _blocker(blocker: Blocker) -> Json:
    instance = str(blocker.instance) if blocker.instance else None
    return {**_holder(blocker.holder), "instance": instance, "reason": blocker.reason}


def _counts(counts: Counts) -> dict[str, int]:
    return dict(counts)
