"""XLA's options in the tests, by their names without dashes."""

from __future__ import annotations

import importlib.metadata
import os

# The ordinary and the full tests check the mathematics, and compile far more than they compute.
FAST: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
# The options of users, where a test needs them: fusions and some instructions round differently.
USUAL: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
# An unknown option makes XLA end the process, and these change between versions.
_VERSION = importlib.metadata.version("jaxlib")
if _VERSION.startswith(("0.10.", "0.12.")):
    FAST |= {"xla_llvm_disable_expensive_passes": True, "xla_cpu_parallel_codegen_split_count": 1}
    USUAL |= {"xla_llvm_disable_expensive_passes": False}
if _VERSION.startswith("0.10."):
    FAST |= {"xla_cpu_use_fusion_emitters": False}
    USUAL |= {"xla_cpu_use_fusion_emitters": True}


# The variable that names the directory of the programs that all tests of a run share.
PROGRAMS = "JAXSPEC_TEST_PROGRAMS"


def shared_programs() -> dict[str, str]:
    """Returns the environment with which JAX shares the compiled programs of a run; empty without a directory.

    Many files compile the same programs of the same tiny models, and so do the workers and the tiers.
    """
    if PROGRAMS not in os.environ:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": os.environ[PROGRAMS],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def flags() -> str:
    """Returns `FAST` as the value of XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())
