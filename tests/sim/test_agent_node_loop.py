"""The loop of the node's agent with a scripted mind: what it does with decisions, whatever they are about.

What is decided is tested where it is decided. Time is virtual.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from agent_nodes import AGENT, AT, LEASE, NODE, Node, until, with_machine

from migd.agent.effects import LookAgain
from migd.agent.node.bounds import PAUSE_MAX_S
from migd.agent.node.effects import ChangeNode, HangUp, RefreshDevices, Wait
from migd.agent.node.looping import HungAgentError, LibraryReplacedError, Mind
from migd.agent.node.running import NoNodeError
from migd.agent.node.telling import Told
from migd.agent.records import NodeWork, Record, Transaction
from migd.agent.store import RecordError
from migd.kube.nodes import NodeChange
from migd.mig.geometry import Layout
from migd.mig.operations import SetMode
from migd.nvml.errors import VersionError
from migd.plans.partitions import PartitionStatus
from migd.sim.cluster.faults import Trouble
from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.faults import Fault


class Script:
    """Decides as a list says: one effect after the other, each begun once and remembered as the record's turn.

    answers: what came of each. seen: every sight that was decided upon.
    """

    def __init__(self, *effects, begun=False, mig="off"):
        self.effects = list(effects)
        self.begun = begun
        self.answers = []
        self.seen = []
        self.phase = "Idle"

    @property
    def mind(self) -> Mind:
        return Mind(self.decide, self.answered, lambda record: False, self.told)

    def decide(self, record: Record, seen):
        self.seen.append(seen)
        at = int(record.order_id or 0)
        if at >= len(self.effects):
            return self._with(record, at, "Rest"), None
        effect = self.effects[at]
        if isinstance(effect, Wait | LookAgain):
            return self._with(record, at + 1, "Rest"), effect
        return self._with(record, at, "Applying"), effect

    def _with(self, record, at, stage):
        gpus = record.gpus
        if stage == "Applying":
            for gpu in self.seen[-1].gpus:
                transaction = Transaction("t", Layout(False), Layout(True), touched=True)
                gpus = {**gpus, gpu.uuid: replace(record.gpu(gpu.uuid), transaction=transaction)}
        return replace(record, order_id=str(at), node=NodeWork(stage=stage), gpus=gpus)

    def answered(self, record, effect, error, now_s):
        self.answers.append((effect, error, now_s))
        at = int(record.order_id) + 1
        gpus = {} if at >= len(self.effects) else record.gpus
        return replace(record, order_id=str(at), gpus=gpus)

    def told(self, record, seen, before):
        status = PartitionStatus(phase=self.phase, message=f"at {record.order_id or 0}")
        return Told({p.name: status for p in seen.partitions}, {"migd.dev/state": "ready"})


def virtually(test):
    """Run an async test in virtual time."""

    def run(*args, **kwargs):
        run_virtually(asyncio.wait_for(test(*args, **kwargs), 24 * 3600))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def claimed(node, uuid):
    """Another node has this GPU."""
    other = node.make_node("node-b")
    theirs = {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartition",
        "metadata": {"name": uuid.lower()},
        "spec": {"nodeName": "node-b", "nodeUID": other["metadata"]["uid"]},
    }
    node.admin("POST", AT, theirs)


def close(why="close the node"):
    return ChangeNode(NodeChange(closed=True), why)


@virtually
async def test_at_first_start_every_gpu_gets_an_object_that_goes_with_the_node():
    node = Node("2xa100-80gb")
    async with node.agent(Script().mind):
        await until(lambda: all("status" in p for p in node.partitions().values()) and len(node.partitions()) == 2)
        assert sorted(node.partitions()) == sorted(uuid.lower() for uuid in node.host.gpu_uuids())
        uid = node.node()["metadata"]["uid"]
        for one in node.partitions().values():
            owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid}
            assert one["metadata"]["ownerReferences"] == [owner]
            assert one["metadata"]["labels"] == {"migd.dev/node": NODE}
            assert one["spec"] == {"nodeName": NODE, "nodeUID": uid}
            assert one["status"]["phase"] == "Idle"
        lease = node.get(LEASE)
        assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("pod-a", 180)
        assert lease["metadata"]["ownerReferences"] == [owner]
        assert node.node()["metadata"]["labels"] == {"migd.dev/state": "ready"}


@virtually
async def test_at_rest_and_over_restarts_nothing_is_written_but_the_lease():
    node, script = Node("4xa100-80gb"), Script()
    async with node.agent(script.mind):
        await asyncio.sleep(300)
    since, saves = len(node.server.requests), node.store.saves
    for _ in range(3):
        async with node.agent(script.mind):
            await asyncio.sleep(7200)
    assert node.writes(since) == []
    assert node.store.saves == saves
    renewals = len(node.writes(since, leases=True))
    assert 3 * 110 <= renewals <= 3 * 130
    looks = len(script.seen)
    assert looks <= 3 * 7200 / 30 + 60, "it looks no more often than it must"


@virtually
async def test_the_record_is_saved_before_an_effect_is_begun_and_the_report_arrives_first():
    node = Node()
    uuid = node.uuid
    found = []

    class Watched:
        """GPUs that note what the record and the API server say when an operation begins."""

        def __init__(self, gpus):
            self.look, self.look_at, self.close, self._gpus = gpus.look, gpus.look_at, gpus.close, gpus

        def perform(self, operation):
            found.append((node.store.load().order_id, node.partitions()[node.name]["status"]["message"]))
            self._gpus.perform(operation)

    script = Script(LookAgain(), SetMode(uuid, True))
    async with node.agent(script.mind, change=lambda p: with_machine(p, gpus=Watched(p.machine.gpus))):
        await until(lambda: script.answers)
    assert found == [("1", "at 1")]
    assert node.host.snapshot().gpus[0].pending


@virtually
async def test_a_change_in_the_cluster_wakes_it_and_nothing_else_makes_it_hurry():
    node, script = Node(), Script()
    async with node.agent(script.mind):
        await until(lambda: node.name in node.partitions())
        await asyncio.sleep(100)
        looks = len(script.seen)
        node.wish(node.name)
        await asyncio.sleep(3)
        assert any(p.value.spec.assignment for p in script.seen[-1].partitions)
        assert len(script.seen) == looks + 1
        for number in range(200):  # a busy node
            node.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"x": str(number)}}})
            await asyncio.sleep(0.05)
        assert len(script.seen) <= looks + 15


@virtually
async def test_a_wait_ends_early_when_something_changes():
    node, script = Node(), Script(Wait(1000, "for a pod"), Wait(1000, "again"))
    async with node.agent(script.mind):
        await until(lambda: len(script.seen) >= 1)
        await asyncio.sleep(5)
        node.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"x": "1"}}})
        await asyncio.sleep(2)
        assert script.seen[-1].node.value.labels["x"] == "1"


@virtually
async def test_hardware_goes_on_while_the_api_server_is_away_and_the_report_comes_later():
    node = Node("2xa100-80gb")
    claimed(node, node.host.gpu_uuids()[1])
    steps = [close(), *(SetMode(node.uuid, bool(n % 2 == 0)) for n in range(6))]
    script = Script(*steps)

    def lost(ports):
        class Cut:
            def __init__(self, gpus):
                self.look, self.look_at, self.close, self._gpus = gpus.look, gpus.look_at, gpus.close, gpus

            def perform(self, operation):
                node.faults.away = Trouble.HANGS
                self._gpus.perform(operation)

        return with_machine(ports, gpus=Cut(ports.machine.gpus))

    async with node.agent(script.mind, change=lost):
        await until(lambda: len(script.answers) == len(steps), within_s=60)
        assert all(error is None for _effect, error, _at in script.answers)
        took_s = script.answers[-1][2] - script.answers[0][2]
        assert took_s < 45, f"{took_s} s: a report is waited for once"
        assert node.partitions()[node.name]["status"]["message"] != "at 7"
        node.faults.away = None
        await until(lambda: node.partitions()[node.name]["status"]["message"] == "at 7")


@virtually
async def test_nothing_is_begun_while_the_api_server_is_away():
    node = Node()
    script = Script()
    async with node.agent(script.mind):
        await until(lambda: node.name in node.partitions())
        await asyncio.sleep(10)
        node.faults.away = Trouble.REFUSED
        script.effects = [SetMode(node.uuid, True)]
        for _ in range(20):
            await asyncio.sleep(60)
            assert script.answers == []
        assert "nothing is begun" in node.probes.ready()
        assert node.probes.alive() == ""
        node.faults.away = None
        await until(lambda: script.answers)
        assert node.probes.ready() == ""


@virtually
async def test_nothing_is_begun_on_a_node_that_was_changed_since_the_look():
    node = Node()
    script = Script()
    async with node.agent(script.mind):
        await until(lambda: node.name in node.partitions())
        await asyncio.sleep(10)
        decide, holds = script.decide, {"metadata": {"annotations": {"migd.dev/hold": "ann"}}}

        def late(record, seen):
            """An admin is faster than the watch by a hair."""
            if "migd.dev/hold" not in seen.node.annotations:
                node.merge(f"/api/v1/nodes/{NODE}", holds)
                script.effects = [SetMode(node.uuid, True)]
            else:
                script.effects = []
            return decide(record, seen)

        script.decide = late
    async with node.agent(script.mind):
        await asyncio.sleep(60)
    assert "migd.dev/hold" in script.seen[-1].node.annotations
    assert script.answers == []


def hanging() -> tuple[Node, Script]:
    """A node on which the first operation does not return, and a mind that asks for it."""
    node = Node()
    node.host.inject(Fault("nvmlDeviceSetMigMode", "hang"))
    return node, Script(close(), SetMode(node.uuid, True))


@virtually
async def test_an_operation_that_hangs_is_told_while_the_lease_lives_and_ends_the_process():
    node, script = hanging()
    async with node.agent(script.mind) as agent:
        error = await agent.ends()
        assert isinstance(error, HungAgentError)
        assert asyncio.get_running_loop().time() >= 120
    assert node.get(LEASE)["spec"]["renewTime"] >= "2026-01-01T00:02:00", "the lease lived on"
    record = node.store.load()
    transaction = record.gpu(node.uuid).transaction
    assert transaction.back
    assert transaction.parked
    assert record.gpu(node.uuid).outcome.cause.reason == "NVMLError"
    assert node.get(LEASE)["spec"]["holderIdentity"] == "pod-a", "the next process goes on"


@virtually
async def test_an_operation_that_hangs_ends_the_process_as_such_also_where_it_cannot_be_saved():
    node, script = hanging()
    async with node.agent(script.mind) as agent:
        await asyncio.sleep(60)
        node.host.inject(Fault("record.save", "error", times=0))
        assert isinstance(await agent.ends(), HungAgentError)
    assert node.store.load().gpu(node.uuid).outcome is None, "it could not be saved"


@virtually
async def test_a_look_that_hangs_an_hour_ends_with_a_condition():
    node, script = Node("2xa100-80gb"), Script()
    async with node.agent(script.mind) as agent:
        await until(lambda: len(node.partitions()) == 2 and "status" in node.partitions()[node.name])
        at_s = asyncio.get_running_loop().time()
        node.host.inject(Fault("nvmlDeviceGetMigMode", "hang", gpu=1, times=0))
        assert isinstance(await agent.ends(), HungAgentError)
        assert asyncio.get_running_loop().time() - at_s < 120
    for one in node.partitions().values():
        (ready,) = [c for c in one["status"]["conditions"] if c["type"] == "Ready"]
        assert (one["status"]["phase"], ready["status"], ready["reason"]) == ("Failed", "False", "NVMLError")
        assert "nvmlDeviceGetMigMode" in ready["message"]


@virtually
async def test_a_node_whose_gpus_cannot_be_read_is_failed_only_where_something_is_wished_of_them():
    """A node without a plan has no state: nobody looks for one there, and nothing would take its label away."""
    node, script = Node(), Script()
    async with node.agent(script.mind):
        await until(lambda: "status" in node.partitions().get(node.name, {}))
        node.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"migd.dev/state": None}}})
        node.host.reload_driver(600)
        await until(lambda: node.partitions()[node.name]["status"]["phase"] == "Failed")
        await asyncio.sleep(60)
        assert "labels" not in node.node()["metadata"]
        node.wish(node.name)
        await until(lambda: "labels" in node.node()["metadata"])
        assert node.node()["metadata"]["labels"] == {"migd.dev/state": "failed"}


@virtually
async def test_a_driver_that_is_gone_is_told_and_comes_back_by_itself():
    node, script = Node(), Script()
    async with node.agent(script.mind):
        await until(lambda: "status" in node.partitions().get(node.name, {}))
        node.host.reload_driver(300)
        await until(lambda: node.partitions()[node.name]["status"]["phase"] == "Failed")
        looks = len(script.seen)
        assert node.probes.ready() != ""
        await until(lambda: node.partitions()[node.name]["status"]["phase"] == "Idle", within_s=600)
        assert len(script.seen) > looks
        (event,) = [e for e in node.events() if e["reason"] == "NVMLError"]
        assert event["regarding"]["name"] == node.name
        assert event["type"] == "Warning"


@virtually
async def test_a_process_whose_library_is_another_drivers_by_now_ends_and_one_that_started_so_waits():
    """A driver is upgraded without a reboot, as the GPU Operator does it; what is loaded stays loaded."""
    node, script, upgraded = Node(), Script(), []

    def change(ports):
        gpus = ports.machine.gpus

        class Gpus:
            close, perform, look_at = gpus.close, gpus.perform, gpus.look_at

            def look(self):
                if upgraded:
                    raise VersionError("nvmlInit", "", 18)
                return gpus.look()

        return with_machine(ports, gpus=Gpus())

    async with node.agent(script.mind, change=change) as agent:
        await until(lambda: script.seen)
        upgraded.append(True)
        assert isinstance(await agent.ends(), LibraryReplacedError)
    async with node.agent(script.mind, change=change):
        await asyncio.sleep(600)
        assert "NVML code 18" in node.probes.ready()
        looks = len(script.seen)
        upgraded.clear()
        await until(lambda: len(script.seen) > looks)


@virtually
async def test_a_record_that_cannot_be_saved_holds_up_the_effect_and_not_for_ever():
    node, script = Node(), Script(SetMode("", True))
    script.effects = [SetMode(node.uuid, True)]
    node.host.inject(Fault("record.save", "error", times=5))
    async with node.agent(script.mind):
        await asyncio.sleep(5)
        assert script.answers == []
        assert "cannot write the record" in node.probes.ready()
        await until(lambda: script.answers)
    assert node.store.load().order_id == "1"


@virtually
async def test_a_record_that_cannot_be_saved_is_told_of_once_that_lasts_and_no_longer_than_it_does():
    """Seen: only /readyz said that the disk was full, and the GPU waited as if it were somebody else's turn."""
    node, script = Node("2xa100-80gb"), Script()
    async with node.agent(script.mind):
        await until(lambda: len(node.partitions()) == 2 and all("status" in p for p in node.partitions().values()))
    (other,) = set(node.partitions()) - {node.name}
    node.wish(node.name)
    script.effects = [SetMode(node.uuid, True)]
    node.host.inject(Fault("record.save", "error", times=0))
    async with node.agent(script.mind):
        await until(lambda: "cannot write the record" in node.probes.ready())
        before = node.partitions()
        await asyncio.sleep(10)
        assert node.partitions() == before, "a moment's trouble is no news"
        await until(lambda: node.partitions()[node.name]["status"]["phase"] == "Blocked")
        told = node.partitions()[node.name]["status"]
        assert told["reason"] == "NoPermission"
        assert "cannot write the record" in told["message"]
        (ready,) = [c for c in told["conditions"] if c["type"] == "Ready"]
        assert (ready["status"], ready["reason"]) == ("False", "NoPermission")
        assert node.partitions()[other] == before[other], "nothing is wished of it, so nothing is in its way"
        await until(lambda: node.node()["metadata"]["labels"]["migd.dev/state"] == "blocked")
        since = len(node.server.requests)
        await asyncio.sleep(600)
        assert node.writes(since) == []
        node.host.clear_faults()
        await until(lambda: script.answers)
        await until(lambda: "record" not in node.partitions()[node.name]["status"].get("message", ""))


