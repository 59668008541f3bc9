"""Who interferes in a story, and how: each act of `drawing.ACTS` on a fleet that runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import pynvml
from fleet import Fleet, plan
from processes import OPERATOR

from migd.sim.cluster.faults import NONE, Chances, Faults, Trouble, WatchTrouble
from migd.sim.errors import SimulatedCrash, SimulationError
from migd.sim.faults import Fault
from migd.sim.nodes.carving import carve, clear
from migd.sim.nodes.documents import running
from migd.sim.nodes.world import SimNode, Workload
from whole.disrupting import Disrupting
from whole.drawing import CALLS, CUTS, Act, Tale, instances

PLAN: Final = "plan"
_READS: Final = ("nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances", "nvmlDeviceGetComputeRunningProcesses*")
_ERRORS: Final = (999, 999, 10, 15, 19)
CALM_S: Final = 20.0
"""So long after the last act its faults may still strike."""
_DISTURBING: Final = frozenset({"kubelet restart", "plugin crashes", "gpu lost", "xid", "reload", "drift"})
FORCED_S: Final = 5.0
"""So long after a pod was deleted by force its device may be given away while its kubelet still has it."""
_HOLD: Final = "migd.dev/hold"


class Weather(Faults):
    """The API server's troubles: by chance, in spells, and times when it is away."""

    def __init__(self, seed: int, chances: Chances) -> None:
        super().__init__(seed, chances)
        self.dice = random.Random(f"weather {seed}")
        self.met: set[str] = set()
        self.always = chances
        self.now = chances
        self.away: Trouble | None = None

    def calm(self) -> None:
        self.always = self.now = NONE
        self.away = None

    def of_request(self) -> Trouble | None:
        found = self.away
        if found is None and self.now.request and self.dice.random() < self.now.request:
            found = self.dice.choice(list(Trouble))
        return self._noted(found)

    def of_watch(self) -> WatchTrouble | None:
        found = WatchTrouble.CUT if self.away is not None else None
        if found is None and self.now.watch and self.dice.random() < self.now.watch:
            found = self.dice.choice(list(WatchTrouble))
        return self._noted(found)

    def delay_s(self, most_s: float) -> float:
        return self.dice.random() * most_s

    def _noted(self, found: Any) -> Any:
        if found is not None:
            self.met.add(f"{type(found).__name__} {found.name}")
        return found


class Strikes:
    """Where processes die: at the request that is counted down to."""

    def __init__(self) -> None:
        self.armed: dict[str, tuple[str, int]] = {}  # program -> before or after, and how many writes from now
        self.struck: set[str] = set()

    def __call__(self, who: str, where: str) -> bool:
        armed = self.armed.get(who)
        when, _, request = where.partition(" ")
        if armed is None or armed[0] != when or request.startswith(("GET", "a ")) or "/leases" in request:
            return False
        self.armed[who] = (armed[0], armed[1] - 1)
        if armed[1] > 1:
            return False
        del self.armed[who]
        what = "eviction" if request.endswith("/eviction") else request.partition(" ")[0]
        self.struck.add(f"{who.partition(' ')[0]} {when} {what}")
        return True


