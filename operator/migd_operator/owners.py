"""Others that own MIG on a node and say so in objects of their own: found where such kinds are served.

A kind that the cluster does not have is no error, and it may come later. Where the rights to look are missing, that is
said once: then the operator cannot see that owner, and people must know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from migd.kube.errors import DeniedError, Json, KubeError, MissingError
from migd.kube.ports import Cluster, Following
from migd.kube.stored import EVERYWHERE, Interner, Kind, Where

_log = logging.getLogger(__name__)
_AGAIN_S: Final = 300.0
"""How often a kind that is not served, or may not be read, is asked for."""
_ENDED: Final = frozenset({"Complete", "Completed", "Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns MIG on which node; who is "" where it has ended."""

    node: str
    who: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """One kind of object that says so. kinds: its versions, the newest first; the first that is served is read."""

    kinds: tuple[Kind[Owner], ...]
    where: Where = EVERYWHERE


def _of_dra(document: Json, same: Interner) -> Owner:
    """A ResourceSlice of NVIDIA's DRA driver: it may make and remove instances by itself. Source: its DynamicMIG."""
    spec = document["spec"]
    driver = spec.get("driver")
    return Owner(same(spec.get("nodeName") or ""), "NVIDIA's DRA driver (ResourceSlice)" if driver == _DRIVER else "")


def _of_das(document: Json, same: Interner) -> Owner:
    """A NodeAccelerator of the dynamic accelerator slicer, which creates instances; it is named by its node."""
    spec = document.get("spec") or {}
    return Owner(same(spec.get("nodeName") or document["metadata"]["name"]), "DAS (NodeAccelerator)")


def _of_nvsentinel(document: Json, same: Interner) -> Owner:
    """A GPU reset by NVSentinel, which pauses GPU clients and resets GPUs until it is finished."""
    spec, status = document.get("spec") or {}, document.get("status") or {}
    conditions = status.get("conditions") or ()
    ended = bool(status.get("completionTime")) or any(
        c.get("type") in _ENDED and c.get("status") == "True" for c in conditions
    )
    return Owner(same(spec.get("nodeName") or ""), "" if ended else "NVSentinel (GPUReset)")


_DRIVER: Final = "gpu.nvidia.com"
ELSEWHERE: Final = (
    Elsewhere(
        tuple(
            Kind(f"resource.k8s.io/{version}", "ResourceSlice", "resourceslices", _of_dra)
            for version in ("v1", "v1beta1")
        ),
        Where(fields=f"spec.driver={_DRIVER}"),
    ),
    Elsewhere(
        (Kind("inference.redhat.com/v1alpha1", "NodeAccelerator", "nodeaccelerators", _of_das, namespaced=True),)
    ),
    Elsewhere((Kind("janitor.dgxc.nvidia.com/v1alpha1", "GPUReset", "gpuresets", _of_nvsentinel),)),
)


class OwnersElsewhere:
    """Who owns MIG where, as far as such objects tell. changed: told of each change."""

    def __init__(self, cluster: Cluster, changed: Callable[[], None]) -> None:
        self._cluster = cluster
        self._changed = changed
        self._following: list[Following[Owner]] = []
        self._said: set[str] = set()

    @property
    def found(self) -> dict[str, tuple[str, ...]]:
        """The owners of each node, for people."""
        owners: dict[str, set[str]] = {}
        for following in self._following:
            for stored in following.cache:
                if stored.value.who and stored.value.node and not stored.deleting:
                    owners.setdefault(stored.value.node, set()).add(stored.value.who)
        return {node: tuple(sorted(who)) for node, who in owners.items()}

    async def run(self) -> None:
        """Look for each kind until it is served, and follow it from then on; until cancelled."""
        async with asyncio.TaskGroup() as group:
            for one in ELSEWHERE:
                group.create_task(self._find(one))

    async def _find(self, one: Elsewhere) -> None:
        while (kind := await self._served(one)) is None:
            await asyncio.sleep(_AGAIN_S)
        self._following.append(self._cluster.follow(kind, self._noticed, where=one.where))

    async def _served(self, one: Elsewhere) -> Kind[Owner] | None:
        for kind in one.kinds:
            try:
                await self._cluster.list(kind, one.where)
            except MissingError:
                continue
            except DeniedError as error:
                if kind.plural not in self._said:
                    _log.warning("cannot see whether others own MIG by %s: %s", kind.plural, error)
                self._said.add(kind.plural)
                return None
            except KubeError as error:
                _log.info("%s; again later", error)
                return None
            return kind
        return None

    def _noticed(self, _change: Any) -> None:
        self._changed()
