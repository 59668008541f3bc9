"""Objects as the API server has them: the parsed value with what is needed to write and to compare it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from migd.kube.errors import Json
from migd.kube.ownership import Digest, ListMaps

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)
OURS: Final = "migd.dev/"
"""The prefix of labels, annotations and taints that are ours."""
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Interner:
    """Equal values become the same one: thousands of GPUs share a few boards, layouts and sets of labels.

    It forgets all when it knows too many, so that values nobody has any more do not pile up.
    """

    def __init__(self, known_max: int = 1 << 16) -> None:
        self._known: dict[Hashable, Any] = {}
        self._known_max = known_max

    def __call__(self, value: H) -> H:
        """The first of the values equal to this one."""
        return self._same((type(value), value), value)

    def mapping(self, found: Mapping[str, str] | None) -> Mapping[str, str]:
        """A mapping of texts as a read-only value, shared where it is equal."""
        if not found:
            return NOTHING
        key = tuple(sorted(found.items()))
        return self._same(key, MappingProxyType(dict(key)))

    def _same(self, key: Hashable, value: T) -> T:
        if len(self._known) >= self._known_max:
            self._known.clear()
        return self._known.setdefault(key, value)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """One object.

    namespace: "" for kinds without. generation: of the spec; 0 for kinds that count none. deleting: its deletion was
    asked for. annotations: ours only. applied: what our manager applied, by subresource: see `ownership`.
    """

    name: str
    namespace: str
    uid: str
    resource_version: str
    generation: int
    deleting: bool
    annotations: Mapping[str, str]
    applied: Mapping[str, Digest]
    value: T

    @property
    def key(self) -> str:
        """Its name within its kind: "name", or "namespace/name"."""
        return key_of(self.name, self.namespace)


def key_of(name: str, namespace: str = "") -> str:
    """An object's name within its kind."""
    return f"{namespace}/{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of object: where it is served, and how a document becomes a value.

    parse: ValueError, KeyError or TypeError for a document that is none of these. list_maps: see `ownership`.
    """

    api_version: str
    kind: str
    plural: str
    parse: Callable[[Json, Interner], T]
    namespaced: bool = False
    list_maps: ListMaps = field(default_factory=dict)

    def path(self, name: str = "", namespace: str = "", subresource: str = "") -> str:
        """The URL path of one object, or of all (in one namespace) where there is no name."""
        assert self.namespaced or not namespace, f"{self.kind} has no namespace"
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        where = f"/namespaces/{namespace}" if namespace else ""
        return root + where + "".join(f"/{part}" for part in (self.plural, name, subresource) if part)


@dataclass(frozen=True, slots=True)
class Where:
    """Which objects of a kind: in one namespace, and by selectors as Kubernetes writes them; empty for all."""

    namespace: str = ""
    fields: str = ""
    labels: str = ""

    @property
    def query(self) -> dict[str, str]:
        """The selectors as a query."""
        found = {"fieldSelector": self.fields, "labelSelector": self.labels}
        return {name: text for name, text in found.items() if text}


EVERYWHERE: Final = Where()
