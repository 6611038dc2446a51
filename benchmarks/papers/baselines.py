"""The baselines of every table: the truncated model, an untrained draft, an ideal stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.papers.oracle import oracle
from benchmarks.papers.workbench import Workbench, distribution
from jaxspec.drafting.draft_model_drafter import DraftModel as SeparateDraft
from jaxspec.drafting.layerskip_drafter import LayerSkip as EarlyExit
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import checkpoint
from jaxspec.io.embedded import embedded_model, embedded_names
from jaxspec.io.methods.method_files import FITNESS_NAME
from jaxspec.measuring.bench.suite import Peer
from jaxspec.methods import DraftModel, LayerSkip, Method
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Drafter

M = TypeVar("M", bound=Method)
# The run of drafts under a stop rule that has the text.
ORACLE = "oracle stop"
# Constant draft lengths to try, and shares of the layers for early exits.
CONSTANTS = (1, 2, 4, 8)
_SHARES = (8, 4, 2)
ORACLE_TOKENS = 12
# The held-out loss of the useful depth exceeds the whole model's by at most this, in nats per token.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Cut:
    """Plain decoding of the model truncated to its useful depth.

    Attributes:
      name: name of the run; None if there is no such depth.
      peers: the run by its name; empty if there is none.
      models: the models that it generates with.
      note: a note for the report.
    """

    name: str | None
    peers: dict[str, Peer]
    models: tuple[LanguageModel, ...]
    note: str


def cut(bench: Workbench, temperature: float = 0.0) -> Cut:
    """Truncates the model to the fewest layers with the whole model's held-out loss, within .02 nats per token.

    A method is useful only if it is faster than this model.
    """
    lm, report = bench.lm, bench.fitness
    if report is None:
        return Cut(
            None,
            {},
            (),
            f"There is no {FITNESS_NAME} beside the model, so its useful depth is unknown.",
        )
    kinds = list(report["kinds"].values())
    # The mean by exit over the kinds of work, weighted by their tokens.
    loss = np.average(
        [kind["loss"] for kind in kinds], axis=0, weights=[kind["tokens"] for kind in kinds]
    ).tolist()
    near = (layers for layers, nats in enumerate(loss, 1) if nats - loss[-1] <= TOLERANCE)
    depth = next(near, len(loss))
    if depth == len(loss):
        return Cut(
            None,
            {},
            (),
            "Plain, cut to the useful depth: none; no exit has the whole model's held-out loss within .02.",
        )
    short = LanguageModel(
        lm.config.truncated(depth),
        llama.truncate(lm.params, depth),
        lm.tokenizer,
        name=f"{lm.name} cut to {depth} layers",
        device=lm.device,
        mesh=lm.mesh,
    )
    name = f"plain, cut to {depth} layers"
    rises = {name: one["loss"][depth - 1] - one["loss"][-1] for name, one in report["kinds"].items()}
    most = max(rises, key=rises.__getitem__)
    note = (
        f"The model cut to {depth} layers has the whole's held-out loss within .02 nats per token, over all kinds "
        f"together; it loses most on {most}, {rises[most]:.3f}."
    )
    return Cut(name, {name: generating(bench, "autoregressive", temperature, lm=short)}, (short,), note)


def generating(
    bench: Workbench,
    method: Any,
    temperature: float = 0.0,
    *,
    lm: LanguageModel | None = None,
    **options: Any,
) -> Peer:
    """Makes a run that is not a method of the model itself, or that has other arguments than a method.

    Args:
      bench: gives the number of tokens.
      method: a method, as for `generate`.
      temperature: see `distribution`.
      lm: the model that generates. Default: the workbench's.
      **options: further arguments of `generate`, such as acceptor.
    """
    model = lm or bench.lm
    given = distribution(temperature) | {"max_new_tokens": bench.options.max_new_tokens} | options

    def run(prompt: Sequence[int], seed: int) -> Any:
        return model.generate(prompt, method=method, seed=seed, **given)

    return run


def early_exits(lm: LanguageModel) -> list[int]:
    """Returns the exits to try: about an eighth, a quarter and half of the layers."""
    depth = lm.config.num_layers
    return sorted({max(1, depth // share) for share in _SHARES} - {depth})


def truncations(lm: LanguageModel, constants: Sequence[int] = ()) -> dict[str, Method]:
    """Returns the model's own first layers as an untrained draft model, by exit and constant draft length."""
    return {
        f"first {exit_layer} layers, K {count}": DraftModel(draft_exit=exit_layer, num_draft_tokens=count)
        for exit_layer in early_exits(lm)
        for count in constants or CONSTANTS
    }


