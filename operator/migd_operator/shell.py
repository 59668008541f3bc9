"""The kopf shell: it watches GPUPartitionPlans and wakes the operator when one changes. It writes nothing.

kopf runs on a loop and in a thread of its own: when it ends, by design it cancels whatever else runs on its loop, and
some answers of an API server end it. It is started again then; the operator's own caches see all that kopf sees.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast

import kopf

from migd.kube.connecting import credentials
from migd.plans.plan import API_VERSION

PLURAL: Final = "gpupartitionplans"
LOGIN_FOR: Final = timedelta(minutes=10)
"""Bound tokens are replaced in their file long before they expire; kopf would read it again only after a 401."""
_STOP_S: Final = 5.0
_AGAIN_FIRST_S: Final = 1.0
_AGAIN_MOST_S: Final = 60.0
_IDENTITY: Final = cast("Any", "migd-operator")
"""Among peers, of which there are none. Not given, kopf asks for the name of our user, and ends where it has none."""
_log = logging.getLogger(__name__)


def registered(kubeconfig: Path | None, wake: Callable[[], None]) -> kopf.OperatorRegistry:
    """A registry of our own with our two handlers: how to log in, and whom to wake. wake is called on kopf's loop."""
    registry = kopf.OperatorRegistry()
    group, version = API_VERSION.split("/")

    @kopf.on.login(registry=registry)
    async def _login(**_: object) -> kopf.ConnectionInfo:
        ours = await credentials(kubeconfig)
        scheme, _space, token = (ours.authorization or "").partition(" ")
        return kopf.ConnectionInfo(
            server=ours.server,
            ca_path=ours.ca,
            insecure=not ours.verify,
            scheme=scheme or None,
            token=token or None,
            certificate_path=ours.certificate,
            private_key_path=ours.key,
            expiration=datetime.now(UTC) + LOGIN_FOR,
        )

    @kopf.on.event(group, version, PLURAL, registry=registry)
    async def _changed(**_: object) -> None:
        wake()

    return registry


def configured() -> kopf.OperatorSettings:
    """kopf's settings. Each is there for a measured reason: no peers, no scans, no posts, and ends to all waits."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True  # we have a lease
    settings.scanning.disabled = True  # no watch of all namespaces and definitions
    settings.posting.enabled = False  # we post events ourselves
    settings.persistence.finalizer = "migd.dev/operator"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="migd.dev")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix="migd.dev", key="last-handled")
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    settings.process.ultimate_exiting_timeout = None  # it would kill the process; we end it ourselves
    return settings


async def run_shell(kubeconfig: Path | None, wake: Callable[[], None]) -> None:
    """Run kopf until cancelled. Where it ends by itself it is started again, after waits that grow to a minute."""
    loop = asyncio.get_running_loop()
    wait_s = _AGAIN_FIRST_S
    while True:
        began_s = loop.time()
        why = await _one_life(registered(kubeconfig, lambda: _soon(loop, wake)))
        wait_s = _AGAIN_FIRST_S if loop.time() - began_s > _AGAIN_MOST_S else min(2 * wait_s, _AGAIN_MOST_S)
        _log.warning("kopf ended: %s; again in %.0f s, plans are seen without it meanwhile", why, wait_s)
        await asyncio.sleep(wait_s)


async def _one_life(registry: kopf.OperatorRegistry) -> str:
    """Run kopf in a thread until it ends; why it did. When cancelled it is told to stop, and given a few seconds."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    stop = threading.Event()
    thread = threading.Thread(target=_live, args=(registry, stop, loop, ended), name="kopf", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(ended)
    finally:
        stop.set()
        if not ended.done():
            await asyncio.wait({ended}, timeout=_STOP_S)


def _live(
    registry: kopf.OperatorRegistry,
    stop: threading.Event,
    loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[str],
) -> None:
    why = "it stopped"
    try:
        asyncio.run(
            kopf.operator(
                identity=_IDENTITY,
                registry=registry,
                settings=configured(),
                clusterwide=True,
                standalone=True,
                stop_flag=stop,
            )
        )
    except Exception as error:
        why = f"{type(error).__name__}: {error}"

    def tell() -> None:
        if not ended.done():
            ended.set_result(why)

    _soon(loop, tell)


def _soon(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    """Do it on that loop; where the loop has ended meanwhile, nobody needs it any more."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        return
