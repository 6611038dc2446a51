"""Sets environment variables of a command before the libraries that read them are imported."""

from __future__ import annotations

import os


def quieten() -> None:
    """Suppresses warnings of libraries that a user can do nothing about, unless the user has set these variables."""
    # transformers warns that PyTorch is missing, and that a text is longer than a model's context; XLA warns about
    # details of cached executables.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def compile_only() -> None:
    """Keeps JAX off this machine's accelerators, and enables an accelerator's compiler without a device.

    Raises:
      ValueError: JAX has started on an accelerator in this process.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Without these, libtpu queries a cloud's metadata server, warns about missing answers, and refuses to be loaded by
    # two processes at a time. The values do not affect the programs, whose target chips are described separately.
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
    # A cached program of another process would give a wrong compile time.
    jax.config.update("jax_enable_compilation_cache", False)
