"""Contract checks for drafters, including those of other packages, with small models and a slow reference.

    from jaxspec.testing import check_drafter
    check_drafter(MyDrafter(num_draft_tokens=4))

`models` has small Llama models with random weights, `reference` a decoder without a cache, `loop` the compiled loop
without the engine, `distributions` enumerated distributions of texts, and `contracts` the contracts of every drafter.
"""

from jaxspec.testing.contracts import check_drafter
from jaxspec.testing.loop import Loop
from jaxspec.testing.models import DEEP, TARGET, language_model, params

__all__ = ["DEEP", "TARGET", "Loop", "check_drafter", "language_model", "params"]