@virtually
async def test_a_record_that_cannot_be_read_ends_it():
    node = Node()
    node.store.load = lambda: (_ for _ in ()).throw(RecordError("the record is damaged"))
    async with node.agent(Script().mind) as agent:
        assert isinstance(await agent.ends(), RecordError)


def paused(node):
    """The node is closed, and a GPU client paused, as an agent before left it."""
    client = "nvidia.com/gpu.deploy.dcgm"
    owed = {"migd.dev/owed": json.dumps({"turn": "t", "labels": {client: "true"}})}
    metadata = {"annotations": owed, "labels": {client: "paused-for-mig-change"}}
    taints = [{"key": "migd.dev/changing", "effect": "NoSchedule"}]
    node.merge(f"/api/v1/nodes/{NODE}", {"metadata": metadata, "spec": {"taints": taints}})


def whole(node):
    found = node.node()
    client = found["metadata"]["labels"]["nvidia.com/gpu.deploy.dcgm"]
    return client == "true" and not found["spec"].get("taints") and not found["metadata"].get("annotations")


@virtually
async def test_an_agent_that_cannot_read_its_record_opens_the_node_before_it_ends():
    node = Node()
    node.store.load = lambda: (_ for _ in ()).throw(RecordError("the record is damaged"))
    paused(node)
    async with node.agent(Script().mind) as agent:
        assert isinstance(await agent.ends(), RecordError)
    assert whole(node)


