"""GPUPartition on a real API server: whose field is whose, what cannot change, what is selected by."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from boards import board, listings
from controlplane.running import ControlPlane
from integration.texts import NOW, PARTITIONS, condition, desired, gpu_name, partition

from migd.mig.boards import Board
from migd.mig.profiles import Engines, Placement, Profile
from migd.plans.partitions import partition_of

PLACE = {"start": 0, "size": 4}
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Ready",
    "reason": "",
    "message": "",
    "conditions": [condition(kind) for kind in ("Ready", "Drained", "Applied", "Advertised")],
    "board": {
        "index": 3,
        "uuid": "GPU-5c89852c-8268-c4e4-41f0-2e1dd3a7d26a",
        "model": "NVIDIA A100-SXM4-80GB",
        "architecture": "Ampere",
        "pciDeviceId": "0x20B210DE",
        "memoryMiB": 81920,
        "driver": "580.95.05",
        "migCapable": True,
        "modeChangeResets": True,
        "profiles": [
            {
                "name": "3g.40gb",
                "id": 9,
                "computeSlices": 3,
                "memoryMiB": 40192,
                "instancesMax": 2,
                "engines": {"copy": 3, "decoder": 2},
                "placements": [PLACE, {"start": 4, "size": 4}],
            }
        ],
    },
    "observed": {
        "summary": "3g.40gb 3×1g.10gb",
        "inUse": "2/4",
        "mig": {"current": "Enabled", "pending": "Enabled"},
        "busy": False,
        "instances": [
            {
                "profile": "3g.40gb",
                "placement": PLACE,
                "gi": 1,
                "ci": 0,
                "migUUID": "MIG-a",
                "inUse": True,
                "foreign": False,
            }
        ],
    },
    "blockers": [
        {"reason": "InUse", "instance": "3g.40gb@4", "pod": {"namespace": "a", "name": "b", "uid": "c"}},
        {"reason": "InUse", "pid": 4711, "command": "python"},
        {"reason": "InUse", "daemon": "dcgm"},
        {
            "reason": "DrainBlocked",
            "instance": "1g.10gb@0",
            "pod": {"namespace": "a", "name": "b", "uid": "c"},
            "podDisruptionBudgets": ["keep-two"],
        },
    ],
    "blockersLeftOut": 2,
    "victims": [{"namespace": "a", "name": "b", "uid": "c"}],
    "lastTransition": {
        "id": "4f2a",
        "generation": 4,
        "from": "MIG off",
        "to": "3g.40gb 3×1g.10gb",
        "startedAt": NOW,
        "finishedAt": NOW,
        "result": "Succeeded",
        "steps": [{"name": "Apply", "startedAt": NOW, "milliseconds": 812}],
    },
    "previous": {"summary": "3g.40gb", "mig": "Enabled", "instances": [{"profile": "3g.40gb", "placement": PLACE}]},
}
LABELLED = {"key": "keep", "operator": "Exists"}
EVICTION = {
    "podUID": "c",
    "code": 429,
    "reason": "DrainBlocked",
    "podDisruptionBudgets": ["keep-two"],
    "message": "Cannot evict pod",
    "at": NOW,
}
OPERATORS = {"evictions": [EVICTION], "conditions": [condition("Assigned"), condition("AgentAlive")]}


EVICTS: dict[str, Any] = {
    "policy": "Evict",
    "timeout": "30m",
    "protect": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}, LABELLED]},
    "allow": ["EmptyDir", "Unmanaged"],
}


def made(plane: ControlPlane, **spec: Any) -> str:
    name = gpu_name()
    plane.admin.create(PARTITIONS, partition(name, **spec)).object()
    return name


def applied(name: str, status: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartition", "metadata": {"name": name}, "status": status}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"desired": desired()},
        {"desired": desired(), "assignment": {"id": "0123abcd", "gpus": 8}},
        {"desired": desired(mig="Disabled", instances=[])},
        {"desired": desired(instances=[], allowEmpty=True)},
        {"desired": desired(instances=[{"memoryGB": 10, "computeSlices": 1, "count": 3}], onFailure="Hold")},
        {"desired": desired(disruption=EVICTS)},
        {"desired": desired(disruption={**EVICTS, "protect": {}, "allow": []})},
    ],
)
def test_a_good_partition_is_taken(plane: ControlPlane, spec: dict[str, Any]):
    plane.admin.create(PARTITIONS, partition(gpu_name(), **spec), dryRun="All").object()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"assignment": {"id": "0123abcd", "gpus": 8}}, "assignment goes with desired only"),
        ({"desired": desired(mig="Disabled")}, "instances go with mig Enabled only"),
        ({"desired": desired(instances=[])}, "allowEmpty: true says it is meant"),
        ({"desired": desired(instances=[{"count": 2}])}, "needs exactly one of profile and memoryGB"),
        ({"desired": desired(plan={"name": "a", "uid": "b"})}, "spec.desired.plan.generation: Required value"),
        ({"desired": {"mig": "Enabled"}}, "spec.desired.plan: Required value"),
        (
            {"desired": desired(disruption={**EVICTS, "allow": ["Everything"]})},
            "disruption.allow[0]: Unsupported value",
        ),
        ({"desired": desired(disruption={**EVICTS, "maxEvictions": 1})}, 'disruption.maxEvictions"'),
        ({"nodeName": ""}, "spec.nodeName in body should be at least 1 chars long"),
        ({"nodeUID": None}, "spec.nodeUID: Required value"),
        ({"sharing": {}}, 'unknown field "spec.sharing"'),
    ],
)
def test_a_bad_partition_is_refused_with_a_sentence(plane: ControlPlane, spec: dict[str, Any], said: str):
    answer = plane.admin.create(
        PARTITIONS, partition(gpu_name()) | {"spec": partition("x")["spec"] | spec}, dryRun="All"
    )
    assert answer.code in (400, 422)
    assert said in answer.message


@pytest.mark.parametrize("name", ["node-a-gpu-0", "mig-5c89852c", "gpu-", "gpu-a.b"])
def test_a_partition_is_named_by_its_gpu(plane: ControlPlane, name: str):
    answer = plane.admin.create(PARTITIONS, partition(name), dryRun="All")
    assert "is named by its GPU's UUID in lower case" in answer.message


@pytest.mark.parametrize("field", ["nodeName", "nodeUID"])
def test_a_partition_stays_on_its_node(plane: ControlPlane, field: str):
    name = made(plane)
    answer = plane.admin.patch(f"{PARTITIONS}/{name}", {"spec": {field: "another"}})
    ((at, said),) = answer.causes
    assert at == f"spec.{field}"
    assert f"{field} cannot change; delete the object, and the agent of the GPU's node makes it anew" in said
    assert plane.admin.patch(f"{PARTITIONS}/{name}", {"spec": {field: None}}).code == 422
    plane.admin.patch(f"{PARTITIONS}/{name}", {"spec": {"desired": desired()}}).object()


def test_a_status_has_room_for_all_that_is_known_of_a_gpu(plane: ControlPlane):
    name = made(plane)
    seen = plane.admin.apply(f"{PARTITIONS}/{name}/status", applied(name, STATUS), "migd-agent").object()
    assert seen["status"] == STATUS, "nothing is filled in"
    assert seen["metadata"]["generation"] == 1


@pytest.mark.parametrize("key", sorted(listings()))
def test_every_known_board_fits_and_comes_back_equal(plane: ControlPlane, key: str):
    name = made(plane)
    known = board(key)
    written = {**STATUS, "board": {**STATUS["board"], "profiles": [_written(p) for p in known.profiles]}}
    seen = plane.admin.apply(f"{PARTITIONS}/{name}/status", applied(name, written), "migd-agent").object()
    assert Board.of(_read(p) for p in seen["status"]["board"]["profiles"]) == known
    del seen["metadata"]["managedFields"]
    assert len(json.dumps(seen)) < 16 * 1024, "8,000 of them are in the operator's memory"


def _written(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "id": profile.profile_id,
        "computeSlices": profile.compute_slices,
        "memoryMiB": profile.memory_mib,
        "instancesMax": profile.instance_count_max,
        "engines": asdict(profile.engines),
        "placements": [place._asdict() for place in profile.placements],
    }


def _read(written: dict[str, Any]) -> Profile:
    return Profile(
        written["name"],
        written["id"],
        written["computeSlices"],
        written["memoryMiB"],
        Engines(**written["engines"]),
        written["instancesMax"],
        tuple(Placement(**place) for place in written["placements"]),
    )


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"phase": "Sleeping"}, "status.phase: Unsupported value"),
        ({"conditions": [condition("Accepted")]}, "status.conditions[0].type: Unsupported value"),
        ({"blockers": [{"reason": "InUse"}] * 65}, "status.blockers: Too many: 65"),
        ({"observed": {"summary": "x" * 1025}}, "status.observed.summary: Too long"),
        ({"victims": [{"namespace": "a", "name": "b", "uid": "c"}] * 2}, "status.victims[1]: Duplicate value"),
        ({"victims": [{"namespace": "a", "name": "b"}]}, "status.victims[0].uid: Required value"),
        ({"victims": [{"namespace": "a", "name": "b", "uid": str(n)} for n in range(257)]}, "victims: Too many: 257"),
        ({"evictions": [EVICTION, {**EVICTION, "code": 201}]}, "status.evictions[1]: Duplicate value"),
        ({"evictions": [{**EVICTION, "reason": "InUse"}]}, "status.evictions[0].reason: Unsupported value"),
        ({"evictions": [{"podUID": "c", "code": 201}]}, "status.evictions[0].at: Required value"),
        ({"evictions": [{**EVICTION, "podDisruptionBudgets": ["b"] * 17}]}, "podDisruptionBudgets: Too many: 17"),
        ({"previous": {"mig": True}}, "status.previous.mig"),
        ({"lastTransition": {"id": "a", "startedAt": NOW, "result": "Fine"}}, "status.lastTransition.result"),
    ],
)
def test_a_bad_status_is_refused(plane: ControlPlane, status: dict[str, Any], said: str):
    name = made(plane)
    answer = plane.admin.patch(f"{PARTITIONS}/{name}/status", {"status": status})
    assert answer.code == 422
    assert said in answer.message


def test_agent_and_operator_write_one_status_side_by_side(plane: ControlPlane):
    name = made(plane)
    at = f"{PARTITIONS}/{name}/status"
    plane.admin.apply(at, applied(name, STATUS), "migd-agent").object()
    both = plane.admin.apply(at, applied(name, OPERATORS), "migd-operator").object()
    assert {c["type"] for c in both["status"]["conditions"]} == {
        "Ready", "Drained", "Applied", "Advertised", "Assigned", "AgentAlive",
    }  # fmt: skip
    assert both["status"]["phase"] == "Ready"
    again = plane.admin.apply(at, applied(name, OPERATORS), "migd-operator").object()
    assert again["metadata"]["resourceVersion"] == both["metadata"]["resourceVersion"], "no change, no write"
    theirs = {"conditions": [condition("Assigned", "False", "Conflict")]}
    refused = plane.admin.apply(at, applied(name, theirs), "migd-agent")
    assert refused.code == 409
    assert 'conflicts with "migd-operator"' in refused.message
    less = plane.admin.apply(at, applied(name, {"conditions": [condition("Assigned")]}), "migd-operator").object()
    assert "evictions" not in less["status"]
    assert {c["type"] for c in less["status"]["conditions"]} == {
        "Ready", "Drained", "Applied", "Advertised", "Assigned",
    }  # fmt: skip


def test_an_answer_is_replaced_and_goes_when_it_is_not_said_again(plane: ControlPlane):
    name = made(plane)
    at = f"{PARTITIONS}/{name}/status"
    other = {**EVICTION, "podUID": "d"}

    def say(*answers: dict[str, Any]) -> list[dict[str, Any]]:
        said = {**({"evictions": list(answers)} if answers else {}), "conditions": [condition("Assigned")]}
        seen = plane.admin.apply(at, applied(name, said), "migd-operator").object()
        found: list[dict[str, Any]] = seen["status"].get("evictions", [])
        return found

    accepted = {"podUID": "c", "code": 201, "at": NOW}
    assert say(EVICTION, other) == [EVICTION, other]
    assert say(accepted, other) == [accepted, other]
    assert say(other) == [other]
    assert say() == []


def test_what_is_protected_in_a_wish_can_become_everything_and_nothing(plane: ControlPlane):
    """A selector is one value: none is no pod, an empty one is every pod, and the two must not be taken for another."""
    name = gpu_name()
    at = f"{PARTITIONS}/{name}"
    plane.admin.apply(at, partition(name), "migd-agent").object()
    without = {key: value for key, value in EVICTS.items() if key != "protect"}
    for disruption in (EVICTS, {**EVICTS, "protect": {}}, without, {**EVICTS, "protect": {}}, EVICTS):
        wish = {**partition(name), "spec": {"desired": desired(disruption=disruption)}}
        seen = plane.admin.apply(at, wish, "migd-operator").object()
        assert seen["spec"]["desired"]["disruption"] == disruption
        assert partition_of(seen).spec.desired == partition_of(partition(name, **wish["spec"])).spec.desired


def test_agent_and_operator_write_one_spec_side_by_side(plane: ControlPlane):
    name = gpu_name()
    at = f"{PARTITIONS}/{name}"
    agents = partition(name)
    plane.admin.apply(at, agents, "migd-agent").object()
    head = {key: agents[key] for key in ("apiVersion", "kind", "metadata")}
    wish = {**head, "spec": {"desired": desired(), "assignment": {"id": "0123abcd", "gpus": 1}}}
    seen = plane.admin.apply(at, wish, "migd-operator").object()
    assert seen["spec"]["nodeName"] == "node-a"
    assert seen["metadata"]["generation"] == 2
    again = plane.admin.apply(at, wish, "migd-operator").object()
    assert again["metadata"]["resourceVersion"] == seen["metadata"]["resourceVersion"], "no change, no write"
    seen = plane.admin.apply(at, {**head, "spec": {}}, "migd-operator").object()
    assert set(seen["spec"]) == {"nodeName", "nodeUID"}, "what the operator no longer says is gone"


def test_a_wish_alone_makes_no_partition(plane: ControlPlane):
    name = gpu_name()
    wish = {**partition(name), "spec": {"desired": desired()}}
    answer = plane.admin.apply(f"{PARTITIONS}/{name}", wish, "migd-operator")
    assert answer.code == 422
    assert "spec.nodeName: Required value" in answer.message


def test_an_agent_lists_and_watches_only_its_own_node(plane: ControlPlane, name: str):
    mine, other = made(plane, node=name), made(plane, node=f"{name}-b")
    selected = plane.admin.get(PARTITIONS, fieldSelector=f"spec.nodeName={name}").object()
    assert [item["metadata"]["name"] for item in selected["items"]] == [mine]
    since = selected["metadata"]["resourceVersion"]
    for touched in (other, mine):
        plane.admin.patch(f"{PARTITIONS}/{touched}/status", {"status": {"phase": "Idle"}}).object()
    events = plane.admin.watch(PARTITIONS, 10, fieldSelector=f"spec.nodeName={name}", resourceVersion=since)
    first = next(events)
    events.close()
    assert (first["type"], first["object"]["metadata"]["name"]) == ("MODIFIED", mine)
    assert plane.admin.get(PARTITIONS, fieldSelector="status.phase=Idle").code == 400


def test_a_partition_goes_with_its_node(plane: ControlPlane, name: str):
    node = plane.admin.create(
        "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    ).object()
    gpu = gpu_name()
    document = partition(gpu, node=name)
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}
    document["metadata"]["ownerReferences"] = [owner]
    plane.admin.create(PARTITIONS, document).object()
    since = plane.admin.get(PARTITIONS).object()["metadata"]["resourceVersion"]
    plane.admin.delete(f"/api/v1/nodes/{name}").object()
    events = plane.admin.watch(PARTITIONS, 60, fieldSelector=f"spec.nodeName={name}", resourceVersion=since)
    assert next(event["type"] for event in events if event["object"]["metadata"]["name"] == gpu) == "DELETED"


def test_kubectl_shows_what_goes_on_on_each_gpu(plane: ControlPlane, name: str):
    gpu = made(plane, node=name, desired=desired())
    status = {**STATUS, "phase": "WaitingForIdle", "reason": "InUse", "message": "b holds 3g.40gb@4"}
    plane.admin.apply(f"{PARTITIONS}/{gpu}/status", applied(gpu, status), "migd-agent").object()
    head, row = plane.kubectl("get", "gpart", gpu).stdout.splitlines()
    assert head.split() == ["NAME", "NODE", "GPU", "DESIRED", "OBSERVED", "PHASE", "IN-USE", "REASON", "AGE"]
    layout = ["3g.40gb", "3×1g.10gb"]
    assert row.split()[:-1] == [gpu, name, "3", *layout, *layout, "WaitingForIdle", "2/4", "InUse"]
    head, row = plane.kubectl("get", "gpupartitions", gpu, "-o", "wide").stdout.splitlines()
    assert head.split()[9:] == ["MODEL", "PLAN", "MESSAGE"]
    assert row.endswith("b holds 3g.40gb@4")
    assert "NVIDIA A100-SXM4-80GB   inference" in row
    assert gpu in plane.kubectl("get", "migd", "-o", "name").stdout
    assert plane.kubectl("get", "gpart", "--field-selector", f"spec.nodeName={name}", "-o", "name").stdout == (
        f"gpupartition.migd.dev/{gpu}\n"
    )


def test_kubectl_applies_and_edits_a_partition_strictly(plane: ControlPlane):
    document = partition(gpu_name())
    assert plane.kubectl("apply", "-f", "-", stdin=json.dumps(document)).returncode == 0
    document["spec"]["desird"] = {}
    refused = plane.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    assert refused.returncode != 0
    assert 'unknown field "spec.desird"' in refused.stderr
