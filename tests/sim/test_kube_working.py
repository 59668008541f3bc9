"""Workers, held leases, throttles and the virtual loop itself, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from migd.kube.cluster import ApiCluster, Identity
from migd.kube.errors import DeniedError, RefusedError, UnavailableError
from migd.kube.holding import Holding, Pace
from migd.kube.leases import Claim, Held, HeldBy
from migd.kube.queueing import Backoff
from migd.kube.transport import Throttle
from migd.kube.working import Worker
from migd.sim.cluster.faults import Chances, Faults
from migd.sim.cluster.server import SimCluster
from migd.sim.cluster.virtual_time import DeadlockError, run_virtually

STEADY = Backoff(first_s=1.0, most_s=8.0, jitter=0.0)


def test_an_hour_passes_in_no_time_and_in_order():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []

        async def after(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, round(loop.time(), 6)))

        await asyncio.gather(after(3600), after(1), after(60))
        return seen

    assert run_virtually(main()) == [(1, 1.0), (60, 60.0), (3600, 3600.0)]


def test_waiting_for_what_never_comes_is_said_and_not_waited_for():
    with pytest.raises(DeadlockError):
        run_virtually(asyncio.Event().wait())


def working(reconcile, at_once=4):
    """A worker that runs, to be used as `async with`."""

    class Running:
        async def __aenter__(self):
            self.failures = []
            failed = lambda key, error: self.failures.append((key, type(error)))  # noqa: E731
            self.worker = Worker(reconcile, at_once, STEADY, random.Random(1), failed)
            self.task = asyncio.create_task(self.worker.run())
            return self

        async def __aexit__(self, *_):
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    return Running()


def test_no_key_is_worked_on_twice_at_once_and_different_ones_are():
    async def main():
        running, most, done = set(), 0, []

        async def reconcile(key):
            nonlocal most
            assert key not in running
            running.add(key)
            most = max(most, len(running))
            await asyncio.sleep(1.0)
            running.discard(key)
            done.append(key)

        async with working(reconcile, at_once=2) as found:
            for key in "aabbccaa":
                found.worker.add(key)
            await asyncio.sleep(0.5)
            found.worker.add("a")
            await asyncio.sleep(10.0)
            assert found.worker.idle
        return most, sorted(done)

    assert run_virtually(main()) == (2, ["a", "a", "b", "c"])


def test_what_fails_comes_back_later_each_time_and_as_late_as_was_asked():
    async def main():
        loop, times = asyncio.get_running_loop(), []
        errors = [
            UnavailableError("GET /x", 429, "later", 5.0),
            UnavailableError("GET /x", 0, "refused", 0.0),
            DeniedError("GET /x", 403, "no"),
            RefusedError("GET /x", 422, "no"),
        ]

        async def reconcile(key):
            times.append(loop.time())
            if errors:
                raise errors.pop(0)
            return 100.0

        async with working(reconcile) as found:
            found.worker.add("a")
            await asyncio.sleep(200.0)
            assert [kind for _, kind in found.failures] == [
                UnavailableError,
                UnavailableError,
                DeniedError,
                RefusedError,
            ]
        return [round(b - a, 3) for a, b in itertools.pairwise(times)]

    assert run_virtually(main()) == [5.0, 2.0, 30.0, 30.0, 100.0]


def test_a_bug_ends_the_worker():
    async def main():
        async def reconcile(key):
            raise ZeroDivisionError

        async with working(reconcile) as found:
            found.worker.add("a")
            with pytest.raises(ExceptionGroup) as raised:
                await found.task
            assert raised.group_contains(ZeroDivisionError)

    run_virtually(main())


def test_requests_are_spread_after_a_burst():
    async def main():
        throttle, times = Throttle(per_s=10.0, burst=5), []

        async def ask():
            await throttle.turn()
            times.append(round(asyncio.get_running_loop().time(), 3))

        await asyncio.gather(*(ask() for _ in range(8)))
        await asyncio.sleep(60)
        await asyncio.gather(*(ask() for _ in range(5)))
        return times

    assert run_virtually(main()) == [0.0] * 5 + [0.1, 0.2, 0.3] + [60.3] * 5


class Scripted:
    """Leases that answer as told: how long a claim is held for, an error, or a float to wait first."""

    def __init__(self, *script):
        self.script = list(script)
        self.released = 0

    async def claim(self, claim):
        due = self.script.pop(0) if self.script else "held"
        if isinstance(due, float):
            await asyncio.sleep(due)
            due = "held"
        if isinstance(due, Exception):
            raise due
        now = asyncio.get_running_loop().time()
        return Held(now + claim.duration_s) if due == "held" else HeldBy(due, now + claim.duration_s)

    async def release(self, claim):
        self.released += 1


def held(leases, seconds):
    """What a holding was told, with the time, while it ran for so long."""

    async def main():
        loop, told = asyncio.get_running_loop(), []
        pace = Pace(renew_s=2.0, margin_s=5.0)
        holding = Holding(
            leases, Claim("l", "ns", "me", 15), pace, lambda now: told.append((round(loop.time(), 3), now))
        )
        task = asyncio.create_task(holding.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not holding.held
        return told

    return run_virtually(main())


def test_a_lease_is_held_renewed_and_given_up_at_the_end():
    leases = Scripted()
    assert held(leases, 61.0) == [(0.0, True), (61.0, False)]
    assert leases.released == 1


def test_an_end_does_not_wait_for_a_lease_that_cannot_be_given_up():
    class Hanging(Scripted):
        async def release(self, claim):
            await super().release(claim)
            await asyncio.Event().wait()

    async def main():
        leases = Hanging()
        task = asyncio.create_task(Holding(leases, Claim("l", "ns", "me", 15), Pace(margin_s=5.0)).run())
        await asyncio.sleep(10.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return leases.released, asyncio.get_running_loop().time()

    assert run_virtually(main()) == (1, 15.0)


def test_a_lease_that_cannot_be_renewed_counts_as_lost_before_it_expires():
    down = UnavailableError("GET /x", 0, "refused")
    leases = Scripted("held", *[down] * 6, "held")
    assert held(leases, 30.0) == [(0.0, True), (10.0, False), (14.0, True), (30.0, False)]


def test_an_answer_that_does_not_come_does_not_hide_that_the_lease_is_lost():
    leases = Scripted("held", 600.0)
    told = held(leases, 40.0)
    assert told[:2] == [(0.0, True), (10.0, False)]


def test_a_lease_of_another_is_waited_for_and_not_given_up():
    leases = Scripted("other", "other", "held")
    assert held(leases, 5.0)[0] == (4.0, True)
    waiting = Scripted(*["other"] * 9)
    assert held(waiting, 5.0) == []
    assert waiting.released == 0


def test_two_who_want_one_lease_never_have_it_at_once_whatever_goes_wrong():
    """Each looks at `held` before it acts; with hangs, lost answers and refusals by seed."""

    async def main(seed):

        server = SimCluster(seed, Faults(seed, Chances(request=0.3)))
        tasks, holdings = [], []
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                identity = Identity(name, name, name)
                cluster = ApiCluster(server.transport(name), identity, server.now, dice=random.Random(seed))
                holding = Holding(cluster, Claim("l", "ns", name, 15), Pace())
                holdings.append(holding)
                tasks.append(group.create_task(holding.run()))
            turns = 0
            for second in range(600):
                await asyncio.sleep(1.0)
                assert sum(h.held for h in holdings) <= 1, f"seed {seed}, second {second}"
                turns += any(h.held for h in holdings)
                if second == 200 and holdings[0].held:
                    tasks[0].cancel()
            assert turns > 200, f"seed {seed}: nobody had it"
            for task in tasks:
                task.cancel()

    for seed in range(20):
        run_virtually(main(seed))


def test_a_lease_that_is_ours_is_renewed_by_one_request_and_looked_at_only_where_that_is_refused():
    async def main():
        server = SimCluster()
        async with ApiCluster(server.transport("a"), Identity("a", "a", "a"), server.now) as cluster:
            claim = Claim("l", "ns", "a", 15)
            for _ in range(3):
                assert isinstance(await cluster.claim(claim), Held)
            path, merge = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l", "application/merge-patch+json"
            server.answer("admin", "PATCH", path, {}, {"metadata": {"annotations": {"x": "y"}}}, merge)
            assert isinstance(await cluster.claim(claim), Held)
            server.answer("admin", "DELETE", path, {}, None, "")
            assert isinstance(await cluster.claim(claim), Held)
            theirs = {"spec": {"holderIdentity": "b", "renewTime": "2026-01-01T00:00:09.000000Z"}}
            server.answer("admin", "PATCH", path, {}, theirs, merge)
            assert isinstance(await cluster.claim(claim), HeldBy)
        return [(r.verb, r.code) for r in server.requests if r.user == "a"]

    looked, renewed = ("get", 200), ("update", 200)
    assert run_virtually(main()) == [
        *[("get", 404), ("create", 201), renewed, renewed],
        *[("update", 409), looked, renewed],
        *[("update", 404), ("get", 404), ("create", 201)],
        *[("update", 409), looked],
    ]
