"""`python -m controlplane build | cluster | cluster-down`: what the Makefile calls."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before gRPC is loaded: it tells of each socket that closes

from controlplane import background
from controlplane.building import BuildError, NotBuiltError, build

USAGE = (
    "usage: python -m controlplane build | cluster [--nodes N] [--gpus SPEC] [--style STYLE] [--bare] | cluster-down\n"
)


def main(words: list[str]) -> int:
    """Run one command; the exit status."""
    match words:
        case ["build"]:
            return _build()
        case ["cluster", *options]:
            return background.up(options)
        case ["cluster-run", *options]:  # started by the one before
            return background.run(options)
        case ["cluster-down"]:
            return background.down()
        case _:
            sys.stderr.write(USAGE)
            return 2


def _build() -> int:
    try:
        build(say=_say)
    except (BuildError, NotBuiltError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # a build takes minutes: each line when it is so


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
