"""Leases: who holds one, when it has expired for us, and taking, renewing and giving up our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from migd.kube.errors import Json
from migd.kube.stored import Interner, Kind, Stored

API_VERSION: Final = "coordination.k8s.io/v1"
DUPLICATES: Final = "migd.dev/duplicates"
"""The annotation by which an agent says which GPUPartitions of other nodes it has too: names, comma-separated."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease. holder: "" for nobody. duration_s: it expires so long after the last renewal that anybody saw.

    renewed, acquired: RFC 3339 with microseconds, by the holder's clock: compared for equality only.
    """

    holder: str
    duration_s: int
    acquired: str
    renewed: str
    transitions: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The lease that somebody wants: where it is, for whom, and how long it lasts unrenewed.

    owner: (name, uid) of the node that the lease goes with; None for none. annotations: ours, such as what is wrong
    with the holder.
    """

    name: str
    namespace: str
    holder: str
    duration_s: int
    owner: tuple[str, str] | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """The lease is ours until `until_s` of our monotonic clock, unless it is renewed before."""

    until_s: float


@dataclass(frozen=True, slots=True)
class HeldBy:
    """The lease is somebody else's; it expires for us at `until_s` of our monotonic clock, if they stay silent."""

    holder: str
    until_s: float


class Expiry:
    """When leases expire, as one observer sees it: so long after *we* saw the last renewal.

    Clocks of others are not compared with ours. So after our start no lease is expired before its duration is over.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[str, str], float]] = {}  # key -> (holder, renewed), since when

    def until_s(self, key: str, lease: Lease, now_s: float) -> float:
        """When this lease expires; call it at every look. A lease that nobody holds has expired."""
        mark = (lease.holder, lease.renewed)
        before = self._seen.get(key)
        if before is None or before[0] != mark:
            self._seen[key] = before = (mark, now_s)
        return before[1] + lease.duration_s if lease.holder else before[1]

    def expired(self, key: str, lease: Lease, now_s: float) -> bool:
        """Whether it has."""
        return self.until_s(key, lease, now_s) <= now_s

    def forget(self, key: str) -> None:
        """A lease is gone."""
        self._seen.pop(key, None)


def claimed(claim: Claim, seen: Stored[Lease] | None, free: bool, now: datetime) -> Json | None:
    """The lease to write so that it is ours; None where it is somebody else's and not free.

    seen: as it is now. free: it has expired. now: the wall clock, UTC. A lease that was seen carries its resource
    version, so that of two who write at once only one gets it.
    """
    ours = seen is not None and seen.value.holder == claim.holder
    if seen is not None and not ours and not free:
        return None
    time = micro_time(now)
    before = seen.value if seen else None
    spec: Json = {
        "holderIdentity": claim.holder,
        "leaseDurationSeconds": claim.duration_s,
        "acquireTime": before.acquired if before and ours and before.acquired else time,
        "renewTime": time,
        "leaseTransitions": (before.transitions + (0 if ours else 1)) if before else 0,
    }
    return _document(claim, seen, spec)


def released(claim: Claim, seen: Stored[Lease], now: datetime) -> Json:
    """The lease to write so that it is nobody's at once."""
    spec: Json = {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "acquireTime": micro_time(now),
        "renewTime": micro_time(now),
        "leaseTransitions": seen.value.transitions,
    }
    return _document(claim, seen, spec)


def _document(claim: Claim, seen: Stored[Lease] | None, spec: Json) -> Json:
    metadata: Json = {"name": claim.name, "namespace": claim.namespace}
    if claim.annotations:
        metadata["annotations"] = dict(claim.annotations)
    if claim.owner is not None:
        name, uid = claim.owner
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}]
    if seen is not None:
        metadata |= {"resourceVersion": seen.resource_version, "uid": seen.uid}
    return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}


def micro_time(now: datetime) -> str:
    """A time as the API server's MicroTime: RFC 3339 in UTC, with microseconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _lease(document: Json, same: Interner) -> Lease:
    spec = document.get("spec") or {}
    return Lease(
        holder=same(spec.get("holderIdentity") or ""),
        duration_s=spec.get("leaseDurationSeconds") or 0,
        acquired=spec.get("acquireTime") or "",
        renewed=spec.get("renewTime") or "",
        transitions=spec.get("leaseTransitions") or 0,
    )


LEASES: Final = Kind(API_VERSION, "Lease", "leases", _lease, namespaced=True)
