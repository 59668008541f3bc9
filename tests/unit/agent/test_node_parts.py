"""Small parts of the node's agent: labels of nodes, the thread that blocks in the loop's place."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migd.agent.node.offloading import OneThread, inline
from migd.agent.node.registering import document, node_label

LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
PART = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
NAMES = st.lists(PART, min_size=1, max_size=4).map(".".join).filter(lambda name: len(name) <= 253)


@given(NAMES)
def test_every_name_of_a_node_makes_a_label(name):
    label = node_label(name)
    assert len(label) <= 63
    assert LABEL_VALUE.fullmatch(label)
    assert (label == name) == (len(name) <= 63)


def test_long_names_that_begin_alike_have_labels_of_their_own():
    one, other = "a" * 60 + ".one.example", "a" * 60 + ".other.example"
    assert node_label(one) != node_label(other)
    assert document(one, "u")["metadata"]["labels"]["migd.dev/node"] == node_label(one)
    assert document(one, "u")["spec"]["nodeName"] == one


def test_what_blocks_runs_in_one_thread_that_is_not_the_loops():
    async def main():
        off_loop = OneThread()
        found = await asyncio.gather(*(off_loop(threading.get_ident) for _ in range(5)))
        assert len(set(found)) == 1
        assert found[0] != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await off_loop(lambda: 1 // 0)
        assert await inline(threading.get_ident) == threading.get_ident()

    asyncio.run(main())


def test_what_blocks_does_not_block_the_loop_and_its_end_ends_with_it():
    async def main():
        release = threading.Event()
        work = asyncio.ensure_future(OneThread()(lambda: release.wait(30)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not work.done()
        release.set()
        assert await work
        hanging = threading.Event()
        abandoned = asyncio.ensure_future(OneThread()(lambda: hanging.wait(30)))
        await asyncio.sleep(0)
        abandoned.cancel()
        hanging.set()
        with pytest.raises(asyncio.CancelledError):
            await abandoned

    asyncio.run(main())
