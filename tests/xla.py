"""XLA's options in the tests, by their names without dashes."""

from __future__ import annotations

import importlib.metadata

# The ordinary and the full tests check the mathematics, and compile far more than they compute.
FAST: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
# The options of users, where a test needs them: fusions and some instructions round differently.
USUAL: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
# An unknown option makes XLA end the process, and these change between versions.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FAST |= {
        "xla_cpu_use_fusion_emitters": False,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    USUAL |= {"xla_cpu_use_fusion_emitters": True, "xla_llvm_disable_expensive_passes": False}


def flags() -> str:
    """Returns `FAST` as the value of XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())
