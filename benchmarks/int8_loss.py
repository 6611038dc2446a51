"""The loss of int8: `python -m benchmarks.int8_loss --model DIR --text FILE` prints JSON.

The model reads a text in float32, with int8 weights, and with int8 weights and activations, for several numbers of
input channels that are computed apart (`jaxspec.model.quantisation.Outliers`). With `--cache` it reads the text in
float32 with a float32 and with an int8 cache.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host.files import read_text
from jaxspec.host.progress import OnProgress
from jaxspec.loading.int8 import with_activations
from jaxspec.measuring.bench import prompts
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.quantisation import NUM_OUTLIERS, quantise
from jaxspec.texts.results import Score

# Numbers of input channels that are computed apart.
OUTLIERS = (1, 16, 32, 64, 128)
# Tokens of context without a cache; a longer text is cut into windows of as many.
WINDOW = 512
# Tokens that the model reads in one pass with a cache.
CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """The loss of int8 weights and activations, or of an int8 cache, on a text, compared with float32.

    Attributes:
      text: a text file that the model was not trained on. Default: the prompts with which speeds are reported.
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      tokens: number of tokens to predict, rounded up to whole windows of 512, or down to whole windows of a cache.
      cache: compare caches.
      window: with --cache, tokens of context; a multiple of 256.
    """

    text: Path | None = None
    model: str = "large"
    tokens: int = 4096
    cache: bool = False
    window: int = 2048


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns the report of `of_weights`, or of `of_cache`, with the model's name.

    Raises:
      ValueError: the window is no multiple of 256, or the text has fewer tokens; one line.
    """
    lm = load(options.model, dtype="float32", device="cpu")
    if options.text is None:
        kinds = prompts.load("reporting", lm.directory).values()
        text = "\n\n".join(one for texts in kinds for one in texts)
    else:
        text = read_text(options.text, "--text must be a text file")
    if options.cache:
        return {"model": lm.name, **of_cache(lm, text, options.tokens, options.window, on_progress)}
    return {"model": lm.name, **of_weights(lm, text, options.tokens, on_progress)}


def of_weights(
    lm: LanguageModel, text: str, limit: int, on_progress: OnProgress = lambda what: None
) -> dict[str, Any]:
    """Reads a text with float32, with int8 weights, and with int8 weights and activations, in windows.

    Args:
      lm: the model in float32.
      text: a text that the model was not trained on.
      limit: maximum number of tokens.
      on_progress: called with the current step.

    Returns:
      `tokens`, the number of judged tokens; `loss` in float32, in nats per token; `forms`, by name: `loss`,
      `increase` over float32 with the half width of its 95 % `interval`, and `agreement`, the share of tokens whose
      most likely successor is the same.

    Raises:
      ValueError: the text has fewer than two tokens.
    """
    ids = np.asarray(lm.encode(text), np.int32)
    window = min(WINDOW, lm.config.context_length - 1, len(ids) - 1, limit)
    if window < 1:
        raise ValueError(f"the text has {len(ids)} tokens; give at least 2")
    rows = [ids[first : first + window + 1] for first in range(0, min(len(ids) - window, limit), window)]
    on_progress("reading the text in float32")
    expected, chosen = _losses(lm, rows)
    report: dict[str, Any] = {"tokens": expected.size, "loss": float(expected.mean()), "forms": {}}
    for name, params in _forms(lm):
        on_progress(f"reading the text with int8 {name}")
        losses, best = _losses(LanguageModel(lm.config, params), rows)
        change = losses - expected
        report["forms"][name] = {
            "loss": float(losses.mean()),
            "increase": float(change.mean()),
            "interval": float(1.96 * change.std() / change.size**0.5),
            "agreement": float((best == chosen).mean()),
        }
    return report


def _forms(lm: LanguageModel) -> Iterator[tuple[str, llama.Params]]:
    """Yields the names and the parameters of the forms of int8."""
    small = quantise(lm.config, lm.params)
    yield "weights", small
    for count in OUTLIERS:
        apart = "" if count == NUM_OUTLIERS else f", {count} channels apart"
        yield f"weights and activations{apart}", with_activations(lm.config, small, lm.tokenizer, count)


def _losses(lm: LanguageModel, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns −log probability of each token of windows int32[N + 1] but their first, and the most likely tokens."""
    texts = [row.tolist() for row in rows]
    scores = cast("list[Score]", lm.score([text[:1] for text in texts], [text[1:] for text in texts]))
    losses = [-log_prob for score in scores for log_prob in score.log_probs]
    return np.array(losses), np.array([token for score in scores for token in score.top_tokens])


def of_cache(
    lm: LanguageModel, text: str, limit: int, window: int, on_progress: OnProgress = lambda what: None
) -> dict[str, Any]:
    """Reads a text with a float32 and with an int8 cache, in windows.

    Returns:
      `tokens`, the number of predicted tokens; `window`; `loss` with a float32 cache, in nats per token; and pairs of a
      mean and the half width of its 95 % interval (tokens are taken as independent): `increase` of the loss,
      `divergence` (Kullback and Leibler's, of the distribution with an int8 cache from that with float32, in nats), and
      `agreement`, the share of tokens with the same most likely token.
    """
    ids = np.asarray(lm.encode(text), np.int32)
    count = min(limit, len(ids) - 1) // window
    if window % CHUNK or not count:
        raise ValueError(
            f"window is {window}, and the text has {len(ids)} tokens; give a multiple of {CHUNK} below that number"
        )
    configs = [dataclasses.replace(lm.config, kv_cache_dtype=name) for name in ("auto", "int8")]
    found = []
    for number in range(count):
        caches = [kv.create(config, 1, window, jnp.float32) for config in configs]
        for first in range(0, window, CHUNK):
            on_progress(f"window {number + 1} of {count}, token {first}")
            at = number * window + first
            chunk, following = ids[at : at + CHUNK], ids[at + 1 : at + CHUNK + 1]
            read = [
                _read(config, lm.params, chunk[None], first, cache)
                for config, cache in zip(configs, caches, strict=True)
            ]
            caches = [cache for _, cache in read]
            found.append(_compared(*(log_p for log_p, _ in read), following))
    loss, *changes = np.concatenate([np.asarray(part) for part in found], axis=1)
    means = {
        name: (float(change.mean()), float(1.96 * change.std() / change.size**0.5))
        for name, change in zip(("increase", "divergence", "agreement"), changes, strict=True)
    }
    return {"tokens": loss.size, "window": window, "loss": float(loss.mean()), **means}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _read(
    config: LlamaConfig, params: llama.Params, tokens: jax.Array, first: jax.Array, cache: kv.KVCache
) -> tuple[jax.Array, kv.KVCache]:
    """Returns log p float32[T, V] after tokens int32[1, T] at positions from `first` on, and the cache."""
    logits, _, cache = llama.forward(config, params, tokens, jnp.full(1, first, jnp.int32), cache)
    return jax.nn.log_softmax(logits[0]), cache


@jax.jit
def _compared(expected: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """Returns float32[4, T]: the loss, its increase, the divergence, and whether the most likely tokens agree."""
    losses, changed = (
        -jnp.take_along_axis(log_p, following[:, None], axis=-1)[:, 0] for log_p in (expected, log_q)
    )
    divergence = jnp.sum(jnp.exp(expected) * (expected - log_q), axis=-1)
    agrees = jnp.argmax(expected, axis=-1) == jnp.argmax(log_q, axis=-1)
    return jnp.stack([losses, changed - losses, divergence, agrees.astype(jnp.float32)])


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.int8_loss", Options, measure))
