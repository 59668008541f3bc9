"""What a deletion makes of an object: gone at once, or going, by its grace and its finalizers. Pure.

Source: apiserver's rest.BeforeDelete and the pod strategy's CheckGracefulDelete, as seen on 1.37.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from migd.sim.cluster.fields import Json

_TERMINAL: Final = ("Succeeded", "Failed")
_OWN_GRACE_S: Final = 30


def deleting(kind: str, document: Json, options: Mapping[str, Any], now: datetime) -> Json | None:
    """The document once its deletion was asked for; None where nothing keeps it.

    Only a pod that is bound and has not ended has a grace. It is over when its kubelet deletes it with a grace of 0;
    a deletion under way can only be given less. Finalizers keep anything: see `released`.
    """
    metadata = document["metadata"]
    asked: int | None = options.get("gracePeriodSeconds")
    if "deletionTimestamp" in metadata:
        before = metadata.get("deletionGracePeriodSeconds", 0)
        if before and (asked is None or asked >= before):
            return document
        grace = max(asked or 0, 0)
        ends = time_of(metadata["deletionTimestamp"]) + timedelta(seconds=grace - before)
    else:
        grace = _grace_s(document, asked) if kind == "Pod" else 0
        ends = now + timedelta(seconds=grace)
    if not grace and not _finalizers(document):
        return None
    going: Json = {"deletionTimestamp": text_of(ends), "deletionGracePeriodSeconds": grace}
    after: Json = {**document, "metadata": {**metadata, **going}}
    if kind == "Namespace":
        after["status"] = {**(document.get("status") or {}), "phase": "Terminating"}
    return after


def released(document: Json) -> bool:
    """Whether nothing keeps an object any more whose deletion was asked for: it has no grace left and no finalizer."""
    metadata = document["metadata"]
    return (
        "deletionTimestamp" in metadata and not metadata.get("deletionGracePeriodSeconds") and not _finalizers(document)
    )


def time_of(text: str) -> datetime:
    """A time as the API has it."""
    return datetime.strptime(text, _FORMAT).replace(tzinfo=UTC)


def text_of(time: datetime) -> str:
    """A time as the API has it, to the second."""
    return time.strftime(_FORMAT)


_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"


def _grace_s(pod: Json, asked: int | None) -> int:
    """Seconds that a pod may take; a negative grace is one second."""
    if not pod["spec"].get("nodeName") or (pod.get("status") or {}).get("phase") in _TERMINAL:
        return 0
    grace = int(pod["spec"].get("terminationGracePeriodSeconds", _OWN_GRACE_S) if asked is None else asked)
    return 1 if grace < 0 else grace


def _finalizers(document: Json) -> bool:
    """Whether somebody still has something to do before it may go; a namespace says so in its spec."""
    return bool(document["metadata"].get("finalizers") or (document.get("spec") or {}).get("finalizers"))
