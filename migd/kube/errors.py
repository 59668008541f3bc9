"""What can go wrong with the API server, named by what the caller can do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]
RETRY_S: Final = 1.0
"""How long to wait before a retry where the API server does not say."""


class KubeError(Exception):
    """A request to the API server did not do what was asked. str() says what, on what, and why.

    request: as "PATCH /api/v1/nodes/node-a". code: the HTTP status, 0 where nobody answered.
    """

    def __init__(self, request: str, code: int, said: str) -> None:
        self.request = request
        self.code = code
        self.said = said
        super().__init__(f"{request}: {f'{code}: ' if code else ''}{said}")


class UnavailableError(KubeError):
    """Nobody answered, or too many ask (429), or the server is not well (5xx): try again after `retry_after_s`.

    A write may have been done all the same: look before it is done again.
    """

    def __init__(self, request: str, code: int, said: str, retry_after_s: float = RETRY_S) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(request, code, said)


class MissingError(KubeError):
    """The object, its namespace or its kind is not there: look again, and perhaps create it."""


class ConflictError(KubeError):
    """Somebody else wrote meanwhile, owns a field, or has that name already: look again, then decide anew."""


class StaleError(KubeError):
    """What was to be read or watched from is too old to be known: list again."""


class DeniedError(KubeError):
    """The rights or a policy do not allow it: a person has to; tell them, and try again slowly."""


class EndingError(DeniedError):
    """The namespace is being deleted, and takes nothing new: what is in it goes by itself."""


class BudgetError(KubeError):
    """A PodDisruptionBudget does not let the pod be evicted now: ask again in a few seconds, and say so.

    message: which budget and why, as far as the API server tells; budgets are looked up by their selectors to be
    sure. several: more than one budget has the pod, which the API server refuses whatever they allow: a person has to.
    """

    def __init__(self, request: str, code: int, said: str, several: bool = False, cause: str = "") -> None:
        self.several = several
        self.message = cause or said
        super().__init__(request, code, f"{said} {cause}".strip())


class RefusedError(KubeError):
    """The API server does not take this content, and will not take it the next time either."""


class UnreadableError(KubeError):
    """The object is there, and its document is none of its kind: a person has to look, or a newer migd."""


def error_of(request: str, code: int, headers: Mapping[str, str], body: Json) -> KubeError:
    """The error of an answer that is no success, by its code and its Status.

    Source: apimachinery's errors.go. A policy denies with 422 and no cause of a field unless it says a reason; a
    JSON patch whose test fails answers 422 as well, with a text of its own, and so does an apply to another object
    of that name than the one whose uid is in the body. A budget refuses with 429 or, where its status makes no
    sense, with 403; both say the cause.
    """
    said = str(body.get("message") or body.get("reason") or "no message")
    causes = {str(cause.get("reason", "")): str(cause.get("message", "")) for cause in _causes(body)}
    if _BUDGET in causes or (code == 500 and _SEVERAL in said):
        return BudgetError(request, code, said, _BUDGET not in causes, causes.get(_BUDGET, ""))
    if code == 429 or code >= 500:
        return UnavailableError(request, code, said, _retry_after_s(headers, body))
    if code == 403 and _ENDING in causes:
        return EndingError(request, code, said)
    if code in (401, 403):
        return DeniedError(request, code, said)
    if code == 422 and (_is_failed_test(said, body) or _is_another(said)):
        return ConflictError(request, code, said)
    if code == 422 and "ValidatingAdmissionPolicy" in said:
        return DeniedError(request, code, said)
    return _BY_CODE.get(code, RefusedError)(request, code, said)


_BY_CODE: Final[Mapping[int, type[KubeError]]] = {404: MissingError, 409: ConflictError, 410: StaleError}
_BUDGET: Final = "DisruptionBudget"  # the API's policy/v1, DisruptionBudgetCause
_SEVERAL: Final = "more than one PodDisruptionBudget"
_ENDING: Final = "NamespaceTerminating"
_TEST_FAILED: Final = "the server rejected our request due to an error in our request"
"""What a JSON patch that cannot be applied is answered with, whatever the cause."""


def _causes(body: Json) -> Sequence[Json]:
    return (body.get("details") or {}).get("causes") or ()


def _is_failed_test(said: str, body: Json) -> bool:
    return said == _TEST_FAILED and not _causes(body)


def _is_another(said: str) -> bool:
    return "metadata.uid: Invalid value" in said and "immutable" in said


def _retry_after_s(headers: Mapping[str, str], body: Json) -> float:
    """Retry-After in seconds, as header or in the Status; RETRY_S where neither is a number."""
    for found in (headers.get("Retry-After"), (body.get("details") or {}).get("retryAfterSeconds")):
        try:
            return max(0.0, float(str(found)))
        except ValueError:
            continue
    return RETRY_S
