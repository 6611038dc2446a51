"""The project's trainer; see README.md beside this file."""

import sys

from jaxspec.io import extras

try:
    extras.require("train", "grain", "optax", "orbax.checkpoint", "tensorboardX", "yaml")
except extras.MissingExtra as missing:
    # `python -m training.X` imports this package before X, which therefore cannot turn the error into one line.
    # While it looks for X, Python sets sys.argv[0] to "-m".
    if sys.argv[:1] == ["-m"]:
        sys.exit(f"jaxspec: error: {missing}")
    raise
