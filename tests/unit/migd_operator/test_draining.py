"""One pod asked for: what is looked at first, what each answer means, and when it is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from unit.migd_operator.drains import PodServer, victim
from unit.migd_operator.fleets import NOW

from migd.kube.errors import (
    BudgetError,
    ConflictError,
    DeniedError,
    EndingError,
    KubeError,
    RefusedError,
    UnavailableError,
)
from migd.plans.plan import Disruption
from migd.sim.cluster.virtual_time import run_virtually
from migd_operator.draining import Evictor
from migd_operator.evicting import Ask
from migd_operator.facts import Answer

LOOK = Ask(victim("u"), "n1", ("p",), (Disruption(policy="Evict", gracePeriodSeconds=7),))  # type: ignore[call-arg]
CALL = Ask(LOOK.pod, LOOK.node, LOOK.plans, LOOK.rules, counted=True, call=True)


def played(test: Callable[[Evictor, PodServer, list[str]], Awaitable[None]], *, there: bool = True) -> PodServer:
    server, counted = PodServer(), list[str]()
    if there:
        server.add("u")

    async def main() -> None:
        cluster: Any = server
        await test(Evictor(cluster, lambda: NOW, counted=counted.append), server, counted)

    run_virtually(main())
    return server


def test_a_look_asks_for_nothing_and_a_call_looks_again_and_then_evicts_with_the_plans_grace():
    async def test(evictor: Evictor, server: PodServer, counted: list[str]) -> None:
        assert await evictor.ask(LOOK)
        assert evictor.answers["u"] == Answer(NOW, fit=True)
        assert not await evictor.ask(LOOK), "nothing is new"
        assert await evictor.ask(CALL)
        answer = evictor.answers["u"]
        assert (answer.going, answer.code, answer.reason, answer.spent) == (True, 201, None, True)
        assert counted == ["accepted"]

    server = played(test)
    assert server.requests == ["get pod-u", "get pod-u", "get pod-u", "evict pod-u"]
    assert server.calls == [("u", 7)]


def test_a_pod_of_the_same_name_is_never_called():
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        server.add("another", name="pod-u")
        await evictor.ask(CALL)
        answer = evictor.answers["u"]
        assert (answer.going, answer.code) == (True, None)

    assert played(test).calls == []


@pytest.mark.parametrize("looked_at_before", [True, False])
def test_a_pod_that_ends_already_is_not_called_and_counts_where_an_earlier_process_may_have(looked_at_before: bool):
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        if looked_at_before:
            await evictor.ask(LOOK)
        server.ends("u")
        await evictor.ask(CALL)
        answer = evictor.answers["u"]
        assert (answer.going, answer.code, answer.spent) == (True, None, not looked_at_before)

    assert played(test).calls == []


def test_what_must_be_kept_is_looked_at_again_after_a_while():
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        server.pods.clear()
        server.add("u", limits={"cpu": "1"})
        await evictor.ask(CALL)
        answer = evictor.answers["u"]
        assert (answer.fit, answer.reason, answer.code, answer.spent) == (False, "DrainBlocked", None, False)
        assert evictor.again_s == 30.0
        server.add("u")
        assert await evictor.ask(LOOK)
        assert evictor.answers["u"] == Answer(NOW, fit=True)

    assert played(test).calls == []


def of(error: KubeError) -> Callable[[Any], None]:
    def refuse(_pod: Any) -> None:
        raise error

    return refuse


ANSWERS: list[tuple[KubeError, str, dict[str, Any], float | None]] = [
    (
        BudgetError("POST", 429, "Cannot evict.", cause="needs 2"),
        "budget",
        {"code": 429, "reason": "DrainBlocked", "budgets": ("guard", "other"), "message": "needs 2"},
        5.0,
    ),
    (BudgetError("POST", 500, "more than one", several=True), "budgets", {"code": 500, "reason": "DrainBlocked"}, 30.0),
    (UnavailableError("POST", 429, "too many", 7.0), "busy", {"code": 429, "reason": "Waiting", "spent": False}, 7.0),
    (UnavailableError("POST", 503, "no leader", 1.0), "busy", {"code": 503, "reason": "Waiting", "spent": True}, 5.0),
    (UnavailableError("POST", 0, "reset", 1.0), "busy", {"code": None, "reason": "Waiting", "spent": True}, 5.0),
    (EndingError("POST", 403, "terminating"), "ending", {"code": 403, "reason": "Waiting"}, 5.0),
    (DeniedError("POST", 403, "forbidden"), "denied", {"code": 403, "reason": "NoPermission"}, 30.0),
    (ConflictError("POST", 409, "another"), "conflict", {"code": 409, "reason": "Waiting", "fit": False}, None),
    (RefusedError("POST", 400, "bad grace"), "refused", {"code": 400, "reason": "DrainBlocked"}, 30.0),
]


@pytest.mark.parametrize(("error", "counts", "said", "again_s"), ANSWERS, ids=[f"{a[1]}-{a[0].code}" for a in ANSWERS])
def test_each_answer_is_told_by_what_can_be_done_about_it(
    error: KubeError, counts: str, said: dict[str, Any], again_s: float | None
):
    async def test(evictor: Evictor, server: PodServer, counted: list[str]) -> None:
        server.budgets = {"guard": {"app": "a"}, "other": {}, "theirs": {"app": "b"}}
        server.answer = of(error)
        await evictor.ask(LOOK)
        await evictor.ask(CALL)
        answer = evictor.answers["u"]
        assert {name: getattr(answer, name) for name in said} == said
        assert (answer.going, counted, evictor.again_s) == (False, [counts], again_s)
        too_many = isinstance(error, UnavailableError) and error.code == 429
        assert evictor.busy == too_many, "what fails for one pod may be well for the others"
        await asyncio.sleep(again_s or 1)
        assert not evictor.busy
        server.answer = lambda _pod: None
        await evictor.ask(CALL)
        assert evictor.answers["u"].code == 201

    played(test)


def test_the_same_answer_again_is_no_news_but_for_when_it_is_asked_for_next():
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        server.answer = of(BudgetError("POST", 429, "no", cause="no"))
        assert await evictor.ask(CALL)
        await asyncio.sleep(5)
        assert not await evictor.ask(CALL)
        assert evictor.again_s == 5.0

    assert len(played(test).calls) == 2


def test_a_pod_that_cannot_be_seen_is_not_called():
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        for error, reason, again_s in (
            (DeniedError("GET", 403, "forbidden"), "NoPermission", 30.0),
            (UnavailableError("GET", 429, "too many", 3.0), "Waiting", 3.0),
        ):

            def before(_request: str, error: KubeError = error) -> None:
                raise error

            server.before = before
            await evictor.ask(CALL)
            answer = evictor.answers["u"]
            assert (answer.fit, answer.reason, evictor.again_s) == (False, reason, again_s)

    assert played(test).calls == []


def test_a_call_that_is_cut_short_may_have_been_accepted():
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        await evictor.ask(LOOK)

        def hang(request: str) -> None:
            if request.startswith("evict"):
                raise asyncio.CancelledError

        server.before = hang
        with pytest.raises(asyncio.CancelledError):
            await evictor.ask(CALL)
        assert evictor.answers["u"].spent

    played(test)


def test_what_nobody_asks_for_any_more_is_forgotten_and_all_of_it_when_somebody_else_may_act():
    async def test(evictor: Evictor, server: PodServer, _counted: list[str]) -> None:
        await evictor.ask(LOOK)
        evictor.keep({"u"})
        assert "u" in evictor.answers
        evictor.keep(())
        assert not evictor.answers
        await evictor.ask(LOOK)
        evictor.forget()
        assert not evictor.answers

    played(test)
