"""`make demo` tells its story, README shows what it prints, and its tables are those of the definitions."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from columns import age, found, get

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
TOLD = [
    "1. Three nodes",
    "gpu-a100-02  0             7g.80gb                    Idle   1/1",
    "Besides, 12 of 12 pods of embedder wait",
    "2. A wish that cannot be",
    "infeasible  0/3    0/6   False  Infeasible",
    "Nearest that fits: 2×3g.40gb or",
    "3. One that can",
    "gpu-a100-02  1     7g.80gb                                       7g.80gb    4×1g.10gb 3g.40gb          InUse",
    "6 GPUs on 3 nodes would change, into 3g.40gb 4×1g.10gb: 5 kept, 5 destroyed, 25 created.",
    "4. Go.",
    "gpu-a100-01  closed  Changing",
    "gpu-a100-01  open    Ready",
    "gpu-h100-01  closed  Changing",
    "gpu-a100-02  open    WaitingForIdle",
    "gpu-h100-01  open    Ready           2/3          3g.40gb 4×1g.10gb",
    "7g.80gb            WaitingForIdle  1/1     InUse",
    "waits: 7g.80gb@0 is held by pod default/nightly-train-",
    "gpu-a100-02  closed  Changing",
    "gpu-a100-02  open    Ready           3/3          3g.40gb 4×1g.10gb",
    "5. All is as wished.",
    "THE SAME AS BEFORE",
    "yes",
    "$ kubectl get nodes -L migd.dev/",
    "gpu-h100-01  8                  2                  ready  nvidia.com/mig-1g.10gb 8, nvidia.com/mig-3g.40gb 2",
    "12 of 12 pods of embedder run now.",
    "By the UUIDs of MIG devices it was: 5 kept, 5 destroyed, 25 created.",
    "Closed at the same time: 1 node (maxUnavailable: 1), none for longer than",
    "6. Small ones everywhere",
    "1 pod of 15 to be evicted",
    "gpu-a100-02  closed  Draining",
    "DrainBlocked: pod default/reranker-",
    "gpu-a100-02  open    Blocked",
    "DrainTimeout: not drained within 1m:",
    "7. The budget goes",
    "gpu-a100-02  open    Ready           3/3          7×1g.10gb",
    "The 14 others have the MIG device that they had.",
    "make cluster",
]


@pytest.fixture(scope="module")
def story() -> str:
    command = [sys.executable, str(ROOT / "examples/demo.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_the_demo_tells_its_story(story: str):
    at = 0
    unwrapped = re.sub(r"\n  +(?=\S)", " ", story)
    for line in TOLD:
        where = unwrapped.find(line, at)
        assert where >= 0, f"missing, or not in this order: {line}\n{story}"
        at = where + 1


def test_the_demo_fits_a_terminal_and_one_look(story: str):
    assert max(map(len, story.splitlines())) <= 120
    assert len(story.splitlines()) <= 125


def test_what_readme_shows_of_the_demo_is_what_it_prints(story: str):
    """Each line in its order, without times and UUIDs; a line of … stands for lines left out."""
    (block,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = [_plain(line) for line in story.splitlines()]
    at = 0
    for part in re.split(r"^…\n", block, flags=re.MULTILINE):
        lines = [_plain(line) for line in part.strip("\n").splitlines()]
        starts = [n for n in range(at, len(printed)) if printed[n : n + len(lines)] == lines]
        assert starts, f"not printed, or not in this order:\n{part}\n{story}"
        at = starts[0] + len(lines)


def _plain(line: str) -> str:
    line = re.sub(r"\b(gpu|MIG)-[0-9a-f]{8}[0-9a-f…-]*", r"\1-…", line)
    return re.sub(r"\s+", " ", re.sub(r"\b(\d+[smh])+\b", "T", line)).strip()


def test_a_table_has_the_columns_of_the_definition_and_cuts_long_names():
    one = {
        "metadata": {"name": "gpu-5c89852c-0000", "creationTimestamp": (NOW - timedelta(minutes=3)).isoformat()},
        "spec": {"nodeName": "node-a", "desired": {"summary": "7×1g.10gb"}},
        "status": {"board": {"index": 0}, "phase": "Pending", "reason": "Waiting"},
    }
    heads, row = get("gpupartitions", [one], NOW).splitlines()
    assert heads.split() == ["NAME", "NODE", "GPU", "DESIRED", "OBSERVED", "PHASE", "IN-USE", "REASON", "AGE"]
    assert row.split() == ["gpu-5c89852c…", "node-a", "0", "7×1g.10gb", "Pending", "Waiting", "3m"]
    assert row.index("Pending") == heads.index("PHASE")


def test_a_path_finds_the_entry_of_a_list_by_its_type():
    document = {
        "status": {"conditions": [{"type": "Accepted", "status": "True"}, {"type": "Ready", "status": "False"}]}
    }
    assert found(document, '.status.conditions[?(@.type=="Ready")].status') == "False"
    assert found(document, '.status.conditions[?(@.type=="Stalled")].status') is None
    assert found(document, ".status.nodes.summary") is None


def test_ages_are_as_kubectl_writes_them():
    written = [age(s) for s in (0, 119.9, 120, 200, 599, 600, 10_799, 10_800, 172_799, 172_800)]
    assert written == ["0s", "119s", "2m", "3m20s", "9m59s", "10m", "179m", "3h", "47h", "2d"]
