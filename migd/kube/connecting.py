"""Connections to a real API server: the only place that uses the `kubernetes` package, and that opens a socket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

import aiohttp
import yaml
from kubernetes.aio import client, config

from migd.kube.errors import Json
from migd.kube.transport import JSON, Answer, Query, Transport

_NO_KUBECONFIG: Final = (AttributeError, KeyError, TypeError, ValueError)
"""What the package raises for a YAML document that is no kubeconfig."""
_CONNECT_S: Final = 10.0
_REREAD_S: Final = 60.0  # as the package does for pods
_FOREVER: Final = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)  # a watch's silence is watched above this


class HttpTransport(Transport):
    """A connection to an API server as `kubernetes.aio` is configured; use it as a context, which closes it.

    The package gives what is easy to get wrong: kubeconfigs and in-cluster credentials, tokens that are read again
    before they expire, TLS, proxies. Its generated classes are left out: we send and get documents.
    """

    def __init__(self, configuration: client.Configuration, user_agent: str) -> None:
        self._client = client.ApiClient(configuration)
        self._client.user_agent = user_agent

    @classmethod
    async def connect(cls, user_agent: str, kubeconfig: Path | None = None, reread_s: float = _REREAD_S) -> Self:
        """By a kubeconfig; without one as a pod of the cluster. ConnectError says what is missing.

        reread_s: so often the kubeconfig is read again, where it has a token or gets one: tokens expire.
        """
        configuration = await _configured(kubeconfig)
        if kubeconfig is not None and configuration.api_key:
            configuration.refresh_api_key_hook = _rereading(kubeconfig, reread_s)
        configuration.retries = None  # we do: our waits are bounded, told and tested
        return cls(configuration, user_agent)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()
        await asyncio.sleep(0)  # connections that were aborted are gone after one turn of the loop

    async def request(self, method: str, path: str, query: Query, body: Any, content_type: str) -> Answer:
        """See `Transport`."""
        response = await self._send(method, path, query, body, content_type)
        async with response:
            try:
                return response.status, dict(response.headers), _object(await response.read())
            except aiohttp.ClientError as error:
                raise ConnectionError(str(error) or type(error).__name__) from error

    @asynccontextmanager
    async def watch(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[Json]]:
        """See `Transport`."""
        response = await self._send("GET", path, query, None, JSON)
        try:
            yield _events(response)
        finally:
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()  # a TLS goodbye would wait for a server that may be gone
            response.close()

    async def _send(self, method: str, path: str, query: Query, body: Any, content_type: str) -> aiohttp.ClientResponse:
        headers = {"Accept": JSON, "Content-Type": content_type}
        asked = await self._client.param_serialize(
            method,
            path + (f"?{urlencode(query)}" if query else ""),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        _, url, headers, body, _ = asked
        try:
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=_FOREVER
            )
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        response: aiohttp.ClientResponse = answer.response
        return response


@dataclass(frozen=True, slots=True)
class Credentials:
    """What another client in this process needs to be who we are; None for what is not used. Tokens age: ask anew.

    server: the URL. authorization: the header, as "Bearer …". The others are paths of PEM files. verify: check the
    server's certificate.
    """

    server: str
    authorization: str | None
    ca: str | None
    certificate: str | None
    key: str | None
    verify: bool


async def credentials(kubeconfig: Path | None = None) -> Credentials:
    """Ours, as `HttpTransport.connect` finds them; ConnectError says what is missing."""
    found = await _configured(kubeconfig)
    authorization = await found.get_api_key_with_prefix("BearerToken")
    return Credentials(
        found.host, authorization, found.ssl_ca_cert, found.cert_file, found.key_file, bool(found.verify_ssl)
    )


async def _configured(kubeconfig: Path | None) -> client.Configuration:
    configuration = client.Configuration()
    await _load(kubeconfig, configuration)
    return configuration


async def _load(kubeconfig: Path | None, configuration: client.Configuration) -> None:
    try:
        if kubeconfig is not None:
            await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError, yaml.YAMLError, *_NO_KUBECONFIG) as error:
        where = f"the kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
        raise ConnectError(f"cannot connect by {where}: {error}") from error


class ConnectError(Exception):
    """There are no usable credentials; the text says which were looked for."""


def in_cluster() -> bool:
    """Whether this process is a pod of a cluster."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def _rereading(kubeconfig: Path, every_s: float) -> Callable[[client.Configuration], Awaitable[None]]:
    """A hook that reads credentials again; the package itself reads a kubeconfig's tokenFile once."""
    clock = asyncio.get_running_loop().time
    again_at = clock() + every_s

    async def reread(configuration: client.Configuration) -> None:
        nonlocal again_at
        if clock() < again_at:
            return
        again_at = clock() + every_s
        with suppress(ConnectError):  # it is being replaced: what we have is good for a while
            await _load(kubeconfig, configuration)

    return reread


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The events of a watch, a line each; a refusal as one event."""
    if response.status != 200:
        yield {"type": "ERROR", "object": {"code": response.status, **_object(await response.read())}}
        return
    try:
        async for line in response.content:
            yield json.loads(line)
    except aiohttp.ClientError as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    except ValueError as error:  # half a line: the connection was cut
        raise ConnectionError(f"the stream broke off: {error}") from error


def _object(said: bytes) -> Json:
    """An answer's object, or a Status of what else was said."""
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": said[:1024].decode(errors="replace").strip()}
