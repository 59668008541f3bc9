"""Start of the command `migd`."""

from migd.cli.main import main

if __name__ == "__main__":
    main()