@virtually
async def test_an_agent_that_ends_at_every_decision_keeps_no_node_closed():
    node = Node()
    paused(node)
    now_s = asyncio.get_running_loop().time()
    work = NodeWork(stage="Applying", since_s=now_s, closed_s=now_s, paused_s=now_s)
    node.store.save(Record(node.host.boot_id(), node=work))

    def mistaken(record, seen):
        raise ZeroDivisionError

    for _ in range(10):
        async with node.agent(replace(Script().mind, decide=mistaken)) as agent:
            assert isinstance(await agent.ends(), ZeroDivisionError)
        assert asyncio.get_running_loop().time() - now_s > PAUSE_MAX_S or not whole(node), "not too early"
        await asyncio.sleep(60)
    assert whole(node)


@virtually
async def test_the_lease_goes_with_the_node_that_is_there_now():
    node = Node()
    async with node.agent(Script().mind):
        await until(lambda: node.get(LEASE))
        node.admin("DELETE", f"/api/v1/nodes/{NODE}")
        uid = node.make_node(NODE)["metadata"]["uid"]
        await asyncio.sleep(130)
        (owner,) = node.get(LEASE)["metadata"]["ownerReferences"]
        assert owner["uid"] == uid, "with a stale one the lease would be collected at once, again and again"


