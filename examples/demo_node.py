"""What migd does on one machine, in a short story on 8 simulated GPUs: `make demo-node`.

Every command is real and can be repeated.
The simulated machine lives in demo.json in the working folder and stays there, so that the reader can go on with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = os.path.relpath(HERE / "gpu-operator-configmap.yaml")
STATE = "demo.json"
MEANING = {
    0: "",
    1: "something failed",
    2: "bad input or usage",
    3: "cannot be met on this hardware: nothing was touched",
    4: "blocked: nothing was touched",
    5: "there are changes to make",
    -9: "killed, as by kill -9",
}
BOLD, DIM, PLAIN = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")


def tell(text: str) -> None:
    """A part of the story."""
    print(f"\n{BOLD}{text}{PLAIN}", flush=True)


def migd(command: str, expect: int = 0) -> None:
    """Print a command, run it, print what it answers and how it ended. expect: its exit code in this story."""
    words = [*shlex.split(command), "--state", STATE]
    print(f"\n{DIM}$ migd {shlex.join(words)}{PLAIN}", flush=True)
    columns = str(min(shutil.get_terminal_size((120, 24)).columns, 140))
    ended = subprocess.run(
        [sys.executable, "-m", "migd", *words],
        check=False,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": columns},
    )
    if ended.returncode != expect:
        sys.exit(f"this demo expected exit code {expect}, not {ended.returncode}: please report it")
    if MEANING[ended.returncode]:
        print(f"{DIM}(exit code {ended.returncode}: {MEANING[ended.returncode]}){PLAIN}", flush=True)


def fresh() -> None:
    """Remove what an earlier demo left."""
    for left in (STATE, f".{STATE}.lock"):
        Path(left).unlink(missing_ok=True)
    shutil.rmtree(f"{STATE}.d", ignore_errors=True)


def main() -> None:
    """The story."""
    began = time.monotonic()
    fresh()
    print("What migd does, on simulated GPUs that refuse what real ones refuse. Every command here is real and can be")
    print(
        "repeated; after `make demo-node` migd is .venv/bin/migd. Only the simulated durations are cut, to a twentieth."
    )
    tell(f"1. Eight A100s, simulated, in the file {STATE}. They are fresh: MIG is off.")
    migd("gpus --simulate 8xa100-80gb")
    migd("sim switch duration_scale=0.05")

    tell(f"2. {FILE} is a file as people have it: a ConfigMap of the GPU Operator.\n   What would it do?")
    migd(f"plan -f {FILE} -c all-balanced", expect=5)

    tell(
        "3. One of its entries can never fit, though its compute slices add up: 3 + 3 + 1 = 7.\n"
        "   migd says so before it touches anything, with what would fit instead."
    )
    migd(f"apply -f {FILE} -c all-3g.40gb", expect=3)

    tell("4. The balanced one fits.")
    migd(f"apply -f {FILE} -c all-balanced")

    tell("5. Somebody starts to work on a small instance of GPU 3.")
    migd("sim hold --gpu 3 --start 3 --command 'python serve.py' --container 3f1c2d9a80b7")
    migd("gpus")

    tell("6. One instance for each GPU would need its place. It is blocked, by name. (--wait-idle would wait.)")
    migd(f"apply -f {FILE} -c all-7g.80gb", expect=4)

    tell("7. Seven small ones leave it alone: what fits the wish stays, and what is in use stays for certain.")
    migd(f"apply -f {FILE} -c all-1g.10gb")
    migd("gpus")

    tell("8. A crash. The next change will be killed in the middle of GPU 2, at its second new instance.")
    migd("sim fault nvmlDeviceCreateGpuInstanceWithPlacement --action kill --after --gpu 2 --nth 2")
    migd(f"apply -f {FILE} -c all-balanced", expect=-9)
    migd("gpus")

    tell("9. The same command again finishes it. Nothing has to be cleaned up by hand.")
    migd(f"apply -f {FILE} -c all-balanced")

    tell("10. And back: rollback swaps the present and the previous layout. The busy instance has never noticed.")
    migd("rollback")
    migd("gpus")

    print(
        f"\nThat was migd in {time.monotonic() - began:.0f} seconds. The machine is still there; go on with it:\n\n"
        f"  .venv/bin/migd gpus -o json --state {STATE}\n"
        f"  .venv/bin/migd plan -f examples/plans/mixed.yaml --state {STATE}\n"
        f"  .venv/bin/migd sim reboot --state {STATE}\n"
        "  .venv/bin/migd plan -f examples/plans/by-need.yaml --simulate a100-40gb,a100-80gb,h200\n\n"
        "docs/cli.md has all commands, docs/plans.md what a plan can say, docs/simulator.md what the simulated GPUs do."
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
