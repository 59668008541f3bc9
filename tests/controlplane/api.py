"""A plain client of the API server for tests: one request, one answer, nothing hidden."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode

from controlplane.certificates import Pair
from controlplane.processes import until

APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
_TIMEOUT_S: Final = 30.0
_FILLING_S: Final = 30.0
_GONE: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server answered. body: the object or the Status; warnings: its Warning headers."""

    code: int
    body: Json
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        return 200 <= self.code < 300

    @property
    def message(self) -> str:
        """What a Status says; "" in an object."""
        return str(self.body.get("message", ""))

    @property
    def causes(self) -> tuple[tuple[str, str], ...]:
        """The (field, message) pairs of a refusal."""
        causes = (self.body.get("details") or {}).get("causes") or ()
        return tuple((cause.get("field", ""), cause.get("message", "")) for cause in causes)

    def object(self) -> Json:
        """The object; AssertionError with the refusal where there is none."""
        assert self.ok, f"{self.code}: {self.message}"
        return self.body


class Api:
    """Somebody's view of the API server: by a client certificate or a bearer token."""

    def __init__(self, port: int, authority: Path, client: Pair | None = None, token: str = "") -> None:
        self._port = port
        self._tls = ssl.create_default_context(cafile=str(authority))
        if client is not None:
            self._tls.load_cert_chain(client.certificate, client.key)
        self._tls.sslsocket_class = _Socket
        self._kept = threading.local()  # a connection for each thread: most of what many of them cost is to make them
        self._headers = {"User-Agent": "migd-tests", "Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, **query: str) -> Answer:
        """GET."""
        return self.request("GET", path, query=query)

    def create(self, path: str, body: Json, **query: str) -> Answer:
        """POST; unknown and double fields are refused unless the query says otherwise, as with kubectl."""
        return self.request("POST", path, body, query={"fieldValidation": "Strict", **query})

    def replace(self, path: str, body: Json, **query: str) -> Answer:
        """PUT."""
        return self.request("PUT", path, body, query={"fieldValidation": "Strict", **query})

    def patch(self, path: str, body: object, content_type: str = MERGE, **query: str) -> Answer:
        """PATCH."""
        return self.request("PATCH", path, body, content_type, query)

    def apply(self, path: str, body: Json, manager: str, *, force: bool = False) -> Answer:
        """Server-side apply as a field manager."""
        query = {"fieldManager": manager, "fieldValidation": "Strict", "force": "true" if force else "false"}
        return self.request("PATCH", path, body, APPLY, query)

    def delete(self, path: str, **query: str) -> Answer:
        """DELETE."""
        return self.request("DELETE", path, query=query)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request; OSError where nobody answers."""
        headers = self._headers | ({} if body is None else {"Content-Type": content_type})
        text = None if body is None else json.dumps(body)
        kept: http.client.HTTPSConnection | None = getattr(self._kept, "connection", None)
        self._kept.connection = None
        if kept is not None:
            try:
                answer = _asked(kept, method, _with(path, query), text, headers)
            except _GONE:  # ended by the server since the last request, which it then has not taken
                kept = None
        if kept is None:
            kept = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls, timeout=_TIMEOUT_S)
            answer = _asked(kept, method, _with(path, query), text, headers)
        self._kept.connection = kept
        return answer

    def watch(self, path: str, seconds: int, **query: str) -> Watching:
        """The events of a watch until the server ends it after so many seconds; see `Watching`.

        An API server that has just started refuses watches until its caches are filled: it is asked again then.
        """
        asked = _with(path, {**query, "watch": "true", "timeoutSeconds": str(seconds)})
        begun: list[Watching] = []

        def begins() -> bool:
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self._port, context=self._tls, timeout=seconds + _TIMEOUT_S
            )
            try:
                connection.request("GET", asked, headers=self._headers)
                answer = connection.getresponse()
                if answer.status == 200:
                    begun.append(Watching(connection, answer))
                    return True
                assert answer.status == 429, answer.read().decode()
            except BaseException:
                connection.close()
                raise
            connection.close()
            return False

        assert until(begins, _FILLING_S, 1.0), f"the API server still refuses to watch {path}"
        return begun[0]


class Watching:
    """The events of one watch, as they come. `close` may be called by another thread: the events then end."""

    def __init__(self, connection: http.client.HTTPSConnection, answer: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._answer = answer
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Json:
        try:
            line = self._answer.readline()
        except (OSError, ValueError, http.client.HTTPException):
            if not self._closed:
                raise
            line = b""
        if line.endswith(b"\n"):
            found: Json = json.loads(line)
            return found
        self._connection.close()
        raise StopIteration

    def close(self) -> None:
        """Leave before the server ends it."""
        self._closed = True
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._connection.sock.shutdown(socket.SHUT_RDWR)


class _Socket(ssl.SSLSocket):
    """One that is closed with the thread, or the client, that has it: nobody else is told of its end."""

    def __del__(self) -> None:
        self.close()


def _asked(
    connection: http.client.HTTPSConnection, method: str, path: str, text: str | None, headers: Mapping[str, str]
) -> Answer:
    """One request and its answer; the connection is closed where that fails."""
    try:
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        said = answer.read()
    except BaseException:
        connection.close()
        raise
    return Answer(answer.status, _object(said), tuple(answer.headers.get_all("Warning") or ()))


def _with(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _object(said: bytes) -> Json:
    try:
        found = json.loads(said)
    except ValueError:
        return {"message": said.decode(errors="replace")}
    return found if isinstance(found, dict) else {"message": said.decode(errors="replace")}