@virtually
async def test_sigterm_finishes_the_effect_and_leaves_the_rest_and_the_lease_to_the_next_process():
    node = Node()
    script = Script(close(), SetMode(node.uuid, True), SetMode(node.uuid, False))
    node.host.inject(Fault("nvmlDeviceSetMigMode", "delay", delay_s=20.0))
    async with node.agent(script.mind) as agent:
        await until(lambda: node.node()["spec"].get("taints"))
        await asyncio.sleep(1)
        at_s = asyncio.get_running_loop().time()
        agent.stop.set()
        await agent.ends()
        assert 10 < asyncio.get_running_loop().time() - at_s < 30
    assert [effect for effect, _error, _at in script.answers] == script.effects[:2]
    assert node.host.snapshot().gpus[0].pending
    assert node.node()["spec"]["taints"], "nothing is restored on the way out"
    assert node.get(LEASE)["spec"]["holderIdentity"] == "pod-a"
    async with node.agent(script.mind, holder="pod-b"):  # and is not waited out
        await until(lambda: len(script.answers) == 3, within_s=30)
        assert node.get(LEASE)["spec"]["holderIdentity"] == "pod-b"
        await asyncio.sleep(60)
    assert node.get(LEASE)["spec"]["holderIdentity"] == "", "at rest it is given up"


