"""Looking at the pods that must go, and calling for their eviction, one by one; answers are kept for the next look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType
from typing import Final

from migd.kube.budgets import BUDGETS, selects
from migd.kube.errors import (
    BudgetError,
    ConflictError,
    DeniedError,
    EndingError,
    KubeError,
    MissingError,
    UnavailableError,
)
from migd.kube.pods import PODS, Pod
from migd.kube.ports import Cluster
from migd.kube.stored import Stored, Where
from migd.plans.partitions import BUDGETS_MAX, NotGoing
from migd_operator.evicting import Ask, verdict
from migd_operator.facts import Answer

BUDGET_S: Final = 5.0
"""So long before a pod that a budget holds is asked for again, as kubectl drain has it."""
PERSON_S: Final = 30.0
"""So long before what a person has to cure is tried again: two budgets on one pod, missing rights, a pod to keep."""
_log = logging.getLogger(__name__)


class Evictor:
    """Asks for evictions, and keeps what it was answered, by pod. failed: told of each request that failed.

    counted: told of each call, as "accepted" or "budget"; see docs/operator.md.
    """

    def __init__(
        self,
        cluster: Cluster,
        wall_clock: Callable[[], datetime],
        failed: Callable[[KubeError], None] = lambda _error: None,
        counted: Callable[[str], None] = lambda _answer: None,
    ) -> None:
        self._cluster = cluster
        self._wall_clock = wall_clock
        self._failed = failed
        self._counted = counted
        self._answers: dict[str, Answer] = {}
        self._not_before_s = float("-inf")

    @property
    def answers(self) -> Mapping[str, Answer]:
        """What is known now, by the pod's uid; a copy."""
        return MappingProxyType(dict(self._answers))

    @property
    def busy(self) -> bool:
        """Whether the API server wants to be asked no more for now."""
        return self._not_before_s > self._now_s()

    @property
    def again_s(self) -> float | None:
        """In how many seconds a pod may be asked for again; None where none waits for that."""
        now_s = self._now_s()
        times_s = (one.again_s for one in self._answers.values() if not one.going and one.again_s is not None)
        return min((time_s - now_s for time_s in times_s if time_s > now_s), default=None)

    def forget(self) -> None:
        """Somebody else may act from now on: what we know of what was called and what was not is worth nothing."""
        self._answers.clear()

    def keep(self, uids: Collection[str]) -> None:
        """Forget all others: nobody asks for them any more."""
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in uids}

    async def ask(self, ask: Ask) -> bool:
        """Look at one pod, and call where that is asked and it may go; whether there is something new to decide on.

        Raises nothing of the API server's: what it answers is an answer, or that it has none now.
        """
        uid = ask.pod.uid
        before = self._answers.get(uid)
        known = Answer(self._wall_clock()) if before is None else before
        # what an earlier process has called may go by that
        known = replace(known, spent=ask.counted and (before is None or before.spent))
        try:
            found = await self._cluster.get(PODS, ask.pod.name, ask.pod.namespace)
        except KubeError as error:
            self._failed(error)
            answer = self._unseen(known, error)
        else:
            going, why = verdict(ask, found)
            if going:
                answer = replace(known, going=True, reason=None, budgets=(), message=why, again_s=None)
            else:
                assert found is not None, "what is gone is going"
                known = replace(known, fit=not why, spent=False)  # it is there and does not end: nobody has evicted it
                if why:
                    answer = self._refused(known, why)
                else:
                    answer = await self._call(ask, found, known) if ask.call else Answer(known.at, fit=True)
        answer = self._answers[uid] = replace(answer, at=self._since(before, answer))
        return before is None or replace(before, again_s=None) != replace(answer, again_s=None)

    async def _call(self, ask: Ask, pod: Stored[Pod], known: Answer) -> Answer:
        """One eviction call. Where this is cut short, it may have been accepted."""
        self._answers[ask.pod.uid] = replace(known, spent=True)
        now_s = self._now_s()
        try:
            await self._cluster.evict(pod, ask.grace_s)
        except KubeError as error:
            _log.info("%s", error)
            self._failed(error)
            return await self._not_now(pod, known, error, now_s)
        _log.info("pod %s is evicted for plan %s", pod.key, " and ".join(ask.plans))
        self._counted("accepted")
        message = f"evicted for plan {' and '.join(ask.plans)}"
        return Answer(known.at, fit=True, going=True, code=201, message=message, spent=True)

    async def _not_now(self, pod: Stored[Pod], known: Answer, error: KubeError, now_s: float) -> Answer:
        """What a call that was not accepted leaves to say."""
        plain = Answer(known.at, fit=True, code=error.code or None, message=error.said)
        match error:
            case BudgetError():
                self._counted("budgets" if error.several else "budget")
                again_s = now_s + (PERSON_S if error.several else BUDGET_S)
                names = await self._budgets_of(pod)
                return replace(plain, reason="DrainBlocked", budgets=names, message=error.message, again_s=again_s)
            case MissingError():
                self._counted("gone")
                return replace(plain, going=True, message="it is gone")
            case ConflictError():  # most likely another pod has its name: the next look tells
                self._counted("conflict")
                return replace(plain, fit=False, reason="Waiting", again_s=now_s)
            case EndingError():
                self._counted("ending")
                message = "its namespace is being deleted, and the pod with it"
                return replace(plain, reason="Waiting", message=message, again_s=now_s + BUDGET_S)
            case DeniedError():
                self._counted("denied")
                return replace(plain, reason="NoPermission", again_s=now_s + PERSON_S)
            case UnavailableError():
                self._counted("busy")
                # one that was only too many is not done; of any other nobody knows
                return replace(self._busy(plain, error), spent=error.code != 429)
            case _:
                self._counted("refused")
                return replace(plain, reason="DrainBlocked", again_s=now_s + PERSON_S)

    async def _budgets_of(self, pod: Stored[Pod]) -> tuple[str, ...]:
        """The budgets that have a pod, by name; none where they cannot be read: what was answered names one as well."""
        try:
            found = await self._cluster.list(BUDGETS, Where(namespace=pod.namespace))
        except KubeError as error:
            _log.warning("the budgets of pod %s cannot be named: %s", pod.key, error)
            self._failed(error)
            return ()
        return tuple(one.name for one in found if selects(one.value, pod.value.labels))[:BUDGETS_MAX]

    def _unseen(self, known: Answer, error: KubeError) -> Answer:
        """What a look that failed leaves to say."""
        _log.info("%s", error)
        known = replace(known, fit=False, code=None, message=error.said, budgets=())
        if isinstance(error, UnavailableError):
            return self._busy(known, error)
        reason: NotGoing = "NoPermission" if isinstance(error, DeniedError) else "DrainBlocked"
        return replace(known, reason=reason, again_s=self._now_s() + PERSON_S)

    def _busy(self, known: Answer, error: UnavailableError) -> Answer:
        """The API server says when it may be asked again; until then it is asked for no other pod either."""
        wait_s = error.retry_after_s if error.code == 429 else max(error.retry_after_s, BUDGET_S)
        self._not_before_s = again_s = self._now_s() + wait_s
        message = f"the API server is busy; asked again after {wait_s:g} s: {error.said}"
        return replace(known, reason="Waiting", message=message, again_s=again_s)

    def _refused(self, known: Answer, why: str) -> Answer:
        again_s = self._now_s() + PERSON_S
        return replace(known, code=None, reason="DrainBlocked", budgets=(), message=why, again_s=again_s)

    def _since(self, before: Answer | None, answer: Answer) -> datetime:
        """Since when it is answered so: the same answer again is no news."""
        same = before is not None and _said(before) == _said(answer)
        return before.at if before is not None and same else self._wall_clock()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _said(answer: Answer) -> object:
    return answer.going, answer.code, answer.reason, answer.budgets, answer.message
