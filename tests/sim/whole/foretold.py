"""What a plan's preview said, against what was then done to each GPU: where nobody interferes, they are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fleet import Fleet

from whole.truth import GpuTruth, There, truth

Done = tuple[str, str, str, str, str, str]
"""Of one GPU: from, to, kept, destroyed, created, mode change."""


def everything(fleet: Fleet) -> dict[str, GpuTruth]:
    """Every GPU of every node, by UUID."""
    return {uuid: gpu for node in fleet.nodes for uuid, gpu in truth(node).items()}


def differing(preview: Mapping[str, Any], before: Mapping[str, GpuTruth], after: Mapping[str, GpuTruth]) -> list[str]:
    """What was said and not done, or done and not said."""
    said = Counter(one for group in preview.get("groups") or () if "reason" not in group for one in _said(group))
    done = Counter(_done(before[uuid], after[uuid]) for uuid in sorted(before) if _changed(before[uuid], after[uuid]))
    missing, unsaid = sorted((said - done).elements()), sorted((done - said).elements())
    return [f"the preview said {one}, and it was not done" for one in missing] + [
        f"{one} was done, and the preview did not say it" for one in unsaid
    ]


def uncounted(preview: Mapping[str, Any], accepted: int) -> list[str]:
    """Where the preview counts other evictions than there were."""
    said = (preview.get("totals") or {}).get("evict", 0)
    return [] if said == accepted else [f"the preview said {said} evictions, and {accepted} were accepted"]


def _said(group: Mapping[str, Any]) -> list[Done]:
    listed = (
        _counts({c["profile"]: c["count"] for c in group.get(key) or ()}) for key in ("keep", "destroy", "create")
    )
    kept, destroyed, created = listed
    return [(group["from"], group["to"], kept, destroyed, created, group.get("modeChange", ""))] * group["gpus"]


def _done(before: GpuTruth, after: GpuTruth) -> Done:
    was, now = {t.serial: t for t in before.there}, {t.serial: t for t in after.there}
    mode = "" if before.mig == after.mig else ("Enable" if after.mig else "Disable")
    return (
        str(before.layout),
        str(after.layout),
        _profiles(t for serial, t in was.items() if serial in now),
        _profiles(t for serial, t in was.items() if serial not in now),
        _profiles(t for serial, t in now.items() if serial not in was),
        mode,
    )


def _changed(before: GpuTruth, after: GpuTruth) -> bool:
    return (before.mig, [t.serial for t in before.there]) != (after.mig, [t.serial for t in after.there])


def _profiles(there: Iterable[There]) -> str:
    return _counts(Counter(t.instance.profile for t in there))


def _counts(found: Mapping[str, int]) -> str:
    return " ".join(f"{number}×{profile}" for profile, number in sorted(found.items()))
