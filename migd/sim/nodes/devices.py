"""The kubelet's device manager: which devices there are, which pod holds which, and what the node says of them.

No socket and no clock is here: whoever serves it tells of registrations, lists, closed sockets and restarts, with the
time in seconds. Source: kubelet 1.37, pkg/kubelet/cm/devicemanager and pkg/kubelet/nodestatus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

GRACE_S: Final = 300.0
"""An endpoint that went is forgotten after so long, at the next look."""
Prefer = Callable[[Iterable[str], int], list[str]]
"""(available ids, how many) -> which ones; what a plugin answers to GetPreferredAllocation."""


class AdmissionError(Exception):
    """A pod cannot be admitted: it fails with this reason and text."""

    def __init__(self, text: str, reason: str = "UnexpectedAdmissionError") -> None:
        self.reason = reason
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Wants:
    """What a pod asks for. containers: name -> resource -> how many; init containers are not told apart."""

    uid: str
    namespace: str
    name: str
    containers: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """What one container of an active pod holds of one resource, as pod-resources lists it."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What the device manager tells the node status. removed: resources it has just forgotten; told once only."""

    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    removed: frozenset[str]


def advertised(before: Mapping[str, int], report: Report) -> tuple[dict[str, int], dict[str, int]]:
    """Capacity and allocatable of the node, given the capacity that it showed before.

    A resource of which the report says nothing keeps its capacity, and is as allocatable as that. So a key is never
    removed, and where the one report that says "removed" was lost, its old number is there to stay.
    """
    capacity = {**before, **report.capacity, **dict.fromkeys(sorted(report.removed), 0)}
    return capacity, {**capacity, **report.allocatable}


@dataclass(slots=True)
class _Endpoint:
    number: int
    devices: dict[str, bool]
    prefer: Prefer | None
    stopped_s: float | None = None


@dataclass(slots=True)
class _Pod:
    wants: Wants
    held: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)  # (container, resource) -> ids


def _first(available: Iterable[str], number: int) -> list[str]:
    return sorted(available)[:number]


