"""What is kept of who listens to what, when several threads keep it at once."""

from __future__ import annotations

import json
import threading

from migd.sim.cface.event_sets import FILE, EventSets

WAIT_S = 20.0


def test_what_is_kept_last_was_asked_for_last(tmp_path):
    (tmp_path / FILE).parent.mkdir(parents=True)
    kept, now = EventSets(tmp_path), {"sets": {"1": [0, {}]}}
    asked, go_on = threading.Event(), threading.Event()

    def slowly():
        found = {"7": dict(now)}
        asked.set()
        assert go_on.wait(WAIT_S)
        return found

    slow = threading.Thread(target=kept.save, args=(slowly,))
    slow.start()
    assert asked.wait(WAIT_S)
    now["sets"] = {**now["sets"], "2": [0, {}]}
    fast = threading.Thread(target=kept.save, args=(lambda: {"7": dict(now)},))
    fast.start()
    fast.join(0.05)
    go_on.set()
    slow.join(WAIT_S)
    fast.join(WAIT_S)
    assert json.loads((tmp_path / FILE).read_text())["7"] == now


def test_who_listens_to_nothing_any_more_is_forgotten(tmp_path):
    (tmp_path / FILE).parent.mkdir(parents=True)
    kept = EventSets(tmp_path)
    kept.save(lambda: {"7": {"sets": {"1": [0, {}]}}, "8": {"sets": {"2": [3, {}]}}})
    kept.save(lambda: {"7": {"sets": {}}})
    assert json.loads((tmp_path / FILE).read_text()) == {"8": {"sets": {"2": [3, {}]}}}
