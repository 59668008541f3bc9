"""`python -m controlplane build | real-node | cluster | cluster-down`: what the Makefile calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before gRPC is loaded: it tells of each socket that closes

from controlplane import background
from controlplane.building import BuildError, NotBuiltError, build
from controlplane.processes import StartError
from controlplane.real_packages import PackageError
from controlplane.real_preparing import prepare

USAGE = (
    "usage: python -m controlplane build | real-node | cluster-down\n"
    "       python -m controlplane cluster [--nodes N] [--gpus SPEC] [--style STYLE] [--bare]\n"
)


def main(words: list[str]) -> int:
    """Run one command; the exit status."""
    match words:
        case ["build"]:
            return _made(build)
        case ["real-node"]:
            return _made(prepare)
        case ["cluster", *options]:
            return background.up(options)
        case ["cluster-run", *options]:  # started by the one before
            return background.run(options)
        case ["cluster-down"]:
            return background.down()
        case _:
            sys.stderr.write(USAGE)
            return 2


def _made(work: Callable[[Callable[[str], None]], object]) -> int:
    try:
        work(_say)
    except (BuildError, NotBuiltError, PackageError, StartError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # a build takes minutes: each line when it is so


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
