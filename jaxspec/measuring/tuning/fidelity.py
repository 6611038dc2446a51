"""The fidelity of int8: the loss per token on a text, and the agreement of greedy choices, compared with float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.loading.int8 import with_activations
from jaxspec.measuring.bench import prompts
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantisation import NUM_OUTLIERS, quantise
from jaxspec.texts.results import Score

# Tokens of context; a longer text is cut into windows of as many.
WINDOW = 512


@shows_progress
def measure(
    config: LlamaConfig,
    params: Params,
    tokenizer: Tokenizer | None,
    text: str,
    *,
    limit: int | None = None,
    outliers: Sequence[int] = (NUM_OUTLIERS,),
    on_progress: OnProgress = lambda step: None,
) -> dict[str, Any]:
    """Measures a model with int8 weights, and with int8 weights and activations, both computing in float32.

    Args:
      config: the model.
      params: its parameters, on one device and not quantised; they are converted to float32.
      tokenizer: the model's.
      text: a text that the model was not trained on.
      limit: number of tokens to predict, rounded up to whole windows; None for all of the text.
      outliers: numbers of input channels that products with int8 activations compute apart, one form each.
      on_progress: called with a description of the current step.

    Returns:
      JSON-ready: `tokens`, the number of predicted tokens; `loss` of float32, in nats per token; `forms`, by name:
      `loss`, `increase` of the loss with `interval`, the half width of its 95 % interval (tokens are taken as
      independent), and `agreement`, the share of tokens at which float32 has the same most likely token.

    Raises:
      ValueError: there is no tokenizer, or the text has fewer than two tokens; one line.
    """
    if tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, which the fidelity of int8 needs; add its tokenizer.json"
        )
    ids = np.asarray(tokenizer.encode(text), np.int32)
    window = min(WINDOW, config.context_length - 1, len(ids) - 1, limit or len(ids))
    if window < 1:
        raise ValueError(f"the text for the fidelity of int8 has {len(ids)} tokens; give at least 2")
    last = min(len(ids) - window, limit or len(ids))
    rows = [ids[first : first + window + 1] for first in range(0, last, window)]
    params = jax.tree.map(jnp.float32, params)
    on_progress("reading a text in float32")
    expected, chosen = _losses(config, params, rows)
    report: dict[str, Any] = {"tokens": expected.size, "loss": float(expected.mean()), "forms": {}}
    for name, small in _forms(config, params, tokenizer, outliers):
        on_progress(f"reading a text with int8 {name}")
        losses, best = _losses(config, small, rows)
        change = losses - expected
        report["forms"][name] = {
            "loss": float(losses.mean()),
            "increase": float(change.mean()),
            "interval": float(1.96 * change.std() / change.size**0.5),
            "agreement": float((best == chosen).mean()),
        }
    return report


def held_out_text(directory: Path | None) -> str:
    """Returns a short text: the prompts with which speeds are reported, a model's own if its directory has any."""
    return "\n\n".join(text for texts in prompts.load("reporting", directory).values() for text in texts)


def lines(report: dict[str, Any]) -> list[str]:
    """Returns the lines that describe a report of `measure`.

    Examples:
      >>> form = {"loss": 3.27, "increase": 0.02, "interval": 0.01, "agreement": 0.95}
      >>> lines({"tokens": 1024, "loss": 3.25, "forms": {"weights": form}})[1]
      'int8 weights: loss 3.270 (+0.0200 ± 0.0100), 95.0 % of the most likely tokens are the same'
    """
    first = (
        f"int8 compared with float32 on {report['tokens']:,} tokens; loss of float32: {report['loss']:.3f}"
    )
    return [first] + [
        f"int8 {name}: loss {form['loss']:.3f} ({form['increase']:+.4f} ± {form['interval']:.4f}), "
        f"{100 * form['agreement']:.1f} % of the most likely tokens are the same"
        for name, form in report["forms"].items()
    ]


def _forms(
    config: LlamaConfig, params: Params, tokenizer: Tokenizer, outliers: Sequence[int]
) -> Iterator[tuple[str, Params]]:
    small = quantise(config, params)
    yield "weights", small
    for count in outliers:
        apart = "" if count == NUM_OUTLIERS else f", {count} channels apart"
        yield f"weights and activations{apart}", with_activations(config, small, tokenizer, count)


def _losses(config: LlamaConfig, params: Params, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns −log probability of each token of windows int32[N + 1] but their first, and the most likely tokens."""
    texts = [row.tolist() for row in rows]
    found = LanguageModel(config, params).score([text[:1] for text in texts], [text[1:] for text in texts])
    scores = cast("list[Score]", found)
    losses = [-log_prob for score in scores for log_prob in score.log_probs]
    return np.array(losses), np.array([token for score in scores for token in score.top_tokens])
