"""Inspects a model for self-speculation: the effect and time of its sublayers, and the agreement of early exits."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.drafting.asd_drafter import admg
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.bench import prompts as prompt_set
from jaxspec.measuring.bench.steps import SubmodelSteps
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.measuring.tuning.agreement import exit_choices
from jaxspec.measuring.tuning.texts import prepare_texts
from jaxspec.model.llama import floor_bytes
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import fetched
from jaxspec.programs.buckets import bucket
from jaxspec.requests.reading import Prompt

DEFAULT_BUDGET = 64
SUBLAYERS = ("attention", "mlp")
# A timing lasts at least this long, up to this many steps.
_TIMING_MS, _MAX_STEPS = 15.0, 1024


@shows_progress
def inspect_model(
    lm: LanguageModel,
    prompts: Sequence[Prompt] | None = None,
    *,
    asd: ASDNumbers | None = None,
    max_new_tokens: int | None = None,
    repeats: int = 15,
    on_progress: OnProgress = lambda step: None,
) -> dict[str, Any]:
    """Measures the quantities that ASD and early exits depend on.

    * Similarity: the cosine between the residual stream before and after a sublayer, averaged over the tokens
      of a prompt during prefill (C_l of Metel et al. 2024 for attention, likewise for MLPs), then over prompts
      with equal weights. The summary over layers is the paper's Table 1.
    * Mask: the result of ADMG (Algorithm 1 of the paper) for each prompt and for the mean over prompts, which
      `--shared-mask` uses, with the share of the weights' bytes that a draft still reads. An untied input
      embedding is not counted, because a token reads only one row of it.
    * Time of a sublayer: (a one-token step through all attention sublayers − a step through none) ÷ L, and
      likewise for MLPs. Compiled loops of such steps are timed in turns at the texts' mean live length; the
      result is the median of the differences within a turn.
    * Exit agreement: the model continues each prompt greedily; then one parallel pass compares the top token
      of every exit with the whole model's at each new token. All new tokens have equal weights. See
      `agreement.exit_choices`.

    Args:
      lm: the model.
      prompts: texts or lists of token ids, at least one; None for a few of different kinds, see `bench.prompts`.
      asd: α, m and n of `admg`; by default the paper's.
      max_new_tokens: number of new tokens per prompt; None for 64, or fewer if the context is shorter.
      repeats: turns of the timing.
      on_progress: called with a description of the current step.

    Returns:
      JSON-ready: `model`, `device`, `dtype`, `num_layers`, `alpha`, `every`, `keep_last`; `similarity`, for
      `attention` and `mlp` the list `by_layer` (mean over prompts) and its `min`, `max`, `mean`, `median`;
      `time_ms` of one `attention` and one `mlp` sublayer at `live_tokens`; `mask` of the mean over prompts:
      `skip_attention` and `skip_mlp`, 0-based layers, and `weights_read`, a fraction of bytes;
      `exit_agreement`, a fraction for each exit after 1 … L layers; and `prompts`, a list of `prompt`,
      `prompt_tokens`, `new_tokens`, `similarity` (two lists), `mask` and `exit_agreement`.

    Raises:
      ValueError: there is no prompt, a prompt is empty or too long, or an error of `lm.generate`.
    """
    asd = asd or ASDNumbers()
    if prompts is None:
        own = prompt_set.load(directory=lm.directory).values()
        prompts = [prompt for texts in own for prompt in texts[:2]]
    ids = [_encode(lm, prompt) for prompt in prompts]
    budgets = [_budget(lm, len(one), max_new_tokens) for one in ids]
    on_progress("generating")
    results = lm.generate(ids, method="autoregressive", max_new_tokens=budgets, temperature=0.0)
    texts = [result.tokens for result in results]

    on_progress("comparing layers")
    similarities, agreed = _survey(lm, ids, texts)
    counts = np.array([len(text) for text in texts])
    mean = similarities.mean(axis=0)
    live = round(statistics.fmean(len(one) + len(text) for one, text in zip(ids, texts, strict=True)))
    on_progress("timing")
    time_ms = sublayer_ms(lm, live, repeats)

    # One mask per prompt, then the mask of the mean.
    attention = np.concatenate([similarities, mean[None]])[:, :, 0]
    runs = np.asarray(admg(jnp.asarray(attention, jnp.float32), *dataclasses.astuple(asd)))
    *masks, mean_mask = (_mask(lm, LayerPlan.from_array(run)) for run in runs)
    return {
        "model": lm.name,
        "device": lm.device_kind,
        "dtype": lm.precision,
        "num_layers": lm.config.num_layers,
        **dataclasses.asdict(asd),
        "similarity": {name: _summary(mean[:, kind]) for kind, name in enumerate(SUBLAYERS)},
        "time_ms": time_ms,
        "live_tokens": live,
        "mask": mean_mask,
        "exit_agreement": (agreed.sum(axis=0) / counts.sum()).tolist(),
        "prompts": [
            {
                "prompt": prompt if isinstance(prompt, str) else list(map(int, prompt)),
                "prompt_tokens": len(ids[row]),
                "new_tokens": len(texts[row]),
                "similarity": {
                    name: similarities[row, :, kind].tolist() for kind, name in enumerate(SUBLAYERS)
                },
                "mask": masks[row],
                "exit_agreement": (agreed[row] / counts[row]).tolist(),
            }
            for row, prompt in enumerate(prompts)
        ],
    }


def weights_read(lm: LanguageModel, plan: LayerPlan) -> float:
    """Bytes of weights that a step under a plan reads ÷ those of a full step."""
    whole = floor_bytes(lm.config, lm.params)
    skipped = sum(
        leaf.nbytes
        for layer, runs in zip(lm.params["layers"], plan.run, strict=True)
        for name, run in zip(SUBLAYERS, runs, strict=True)
        if not run
        for leaf in jax.tree.leaves(layer[name])
    )
    share: float = 1 - skipped / whole
    return share


def sublayer_ms(lm: LanguageModel, live: int, repeats: int = 15) -> dict[str, float]:
    """Mean milliseconds of one `attention` and one `mlp` sublayer in a one-token step.

    See `inspect_model` for the method; embedding and head are excluded.

    Args:
      lm: the model.
      live: tokens in the cache, at least 1.
      repeats: turns of the timing.
    """
    depth = lm.config.num_layers
    everything = range(depth)
    plans = {
        "attention": LayerPlan.skipping(depth, mlp=everything),
        "mlp": LayerPlan.skipping(depth, attention=everything),
        "neither": LayerPlan.skipping(depth, everything, everything),
    }
    steps = {
        name: SubmodelSteps(lm, plan, head=False, live=live, capacity=bucket(live))
        for name, plan in plans.items()
    }
    count = _steps_per_timing(steps["attention"], lm.mesh)
    for run in steps.values():
        run(1)
    taken = interleaved(
        {name: functools.partial(run, count) for name, run in steps.items()}, repeats, mesh=lm.mesh
    )

    def per_sublayer(name: str) -> float:
        differences = (some - none for some, none in zip(taken[name], taken["neither"], strict=True))
        return max(0.0, statistics.median(differences) / count / depth)

    return {name: per_sublayer(name) for name in SUBLAYERS}


def _steps_per_timing(run: Callable[[int], None], mesh: Mesh | None) -> int:
    """The number of steps with which the fastest of three calls of `run` lasts at least `_TIMING_MS`."""
    count = 1
    run(count)
    while (
        count < _MAX_STEPS
        and min(interleaved({"": functools.partial(run, count)}, 3, mesh=mesh)[""]) < _TIMING_MS
    ):
        count *= 2
    return count


def _encode(lm: LanguageModel, prompt: Prompt) -> list[int]:
    ids = lm.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not ids or not len(prompt):
        raise ValueError("a prompt is empty; give at least one token")
    return ids


def _budget(lm: LanguageModel, prompt_tokens: int, asked: int | None) -> int:
    """The number of new tokens; `generate` rejects a requested number that exceeds the context."""
    free = lm.config.context_length - prompt_tokens
    if free < 1:
        raise ValueError(
            f"a prompt has {prompt_tokens} tokens, the model's context {lm.config.context_length}; "
            "shorten it, so that at least one more token fits"
        )
    return min(DEFAULT_BUDGET, free) if asked is None else asked


def _survey(
    lm: LanguageModel, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Similarities float64[N, L, 2] of N prompts, and agreement counts int[N, L] of the texts after them."""
    # The last prompt token predicts the first new token, so the pass begins with it.
    fed = [[prompt[-1], *text] for prompt, text in zip(prompts, texts, strict=True)]
    prepared, similarities, _ = prepare_texts(lm, prompts, fed)
    begun = dataclasses.replace(prepared, start=prepared.start - 1)
    similar, chosen = fetched((similarities, _exit_choices(lm.config, lm.params, begun)))
    counts = np.array([len(text) for text in texts])
    real = np.arange(chosen.shape[2]) < counts[:, None]
    agreed = np.sum((chosen == chosen[-1]) & real, axis=2).T
    return np.asarray(similar, np.float64), agreed


_exit_choices = jax.jit(exit_choices, static_argnums=0)


def _mask(lm: LanguageModel, plan: LayerPlan) -> dict[str, Any]:
    return {
        "skip_attention": list(plan.skip_attention),
        "skip_mlp": list(plan.skip_mlp),
        "weights_read": weights_read(lm, plan),
    }


def _summary(by_layer: np.ndarray) -> dict[str, Any]:
    return {
        "by_layer": by_layer.tolist(),
        "min": float(by_layer.min()),
        "max": float(by_layer.max()),
        "mean": float(by_layer.mean()),
        "median": float(np.median(by_layer)),
    }
