"""A small node to decide about: GPUs, kubelet, device plugin, DaemonSets, scheduler and pods, as values and timers.

It does what it is asked, late and in its own order, and keeps count of what must never happen. Left out: what real
hardware operations need of each other, and the API server, which tests/sim has.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from boards import at, board

from migd.agent.node.deciding import answered, decide, needs_list
from migd.agent.node.effects import (
    ChangeNode,
    Effect,
    ForgetRetry,
    HangUp,
    LookAgain,
    RefreshDevices,
    StopPlugin,
    Wait,
)
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.telling import Told, told
from migd.agent.records import Cause, Record
from migd.agent.store import decode, encode
from migd.kube.nodes import TAINT, Node, Taint
from migd.kube.pods import Pod
from migd.kube.stored import Stored
from migd.kubelet.ports import PodDevices
from migd.mig.boards import Board
from migd.mig.geometry import Geometry, GpuInstance, Layout
from migd.mig.observed import Holder, MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    ResetGpu,
    SetMode,
)
from migd.plans.partitions import EvictionDoc, Partition, partition_of

BOARD = board("a30")
START = datetime(2026, 1, 31, 12, tzinfo=UTC)
DEPLOY = "nvidia.com/gpu.deploy."
CLIENTS = ("device-plugin", "dcgm", "dcgm-exporter", "gpu-feature-discovery")
APPS = {"device-plugin": "nvidia-device-plugin-daemonset", "dcgm": "nvidia-dcgm",
        "dcgm-exporter": "nvidia-dcgm-exporter", "gpu-feature-discovery": "gpu-feature-discovery"}  # fmt: skip


class Crash(Exception):  # noqa: N818
    """The agent's process ended here."""


@dataclass
class ToyGpu:
    """A GPU. made: by instance, the serial number of its creation. used: instances that a process is on; in
    which container, or else on the host: `containers`.

    resets: a mode change takes a reset, which nothing here can do.
    """

    uuid: str
    index: int
    mig: bool = False
    made: dict[GpuInstance, int] = field(default_factory=dict)
    bare: set[GpuInstance] = field(default_factory=set)
    used: set[GpuInstance] = field(default_factory=set)
    containers: dict[GpuInstance, str] = field(default_factory=dict)
    whole_used: bool = False
    refuses: dict[type, Cause] = field(default_factory=dict)
    lost: bool = False
    trouble: str = ""
    resets: bool = False
    board: Board = BOARD

    def ids(self) -> dict[str, GpuInstance | None]:
        """By device id, what a plugin that starts now would offer."""
        if not self.mig:
            return {self.uuid: None}
        return {f"MIG-{self.index}-{serial}": i for i, serial in self.made.items() if i not in self.bare}

    def seen(self) -> SeenGpu:
        if self.lost:
            return SeenGpu(self.uuid, self.index, "", "", 0, None, lost=True)
        found = tuple(
            SeenInstance(
                i,
                serial % 7,
                () if i in self.bare else (SeenComputeInstance(0, True, f"MIG-{self.index}-{serial}"),),
                i in self.used,
                (Holder(4242, "python train.py", self.containers.get(i, "")),) if i in self.used else (),
            )
            for i, serial in sorted(self.made.items())
        )
        return SeenGpu(self.uuid, self.index, "NVIDIA A30", "0x20B710DE", 24576, MigMode(self.mig, self.mig),
                       not self.resets, self.board, found, self.whole_used, trouble=self.trouble)  # fmt: skip


@dataclass
class ToyPod:
    """A pod. app: a GPU client's; "" for a workload, which wants one of `resource` and holds `device` once admitted.

    more: other devices that it holds. owner: kind of its controller. budget: a PodDisruptionBudget that does not allow
    its eviction. grace_s: how long it takes to end; None: it never does. again: its controller makes another one once
    it is evicted.
    """

    name: str
    uid: str
    app: str = ""
    resource: str = ""
    phase: str = "Pending"
    device: str = ""
    more: tuple[str, ...] = ()
    deleting: bool = False
    bound: bool = True
    began_s: float = 0.0
    owner: str = "Job"
    labels: dict[str, str] = field(default_factory=dict)
    tolerates: bool = False
    empty_dir: bool = False
    budget: str = ""
    grace_s: float | None = 2.0
    again: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.more) if self.device else ()


