"""GPUPartitions and plans in a cache: the values of `migd.plans`, shared where they are equal."""

from __future__ import annotations

from copy import deepcopy

import pytest
from kube_contract.objects import BOARD, NOW, OBSERVED, Json, condition, desired, partition, plan

from migd.kube.caches import Cache, Reader
from migd.kube.partitions import PARTITIONS, PLANS
from migd.kube.stored import Interner
from migd.plans.partitions import partition_document, partition_of
from migd.plans.plan import plan_of
from migd.plans.statuses import plan_status_of


def stored(document: Json, status: Json | None = None) -> Json:
    """The document as an API server has it, apart from all others."""
    found = deepcopy(document)
    name = found["metadata"]["name"]
    found["metadata"] |= {"uid": f"u-{name}", "resourceVersion": "3", "generation": 2}
    return found | ({"status": deepcopy(status)} if status else {})


STEP = {"name": "Create", "startedAt": NOW, "milliseconds": 5}
TOLD: Json = {
    "phase": "WaitingForIdle",
    "reason": "InUse",
    "board": BOARD,
    "observed": OBSERVED,
    "conditions": [condition("Ready", "False", "InUse"), condition("Assigned")],
    "victims": [{"namespace": "default", "name": "p", "uid": "u"}],
    "blockers": [{"reason": "InUse", "pid": 7}],
    "lastTransition": {"id": "t1", "from": "MIG off", "startedAt": NOW, "steps": [STEP]},
    "previous": {"mig": "Enabled", "instances": [{"profile": "3g.40gb", "placement": {"start": 0, "size": 4}}]},
}


def gpu(name: str) -> Json:
    wish = {**desired(), "disruption": {"policy": "Evict", "timeout": "30m", "protect": {"matchLabels": {"a": "b"}}}}
    body = partition(name, desired=wish, assignment={"id": "0123456789abcdef", "gpus": 8})
    body["metadata"] |= {"labels": {"a": "b"}, "annotations": {"migd.dev/hold": ""}}
    return stored(body, TOLD)


def test_a_cached_partition_equals_the_one_that_a_document_is():
    found = Reader(PARTITIONS, "me", Interner()).read(gpu("gpu-a")).value
    plain = partition_of(gpu("gpu-a"))
    assert found == plain
    assert partition_document(found) == partition_document(plain)
    assert (found.gpu, found.owned) == (plain.gpu, plain.owned)


def test_what_gpus_have_in_common_is_one_object():
    reader = Reader(PARTITIONS, "me", Interner())
    one, two = (reader.read(gpu(name)).value for name in ("gpu-a", "gpu-b"))
    assert one.spec.desired.disruption.protect is not None
    for of in (
        lambda p: p.spec.node_name,
        lambda p: p.spec.desired,
        lambda p: p.spec.assignment,
        lambda p: p.status.conditions,
        lambda p: p.status.board.profiles,
        lambda p: p.status.board.model,
        lambda p: p.status.observed.instances[0].placement,
        lambda p: p.gpu.board,
        lambda p: p.gpu.model,
        lambda p: p.gpu.instances[0].instance,
    ):
        assert of(one) is of(two)


def test_a_partition_that_cannot_be_read_is_named_with_what_is_wrong():
    cache = Cache(Reader(PARTITIONS, "me", Interner()))
    odd = gpu("gpu-odd")
    odd["status"]["phase"] = "Dancing"
    cache.listed([cache.read(odd), cache.read(gpu("gpu-a"))], "5")
    assert set(cache.objects) == {"gpu-a"}
    assert "gpu-odd: status.phase" in cache.unreadable["gpu-odd"]


PLAN_STATUS: Json = {"observedGeneration": 1, "conditions": [condition("Ready")]}


def test_a_plan_comes_with_its_status():
    found = Reader(PLANS, "me", Interner()).read(stored(plan("p", priority=3), PLAN_STATUS)).value
    assert (found.plan, found.status) == (plan_of(plan("p", priority=3)), plan_status_of(PLAN_STATUS))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (stored(plan("odd", rules=[]), PLAN_STATUS), "spec.rules: must not be empty"),
        (stored(plan("odd"), {"observedGeneration": "1"}), "status.observedGeneration"),
    ],
)
def test_a_plan_that_cannot_be_read_stays_visible_and_stops_no_other(document: Json, said: str):
    cache = Cache(Reader(PLANS, "me", Interner()))
    cache.listed([cache.read(stored(plan("odd"))), cache.read(stored(plan("p")))], "5")
    assert set(cache.objects) == {"odd", "p"}
    document["metadata"]["resourceVersion"] = "6"
    cache.event("MODIFIED", document)
    assert set(cache.objects) == {"odd", "p"}
    assert cache.unreadable == {}
    odd = cache.objects["odd"]
    assert (odd.value.plan, odd.uid, odd.annotations) == (None, document["metadata"]["uid"], {})
    assert said in odd.value.invalid
    assert odd.value.status == (plan_status_of(PLAN_STATUS) if said.startswith("spec") else None)


def test_a_plan_with_a_generated_name_is_read_like_any_other():
    document = stored(plan("p-x7k2p"))
    document["metadata"]["generateName"] = "p-"
    assert Reader(PLANS, "me", Interner()).read(document).value.plan == plan_of(plan("p-x7k2p"))
    of_a_gpu = stored(partition("gpu-1"))
    of_a_gpu["metadata"]["generateName"] = "gpu-"
    assert Reader(PARTITIONS, "me", Interner()).read(of_a_gpu).value.name == "gpu-1"
