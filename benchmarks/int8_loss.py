"""The loss of int8: `python -m benchmarks.int8_loss --model DIR --text FILE` prints JSON.

The model reads a text in float32, with int8 weights, and with int8 weights and activations, for several numbers of
input channels that are computed apart (`jaxspec.model.quantisation.Outliers`).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from benchmarks import command
from jaxspec.engine.language_model import load
from jaxspec.host.files import read_text
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.tuning import fidelity

# Numbers of input channels that are computed apart.
OUTLIERS = (1, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Options:
    """The loss of int8 weights and activations on a text, compared with float32.

    Attributes:
      text: a text file that the model was not trained on. Default: the prompts with which speeds are reported.
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      tokens: number of tokens to predict, rounded up to whole windows of 512.
    """

    text: Path | None = None
    model: str = "large"
    tokens: int = 4096


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns the report of `jaxspec.measuring.tuning.fidelity.measure`, with the model's name."""
    lm = load(options.model, dtype="float32", device="cpu")
    if options.text is None:
        text = fidelity.held_out_text(lm.directory)
    else:
        text = read_text(options.text, "--text must be a text file")
    found = fidelity.measure(
        *(lm.config, lm.params, lm.tokenizer, text),
        limit=options.tokens,
        outliers=OUTLIERS,
        on_progress=on_progress,
    )
    return {"model": lm.name, **found}


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.int8_loss", Options, measure))