@virtually
async def test_signals_and_device_files_are_answered_like_operations():
    node = Node()
    pod = ("gpu-operator", "plugin", "5c89852c-8268-c4e4-41f0-2e1dd3a7d26a")
    client = node.host.nvml(pid=4711, command="nvidia-device-plugin", container=f"pod{pod[2]}/ctr")
    client.nvmlInit()
    script = Script(close(), HangUp((pod,)), HangUp((("a", "b", "gone"),)), RefreshDevices((node.uuid,)))
    script.effects.append(RefreshDevices((node.uuid,)))
    node.host.inject(Fault("devices.refresh", "error"))
    async with node.agent(script.mind):
        await until(lambda: len(script.answers) == 5)
    errors = [error for _effect, error, _at in script.answers]
    assert node.hung_up == [4711]
    assert [error and error.reason for error in errors] == [None, None, "NoDevicePlugin", "NVMLError", None]
    assert "a/b" in errors[2].message


@virtually
async def test_a_write_that_is_denied_is_an_answer_and_one_that_conflicts_is_not():
    node = Node()
    node.server.policy = lambda r: "not yours" if r.user == AGENT and r.resource == "nodes" and r.writes else ""
    script = Script(close())
    async with node.agent(script.mind):
        await until(lambda: script.answers)
        (_effect, error, _at), *_ = script.answers
        assert error.reason == "NoPermission"
        assert "not yours" in error.message

    node, tries = Node(), []

    def conflicts(request):
        if request.user == AGENT and request.resource == "nodes" and request.writes and len(tries) < 3:
            tries.append(request)
            node.merge(
                f"/api/v1/nodes/{NODE}", {"spec": {"taints": [{"key": f"t{len(tries)}", "effect": "NoSchedule"}]}}
            )
        return ""

    node.server.policy = conflicts
    script = Script(close())
    async with node.agent(script.mind):
        await until(lambda: script.answers)
    assert script.answers[0][1] is None
    assert len(node.node()["spec"]["taints"]) == 2, "the other's and ours"


