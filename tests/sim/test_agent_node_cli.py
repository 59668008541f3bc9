"""`migd agent` as a command: its options, what it says where it cannot start, and a whole life against an API server.

The API server is the simulated one behind a socket, so time is real: what is waited for is polled with a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from migd.agent.locking import exclusive
from migd.sim.cluster.server import SimCluster

ROOT = Path(__file__).parents[2]
NODE = "node-a"


class ServedCluster:
    """The simulated API server behind a socket, in a thread of its own."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    def __enter__(self) -> ServedCluster:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.server, self._stop = SimCluster(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        transport, query = self.server.transport("agent"), dict(request.query)
        if query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            async with transport.watch(request.path, query) as events:
                async for event in events:
                    with contextlib.suppress(ConnectionError):
                        await response.write(json.dumps(event).encode() + b"\n")
            return response
        text = await request.text()
        body = json.loads(text) if text else None
        code, headers, found = await transport.request(
            request.method, request.path, query, body, request.headers.get("Content-Type", "")
        )
        return web.json_response(found, status=code, headers=dict(headers))

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        async def ask() -> Any:
            return self.server.answer("admin", method, path, {}, body, "application/json")

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(30)[2]

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        named = {"name": "x"}
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{**named, "user": {"token": "t"}}],
            "contexts": [{**named, "context": {"cluster": "x", "user": "x"}}],
        }
        path.write_text(yaml.safe_dump(body))
        return path


def until(holds: Callable[[], Any], within_s: float = 60.0) -> Any:
    """What a look says once it says anything, within so many seconds."""
    asking = Retrying(
        retry=retry_if_result(lambda found: not found), wait=wait_fixed(0.05), stop=stop_after_delay(within_s)
    )
    return asking(holds)


@pytest.fixture(autouse=True)
def _same_log() -> Iterator[None]:
    """A command in this process sets up the process's log: afterwards it is as before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def served() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "migd", "agent", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which node is this? Name it with --node, or in NODE_NAME"),
        (("--node", NODE), "which API server? Name a kubeconfig with --kubeconfig, or run as a pod"),
        (("--node", NODE, "--listen", "8080"), "--listen 8080: write ADDR:PORT"),
        (("--node", NODE, "--listen", ":65536"), "--listen :65536: write ADDR:PORT"),
        (("--node", NODE, "--listen", "x:y"), "--listen x:y: write ADDR:PORT"),
        (("--node", NODE, "--simulate", "a100-80gb"), "--simulate needs --state FILE here"),
        (("--node", NODE, "--simulate", "nonsense", "--state", "m.json"), "nonsense"),
        (("--node", NODE, "--bogus"), "No such option"),
    ],
)
def test_a_wrong_call_is_answered_with_what_to_do(cli, words, said, monkeypatch, tmp_path):
    for name in ("NODE_NAME", "POD_NAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    ran = cli.bare("agent", *words)
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_kubeconfig_that_is_not_there_or_is_none_is_named(cli, tmp_path):
    here = ("agent", "--node", NODE, "--state-dir", str(tmp_path / "s"), "--kubelet-dir", "/k")
    ran = cli.bare(*here, "--kubeconfig", str(tmp_path / "gone"))
    assert ran.code == 2
    assert f"cannot connect by the kubeconfig {tmp_path / 'gone'}" in ran.err
    (tmp_path / "odd").write_text("[1, 2")
    ran = cli.bare(*here, "--kubeconfig", str(tmp_path / "odd"))
    assert ran.code == 2
    assert "odd" in ran.err
    assert "Traceback" not in ran.err


def test_the_help_names_every_option_and_where_it_comes_from(cli):
    ran = cli.bare("agent", "--help")
    assert ran.code == 0
    for word in ("--node", "NODE_NAME", "--kubeconfig", "--namespace", "--state-dir", "--kubelet-dir", "--listen"):
        assert word in ran.out
    for word in ("--simulate", "--state", "--pod", "POD_NAME"):
        assert word in ran.out


def test_another_migd_at_work_on_this_machine_is_named(cli, tmp_path):
    with exclusive(tmp_path):
        ran = cli.bare("agent", "--node", NODE, "--state-dir", str(tmp_path), "--kubeconfig", "/dev/null")
    assert ran.code == 4
    assert re.search(rf"process {os.getpid()} holds .*/lock: it is changing this machine's GPUs", ran.err)


def test_a_node_that_the_cluster_does_not_have_is_an_error(served, cli, tmp_path):
    here = ("--kubelet-dir", str(tmp_path), "--kubeconfig", str(served.kubeconfig(tmp_path)))
    ran = cli.bare("agent", "--node", NODE, "--simulate", "a100-80gb", "--state", str(cli.state), *here)
    assert ran.code == 2
    assert f"the cluster has no node {NODE}: see `kubectl get nodes`" in ran.err


def test_an_address_that_is_taken_is_an_error(served, cli, tmp_path):
    here = ("--kubelet-dir", str(tmp_path), "--kubeconfig", str(served.kubeconfig(tmp_path)))
    listen = ("--listen", f"127.0.0.1:{served.port}")
    ran = cli.bare("agent", "--node", NODE, "--simulate", "a100-80gb", "--state", str(cli.state), *here, *listen)
    assert ran.code == 1
    assert f"cannot listen on 127.0.0.1:{served.port}" in ran.err


def test_a_life_from_start_to_sigterm(served, cli, tmp_path):
    """It registers, answers probes, keeps others off the machine, logs JSON, and gives its lease up when ended."""
    served.admin("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    here = ("--kubelet-dir", str(tmp_path), "--kubeconfig", str(served.kubeconfig(tmp_path)))
    machine = ("--simulate", "2xa100-80gb", "--state", str(cli.state))
    with program("--node", NODE, "--pod", "pod-a", "--listen", "127.0.0.1:0", *here, *machine) as process:
        assert process.stderr is not None
        lines = []
        threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
        port = until(lambda: next((json.loads(line)["port"] for line in list(lines) if '"listening"' in line), 0))
        at = "/apis/migd.dev/v1alpha1/gpupartitions"
        until(lambda: ["status" in one for one in served.admin("GET", at)["items"]] == [True, True])

        def probe(path: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        assert probe("/healthz") == (200, "ok\n")
        until(lambda: probe("/readyz") == (200, "ok\n"))
        assert 'migd_agent_gpus{phase="Idle"} 2.0' in probe("/metrics")[1]
        plan = cli.plan("{gpus: {all: true}, instances: [{profile: 7g.80gb}]}")
        ran = cli("apply", "-f", plan)
        assert ran.code == 4, "the agent has the machine"
        assert f"process {process.pid} holds" in ran.err
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    lease = served.admin("GET", f"/apis/coordination.k8s.io/v1/namespaces/migd-system/leases/{NODE}")
    assert lease["spec"]["holderIdentity"] == ""
    for line in lines:
        assert json.loads(line)["node"] == NODE
