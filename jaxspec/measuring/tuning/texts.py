"""Prompts of `search` and `tune`, the model's own text after them, and both as arrays for scoring drafts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.files import ending, read_text
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.measuring.bench.prompt_files import Task, encoded, in_turn, own_tasks, read_tasks
from jaxspec.measuring.bench.suite_options import check_budget
from jaxspec.measuring.tuning.agreement import AgreementTexts, prepare
from jaxspec.measuring.tuning.tuning_options import PromptOptions
from jaxspec.model.sharding import local
from jaxspec.programs.buckets import bucket, prefill_chunk_size

_USUAL = PromptOptions()
# Number of prompts per kind of work if no files are given.
_EACH = 2
_WANTED = "`prompt_file` must be text files, one prompt each, or JSON lines"


def read_prompts(lm: LanguageModel, max_new_tokens: int, options: PromptOptions = _USUAL) -> list[list[int]]:
    """Returns the prompts of `read_kinds`."""
    return [ids for _, ids in read_kinds(lm, max_new_tokens, options)]


def read_kinds(
    lm: LanguageModel, max_new_tokens: int, options: PromptOptions = _USUAL
) -> list[tuple[str, list[int]]]:
    """Returns prompts as token ids, each with its kind of text: the category of its set; text files are one kind.

    Prompts of sets and the default ones are left out if they exceed the context.

    Raises:
      ValueError, FileNotFoundError: a file is missing, empty, not text, or too long for the context; or no prompt fits.
    """
    check_budget(max_new_tokens)
    room = lm.config.context_length - max_new_tokens
    exceeds = f"max_new_tokens ({max_new_tokens}) exceed the model's context of {lm.config.context_length}"
    texts, sets = _split(options.prompt_file)
    found = []
    for path in texts[: options.limit]:
        text = read_text(path, _WANTED).removesuffix("\n")
        ids = encoded(lm, Task(path, path, (text,)), chat=options.chat) if text.strip() else []
        if not ids:
            raise ValueError(f"{path} is empty; {_WANTED}")
        if len(ids) > room:
            raise ValueError(f"{path} ({len(ids)} tokens) and {exceeds}; shorten one of them")
        found.append(("text", ids))
    if not texts:
        tasks = read_tasks(sets) if sets else own_tasks("tuning", directory=lm.directory)
        usual = None if sets else _EACH * len({task.category for task in tasks})
        tasks = in_turn(tasks, lambda task: task.category)
        read = ((task.category, encoded(lm, task, chat=options.chat)) for task in tasks)
        fitting = (one for one in read if len(one[1]) <= room)
        found = list(itertools.islice(fitting, options.limit or usual))
        if not found:
            raise ValueError(
                f"the prompts and {exceeds}; give fewer tokens, or shorter prompts by `prompt_file`"
            )
    return found


def _split(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the text files and the prompt sets among the paths.

    Raises:
      ValueError: there are both kinds.
    """
    sets = [path for path in paths if ending(path) in (".json", ".jsonl")]
    texts = [path for path in paths if path not in sets]
    if texts and sets:
        raise ValueError(
            f"prompt_file has {texts[0]}, a text, and {sets[0]}, a prompt set; give files of one type"
        )
    return texts, sets


@shows_progress
def continuations(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_progress: OnProgress = lambda step: None,
) -> list[list[int]]:
    """The model's greedy text after each prompt, by plain decoding."""
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
) -> tuple[AgreementTexts, jax.Array, jax.Array]:
    """Prompts and texts as arrays on the model's device, and the prompts' similarities and vectors, see `prepare`.

    Raises:
      ValueError: every text has fewer than two tokens.
    """
    longest = max(map(len, texts))
    if longest < 2:
        raise ValueError(
            "the model ends its text at once after every prompt; give other prompts by `prompt_file`"
        )
    length = max(map(len, prompts))
    with jax.default_device(local(lm.device)):
        prepared: tuple[AgreementTexts, jax.Array, jax.Array] = _prepare(
            lm.config,
            lm.params,
            _padded(prompts, bucket(length + longest)),
            jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
            _padded(texts, longest),
            jnp.asarray([len(text) for text in texts], jnp.int32),
            chunk_size=prefill_chunk_size(length, lm.device.platform),
            merged=lm.mesh is None,
        )
    jax.block_until_ready(prepared)  # before another program runs, see `bench.steps.Loop`
    return prepared


_prepare = jax.jit(prepare, static_argnames=("config", "chunk_size", "merged"))


def _padded(rows: Sequence[Sequence[int]], width: int) -> jax.Array:
    padded = np.zeros((len(rows), width), np.int32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return jnp.asarray(padded)
