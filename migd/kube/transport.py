"""The seam between us and an API server: one request, one answer; one watch, its events. Real or simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from migd.kube.errors import Json, KubeError, UnavailableError, error_of

APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
JSON: Final = "application/json"

Query = Mapping[str, str]
Answer = tuple[int, Mapping[str, str], Json]
"""HTTP status, headers (as Retry-After), and the object or Status."""


class Transport(Protocol):
    """Somebody's connection to an API server. Raises OSError (TimeoutError is one) where nobody answers in time.

    In plain types only, so that the simulated API server needs none of ours.
    """

    async def request(self, method: str, path: str, query: Query, body: Any, content_type: str) -> Answer:
        """One request. body: None for none. Cancelled or failed, it may have been done all the same."""
        ...

    def watch(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[Json]]:
        """A watch's events until the server ends it; leaving the context ends it from our side.

        Each event is {"type", "object"}. One of type ERROR carries a Status, with `code`, also where the watch itself
        was refused.
        """
        ...


class Throttle:
    """Lets so many requests a second through, and that many at once after a rest; the others wait their turn.

    Python's clients have none of it. Source: client-go's flowcontrol, with more room than its default of 5 and 10.
    """

    def __init__(self, per_s: float = 20.0, burst: int = 40) -> None:
        self._gap_s = 1.0 / per_s
        self._ahead_s = burst * self._gap_s
        self._free_at_s = 0.0

    async def turn(self) -> None:
        """Returns when it is the caller's turn."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + self._gap_s
        wait_s = self._free_at_s - self._ahead_s - now_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)


class Verbs:
    """The requests we make, with every answer that is no success raised as the error it is.

    timeout_s: for one request and its answer.
    """

    def __init__(self, transport: Transport, timeout_s: float, throttle: Throttle | None = None) -> None:
        self.transport = transport
        self._timeout_s = timeout_s
        self._throttle = throttle or Throttle()

    async def get(self, path: str, **query: str) -> Json:
        """The object, or one page of a list."""
        return await self._ask("GET", path, query)

    async def pages(self, path: str, query: Query, limit: int) -> AsyncIterator[tuple[list[Json], str]]:
        """All objects, so many at a time, each page with the resource version that all of them were taken at."""
        more: dict[str, str] = {}
        while True:
            answer = await self.get(path, **query, limit=str(limit), **more)
            metadata = answer["metadata"]
            yield answer.get("items") or [], str(metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            more = {"continue": metadata["continue"]}

    async def create(self, path: str, body: Json) -> Json:
        """The object as it was made; ConflictError where there is one of that name."""
        return await self._ask("POST", path, {"fieldValidation": "Strict"}, body)

    async def replace(self, path: str, body: Json) -> Json:
        """The object as it is now; ConflictError where the resourceVersion in the body is not the last one."""
        return await self._ask("PUT", path, {"fieldValidation": "Strict"}, body)

    async def apply(self, path: str, body: Json, manager: str, force: bool) -> Json:
        """Server-side apply. The object as it is now; ConflictError where another manager has a field."""
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        return await self._ask("PATCH", path, query, body, APPLY)

    async def patch(self, path: str, operations: Sequence[Json]) -> Json:
        """A JSON patch: all of it or nothing. ConflictError where a `test` in it does not hold."""
        return await self._ask("PATCH", path, {}, [*operations], JSON_PATCH)

    async def merge(self, path: str, body: Json) -> Json:
        """A JSON merge patch."""
        return await self._ask("PATCH", path, {}, body, MERGE)

    async def delete(self, path: str, uid: str, dry_run: bool = False) -> Json:
        """Delete this object and no other of its name; ConflictError where that is another one.

        dry_run: rights and policies are asked, and nothing is deleted.
        """
        dry = {"dryRun": ["All"]} if dry_run else {}
        return await self._ask("DELETE", path, {}, {"preconditions": {"uid": uid}, **dry})

    async def _ask(self, method: str, path: str, query: Query, body: Any = None, content_type: str = JSON) -> Json:
        await self._throttle.turn()
        request = f"{method} {path}"
        try:
            async with asyncio.timeout(self._timeout_s):
                code, headers, answer = await self.transport.request(method, path, query, body, content_type)
        except TimeoutError:
            raise UnavailableError(request, 0, f"no answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise UnavailableError(request, 0, str(error) or type(error).__name__) from error
        if not 200 <= code < 300:
            raise error_of(request, code, headers, answer)
        return answer


def error_in(event: Json, path: str) -> KubeError:
    """What a watch event of type ERROR says."""
    status: Json = event["object"]
    return error_of(f"WATCH {path}", int(status.get("code") or 500), {}, status)
