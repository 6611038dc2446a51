"""What `search` and `tune` measure with: prompts, the model's own text after them, the costs of a round's parts."""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.profile import CAPACITY, LIVE, Steps, WrongDrafts
from jaxspec.bench.timing import interleaved, median_ratio
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.engine.buckets import bucket, prefill_piece
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.files import read_text
from jaxspec.model import cache as kv
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Drafter, View, Weights, rising_widths
from jaxspec.sampling import Greedy
from jaxspec.selection.agreement import Calibration, calibration
from jaxspec.selection.cost import MOST_DRAFT_TOKENS, Costs
from jaxspec.stopping import Constant

Report = Callable[[str], None]
# Draft steps in one timing.
_DRAFTED = 8


def read_prompts(lm: LanguageModel, prompt_file: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """Prompts as token ids: one a file; or the default ones, as far as they fit the model's context.

    Raises:
      ValueError, FileNotFoundError: a file is missing, empty, no text, or too long for the context.
    """
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; give at least 2")
    wanted = "`prompt_file` must be text files, one prompt each"
    context = lm.config.context_length
    if not prompt_file:
        fitting = [
            ids
            for ids in map(lm.encode, prompt_set.sample(2, "tuning"))
            if len(ids) + max_new_tokens <= context
        ]
        if not fitting:
            raise ValueError(
                f"max_new_tokens ({max_new_tokens}) and the default prompts exceed the model's context of "
                f"{context}; give fewer, or shorter prompts by `prompt_file`"
            )
        return fitting
    found = []
    for path in prompt_file:
        text = read_text(path, wanted).removesuffix("\n")
        ids = lm.encode(text) if text else []
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
    on_progress: Report = lambda what: None,
) -> list[list[int]]:
    """What the model writes greedily after each prompt, by the plain method."""
    found: dict[int, list[int]] = {}
    for piece in lm.stream(prompts, max_new_tokens=max_new_tokens, temperature=0.0):
        if piece.result is not None:
            found[piece.index] = piece.result.tokens
            if piece.result.error is not None:
                warnings.warn(piece.result.error, RuntimeWarning, stacklevel=2)
            on_progress(f"generating the model's own text: {len(found)} of {len(prompts)} texts")
    return [found[index] for index in range(len(prompts))]


def calibrate(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> tuple[Calibration, jax.Array]:
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
    with jax.default_device(lm.device):
        return _calibrate(
            lm.config,
            lm.params,
            _padded(prompts, bucket(length + longest)),
            jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
            _padded(texts, longest),
            jnp.asarray([len(text) for text in texts], jnp.int32),
            piece=prefill_piece(length, lm.device.platform),
        )


_calibrate = jax.jit(calibration, static_argnames=("config", "piece"))


def _padded(rows: Sequence[Sequence[int]], width: int) -> jax.Array:
    padded = np.zeros((len(rows), width), np.int32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return jnp.asarray(padded)


def measure_costs(lm: LanguageModel, *, repeats: int = 9, on_progress: Report = lambda what: None) -> Costs:
    """Times the parts of a round of one text, in turns with plain decoding; each figure is a median.

    Draft steps run under four masks in one executable (all, no attention, no MLP, neither), from which least
    squares give the share of a sublayer; rounds are those of the real loop, as in `bench.profile`.
    """
    num_layers = lm.config.num_layers
    every = range(num_layers)
    plans = {
        "all": LayerPlan.skipping(num_layers),
        "no attention": LayerPlan.skipping(num_layers, attention=every),
        "no mlp": LayerPlan.skipping(num_layers, mlp=every),
        "neither": LayerPlan.skipping(num_layers, every, every),
    }
    widths = rising_widths(MOST_DRAFT_TOKENS)

    def verifying(rows: int) -> Drafter:
        return WrongDrafts(rows - 1) if rows > 1 else Autoregressive()

    with jax.default_device(lm.device):
        draft = _DraftSteps(lm)
        timed: dict[str, Callable[[], Any]] = {
            name: functools.partial(draft, plan.traced()) for name, plan in plans.items()
        }
        rounds = {rows: Steps(lm, Weights(lm.params), verifying(rows), CAPACITY) for rows in widths}
        timed |= {str(rows): steps for rows, steps in rounds.items()}
        for number, (name, run) in enumerate(timed.items(), 1):
            what = f"a round of {name} rows" if name.isdigit() else "a draft"
            on_progress(f"compiling {what}, {number} of {len(timed)}")
            run()
        taken = interleaved(
            timed, repeats, lambda turn: on_progress(f"measuring the costs of a round's parts, {turn}")
        )
    plain_ms = statistics.median(taken["1"])

    def typical_ms(name: str, count: int) -> float:
        """Of one of `count` in a timing; by its ratio to plain decoding in the same turn."""
        return plain_ms * median_ratio(taken[name], taken["1"]) / count

    ran = [(1, num_layers - len(p.skip_attention), num_layers - len(p.skip_mlp)) for p in plans.values()]
    step_ms = [typical_ms(name, _DRAFTED) for name in plans]
    fitted, *_ = np.linalg.lstsq(np.array(ran), np.array(step_ms), rcond=None)
    rest, attention, mlp = (max(float(ms), 0.0) for ms in fitted)
    verify = tuple((rows, typical_ms(str(rows), rounds[rows].rounds)) for rows in widths)
    return Costs(attention, mlp, rest, verify)


class _DraftSteps:
    """Drafts a few tokens with a traced mask, always from the same live length."""

    def __init__(self, lm: LanguageModel) -> None:
        self._tokens = 3 + jnp.arange(CAPACITY, dtype=jnp.int32)[None] % (lm.config.vocab_size - 3)
        self._cache = kv.create(lm.config, 1, CAPACITY, lm.params["embed"].dtype)
        weights, keys, one = (
            Weights(lm.params),
            jax.random.split(jax.random.key(0), 1),
            jnp.ones(1, jnp.int32),
        )

        @functools.partial(jax.jit, donate_argnames="cache")
        def draft(weights, plan, tokens, cache):
            drafter = DraftVerify(lm.config, plan, rule=Constant(), num_draft_tokens=_DRAFTED)
            view = View(tokens, (LIVE + 1) * one, cache, CAPACITY * one)
            # What a rule remembers does not depend on the prefill.
            state = drafter.init(weights, view, None)  # type: ignore[arg-type]
            proposal, _, cache = drafter.propose(keys, weights, state, view, Greedy())
            return proposal.tokens, cache

        self._draft = functools.partial(draft, weights)

    def __call__(self, plan: jax.Array) -> None:
        tokens, self._cache = self._draft(plan, self._tokens, self._cache)
        jax.block_until_ready(tokens)
