"""Benchmarks, run by `make bench`: how long planning and changing GPUs takes, next to what it is compared with."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)  # boards from real listings and the brute-force twin live there