class DeviceManager:
    """The device manager of one kubelet.

    choose: takes devices where the plugin has no preference; the real one takes any.
    """

    def __init__(self, choose: Prefer = _first) -> None:
        self._choose = choose
        self._endpoints: dict[str, _Endpoint] = {}
        self._pods: dict[str, _Pod] = {}
        self._numbers = 0

    # ---- plugins

    def register(self, resource: str, devices: Mapping[str, bool], prefer: Prefer | None = None) -> int:
        """A plugin registered and sent its first list: what the resource had before is replaced at once.

        Answers a number for `update` and `gone`, so that a plugin that was replaced cannot speak for its successor.
        """
        self._numbers += 1
        self._endpoints[resource] = _Endpoint(self._numbers, dict(devices), prefer)
        return self._numbers

    def update(self, number: int, devices: Mapping[str, bool]) -> None:
        """A plugin sent another list, which counts as a whole."""
        for endpoint in self._endpoints.values():
            if endpoint.number == number and endpoint.stopped_s is None:
                endpoint.devices = dict(devices)

    def gone(self, number: int, now_s: float) -> None:
        """A plugin's socket closed: its devices are unhealthy, and the resource is remembered for GRACE_S."""
        for endpoint in self._endpoints.values():
            if endpoint.number == number and endpoint.stopped_s is None:
                endpoint.devices = dict.fromkeys(endpoint.devices, False)
                endpoint.stopped_s = now_s

    def restarted(self, now_s: float) -> None:
        """The kubelet starts again: of each resource it knows only the name, until its plugin registers; pods stay."""
        for resource in self._endpoints:
            self._numbers += 1
            self._endpoints[resource] = _Endpoint(self._numbers, {}, None, now_s)

    def report(self, now_s: float) -> Report:
        """What the node status is told. Endpoints whose grace is over are forgotten here, and only here."""
        over = {
            name
            for name, endpoint in self._endpoints.items()
            if endpoint.stopped_s is not None and now_s - endpoint.stopped_s > GRACE_S
        }
        for name in over:
            del self._endpoints[name]
        capacity = {name: len(endpoint.devices) for name, endpoint in self._endpoints.items()}
        allocatable = {name: sum(endpoint.devices.values()) for name, endpoint in self._endpoints.items()}
        return Report(capacity, allocatable, frozenset(over))

    def needs(self, wants: Wants, allocatable: Mapping[str, int]) -> None:
        """The last check of an admission, after `admit`: the node's own numbers, as it last told them.

        AdmissionError where the pod asks for a resource that this manager knows no more, and of which the node says too
        little. A resource that the node does not tell of at all is none of its business.
        """
        for resource, number in _totals(wants).items():
            told = allocatable.get(resource)
            if told is not None and number > told and resource not in self._endpoints and not self._in_use(resource):
                asked = f"requested: {number}, used: 0, capacity: {told}"
                self.free(wants.uid)
                raise AdmissionError(f"Node didn't have enough resource: {resource}, {asked}", f"OutOf{resource}")

    # ---- pods

    def admit(self, wants: Wants, *, running: bool = False) -> None:
        """Give a pod its devices; again after a restart, when it keeps what it has. AdmissionError, and it has none.

        running: its containers run: the kubelet restarted, and the plugins need not have come back. What is asked of a
        resource that never was here is not this manager's: cluster-level resources are.
        """
        pod = self._pods.setdefault(wants.uid, _Pod(wants))
        try:
            for container, limits in wants.containers.items():
                for resource, number in limits.items():
                    if number and (resource in self._endpoints or self._in_use(resource)):
                        self._allocate(pod, container, resource, number, running)
        except AdmissionError:
            del self._pods[wants.uid]
            raise

    def _allocate(self, pod: _Pod, container: str, resource: str, number: int, running: bool) -> None:
        has = pod.held.get((container, resource))
        if has is not None and len(has) != number:
            raise _failed(f"changed request for resource {resource!r} from {len(has)} to {number}")
        if running:
            return
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise _failed(f"cannot allocate unregistered device {resource}")
        healthy = {one for one, well in endpoint.devices.items() if well}
        if not healthy:
            raise _failed(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if has is not None:
            if not healthy.issuperset(has):
                raise _failed(f"previously allocated devices are no longer healthy; cannot allocate {resource}")
            return
        available = healthy - self._in_use(resource)
        if len(available) < number:
            asked = f"Requested: {number}, Available: {len(available)}"
            raise _failed(f"requested number of devices unavailable for {resource}. {asked}")
        pod.held[container, resource] = tuple(sorted((endpoint.prefer or self._choose)(sorted(available), number)))

    def _in_use(self, resource: str) -> set[str]:
        return {
            one for pod in self._pods.values() for (_, name), ids in pod.held.items() if name == resource for one in ids
        }

    def hinders(self, uid: str) -> str:
        """Why a container of this pod cannot be started again now; "" where it can.

        Within the grace of a plugin that went it can; after it, it hangs in CreateContainerConfigError until the plugin
        is back.
        """
        pod = self._pods.get(uid)
        names = sorted({resource for _, resource in pod.held}) if pod else []
        missing = [name for name in names if name not in self._endpoints]
        return f"endpoint not found in cache for a registered resource: {missing[0]}" if missing else ""

    def free(self, uid: str) -> None:
        """A pod is terminal or gone: its devices are free."""
        self._pods.pop(uid, None)

    def devices(self, uid: str) -> tuple[str, ...]:
        """The device ids that a pod holds, in order."""
        pod = self._pods.get(uid)
        return tuple(sorted({one for ids in pod.held.values() for one in ids})) if pod else ()

    def held(self) -> tuple[Held, ...]:
        """What active pods hold, in order; pods without devices are left out."""
        return tuple(
            sorted(
                Held(pod.wants.namespace, pod.wants.name, container, resource, ids)
                for pod in self._pods.values()
                for (container, resource), ids in pod.held.items()
            )
        )

    def active(self) -> tuple[Wants, ...]:
        """The pods that were admitted and have not ended, with devices or without, in order of their names."""
        return tuple(sorted((pod.wants for pod in self._pods.values()), key=lambda w: (w.namespace, w.name)))


def _totals(wants: Wants) -> dict[str, int]:
    total: dict[str, int] = {}
    for limits in wants.containers.values():
        for resource, number in limits.items():
            total[resource] = total.get(resource, 0) + number
    return total


def _failed(why: str) -> AdmissionError:
    return AdmissionError(f"Allocate failed due to {why}, which is unexpected")
