"""What every table of a paper is read beside: the model cut short, a draft nobody trained, an ideal stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.bench.oracle import oracle
from jaxspec.bench.suite import Peer
from jaxspec.drafting.draft_model import DraftModel as SeparateDraft
from jaxspec.drafting.layerskip import LayerSkip as EarlyExit
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import checkpoint
from jaxspec.io.embedded import embedded_model, embedded_names
from jaxspec.methods import DraftModel, LayerSkip, Method
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.papers.workbench import Workbench, law
from jaxspec.protocol import Drafter
from jaxspec.tuning import fitness_report

M = TypeVar("M", bound=Method)
# The run of drafts under a stop rule that knows the text.
ORACLE = "oracle stop"
# Constant draft lengths that are tried, and shares of the layers that exit early.
CONSTANTS = (1, 2, 4, 8)
_SHARES = (8, 4, 2)
ORACLE_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Cut:
    """Plain decoding of the model cut to its useful depth.

    Attributes:
      name: of the run; None where there is no such depth.
      peers: the run by its name; none where there is none.
      models: what it generates with.
      note: what to say of it.
    """

    name: str | None
    peers: dict[str, Peer]
    models: tuple[LanguageModel, ...]
    note: str


def cut(bench: Workbench, temperature: float = 0.0) -> Cut:
    """The model cut to the fewest layers whose held-out loss is that of the whole within .02 nats per token.

    Whoever reports a speed-up of a model that does not need its depth must beat this one.
    """
    lm, fitness = bench.lm, bench.fitness
    if fitness is None:
        return Cut(
            None,
            {},
            (),
            f"There is no {fitness_report.FITNESS_NAME} beside the model: whether it needs its depth is not known.",
        )
    depth = fitness_report.useful_exit(fitness)
    if depth is None:
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
    note = f"The model cut to {depth} layers has the whole's held-out loss within .02 nats per token."
    return Cut(name, {name: generating(bench, "autoregressive", temperature, lm=short)}, (short,), note)


def generating(
    bench: Workbench,
    method: Any,
    temperature: float = 0.0,
    *,
    lm: LanguageModel | None = None,
    **options: Any,
) -> Peer:
    """A run that is no method of the model itself, or has arguments that a method does not have.

    Args:
      bench: says how many tokens.
      method: as `generate` takes it.
      temperature: see `law`.
      lm: the model that generates; None for the workbench's.
      **options: further arguments of `generate`, such as acceptor.
    """
    model = lm or bench.lm
    given = law(temperature) | {"max_new_tokens": bench.options.max_new_tokens} | options

    def run(prompt: Sequence[int], seed: int) -> Any:
        return model.generate(prompt, method=method, seed=seed, **given)

    return run


def early_exits(lm: LanguageModel) -> list[int]:
    """The exits that are tried: about an eighth, a quarter and half of the layers."""
    depth = lm.config.num_layers
    return sorted({max(1, depth // share) for share in _SHARES} - {depth})


def truncations(lm: LanguageModel, constants: Sequence[int] = ()) -> dict[str, Method]:
    """The model's own first layers as a draft model that nobody trained, by exit and constant draft length."""
    return {
        f"first {exit_layer} layers, K {count}": DraftModel(draft_exit=exit_layer, num_draft_tokens=count)
        for exit_layer in early_exits(lm)
        for count in constants or CONSTANTS
    }


def constant_exits(lm: LanguageModel, constants: Sequence[int] = ()) -> dict[str, LayerSkip]:
    """LayerSkip, which shares the draft's layers with verification, by exit and constant draft length."""
    return {
        f"exit {exit_layer}, K {count}": LayerSkip(exit_layer=exit_layer, num_draft_tokens=count)
        for exit_layer in early_exits(lm)
        for count in constants or CONSTANTS
    }


def smaller_models(lm: LanguageModel) -> list[str]:
    """Names of the embedded models that could draft for a model: of its vocabulary, with fewer or narrower layers."""

    def size(config: LlamaConfig) -> int:
        return config.num_layers * config.hidden_size * (config.hidden_size + config.intermediate_size)

    found = []
    for name in embedded_names():
        config = checkpoint.read_config(embedded_model(name))
        if size(config) < size(lm.config) and config.vocab_size == lm.config.vocab_size and name != lm.name:
            try:
                lm.stream([0], method=DraftModel(draft=name))
            except ValueError:  # its tokens mean something else
                continue
            found.append(name)
    return found


def fastest(bench: Workbench, name: str, candidates: Mapping[str, M], **options: Any) -> tuple[str, M]:
    """Of some settings the fastest on the tuning prompts, by name.

    Args:
      bench: measures them.
      name: of the records.
      candidates: at least one.
      **options: of `Workbench.measure`.
    """
    best = bench.measure(name, "tuning", candidates, **options).best(list(candidates))
    return best, candidates[best]


def ideal_exit(bench: Workbench, exit_layer: int, longest: int = ORACLE_TOKENS) -> Peer:
    """Greedy drafts by the model's first layers under a stop rule that knows the text; see `oracle`.

    Args:
      bench: generates.
      exit_layer: how many layers draft.
      longest: the most tokens of a draft, K: at least that of the rules that it is compared with.
    """

    lm = bench.lm
    draft = (lm.config.truncated(exit_layer), llama.truncate(lm.params, exit_layer))

    def drafter(prompt: Sequence[int], text: Sequence[int]) -> Drafter:
        rule = oracle(lm, prompt, text, draft, bench.options.max_new_tokens)
        return EarlyExit(lm.config, exit_layer, rule, longest)

    return ideal(bench, drafter)


def ideal_draft(bench: Workbench, name: str, exit_layer: int, longest: int = ORACLE_TOKENS) -> Peer:
    """The same by the first layers of a draft model.

    Args:
      bench, exit_layer, longest: see `ideal_exit`.
      name: of the draft model.
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
    """Greedy drafts under a stop rule that knows the text.

    Args:
      bench: generates.
      drafter: a prompt and the model's greedy text after it → what drafts, with its parameters if it has some.
    """
    known: dict[tuple[int, ...], Drafter | tuple[Drafter, Any]] = {}

    def run(prompt: Sequence[int], seed: int) -> Any:
        key = tuple(prompt)
        if key not in known:
            text = generating(bench, "autoregressive")(prompt, seed).tokens
            known[key] = drafter(prompt, text)
        return generating(bench, known[key])(prompt, seed)

    return run
