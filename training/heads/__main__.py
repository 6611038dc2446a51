"""Runs `python -m training.heads`."""

import sys

from training.heads.train import main

if __name__ == "__main__":
    sys.exit(main())
