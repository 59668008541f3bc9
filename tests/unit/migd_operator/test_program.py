"""The edges of the program: options, pages, logs, and what the docs say of them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from migd.kube.errors import UnavailableError
from migd_operator.logs import log_json
from migd_operator.metering import Meters
from migd_operator.probing import HEARD_MAX_S, pages
from migd_operator.program import options_of
from migd_operator.reconciling import Health

PAGE = (Path(__file__).parents[3] / "docs" / "operator.md").read_text()
CONFIG = ["--kubeconfig", "config"]


def test_options_are_taken_as_the_docs_say():
    found = options_of([*CONFIG, "--listen", "[::1]:9000", "--identity", "me"])
    assert (found.host, found.port, found.namespace, found.identity) == ("::1", 9000, "migd-system", "me")
    assert (options_of(CONFIG).host, options_of(CONFIG).port) == ("0.0.0.0", 8080)
    named = set(re.findall(r"^\| `(--[a-z]+)` \|", PAGE, re.MULTILINE))
    assert named == {"--kubeconfig", "--namespace", "--listen", "--identity"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*CONFIG, "--listen", "8080"], "write it as ADDR:PORT"),
        ([*CONFIG, "--listen", "a:99999"], "write it as ADDR:PORT"),
        ([], "--kubeconfig FILE"),
    ],
)
def test_options_that_cannot_be_used_are_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit, match="2"):
        options_of(words)
    assert said in capsys.readouterr().err


def asked(health: Health, path: str, meters: Meters | None = None) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        async with TestClient(TestServer(pages(lambda: health, meters or Meters()))) as client:
            answer = await client.get(path)
            return answer.status, await answer.text()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("health", "alive", "ready"),
    [
        (Health({"plans": 3.0}, leader=True, settled=True), (200, "ok\n"), (200, "leader\n")),
        (Health({"plans": 70.0}, leader=False, settled=True), (200, "ok\n"), (200, "follower\n")),
        (
            Health({"nodes": 1.0, "plans": HEARD_MAX_S + 1}, leader=True, settled=False),
            (503, "nothing was heard of plans for 301 s\n"),
            (503, "the caches are not complete, or nobody is known to lead yet\n"),
        ),
    ],
)
def test_health_and_readiness_say_why_they_are_red(health: Health, alive: object, ready: object):
    assert (asked(health, "/healthz"), asked(health, "/readyz")) == (alive, ready)


def test_every_metric_is_explained():
    meters = Meters()
    meters.failed(UnavailableError("GET /x", 429, "later"))
    code, text = asked(Health({"plans": 1.5}, leader=True, settled=True), "/metrics", meters)
    assert code == 200
    assert 'migd_api_errors_total{code="429",error="Unavailable"} 1.0' in text
    assert 'migd_watch_age_seconds{kind="plans"} 1.5' in text
    there = set(re.findall(r"^# TYPE (\w+) (?!\w*created)", text, re.MULTILINE))
    told = set(re.findall(r"^\| `(migd_\w+)", PAGE, re.MULTILINE))
    assert {name for name in there if not name.endswith("_created")} == told


def test_logs_are_json_a_line_each_with_what_was_raised():
    stream, root = io.StringIO(), logging.getLogger()
    before, level = root.handlers, root.level
    try:
        log_json(stream)
        logging.getLogger("migd.kube").warning("%s is away", "it")
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("migd").exception("a bug")
    finally:
        root.handlers, _ = before, root.setLevel(level)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["logger"]) == ("it is away", "warning", "migd.kube")
    assert re.fullmatch(r"\d{4}-.*Z", first["time"])
    assert "ValueError: odd" in second["exception"]