def constant_exits(lm: LanguageModel, constants: Sequence[int] = ()) -> dict[str, LayerSkip]:
    """Returns LayerSkip, which reuses the draft's layers in verification, by exit and constant draft length."""
    return {
        f"exit {exit_layer}, K {count}": LayerSkip(exit_layer=exit_layer, num_draft_tokens=count)
        for exit_layer in early_exits(lm)
        for count in constants or CONSTANTS
    }


def smaller_models(lm: LanguageModel) -> list[str]:
    """Returns names of embedded models that can draft for a model: same vocabulary, fewer or narrower layers."""

    def size(config: LlamaConfig) -> int:
        return config.num_layers * config.hidden_size * (config.hidden_size + config.intermediate_size)

    found = []
    for name in embedded_names():
        config = checkpoint.read_config(embedded_model(name))
        if size(config) < size(lm.config) and config.vocab_size == lm.config.vocab_size and name != lm.name:
            try:
                lm.stream([0], method=DraftModel(draft=name))
            except ValueError:  # another vocabulary
                continue
            found.append(name)
    return found


def fastest(bench: Workbench, name: str, candidates: Mapping[str, M], **options: Any) -> tuple[str, M]:
    """Returns the candidate that is fastest on the tuning prompts, with its name.

    Args:
      bench: the workbench.
      name: name of the records.
      candidates: settings by name, at least one.
      **options: arguments of `Workbench.measure`.
    """
    best = bench.measure(name, "tuning", candidates, **options).best(list(candidates))
    return best, candidates[best]


def ideal_exit(bench: Workbench, exit_layer: int, longest: int = ORACLE_TOKENS) -> Peer:
    """Drafts greedily with the model's first layers under a stop rule that has the text; see `oracle`.

    Args:
      bench: the workbench.
      exit_layer: number of layers of the draft.
      longest: largest number of draft tokens, K: at least that of the compared rules.
    """

    lm = bench.lm
    draft = (lm.config.truncated(exit_layer), llama.truncate(lm.params, exit_layer))

    def drafter(prompt: Sequence[int], text: Sequence[int]) -> Drafter:
        rule = oracle(lm, prompt, text, draft, bench.options.max_new_tokens)
        return EarlyExit(lm.config, exit_layer, rule, longest)

    return ideal(bench, drafter)


def ideal_draft(bench: Workbench, name: str, exit_layer: int, longest: int = ORACLE_TOKENS) -> Peer:
    """Drafts greedily with the first layers of a draft model under a stop rule that has the text.

    Args:
      bench, exit_layer, longest: see `ideal_exit`.
      name: name of the draft model.
    """
    made, params = bench.lm.drafter(DraftModel(draft=name, draft_exit=exit_layer, num_draft_tokens=longest))
    assert isinstance(made, SeparateDraft)

    def drafter(prompt: Sequence[int], text: Sequence[int]) -> tuple[Drafter, Any]:
        rule = oracle(bench.lm, prompt, text, (made.config, params), bench.options.max_new_tokens)
        return dataclasses.replace(made, rule=rule), params

    return ideal(bench, drafter)


def ideal(
    bench: Workbench, drafter: Callable[[Sequence[int], Sequence[int]], Drafter | tuple[Drafter, Any]]
) -> Peer:
    """Drafts greedily under a stop rule that has the text.

    Args:
      bench: the workbench.
      drafter: maps a prompt and the model's greedy text after it to a drafter, with its parameters if it has any.
    """
    known: dict[tuple[int, ...], Drafter | tuple[Drafter, Any]] = {}

    def run(prompt: Sequence[int], seed: int) -> Any:
        key = tuple(prompt)
        if key not in known:
            text = generating(bench, "autoregressive")(prompt, seed).tokens
            known[key] = drafter(prompt, text)
        return generating(bench, known[key])(prompt, seed)

    return run
