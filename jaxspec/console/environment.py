"""What the environment of a command is told before the libraries that read it are imported."""

from __future__ import annotations

import os


def quieten() -> None:
    """Keeps libraries from writing to standard error what a user can do nothing about."""
    # transformers: that PyTorch is missing, and that a text is longer than a model's context. XLA: details of
    # cached executables. Who sets these variables wants to see it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
