"""The program `jaxspec`, also as `python -m jaxspec`. It handles Ctrl-C before it imports anything large."""

from __future__ import annotations

import sys

from jaxspec.console import interrupts


def main() -> int:
    """Runs the command line of the process and returns the exit status."""
    interrupts.at_start("jaxspec")
    from jaxspec.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
