"""What `search` and `tune` look at: prompts, the model's own text after them, and both as a draft reads them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.suite_options import check_budget
from jaxspec.bench.timing import OnProgress
from jaxspec.engine.buckets import bucket, prefill_chunk_size
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.files import read_text
from jaxspec.model.sharding import local
from jaxspec.tuning.agreement import AgreementTexts, prepare


def read_prompts(
    lm: LanguageModel, prompt_file: Sequence[str], max_new_tokens: int, *, chat: bool = False
) -> list[list[int]]:
    """Prompts as token ids: one per file; or the default ones, as far as they fit the model's context.

    `chat`: whether each is a message, to be put through the chat template.

    Raises:
      ValueError, FileNotFoundError: a file is missing, empty, no text, or too long for the context.
    """
    check_budget(max_new_tokens)
    wanted = "`prompt_file` must be text files, one prompt each"
    context = lm.config.context_length
    encode = functools.partial(lm.encode, chat=chat)
    if not prompt_file:
        usual = map(encode, prompt_set.sample(2, lm.directory, "tuning"))
        fitting = [ids for ids in usual if len(ids) + max_new_tokens <= context]
        if not fitting:
            raise ValueError(
                f"max_new_tokens ({max_new_tokens}) and the default prompts exceed the model's context of "
                f"{context}; give fewer, or shorter prompts by `prompt_file`"
            )
        return fitting
    found = []
    for path in prompt_file:
        text = read_text(path, wanted).removesuffix("\n")
        ids = encode(text) if text else []
        if not ids:
            raise ValueError(f"{path} is empty; {wanted}")
        if len(ids) + max_new_tokens > context:
            raise ValueError(
                f"{path} ({len(ids)} tokens) and max_new_tokens ({max_new_tokens}) exceed the model's context "
                f"of {context}; shorten one of them"
            )
        found.append(ids)
    return found


def continuations(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_progress: OnProgress = lambda what: None,
) -> list[list[int]]:
    """What the model writes greedily after each prompt, by the plain method."""
    found: dict[int, list[int]] = {}
    for piece in lm.stream(prompts, method="autoregressive", max_new_tokens=max_new_tokens, temperature=0.0):
        if piece.result is not None:
            found[piece.index] = piece.result.tokens
            if piece.result.error is not None:
                warnings.warn(piece.result.error, RuntimeWarning, stacklevel=2)
            on_progress(f"generating the model's own text: {len(found)} of {len(prompts)} texts")
    return [found[index] for index in range(len(prompts))]


def prepare_texts(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> tuple[AgreementTexts, jax.Array]:
    """Prompts and texts as arrays on the model's device, and the prompts' similarities float32[B, L, 2].

    Raises:
      ValueError: no text has the two tokens that a comparison needs.
    """
    longest = max(map(len, texts))
    if longest < 2:
        raise ValueError(
            "the model ends its text at once after every prompt; give other ones by `prompt_file`"
        )
    length = max(map(len, prompts))
    with jax.default_device(local(lm.device)):
        prepared: tuple[AgreementTexts, jax.Array] = _prepare(
            lm.config,
            lm.params,
            _padded(prompts, bucket(length + longest)),
            jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
            _padded(texts, longest),
            jnp.asarray([len(text) for text in texts], jnp.int32),
            chunk_size=prefill_chunk_size(length, lm.device.platform),
            merged=lm.mesh is None,
        )
    jax.block_until_ready(prepared)  # before another program, see `bench.steps.Loop`
    return prepared


_prepare = jax.jit(prepare, static_argnames=("config", "chunk_size", "merged"))


def _padded(rows: Sequence[Sequence[int]], width: int) -> jax.Array:
    padded = np.zeros((len(rows), width), np.int32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return jnp.asarray(padded)
