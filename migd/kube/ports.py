"""The cluster as the agent and the operator see it: small protocols, values in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from migd.kube.caches import Cache, Change
from migd.kube.errors import Json
from migd.kube.events import Note
from migd.kube.leases import Claim, Held, HeldBy
from migd.kube.nodes import Node, NodeChange
from migd.kube.pods import Pod
from migd.kube.stored import EVERYWHERE, Kind, Stored, Where

T = TypeVar("T")


class Following(Protocol[T]):
    """A cache that is kept up to date.

    trouble: what the last try failed on; "" when well. heard_s: when the API server was heard last, a bookmark
    included, by the running loop; -inf for never. A server that is well is heard once a minute.
    """

    cache: Cache[T]
    trouble: str
    heard_s: float

    async def wait_synced(self) -> None:
        """Returns once the first list is complete."""
        ...


class Reads(Protocol):
    """What there is. Raises KubeError where it cannot be asked."""

    def follow(
        self,
        kind: Kind[T],
        changed: Callable[[Change[T]], None],
        listed: Callable[[], None] = lambda: None,
        where: Where = EVERYWHERE,
    ) -> Following[T]:
        """Keep a cache of the objects of a kind from now on; never raises, never gives up.

        changed: called for each change once it is in the cache, also for answers to our own writes. listed: called
        after each complete list. Both must not wait: they add keys to a queue.
        """
        ...

    async def get(self, kind: Kind[T], name: str, namespace: str = "") -> Stored[T] | None:
        """The object as it is now, not as a cache has it; None where there is none."""
        ...

    async def list(self, kind: Kind[T], where: Where = EVERYWHERE) -> tuple[Stored[T], ...]:
        """All objects as they are now, not as a cache has them, by key."""
        ...


class Writes(Protocol):
    """Our objects, written. Raises KubeError; what was decided on is always part of the request."""

    async def apply(
        self,
        kind: Kind[T],
        name: str,
        body: Json,
        seen: Stored[T] | None,
        subresource: str = "",
        force: bool = True,
    ) -> Stored[T]:
        """Server-side apply of what is ours, where that differs from what was seen; no request otherwise.

        body: spec, status or metadata with *all* that we own in the object (or its subresource): what is left out goes.
        seen: as the cache has it; None makes the object. One that was deleted is not made again, and another one that
        has its name now is not written: ConflictError or MissingError. (With a subresource the other one has been
        written when the ConflictError comes: the API server looks at no uid there.) force: take our fields back from
        whoever wrote them; without it that is a ConflictError.
        """
        ...

    async def delete(self, kind: Kind[Any], seen: Stored[Any], dry_run: bool = False) -> None:
        """Delete this object and no other of its name; well where it is gone already.

        dry_run: only ask whether it would be done: DeniedError where it would not, by rights or by a policy.
        """
        ...

    async def without_annotation(self, kind: Kind[T], seen: Stored[T], key: str) -> Stored[T]:
        """Take one of our annotations off an object, whoever wrote it, if it says what was seen.

        None is no request. ConflictError where it, or the object, is another now.
        """
        ...

    async def evict(self, pod: Stored[Pod], grace_s: int | None) -> None:
        """Ask for the eviction of this pod and no other of its name; returns once it is accepted: the pod is going.

        pod: as `get` just had it, not a cache: under a budget the answer for another pod of that name is the
        budget's, or uses it up, and without one it may take ten seconds. grace_s: seconds to end in; None is the pod's
        own. One call, never repeated here: after an UnavailableError it may be accepted all the same, so get the pod
        again first.
        MissingError: it is gone. ConflictError: another pod has its name. BudgetError: a budget forbids it.
        EndingError: its namespace is being deleted, and the pod with it. DeniedError: no rights.
        """
        ...


class NodeWrites(Protocol):
    """What is ours on nodes."""

    async def change_node(self, seen: Stored[Node], change: NodeChange) -> Stored[Node]:
        """Labels, annotations and our taint in one request, where they differ from what was seen; none otherwise.

        ConflictError where one of the keys, or the list of taints if that is written, is not as seen any more: look
        again, and decide anew.
        """
        ...


class Leases(Protocol):
    """Leases by which one is seen to be alive, and by which two never act."""

    async def claim(self, claim: Claim) -> Held | HeldBy:
        """Take the lease if it is free, renew it if it is ours. KubeError says nothing of who holds it."""
        ...

    async def release(self, claim: Claim) -> None:
        """Give the lease up if it is ours, so that the next one need not wait."""
        ...


class Telling(Protocol):
    """Events for people."""

    async def tell(self, note: Note) -> bool:
        """Post an event, count it, or leave it out; whether anything was written. Never raises for the API server."""
        ...


class Cluster(Reads, Writes, NodeWrites, Leases, Telling, Protocol):
    """All of it."""
