"""What a kubeconfig's credentials do as they change; the rest of a connection is tried on a real API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web

from migd.kube.connecting import HttpTransport
from migd.kube.transport import JSON


def test_a_token_in_a_file_is_read_again(tmp_path):
    assert asyncio.run(heard(tmp_path, reread_s=0.0)) == ["Bearer one", "Bearer two", "Bearer two"]


def test_a_token_in_a_file_is_not_read_at_every_request(tmp_path):
    assert asyncio.run(heard(tmp_path, reread_s=3600.0)) == ["Bearer one"] * 3


async def heard(folder: Path, reread_s: float) -> list[str]:
    """What a server hears while the token is first replaced, then missing."""
    said: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        said.append(request.headers["Authorization"])
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/version", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    token = folder / "token"
    kubeconfig = written(folder, f"http://127.0.0.1:{runner.addresses[0][1]}", token)
    try:
        token.write_text("one")
        async with await HttpTransport.connect("test", kubeconfig, reread_s) as transport:
            await transport.request("GET", "/version", {}, None, JSON)
            token.write_text("two")
            await transport.request("GET", "/version", {}, None, JSON)
            token.unlink()
            await transport.request("GET", "/version", {}, None, JSON)
    finally:
        await runner.cleanup()
    return said


def written(folder: Path, server: str, token: Path) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"tokenFile": str(token)}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document))
    return path