@virtually
async def test_a_gpu_that_another_node_has_is_said_in_the_lease_until_it_is_ours():
    node = Node("2xa100-80gb")
    claimed(node, node.uuid)
    async with node.agent(Script().mind):
        await until(lambda: len(node.partitions()) == 2)
        await asyncio.sleep(120)
        assert node.get(LEASE)["metadata"]["annotations"] == {"migd.dev/duplicates": node.name}
        assert node.partitions()[node.name]["spec"]["nodeName"] == "node-b"
        assert "status" not in node.partitions()[node.name]
        node.admin("DELETE", f"{AT}/{node.name}")  # the operator, once node-b says that the board is gone
        await until(lambda: node.partitions().get(node.name, {}).get("spec", {}).get("nodeName") == NODE)
        await asyncio.sleep(120)
        assert "annotations" not in node.get(LEASE)["metadata"]


@virtually
async def test_a_lost_gpu_keeps_its_object_and_a_swapped_one_gets_another():
    node = Node("2xa100-80gb")
    async with node.agent(Script().mind):
        await until(lambda: len(node.partitions()) == 2)
        before = node.partitions()
        node.host.lose_gpu(0)
        await asyncio.sleep(120)
        assert node.partitions().keys() == before.keys()
        node.host.find_gpu(0)
        fresh = node.host.swap_gpu(1)
        await until(lambda: fresh.lower() in node.partitions())
        assert len(node.partitions()) == 3
    node.host.lose_gpu(0)
    async with node.agent(Script().mind):  # now it cannot say its UUID
        await asyncio.sleep(120)
        assert len(node.partitions()) == 3


@virtually
async def test_what_others_spoil_of_ours_is_put_right_and_what_is_theirs_stays():
    node = Node()
    async with node.agent(Script().mind):
        await until(lambda: node.name in node.partitions())
        node.merge(f"{AT}/{node.name}", {"metadata": {"labels": {"migd.dev/node": "elsewhere", "x": "y"}}})
        node.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"migd.dev/state": "unknown"}}})
        await asyncio.sleep(10)
        assert node.partitions()[node.name]["metadata"]["labels"] == {"migd.dev/node": NODE, "x": "y"}
        assert node.node()["metadata"]["labels"]["migd.dev/state"] == "ready"


@virtually
async def test_a_node_that_the_cluster_does_not_have_is_an_error_for_people():
    node = Node()
    node.admin("DELETE", f"/api/v1/nodes/{NODE}")
    async with node.agent(Script().mind) as agent:
        error = await agent.ends()
        assert isinstance(error, NoNodeError)
        assert NODE in str(error)


@virtually
async def test_a_node_that_goes_is_waited_for():
    node, script = Node(), Script()
    async with node.agent(script.mind):
        await until(lambda: node.name in node.partitions())
        node.admin("DELETE", f"/api/v1/nodes/{NODE}")
        await asyncio.sleep(60)
        looks = len(script.seen)
        assert "no node" in node.probes.ready()
        node.make_node(NODE)
        await until(lambda: len(script.seen) > looks)


@pytest.mark.parametrize("seed", range(40))
def test_through_every_trouble_of_the_api_server_all_effects_are_done_once_and_calm_brings_rest(seed):
    async def main():
        from migd.sim.cluster.faults import Chances

        node = Node("2xa100-80gb", seed, Chances(request=0.15, watch=0.1))
        steps = [
            close(),
            *(SetMode(uuid, True) for uuid in node.host.gpu_uuids()),
            ChangeNode(NodeChange(closed=False), "open"),
        ]
        script = Script(*steps)
        async with node.agent(script.mind):
            await until(lambda: len(script.answers) == len(steps), within_s=3600)
            assert [effect for effect, _error, _at in script.answers] == steps
            node.faults.calm()
            await until(lambda: not node.node()["spec"].get("taints"))
            last = f"at {len(steps)}"
            await until(
                lambda: all(p.get("status", {}).get("message") == last for p in node.partitions().values()), 600
            )
            await asyncio.sleep(600)
            since = len(node.server.requests)
            await asyncio.sleep(600)
            assert node.writes(since) == []

    run_virtually(asyncio.wait_for(main(), 24 * 3600))
