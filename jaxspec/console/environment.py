"""What the environment of a command is told before the libraries that read it are imported."""

from __future__ import annotations

import os


def quieten() -> None:
    """Keeps libraries from writing to standard error what a user can do nothing about."""
    # transformers: that PyTorch is missing, and that a text is longer than a model's context. XLA: details of
    # cached executables. Who sets these variables wants to see it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def compile_only() -> None:
    """Keeps JAX off this machine's accelerators, and lets an accelerator's compiler run without one.

    Raises:
      ValueError: JAX has started on an accelerator in this process.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # libtpu would ask a cloud's metadata server where it is, complain of what it does not learn, and refuse to be
    # loaded by two processes at a time. What is said here of this machine's chips changes no program: those that are
    # compiled for are described apart.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    import jax

    jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX runs on a {jax.default_backend()} in this process already; compile for described devices in a "
            "process of its own"
        )
    # What another process compiled would be no compile time.
    jax.config.update("jax_enable_compilation_cache", False)
