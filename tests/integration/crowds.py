"""Tests of one module that run at the same time, each on nodes of its own: most of what they do is to wait.

`at_once` makes a test of a story; the first that is asked for starts the cluster and all selected stories of its
module, and each test then waits for its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from controlplane.clusters import Cluster
from integration.acting import introduced

STORY_S: Final = 480.0
"""So long a story may take at most, beside all the others."""


@dataclass(frozen=True)
class Needs:
    """What a story takes. nodes: how many of its own; spec: the GPUs of each."""

    story: Callable[..., None]
    nodes: int
    spec: str


def at_once(nodes: int = 1, spec: str = "a100-80gb") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a story: a function of a `Cluster` and of the names of its nodes."""

    def made(story: Callable[..., None]) -> Callable[..., None]:
        def test(crowd: Crowd) -> None:
            crowd.end_of(story)

        functools.update_wrapper(test, story)
        del test.__wrapped__  # type: ignore[attr-defined]  # or pytest would take the story's arguments for fixtures
        test.needs = Needs(story, nodes, spec)  # type: ignore[attr-defined]
        return test

    return made


class Crowd:
    """The stories of one module under way."""

    def __init__(self, under_way: Mapping[Callable[..., None], Future[None]]) -> None:
        self._under_way = under_way

    def end_of(self, story: Callable[..., None]) -> None:
        """Wait for one; what it raised is raised."""
        self._under_way[story].result(STORY_S)


def needs_of(request: pytest.FixtureRequest) -> list[Needs]:
    """What the selected stories of the requesting module need."""
    found = (getattr(getattr(item, "function", None), "needs", None) for item in _of_module(request))
    return [one for one in found if isinstance(one, Needs)]


@contextmanager
def crowd_of(needs: Sequence[Needs], folder: Path, programs: Path, **options: Any) -> Iterator[Crowd]:
    """A cluster with nodes for these stories, and the stories under way on it."""
    names: dict[Callable[..., None], list[str]] = {}
    spec: dict[str, str] = {}
    for one in needs:
        names[one.story] = [f"n{len(spec) + i}" for i in range(one.nodes)]
        spec |= dict.fromkeys(names[one.story], one.spec)
    with (
        Cluster(folder, list(spec), spec=spec, programs=programs, **options) as cluster,
        ThreadPoolExecutor(max(1, len(needs))) as pool,
    ):
        introduced(cluster, *spec)
        yield Crowd({one.story: pool.submit(one.story, cluster, *names[one.story]) for one in needs})


def _of_module(request: pytest.FixtureRequest) -> list[pytest.Item]:
    return [item for item in request.session.items if item.nodeid.startswith(f"{request.node.nodeid}::")]
