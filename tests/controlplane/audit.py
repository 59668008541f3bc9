"""What was asked of the API server, as its audit log has it: the only witness of who wrote what."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from controlplane.api import Api
from controlplane.processes import until

POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # what is secret is named, not shown
        {
            "level": "Metadata",
            "resources": [
                {"group": "", "resources": ["secrets", "serviceaccounts/token"]},
                {"group": "authentication.k8s.io", "resources": ["tokenreviews"]},
            ],
        },
        {"level": "Request", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "Metadata"},
    ],
}
"""Every request by who, what and answer; those that write with their bodies."""

WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_WITHIN_S: Final = 10.0
_EVERY_S: Final = 0.02  # a look at the file is cheap


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was answered.

    user: as authenticated, "system:serviceaccount:migd-system:migd-agent". verb: "patch", "watch", …
    resource: plural, with its subresource: "gpupartitions/status". name: "" for lists and creates without one.
    code: the HTTP status. body: what was sent, None where the policy does not keep it. at_s: when it was answered.
    """

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    code: int
    uri: str
    body: Any
    at_s: float = 0.0

    @property
    def writes(self) -> bool:
        """Whether it asked for a change; a refused one too."""
        return self.verb in WRITES


class AuditLog:
    """The audit log of one API server, read on from where the last look ended."""

    def __init__(self, path: Path, admin: Api) -> None:
        self._path = path
        self._admin = admin
        self._seen: list[Request] = []
        self._offset = 0
        self._reading = threading.Lock()  # stories that run at once look at one log

    def requests(self) -> tuple[Request, ...]:
        """Every request answered until now, in the order of the log.

        The log may lag behind the answers by a moment: a mark of our own is waited for first.
        """
        mark, begun = uuid.uuid4().hex, len(self._seen)
        self._admin.get("/version", mark=mark)
        assert until(lambda: self._shows(mark, begun), _WITHIN_S, _EVERY_S), f"the audit log lags by {_WITHIN_S:.0f} s"
        return tuple(self._seen)

    def since(self, earlier: tuple[Request, ...]) -> tuple[Request, ...]:
        """The requests after an earlier look."""
        return self.requests()[len(earlier) :]

    def logged(self, begun: int) -> list[Request]:
        """What is in the log by now, after so many requests: nothing is asked for it, so it may lag."""
        self._read()
        return self._seen[begun:]

    def _shows(self, mark: str, begun: int) -> bool:
        self._read()
        return any(mark in request.uri for request in self._seen[begun:])

    def _read(self) -> None:
        with self._reading, self._path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")  # a line still being written is for the next look
            self._offset += len(whole) + 1 if whole else 0
            self._seen += requests_in(whole.decode().splitlines())


def requests_in(lines: Iterable[str]) -> Iterable[Request]:
    """The answered requests of audit log lines."""
    for line in lines:
        event = json.loads(line)
        if event["stage"] == "ResponseComplete":
            yield _request(event)


def _request(event: dict[str, Any]) -> Request:
    about = event.get("objectRef") or {}
    resource = about.get("resource", "")
    return Request(
        user=event["user"].get("username", ""),
        verb=event["verb"],
        group=about.get("apiGroup", ""),
        resource=f"{resource}/{about['subresource']}" if about.get("subresource") else resource,
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        uri=event["requestURI"],
        body=event.get("requestObject"),
        at_s=datetime.fromisoformat(event["stageTimestamp"]).timestamp(),
    )
