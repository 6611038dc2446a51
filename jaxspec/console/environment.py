"""Sets environment variables of a command before the libraries that read them are imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


def quieten() -> None:
    """Suppresses warnings of libraries that a user can do nothing about, unless the user has set these variables."""
    # transformers warns that PyTorch is missing, and that a text is longer than a model's context; XLA warns about
    # details of cached executables.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def defer_linen() -> None:
    """Makes `flax.linen`, which `import flax` imports and jaxspec does not use, load when it is first used.

    It takes a sixth of the time of all imports. Nothing happens if flax was imported before.
    """
    if "flax" in sys.modules or (flax := importlib.util.find_spec("flax")) is None:
        return
    found = PathFinder.find_spec("flax.linen", flax.submodule_search_locations)
    if found is not None:
        module = importlib.util.module_from_spec(found)
        module.__class__ = _Deferred
        sys.modules["flax.linen"] = module


class _Deferred(ModuleType):
    """A module that is executed when one of its names is first looked up.

    One of `importlib.util.LazyLoader` is executed by the second `import`, which looks up its specification.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


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