class ToyNode:
    """The node. install: how the GPU clients came: Operator, Helm, Tolerant (of every taint) or None."""

    def __init__(self, layouts: Iterable[str | None], install: str = "Operator", seed: int = 0) -> None:
        self.random = Random(seed)
        self.serial = itertools.count(1)
        self.now_s, self.boot = 100.0, "boot-1"
        self.gpus = [self._gpu(n, text) for n, text in enumerate(layouts)]
        self.install = install
        self.labels = {"pool": "a", "nvidia.com/mig.strategy": "mixed"}
        if install == "Operator":
            self.labels |= {f"{DEPLOY}{client}": "true" for client in CLIENTS}
        self.annotations: dict[str, str] = {}
        self.taints: tuple[Taint, ...] = (Taint("nvidia.com/gpu", "present", "NoSchedule"),)
        self.cordoned = False
        self.partitions = {gpu.uuid.lower(): self._partition(gpu, {}) for gpu in self.gpus}
        self.pods: dict[str, ToyPod] = {}
        self.offers: dict[str, tuple[str, str]] = {}  # device id -> (resource, gpu uuid), as the plugin enumerated
        self.allocatable: dict[str, int] = {}
        self.kubelet_answers = True
        self.refresh_fails = False
        self.clients_stay = False
        self.denies: Cause | None = None
        self.keeps_plugin: Cause | None = None
        self.daemons_owner = "DaemonSet"
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.tie = itertools.count()
        self.changes = 0
        self.text: str | None = None
        self.record = Record(self.boot)
        self.writes: dict[str, float] = {}
        self.told = Told({}, {})
        self.status_writes = 0
        self.closed_since: float | None = None
        self.paused_since: float | None = None
        self.longest_closed = self.longest_pause = 0.0
        self.operations: list[Operation] = []
        self.effects: list[Effect] = []
        self.wrong: list[str] = []
        self.evicted: list[str] = []
        self.evictions_left: int | None = None
        self.operator_answers = True
        self._daemons()
        self.pass_time(20.0)

    # --- set-up ---

    def _gpu(self, index: int, text: str | None) -> ToyGpu:
        gpu = ToyGpu(f"GPU-{index}", index, text is not None)
        gpu.made = {i: next(self.serial) for i in sorted(at(BOARD, text or ""))}
        return gpu

    def _partition(self, gpu: ToyGpu, spec: dict[str, Any]) -> Stored[Partition]:
        name = gpu.uuid.lower()
        body = {
            "apiVersion": "migd.dev/v1alpha1",
            "kind": "GPUPartition",
            "metadata": {"name": name, "uid": f"uid-{name}", "generation": 1},
            "spec": {"nodeName": "n1", "nodeUID": "uid-n1", **spec},
        }
        return Stored(name, "", f"uid-{name}", "1", 1, False, {}, {}, partition_of(body))

    def wish(self, turn: str, wishes: dict[int, list[str] | None], number: int | None = None, **more: Any) -> None:
        """Give a turn: by index of GPU, the instances as "2x1g.6gb", or None for MIG off. Others carry none."""
        for gpu in self.gpus:
            spec: dict[str, Any] = {}
            if gpu.index in wishes:
                wanted = wishes[gpu.index]
                split = [w.split("x", 1) for w in wanted or ()]
                spec["desired"] = {
                    "summary": " ".join(wanted or ()) or "MIG off",
                    "mig": "Disabled" if wanted is None else "Enabled",
                    "instances": [{"profile": name, "count": int(count)} for count, name in split],
                    "allowEmpty": wanted == [],
                    "plan": {"name": "p", "uid": "uid-p", "generation": 1},
                    "disruption": {"policy": "WaitForIdle", "timeout": "10m"},
                    **more,
                }
                spec["assignment"] = {"id": turn, "gpus": number or len(wishes)}
            self.respec(gpu, spec)

    def respec(self, gpu: ToyGpu, spec: dict[str, Any]) -> None:
        """Write a partition's spec, as the operator does."""
        name = gpu.uuid.lower()
        old, new = self.partitions[name], self._partition(gpu, spec)
        value = new.value.model_copy(update={"status": old.value.status})
        self.partitions[name] = replace(new, generation=old.generation + 1, annotations=old.annotations, value=value)
        self.changes += 1

    def withdraw(self, keep_wish: bool = True) -> None:
        """Take the turn back; with the wish, where the plan is deleted."""
        for gpu in self.gpus:
            desired = self.partitions[gpu.uuid.lower()].value.spec.desired
            spec = {"desired": desired.model_dump(mode="json", by_alias=True, exclude_none=True)} if desired else {}
            self.respec(gpu, spec if keep_wish else {})

    def annotate(self, index: int, key: str, value: str = "") -> None:
        name = self.gpus[index].uuid.lower()
        old = self.partitions[name]
        self.partitions[name] = replace(old, annotations={**old.annotations, key: value})

    # --- time ---

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (self.now_s + seconds, next(self.tie), act))

    def pass_time(self, seconds: float, wake: bool = False) -> None:
        """Let time pass; wake: only until something of the cluster changes."""
        end, seen = self.now_s + seconds, self.changes
        while self.timers and self.timers[0][0] <= end and not (wake and self.changes != seen):
            when, _, act = heapq.heappop(self.timers)
            self.now_s = max(self.now_s, when)
            act()
        if not (wake and self.changes != seen):
            self.now_s = end

    # --- GPU clients and kubelet ---

    @property
    def closed(self) -> bool:
        return any(taint.key == TAINT for taint in self.taints)

    def _wanted_here(self, client: str) -> bool:
        if self.install == "None":
            return False
        return (
            self.labels.get(f"{DEPLOY}{client}") == "true" if self.install == "Operator" else client == "device-plugin"
        )

    def _daemons(self) -> None:
        for client in CLIENTS:
            pod = next((p for p in self.pods.values() if p.app == client), None)
            if pod is None and self._wanted_here(client) and (not self.closed or self.install == "Tolerant"):
                uid = f"{client}-{next(self.serial)}"
                self.pods[uid] = ToyPod(uid, uid, client)
                self.after(1.5, lambda uid=uid: self._started(uid))  # type: ignore[misc]
                self.changes += 1
            elif pod is not None and not self._wanted_here(client) and not pod.deleting:
                self._stop(pod)

    def _stop(self, pod: ToyPod) -> None:
        pod.deleting = True
        self.changes += 1
        if not self.clients_stay:
            self.after(self.random.uniform(0.2, 2.0), lambda: self._gone(pod))

    def _gone(self, pod: ToyPod) -> None:
        self.pods.pop(pod.uid, None)
        self.changes += 1
        if pod.app == "device-plugin":
            self.offers = {}
            self.after(self.random.uniform(0.5, 8.0), self._report)
        self.after(0.4, self._daemons)

    def _started(self, uid: str) -> None:
        if uid in self.pods:
            self.pods[uid].phase = "Running"
            self.changes += 1
            if self.pods[uid].app == "device-plugin":
                self.enumerate()

    def enumerate(self) -> None:
        """The plugin looks at the GPUs, and registers what it finds."""
        self.offers = {}
        for gpu in self.gpus:
            for device, instance in ({} if gpu.lost else gpu.ids()).items():
                name = "gpu" if instance is None else f"mig-{instance.profile.replace('+', '.')}"
                self.offers[device] = (f"nvidia.com/{name}", gpu.uuid)
        self.after(self.random.uniform(0.2, 3.0), self._report)

    def _report(self) -> None:
        """The kubelet's next node status. A resource that was there once stays, at 0."""
        found = dict.fromkeys(self.allocatable, 0)
        for resource, _ in self.offers.values():
            found[resource] = found.get(resource, 0) + 1
        if found != self.allocatable:
            self.allocatable = found
            self.changes += 1
        self._schedule()

    # --- workloads ---

    def submit(self, name: str, resource: str, seconds: float) -> None:
        """A pod that waits for one device, then runs so long."""
        self.pods[name] = ToyPod(name, name, "", resource, bound=False, began_s=seconds)
        self._schedule()

    def run_pod(self, name: str, resource: str, gpu: int, instance: str = "", **more: Any) -> ToyPod:
        """A pod that runs for good, on this instance (as 1g@0) of this GPU; "" for the GPU as a whole."""
        there = self.gpus[gpu].ids()
        goal = next(iter(made(instance)), None) if instance else None
        device = next(device for device, what in there.items() if what == goal)
        pod = self.pods[name] = ToyPod(name, name, "", f"nvidia.com/{resource}", "Running", device, **more)
        self.changes += 1
        return pod

    def operate(self) -> None:
        """What the operator does: evict the victims that it may, and answer for the others."""
        for name, partition in self.partitions.items():
            said = {one.pod_uid: one for one in partition.value.status.evictions}
            found = tuple(self._evict(victim.uid, said) for victim in partition.value.status.victims)
            if self.operator_answers and found != partition.value.status.evictions:
                status = partition.value.status.model_copy(update={"evictions": found})
                self.partitions[name] = replace(partition, value=partition.value.model_copy(update={"status": status}))
                self.changes += 1

    def _evict(self, uid: str, said: dict[str, EvictionDoc]) -> EvictionDoc:
        pod = self.pods.get(uid)
        if pod is not None and not pod.deleting and pod.budget:
            return self._answer(uid, 429, "DrainBlocked", (pod.budget,), "Cannot evict pod")
        if pod is not None and not pod.deleting and self.evictions_left == 0:
            return self._answer(uid, None, "EvictionBudget", (), "the plan's maxEvictions are used up")
        if pod is not None and not pod.deleting:
            self.evictions_left = None if self.evictions_left is None else self.evictions_left - 1
            self.evicted.append(pod.name)
            self.delete(pod)
        return said.get(uid) or self._answer(uid, 201, None, (), "")

    @staticmethod
    def _answer(uid: str, code: int | None, reason: Any, budgets: tuple[str, ...], message: str) -> EvictionDoc:
        return EvictionDoc(
            pod_uid=uid, code=code, reason=reason, pod_disruption_budgets=budgets, message=message, at=START
        )

    def delete(self, pod: ToyPod) -> None:
        """A pod ends within its grace."""
        pod.deleting = True
        self.changes += 1
        if pod.grace_s is not None:
            self.after(pod.grace_s, lambda: self._ended(pod))

    def _ended(self, pod: ToyPod) -> None:
        gpu, instance = self._where(pod.device)
        if gpu is not None and instance is not None:
            gpu.used.discard(instance)
        if self.pods.get(pod.uid) is pod:
            del self.pods[pod.uid]
            if pod.again:
                name = f"{pod.name}+"
                self.pods[name] = replace(pod, name=name, uid=name, phase="Pending", device="", deleting=False,
                                          bound=False, began_s=1e9)  # fmt: skip
            self.changes += 1
            self.after(0.5, self._schedule)

    def _schedule(self, blind_s: float = 0.0) -> None:
        if self.cordoned:
            return
        for pod in [p for p in self.pods.values() if not p.bound]:
            if self.closed and blind_s == 0 and not pod.tolerates:
                continue
            taken = sum(
                p.bound and p.resource == pod.resource and p.phase in ("Pending", "Running") for p in self.pods.values()
            )
            if self.allocatable.get(pod.resource, 0) > taken:
                pod.bound = True
                self.changes += 1
                late_s = self.random.choice((0.3, 1.5, 8.0, 14.0))  # a kubelet may be busy
                self.after(late_s, lambda pod=pod: self._admit(pod))  # type: ignore[misc]

    def _admit(self, pod: ToyPod) -> None:
        if self.pods.get(pod.uid) is not pod:
            return  # deleted before the kubelet came to it
        held = {device for p in self.pods.values() if p.phase == "Running" for device in p.devices}
        free = sorted(d for d, (resource, _) in self.offers.items() if resource == pod.resource and d not in held)
        self.changes += 1
        if not free:
            pod.phase = "Failed"
            served = any(p.app == "device-plugin" and p.phase == "Running" for p in self.pods.values())
            if not served and not pod.tolerates:  # nothing keeps such a pod away until the kubelet shows 0
                self.wrong.append(f"{pod.name} was bound and killed while the plugin was paused")
            return
        pod.device, pod.phase = free[0], "Running"
        gpu, instance = self._where(pod.device)
        if gpu is not None and instance is not None and self.random.random() < 0.5:
            gpu.used.add(instance)  # the others hold a device and do nothing with it
            gpu.containers[instance] = pod.uid
        self.after(pod.began_s, lambda: self.finish(pod.name))

    def finish(self, name: str) -> None:
        """A workload ends."""
        pod = self.pods.get(name)
        if pod is None:
            return  # evicted before that
        pod.phase = "Succeeded"
        gpu, instance = self._where(pod.device)
        if gpu is not None and instance is not None:
            gpu.used.discard(instance)
        self.changes += 1
        self._schedule()

    def _where(self, device: str) -> tuple[ToyGpu | None, GpuInstance | None]:
        for gpu in self.gpus:
            if device in gpu.ids():
                return gpu, gpu.ids()[device]
        return None, None

    # --- the agent ---

    def seen(self, record: Record) -> NodeSeen:
        labels, allocatable = dict(self.labels), {k: str(v) for k, v in self.allocatable.items()}
        node = Node(labels, self.taints, self.cordoned, True, allocatable, bool(self.annotations))
        pods = tuple(self._pod(p) for p in sorted(self.pods.values(), key=lambda p: p.name) if p.bound)
        devices = tuple(
            PodDevices("ml", p.name, p.resource, p.devices)
            for p in self.pods.values()
            if p.phase == "Running" and p.devices
        )
        return NodeSeen(
            boot_id=self.boot,
            now_s=self.now_s,
            wall=START + timedelta(seconds=self.now_s),
            node=Stored("n1", "", "uid-n1", "1", 0, False, dict(self.annotations), {}, node),
            partitions=tuple(self.partitions[name] for name in sorted(self.partitions)),
            pods=pods,
            pods_listed_at_s=self.now_s if needs_list(record) else None,
            devices=devices if self.kubelet_answers else None,
            kubelet_trouble="" if self.kubelet_answers else "connection refused",
            gpus=tuple(gpu.seen() for gpu in self.gpus),
        )

    def _pod(self, pod: ToyPod) -> Stored[Pod]:
        app = APPS.get(pod.app, "")
        labels = (
            {"name": "nvidia-device-plugin-ds"} if app and self.install != "Operator" else {"app": app} if app else {}
        )
        gpus = ((pod.resource, 1),) if pod.resource else ()
        value = Pod("n1", pod.phase, labels or pod.labels, gpus, False, self.daemons_owner if app else pod.owner, False,
                    pod.empty_dir, ("c",), (pod.uid,),
                    tolerates=(self.install == "Tolerant" and bool(app)) or pod.tolerates)  # fmt: skip
        return Stored(pod.name, "gpu-operator" if app else "ml", pod.uid, "1", 0, pod.deleting, {}, {}, value)

    def step(self, crash: Callable[[str], None] = lambda where: None) -> Effect | None:
        """One look, one decision, one effect. crash: called wherever the process might end."""
        seen = self.seen(self.record)
        record, effect = decide(self.record, seen)
        crash("before the save")
        self.record = record
        self.text = encode(record)
        assert decode(self.text) == record
        crash("before telling")
        self._tell(told(record, seen, self.writes))
        crash("before the effect")
        if effect is not None:
            self.effects.append(effect)
            error = self._do(effect)
            crash("after the effect")
            if not isinstance(effect, Wait | LookAgain):
                self.record = answered(self.record, effect, error, self.now_s)
        self._check()
        return effect

    def restart(self) -> None:
        """Another process of the agent's: only the record is left."""
        self.record = decode(self.text) if self.text is not None else Record(self.boot)
        self.writes = {}

    def run(self, seconds: float, crash: Callable[[str], None] = lambda where: None) -> bool:
        """Steps for so long, or until at rest with nothing to come; whether it came to rest."""
        end, turns = self.now_s + seconds, 0
        while self.now_s < end:
            turns += 1
            assert turns < 20_000, f"no end: {self.effects[-5:]}"
            effect = self.step(crash)
            if effect is None:
                if not self.timers:
                    return True
                self.pass_time(30.0, wake=True)
        return False

    def _tell(self, now: Told) -> None:
        for name, status in now.statuses.items():
            old = self.partitions[name]
            before = old.value.status
            operators = tuple(c for c in before.conditions if c.type in ("Assigned", "AgentAlive"))
            agents = tuple(c for c in before.conditions if c not in operators)
            if status != before.model_copy(update={"conditions": agents, "evictions": ()}):
                self.status_writes += 1
                self.writes[name] = self.now_s
                conditions = operators + status.conditions
                both = status.model_copy(update={"conditions": conditions, "evictions": before.evictions})
                self.after(0.5, self.operate)
                self.partitions[name] = replace(old, value=old.value.model_copy(update={"status": both}))
        for key, value in now.labels.items():
            assert key.startswith("migd.dev/")
            if value is None:
                self.labels.pop(key, None)
            else:
                self.labels[key] = value
        self.told = now

    def _do(self, effect: Effect) -> Cause | None:
        match effect:
            case Wait():
                self.pass_time(effect.seconds, wake=True)
            case LookAgain():
                self.now_s += 0.01
            case ChangeNode() if self.denies is not None:
                return self.denies
            case ChangeNode(then=(_, *_)) | StopPlugin() if self.keeps_plugin is not None:
                return self.keeps_plugin
            case ChangeNode():
                self._change(effect)
            case StopPlugin():
                pod = self.pods.get(effect.uid)
                if pod is not None and not pod.deleting:
                    self._stop(pod)
            case HangUp():
                if any(self.pods[uid].phase == "Running" for _, _, uid in effect.pods if uid in self.pods):
                    self.after(1.0, self.enumerate)
            case RefreshDevices():
                self.now_s += 0.2
                return Cause("NVMLError", "nvidia-modprobe failed") if self.refresh_fails else None
            case ForgetRetry():
                old = self.partitions[effect.partition]
                self.partitions[effect.partition] = replace(old, annotations={})
            case _:
                return self._operate(effect)
        return None

    def _change(self, effect: ChangeNode) -> None:
        change = effect.change
        for values, new in ((self.labels, change.labels), (self.annotations, change.annotations)):
            for key, value in new.items():
                values.pop(key, None) if value is None else values.update({key: value})
        if change.closed is True and not self.closed:
            self.taints = (*self.taints, Taint(TAINT, "", "NoSchedule"))
            self.after(self.random.uniform(0.0, 1.5), lambda: self._schedule(blind_s=1.5))  # binds from its cache
        elif change.closed is False:
            self.taints = tuple(t for t in self.taints if t.key != TAINT)
            self.after(0.3, self._schedule)
        self.after(0.4, self._daemons)

    def _operate(self, effect: Operation) -> Cause | None:
        self.operations.append(effect)
        gpu = next(g for g in self.gpus if g.uuid == effect.gpu_uuid)
        self.now_s += 0.3
        if not self.closed:
            self.wrong.append(f"{effect} on an open node")
        refused = gpu.refuses.get(type(effect))
        if refused is not None:
            return refused
        held = {device for p in self.pods.values() if p.phase == "Running" for device in p.devices}
        match effect:
            case DestroyComputeInstances(instance=i) | DestroyGpuInstance(instance=i):
                used = i in gpu.used or any(gpu.ids().get(device) == i for device in held)
                if used:
                    self.wrong.append(f"{effect} while it is used")
                gpu.bare.add(i)
                if isinstance(effect, DestroyGpuInstance):
                    del gpu.made[i]
                    gpu.bare.discard(i)
            case CreateGpuInstance(instance=i):
                gpu.made[i] = next(self.serial)
                gpu.bare.add(i)
            case CreateComputeInstance(instance=i):
                gpu.bare.discard(i)
            case SetMode(enable=enable):
                if gpu.whole_used or gpu.made or gpu.uuid in held:
                    self.wrong.append(f"{effect} while the GPU is used")
                gpu.mig = enable
            case ResetGpu():
                self.wrong.append("a needless reset")
        return None

    def _check(self) -> None:
        for since, now, longest in (("closed_since", self.closed, "longest_closed"),
                                    ("paused_since", self.paused, "longest_pause")):  # fmt: skip
            began = getattr(self, since)
            if now and began is None:
                setattr(self, since, self.now_s)
            elif began is not None:
                setattr(self, longest, max(getattr(self, longest), self.now_s - began))
                if not now:
                    setattr(self, since, None)

    @property
    def paused(self) -> bool:
        return self.closed and (
            self.labels.get(f"{DEPLOY}device-plugin") == "paused-for-mig-change"
            or (self.install == "Helm" and not any(p.app == "device-plugin" for p in self.pods.values()))
        )

    # --- what came of it ---

    def phases(self) -> list[str]:
        return [str(self.partitions[gpu.uuid.lower()].value.status.phase) for gpu in self.gpus]

    def reasons(self) -> list[str]:
        return [self.partitions[gpu.uuid.lower()].value.status.reason for gpu in self.gpus]

    def layouts(self) -> list[Layout]:
        return [Layout(gpu.mig, frozenset(gpu.made)) for gpu in self.gpus]

    def own_by_hand(self) -> None:
        """All that is there counts as made by migd."""
        for gpu in self.gpus:
            self.record = self.record.with_gpu(gpu.uuid, replace(self.record.gpu(gpu.uuid), owned=frozenset(gpu.made)))
        self.text = encode(self.record)

    def untouched(self) -> bool:
        """Nothing of ours is left on the node."""
        paused = any(value == "paused-for-mig-change" for value in self.labels.values())
        return not self.closed and "migd.dev/owed" not in self.annotations and not paused


def made(text: str) -> Geometry:
    """A geometry of the toy's board."""
    return at(BOARD, text)
