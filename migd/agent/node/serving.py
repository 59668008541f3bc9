"""What the agent answers over HTTP: whether it lives, whether it is ready, and its figures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from migd.agent.node.metrics import CONTENT_TYPE, Metrics

Check = Callable[[], str]
"""What is wrong, in a sentence; "" for nothing."""


class ListenError(Exception):
    """The address cannot be listened on; the text says which and why."""


def application(metrics: Metrics, alive: Check, ready: Check) -> web.Application:
    """/healthz and /readyz answer 200 "ok", or 503 with what is wrong; /metrics as Prometheus reads it."""

    async def healthz(_: web.Request) -> web.Response:
        return _checked(alive)

    async def readyz(_: web.Request) -> web.Response:
        return _checked(ready)

    async def figures(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", figures)])
    return app


def _checked(check: Check) -> web.Response:
    wrong = check()
    return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)


@asynccontextmanager
async def served(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve while within; the port (the one chosen, where 0 was asked for). ListenError where that is not possible."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        found: int = runner.addresses[0][1]
        yield found
    finally:
        await runner.cleanup()
