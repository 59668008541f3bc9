"""Start of the command `migd-operator`."""

import sys

from migd_operator.program import main

if __name__ == "__main__":
    sys.exit(main())
