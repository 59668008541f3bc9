"""What others ask the operator over HTTP: whether it is alive, whether it is ready, and its metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from migd_operator.metering import Meters
from migd_operator.reconciling import Health

HEARD_MAX_S: Final = 300.0
"""An API server that is well is heard once a minute; a watch that was deaf for five is dead, and a new start helps."""
_TEXT: Final = "text/plain"


def alive(health: Health) -> str:
    """Why the process should be started anew; "" where it need not. That it answers at all shows that it runs."""
    deaf = [f"{name} for {age_s:.0f} s" for name, age_s in sorted(health.ages_s.items()) if age_s > HEARD_MAX_S]
    return f"nothing was heard of {', '.join(deaf)}" if deaf else ""


def pages(health: Callable[[], Health], meters: Meters) -> web.Application:
    """/healthz, /readyz and /metrics."""

    async def healthz(_request: web.Request) -> web.Response:
        why = alive(health())
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}\n", content_type=_TEXT)

    async def readyz(_request: web.Request) -> web.Response:
        now = health()
        if not now.settled:
            return web.Response(status=503, text="the caches are not complete, or nobody is known to lead yet\n")
        return web.Response(text="leader\n" if now.leader else "follower\n", content_type=_TEXT)

    async def metrics(_request: web.Request) -> web.Response:
        now = health()
        body = meters.page(now.leader, dict(now.ages_s))
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


@asynccontextmanager
async def serving(host: str, port: int, app: web.Application) -> AsyncIterator[int]:
    """Serve the pages as long as the context lasts; it gives the port. port: 0 takes a free one.

    OSError where the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, shutdown_timeout=1.0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
