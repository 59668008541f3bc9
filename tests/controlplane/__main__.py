"""`python -m controlplane build`: what the Makefile calls."""

from __future__ import annotations

import sys

from controlplane.building import BuildError, NotBuiltError, build


def main(words: list[str]) -> int:
    """Run one command; the exit status."""
    if words != ["build"]:
        sys.stderr.write("usage: python -m controlplane build\n")
        return 2
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