class Acting(Disrupting):
    """Carries out the acts of a tale. done: what was really done. gone: nodes that are not there any more."""

    def __init__(
        self, tale: Tale, fleet: Fleet, weather: Weather, strikes: Strikes, disturbs: Callable[[str, float], None]
    ) -> None:
        self.tale, self.fleet, self.cluster = tale, fleet, fleet.cluster
        self._disturbs = disturbs
        self.weather, self.strikes = weather, strikes
        self.done: set[str] = set()
        self.gone: set[str] = set()
        self.odd: set[str] = set()  # nodes whose device plugin may show less than there is
        self.last_s = 0.0  # when the last of what was begun is over

    def act(self, one: Act) -> None:
        """Do it."""
        dice = random.Random(one.dice)
        node = dice.choice(self.fleet.nodes)
        if node.name in self.gone and one.what != "node joins":
            return
        self.cluster.stage.say("story", f"{one.what} ({node.name})")
        getattr(self, "_" + one.what.replace(" ", "_").replace("-", "_"))(dice, node)
        self.done.add(one.what)
        if one.what in _DISTURBING:
            self._disturbs(node.name, 300.0)
        if one.what in ("pod deleted", "pod replaced"):
            self._disturbs(node.name, FORCED_S)

    def calm(self, dice: random.Random) -> None:
        """Nobody interferes any more; what is gone for good stays gone, and what an admin set stays set."""
        self.cluster.stage.say("story", "calm")
        self.weather.calm()
        self.strikes.armed.clear()
        for node in self.fleet.nodes:
            node.host.clear_faults()
        if self.tale.quiet and self.tale.steady:
            return  # that they go is what is looked at
        for job in (*self.tale.jobs, *self._more_jobs):
            if job.lasts_s is not None or dice.random() < 0.5:
                self.cluster.workloads.stop(job.name)
        for pod in self.tale.lonely:
            if dice.random() < 0.5:
                self.cluster.delete("pods", pod["metadata"]["name"], "default")

    _more_jobs: tuple[Workload, ...] = ()

    def _later(self, dice: random.Random, least_s: float, most_s: float, undo: Callable[[], None]) -> None:
        seconds = dice.uniform(least_s, most_s)
        self.last_s = max(self.last_s, self.cluster.stage.now_s() + seconds)
        self.cluster.stage.later(seconds, undo)

    # ---- plans

    def _rules(self, dice: random.Random) -> list[dict[str, Any]]:
        models = {spec.gpus.partition("x")[2] for spec in self.tale.nodes}
        if len(models) > 1:
            return [{"gpus": {"all": True}, "instances": [{"memoryGB": 5, "count": dice.choice((1, 2, 3))}]}]
        return [{"gpus": {"all": True}, "instances": list(instances(dice.choice(CUTS[next(iter(models))])))}]

    def _edit(self, dice: random.Random, _node: SimNode) -> None:
        self.fleet.edit(PLAN, rules=self._rules(dice))

    def _off(self, _dice: random.Random, _node: SimNode) -> None:
        self.fleet.edit(PLAN, rules=[{"gpus": {"all": True}, "mig": "Disabled"}])

    def _pause(self, dice: random.Random, _node: SimNode) -> None:
        self.fleet.edit(PLAN, paused=True)
        if dice.random() < 0.8:
            self._later(dice, 5, 60, lambda: self.fleet.edit(PLAN, paused=False))

    def _delete(self, dice: random.Random, _node: SimNode) -> None:
        self.cluster.delete("gpupartitionplans", PLAN)
        if dice.random() < 0.5:
            document = plan(PLAN, rules=self._rules(dice), foreignInstances="Adopt")
            self._later(dice, 1, 40, lambda: None if self.fleet.plan(PLAN) else self._apply(document))

    def _apply(self, document: dict[str, Any]) -> None:
        self.fleet.apply(document)

    def _conflict(self, dice: random.Random, _node: SimNode) -> None:
        self._apply(plan("rival", rules=self._rules(dice), foreignInstances="Adopt"))
        if dice.random() < 0.7:
            self._later(dice, 5, 60, lambda: self.cluster.delete("gpupartitionplans", "rival"))

    def _two_plans(self, dice: random.Random, _node: SimNode) -> None:
        rules = self._rules(dice)
        rules[0]["gpus"] = {"indices": [0]}
        self._apply(plan("upper", rules=rules, priority=5, foreignInstances="Adopt"))

    def _infeasible(self, dice: random.Random, _node: SimNode) -> None:
        wish = dice.choice(({"memoryGB": 5, "count": 9}, {"profile": "9g.99gb", "count": 1}))
        self.fleet.edit(PLAN, rules=[{"gpus": {"all": True}, "instances": [wish]}])
        if dice.random() < 0.5:
            rules = self._rules(dice)
            self._later(dice, 5, 60, lambda: self.fleet.edit(PLAN, rules=rules))

    # ---- people and other tools

    def _drift(self, dice: random.Random, node: SimNode) -> None:
        gpu = dice.choice(node.host.snapshot().gpus)
        model = node.spec.gpus.partition("x")[2]
        try:
            clear(node.host, gpu.index)
            if dice.random() < 0.5:
                carve(node.host, gpu.index, list(dice.choice(CUTS[model]))[:1])
        except (pynvml.NVMLError, SimulationError, SimulatedCrash):
            return  # somebody is on it

    def _annotate(self, plural: str, name: str, key: str, value: str | None) -> None:
        self.cluster.admin.merge(plural, name, {"metadata": {"annotations": {key: value}}})

    def _hold(self, dice: random.Random, node: SimNode) -> None:
        self._annotate("nodes", node.name, _HOLD, "ann")
        if dice.random() < 0.8:
            self._later(dice, 5, 90, lambda: self._annotate("nodes", node.name, _HOLD, None))

    def _hold_gpu(self, dice: random.Random, node: SimNode) -> None:
        uuid = dice.choice(node.host.gpu_uuids()).lower()
        self._annotate("gpupartitions", uuid, _HOLD, "ann")
        if dice.random() < 0.8:
            self._later(dice, 5, 90, lambda: self._annotate("gpupartitions", uuid, _HOLD, None))

    def _retry(self, dice: random.Random, node: SimNode) -> None:
        self._annotate("gpupartitions", dice.choice(node.host.gpu_uuids()).lower(), "migd.dev/retry", "now")

    def _cordon(self, dice: random.Random, node: SimNode) -> None:
        self.cluster.admin.cordon(node.name)
        if dice.random() < 0.7:
            self._later(dice, 5, 120, lambda: self.cluster.admin.cordon(node.name, False))

    def _mig_manager(self, dice: random.Random, node: SimNode) -> None:
        label = "nvidia.com/gpu.deploy.mig-manager"
        self.cluster.admin.label(node.name, {label: "true"})
        if dice.random() < 0.7:
            self._later(dice, 5, 90, lambda: self.cluster.admin.label(node.name, {label: None}))

    def _jobs(self, dice: random.Random, node: SimNode) -> None:
        resources = sorted(r for r, n in self.cluster.allocatable(node.name).items() if n)
        if resources and not self._more_jobs:
            job = Workload("late-job", {dice.choice(resources): 1}, 2, (2.0, 30.0), idle=dice.random() < 0.5)
            self._more_jobs = (job,)
            self.cluster.run(job)

    # ---- the API server

    def _api_away(self, dice: random.Random, _node: SimNode) -> None:
        self.weather.away = dice.choice((Trouble.REFUSED, Trouble.REFUSED, Trouble.HANGS, Trouble.UNWELL))

        def back() -> None:
            self.weather.away = None

        self._later(dice, 20, 90, back)

    def _api_bad(self, dice: random.Random, _node: SimNode) -> None:
        self._spell(dice, Chances(dice.choice((0.1, 0.3)), 0.02))

    def _watches_bad(self, dice: random.Random, _node: SimNode) -> None:
        self._spell(dice, Chances(0.0, dice.choice((0.1, 0.4))))

    def _spell(self, dice: random.Random, chances: Chances) -> None:
        self.weather.now = chances

        def over() -> None:
            self.weather.now = self.weather.always

        self._later(dice, 30, 120, over)

    # ---- the hardware

    def _nvml_error(self, dice: random.Random, node: SimNode) -> None:
        code, times = dice.choice(_ERRORS), dice.choice((1, 1, 2, 4))
        node.host.inject(Fault(dice.choice(CALLS), "error", code, nth=dice.choice((1, 1, 2, 3)), times=times))

    def _nvml_late_error(self, dice: random.Random, node: SimNode) -> None:
        fault = Fault(dice.choice(CALLS), "error", 999, when="after", nth=dice.choice((1, 1, 2, 3)))
        node.host.inject(fault)

    def _nvml_in_use(self, dice: random.Random, node: SimNode) -> None:
        node.host.inject(Fault("nvml*InstanceDestroy", "error", 19, times=dice.choice((1, 2, 3, 8))))

    def _nvml_hang(self, dice: random.Random, node: SimNode) -> None:
        node.host.inject(Fault(dice.choice((*CALLS, *_READS)), "hang", nth=dice.choice((1, 1, 2))))

    def _nvml_skip(self, dice: random.Random, node: SimNode) -> None:
        node.host.inject(Fault(dice.choice(CALLS), "skip"))

    def _save_error(self, dice: random.Random, node: SimNode) -> None:
        node.host.inject(
            Fault("record.save", "error", when=dice.choice(("before", "after")), times=dice.choice((1, 3)))
        )

    def _refresh_error(self, dice: random.Random, node: SimNode) -> None:
        node.host.inject(Fault("devices.refresh", "error", times=dice.choice((1, 2, 5))))

    def _gpu_lost(self, dice: random.Random, node: SimNode) -> None:
        index = dice.randrange(len(node.host.snapshot().gpus))
        node.host.lose_gpu(index)
        self.odd.add(node.name)
        if dice.random() < 0.5:
            self._later(dice, 20, 60, lambda: self.cluster.reboot(node.name, 20.0))

    def _xid(self, dice: random.Random, node: SimNode) -> None:
        self.cluster.raise_xid(node.name, 0, dice.choice((48, 79, 13)))
        self.odd.add(node.name)

    def _reload(self, dice: random.Random, node: SimNode) -> None:
        node.host.reload_driver(dice.uniform(1, 30))
        self.odd.add(node.name)

    # ---- processes and machines

    def _agent_kill(self, _dice: random.Random, node: SimNode) -> None:
        self.fleet.agent(node.name).kill()

    def _agent_crash(self, dice: random.Random, node: SimNode) -> None:
        call = dice.choice((*CALLS, "record.save", "record.save", "devices.refresh"))
        node.host.inject(Fault(call, "crash", when=dice.choice(("before", "after")), nth=dice.choice((1, 2, 3, 5))))

    def _agent_strike(self, dice: random.Random, node: SimNode) -> None:
        self.strikes.armed[f"migd-agent {node.name}"] = (dice.choice(("before", "after")), dice.randint(1, 9))

    def _operator_strike(self, dice: random.Random, _node: SimNode) -> None:
        self.strikes.armed[OPERATOR] = (dice.choice(("before", "after")), dice.randint(1, 6))

    def _operator_kill(self, _dice: random.Random, _node: SimNode) -> None:
        self.fleet.operator.kill()

    def _two_operators(self, dice: random.Random, _node: SimNode) -> None:
        rival = self.fleet.another_operator()
        rival.start()
        ending = dice.choice((rival, self.fleet.operator))

        def over() -> None:
            ending.kill(again=False)

        self._later(dice, 10, 60, over)

    def _reboot(self, dice: random.Random, node: SimNode) -> None:
        if node.kubelet.up:
            seconds = dice.uniform(10, 90)
            self.last_s = max(self.last_s, self.cluster.stage.now_s() + seconds + 5.0)
            self.cluster.reboot(node.name, seconds)

    def _kubelet_restart(self, dice: random.Random, node: SimNode) -> None:
        if node.kubelet.up:
            self.cluster.restart_kubelet(node.name, dice.uniform(1, 20))

    def _plugin_crashes(self, dice: random.Random, node: SimNode) -> None:
        for pod in self.cluster.pods(node.name):
            if pod["spec"]["containers"][0]["name"].startswith("nvidia-device-plugin") and running(pod):
                node.kubelet.crash(pod["metadata"]["uid"])

    def _node_vanishes(self, dice: random.Random, node: SimNode) -> None:
        if len(self.fleet.nodes) - len(self.gone) < 2 or not node.kubelet.up:
            return
        self.gone.add(node.name)
        self.cluster.power_off(node.name)
        self._later(dice, 5, 60, lambda: self.cluster.delete("nodes", node.name))

    def _node_joins(self, _dice: random.Random, _node: SimNode) -> None:
        for name in sorted(self.tale.absent):
            if not self.cluster.node(name).kubelet.up and name not in self.gone:
                self.cluster.power_on(name)


async def act_out(tale: Tale, acting: Acting) -> None:
    """All acts in their time, then calm."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for one in tale.acts:
        await asyncio.sleep(max(0.0, began_s + one.at_s - loop.time()))
        acting.act(one)
        acting.fleet.check()
    if tale.acts:
        await asyncio.sleep(max(CALM_S, acting.last_s - loop.time() + 1.0))
    acting.calm(random.Random(f"calm {tale.seed}"))
