"""Generates greedily with transformers on PyTorch, from the same weights and prompts as jaxspec.

This is the only module here that needs PyTorch, which it imports on demand.
"""

from __future__ import annotations

import contextlib
import functools
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.extras import require
from jaxspec.io.gguf.container import is_gguf
from jaxspec.loading.loading import find_model
from jaxspec.methods import DraftModel, LayerSkip, Method, NGram
from jaxspec.texts.results import Result, Statistics
from jaxspec.texts.text import Token

# Our method → the name of the run of its counterpart in transformers.
_NAMES: dict[type[Method], str] = {
    NGram: "transformers prompt lookup",
    DraftModel: "transformers assisted",
    LayerSkip: "transformers early exit",
}


def transformers_runs(
    lm: LanguageModel,
    model: str,
    methods: Mapping[str, Method],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Loads a model into transformers and returns its ways to generate.

    Plain decoding and prompt lookup are always included, assisted generation if a method has a draft model, and early
    exit if `layerskip` is among the methods. Draft model, exit and number of draft tokens (constant) are the method's.

    The first round of assisted generation reads the prompt and verifies a draft, and returns several tokens at once.
    They count as the first token, because a speed covers only the tokens after it.

    Args:
      lm: the model in jaxspec, for its EOS, dtype and drafters.
      model: as in `load`.
      methods: the measured methods, by the name of their run; the last one of each class is used.
      max_new_tokens: the maximum number of new tokens per text.

    Returns:
      Functions (token ids of a prompt) → `Result`, by the name of their run; their keyword `max_new_tokens`
      replaces the maximum.

    Raises:
      MissingExtra: PyTorch is not installed.
      ValueError: transformers cannot load the model.
    """
    require("peers", "torch", "accelerate")
    target = _load(model, lm)
    generate = functools.partial(_generate, lm, target, max_new_tokens=max_new_tokens)
    runs = {"transformers": generate}
    by_class: dict[type[Method], Method] = {NGram: NGram()}
    by_class |= {type(method): method for method in methods.values()}
    for cls, method in by_class.items():
        if cls not in _NAMES or (isinstance(method, DraftModel) and method.draft is None):
            continue
        drafter, _ = lm.drafter(method)
        drafts = drafter.num_draft_tokens
        extra: dict[str, Any] = {"prompt_lookup_num_tokens": drafts}
        if isinstance(method, DraftModel):
            extra = {"assistant_model": _constant(_load(str(method.draft), lm), drafts)}
        elif isinstance(method, LayerSkip):
            _constant(target, drafts)  # the target is its own assistant
            extra = {"assistant_early_exit": drafter.exit_layer}  # type: ignore[attr-defined]
        runs[_NAMES[cls]] = functools.partial(generate, extra=extra)
    return runs


def _load(model: str, lm: LanguageModel) -> Any:
    """Loads the model into transformers, in the same dtype as in jaxspec."""
    import torch
    import transformers

    path = find_model(model)
    where, extra = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                str(where), dtype=getattr(torch, lm.dtype), local_files_only=True, **extra
            )
    except Exception as error:  # transformers raises many types here, some with many lines
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"transformers cannot load {path}: {reason}") from None
    # Replaces the checkpoint's defaults: greedy unless a call sets sampling parameters.
    loaded.generation_config = transformers.GenerationConfig(
        eos_token_id=list(lm.config.eos_token_ids) or None, pad_token_id=0
    )
    return loaded.eval()


def _constant(assistant: Any, num_draft_tokens: int) -> Any:
    """Makes an assistant draft the same number of tokens in every round."""
    assistant.generation_config.num_assistant_tokens = num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


class _Clock:
    """A streamer of transformers that records the time and size of each piece; the prompt is the first piece."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: Any) -> None:
        """Called with new tokens."""
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Called at the end."""


def _generate(
    lm: LanguageModel,
    target: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    extra: Mapping[str, Any] | None = None,
) -> Result:
    import torch

    ids = torch.tensor([list(prompt)], device=target.device)
    clock = _Clock()
    began = time.perf_counter()
    with torch.inference_mode():
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            do_sample=False,
            **(extra or {}),
        )
        tokens = out[0, len(prompt) :].tolist()
    ended = time.perf_counter()
    first, size = clock.times[1], clock.sizes[1]
    counts = (len(tokens) - size + 1, len(clock.times) - 2, 0, 0, 0, ())
    spent = Statistics(*counts, 1e3 * (ended - began), 1e3 * (ended - first), 0.0)
    reason = "eos" if tokens[-1] in lm.config.eos_token_ids else "length"
    text = lm.tokenizer.decode(tokens) if lm.tokenizer is not None else None
    return Result(text, list(map(Token, tokens)), reason, spent)  # type: ignore[arg-type]
