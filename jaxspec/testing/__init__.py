"""Checks for drafters, also those of other packages: small models, a slow reference, and the contracts.

    from jaxspec.testing import check_drafter
    check_drafter(MyDrafter(num_draft_tokens=4))

`models` has small Llama models with random weights, `reference` a decoder without a cache, `loop` the compiled loop
without the engine, `laws` the enumerated law of a model's texts, and `contracts` what every drafter must keep.
"""

from jaxspec.testing.contracts import check_drafter
from jaxspec.testing.loop import Loop
from jaxspec.testing.models import DEEP, TARGET, language_model, params

__all__ = ["DEEP", "TARGET", "Loop", "check_drafter", "language_model", "params"]
