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
        build(say=lambda line: print(line, flush=True))
    except (BuildError, NotBuiltError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
