"""The project's trainer; see README.md beside this file."""

import sys

from jaxspec.console import interrupts

# `python -m training.X` imports this package before X, and X imports a lot before it runs. While Python searches for X,
# it sets sys.argv[0] to "-m".
if sys.argv[:1] == ["-m"] and sys.orig_argv.count("-m"):
    _module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if _module.startswith(f"{__name__}."):
        interrupts.at_start(_module)

from jaxspec.host import extras

# The module of each job of `jaxspec train`, in the order of its help.
JOBS = {
    "soft": "training.soft",
    "heads": "training.heads.train",
    "own-text": "training.own_text",
    "sft": "training.sft",
    "layerskip": "training.layerskip",
    "probe": "training.probe",
    "export": "training.export",
    "plots": "training.plots",
}

try:
    extras.require("train", "grain", "optax", "orbax.checkpoint", "tensorboardX", "yaml", "matplotlib")
except extras.MissingExtra as missing:
    # The import of X fails here, so X itself cannot report the error in one line.
    if sys.argv[:1] == ["-m"]:
        sys.exit(f"jaxspec: error: {missing}")
    raise
