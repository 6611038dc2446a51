"""Method names and options become parts: the one place that knows them all."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor, RejectionAcceptor
from jaxspec.drafting.asd import ASD
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.drafting.ngram import BREAK, NGram
from jaxspec.drafting.s2d import S2D
from jaxspec.io import method_files
from jaxspec.io.files import read_text
from jaxspec.io.method_files import ASDNumbers
from jaxspec.io.user_data import has_user_data, home, model_data
from jaxspec.method_options import (
    ADAPTIVE,
    METHODS,
    Method,
    MethodOptions,
    check_method,
    options_for,
    options_given,
    stop_rules,
)
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Acceptor, Drafter, StopRule
from jaxspec.stopping import (
    AdaptiveGamma,
    AdaptiveLength,
    AnyOf,
    ConfidenceBelow,
    Constant,
    Probe,
    ProductBelow,
)

__all__ = [
    "METHODS",
    "Method",
    "MethodOptions",
    "Model",
    "Resources",
    "build",
    "build_acceptor",
    "carried_over",
    "carries",
    "check_method",
    "options_for",
    "options_given",
]


# Longer drafts only compile longer: every width of a verification is compiled.
MOST_DRAFT_TOKENS = 128
# More than any model has.
MOST_LAYERS = 10_000


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's config and parameters, what it is called, and the exits it was trained for, in layers."""

    config: LlamaConfig
    params: Params
    name: str = ""
    exits: tuple[int, ...] = ()

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `io.method_files.fingerprint`."""
        return method_files.fingerprint(self.config, self.params)

    def until(self, num_layers: int) -> Model:
        """Its first layers alone, the same object each time."""
        if num_layers not in self._cut:
            config = self.config.truncated(num_layers)
            self._cut[num_layers] = Model(config, llama.truncate(self.params, num_layers), self.name)
        return self._cut[num_layers]

    @functools.cached_property
    def _cut(self) -> dict[int, Model]:
        return {}


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a method may need from outside; functions are called only if the method needs them.

    Attributes:
      load_draft: name of a model → the model, checked to share the target's vocabulary.
      encode: text → token ids, for references.
      directory: the target's, where a method's files lie, if not in the user's data directory; None for a model made
        in memory, which has no files.
      laws: the laws that the texts of this batch follow, see `io.method_files.law_name`.
    """

    load_draft: Callable[[str], Model]
    encode: Callable[[str], Sequence[int]]
    directory: Path | None = None
    laws: tuple[str, ...] = ("greedy",)


def build(method: str, options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    """The drafter of a method and its parameters (None if it has none).

    Raises:
      ValueError: unknown method, an option that is not the method's or outside its range.
    """
    name = check_method(method)
    foreign = options_given(options).keys() - options_given(options_for(name, options)).keys()
    if foreign:
        names, rules = ", ".join(f"`{one}`" for one in sorted(foreign)), stop_rules(name, options)
        under = f" with stop_rule={','.join(rules)}" if rules else ""
        raise ValueError(f"method {name}{under} has no option {names}; leave it out or choose another")
    return _BUILDERS[name](options, target, resources)


def build_acceptor(options: MethodOptions, sampling: bool) -> Acceptor:
    """The acceptor: as asked, else greedy for greedy text and block for sampled.

    Raises:
      ValueError: the greedy acceptor is asked for where texts are drawn at random.
    """
    name = options.acceptor or ("block" if sampling else "greedy")
    if name == "greedy":
        if sampling:
            raise ValueError(
                "acceptor='greedy' would not follow the law at a temperature above 0; choose rejection or block"
            )
        return GreedyAcceptor()
    return RejectionAcceptor() if name == "rejection" else BlockAcceptor()


def carries(drafter: Drafter) -> bool:
    """Whether a drafter has a γ that goes from text to text."""
    return any(gamma.carries for gamma in jax.tree.leaves(drafter, is_leaf=_is_gamma) if _is_gamma(gamma))


def carried_over(drafter: Drafter, before: Drafter | None) -> Drafter:
    """The drafter with the γ that one of the same structure, made before, ended with."""
    if len({jax.tree.structure(one) for one in (drafter, before)}) > 1:
        return drafter

    def take(new: Any, old: Any) -> Any:
        return dataclasses.replace(new, first=old.first) if _is_gamma(new) and new.carries else new

    return jax.tree.map(take, drafter, before, is_leaf=_is_gamma)


def _is_gamma(node: Any) -> bool:
    return isinstance(node, AdaptiveGamma)


def _autoregressive(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    return Autoregressive(), None


def _draft_model(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    if options.draft is None and options.draft_exit is None:
        raise ValueError(
            "method draft-model needs a draft; give draft=DIR, or draft_exit=N for the model's own first N layers"
        )
    draft = target if options.draft is None else resources.load_draft(options.draft)
    if options.draft_exit is not None:
        draft = draft.until(options.draft_exit)
    rule, most = _stopping("draft-model", options)
    return DraftModel(draft.config, rule, most), draft.params


def _asd(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    given = (options.alpha, options.every, options.keep_last)
    default = _asd_numbers(options, target, resources) if None in given else ASDNumbers()
    alpha, every, keep_last = (
        usual if number is None else number
        for number, usual in zip(given, dataclasses.astuple(default), strict=True)
    )
    depth = target.config.num_layers
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}; give a cosine similarity above 0 and at most 1 (1: rule off)")
    if not 0 <= every <= MOST_LAYERS:
        raise ValueError(f"every is {every}; give 0 (rule off) or a number of layers, at most {MOST_LAYERS}")
    if not 0 <= keep_last <= depth:
        raise ValueError(f"keep_last is {keep_last}; give a number from 0 to {depth}, the model's layers")
    if every == 1 and keep_last == 0:
        raise ValueError("every=1 with keep_last=0 skips every layer; a draft must run at least one")
    rule, most = _stopping("asd", options)
    numbers = jnp.float32(alpha), jnp.int32(every), jnp.int32(keep_last)
    return ASD(target.config, *numbers, rule, most, options.shared_mask), None


def _asd_numbers(options: MethodOptions, target: Model, resources: Resources) -> ASDNumbers:
    """As in the file named, else as in the one beside the model, else the paper's for models of this name."""
    path = _file(options.asd_numbers, target, resources, method_files.ASD_NAME)
    if options.asd_numbers is not None or (path is not None and path.is_file()):
        assert path is not None
        return method_files.read_asd(path, target.fingerprint)
    code = "codellama" in target.name.lower().replace("-", "")
    numbers = ASDNumbers(every=4, keep_last=3) if code else ASDNumbers()
    return dataclasses.replace(numbers, keep_last=min(numbers.keep_last, target.config.num_layers))


def _draft_verify(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    path = _file(options.plan, target, resources, method_files.PLAN_NAME)
    if path is None or (options.plan is None and not path.is_file()):
        raise FileNotFoundError(
            f"method draft-verify needs a plan{f', and there is no {path}' if path else ''}; "
            "make one with `jaxspec search`, or give plan=FILE"
        )
    plan = method_files.read_plan(path, target.fingerprint, target.config.num_layers)
    rule, most = _stopping("draft-verify", options)
    return DraftVerify(target.config, plan.traced(), rule, most), None


def _layerskip(
    method: Method, options: MethodOptions, target: Model, resources: Resources
) -> tuple[Drafter, Any]:
    depth = target.config.num_layers
    if depth == 1:
        raise ValueError(f"method {method} exits early, and the model has one layer; choose another method")
    exit_layer = max(1, depth // 4) if options.exit_layer is None else options.exit_layer
    if not 1 <= exit_layer < depth:
        raise ValueError(f"exit_layer is {exit_layer}; the model has {depth} layers, give 1 to {depth - 1}")

    def probe() -> Probe:
        if len(set(resources.laws)) > 1:
            raise ValueError(
                f"the texts follow different laws ({', '.join(sorted(set(resources.laws)))}), and a probe "
                "belongs to one; generate them apart"
            )
        law = resources.laws[0]
        path = _file(options.probe, target, resources, method_files.probe_name(exit_layer, law))
        if path is None:
            raise ValueError("the model is in memory only, no probe lies beside it; give probe=FILE")
        if options.probe is None and not path.is_file():
            raise FileNotFoundError(_no_such_probe(path, exit_layer, law, _directories(target, resources)))
        read = method_files.read_probe(path, target.fingerprint, target.config.hidden_size, exit_layer, law)
        direction = jnp.asarray(read.v) * target.params["norm"].astype(jnp.float32)
        return Probe(direction, jnp.float32(read.b), jnp.float32(target.config.rms_norm_eps))

    rule, most = _stopping(method, options, probe)
    return LayerSkip(target.config, exit_layer, rule, most), None


# The lowest that the paper tries; best there for small targets.
_THRESHOLD = 0.5


def _s2d(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    sorted_target = options.draft is None
    draft = target if options.draft is None else resources.load_draft(options.draft)
    # The target's last layer is what verifies.
    exits = tuple(n for n in draft.exits if not sorted_target or n < target.config.num_layers)
    if not exits:
        raise ValueError(
            f"method s2d needs a draft with sorted exits, and {draft.name or 'the model'} has none"
            f"{' below its last layer' if sorted_target else ''}; give draft=DIR, made by "
            "`python -m training.soft`"
        )
    draft = draft.until(exits[-1])
    thresholds = _thresholds(options, exits, target, draft, resources)
    rule, most = _stopping("s2d", options)
    if sorted_target:
        return S2D(target.config, exits, thresholds, rule, most, sorted_target=True), None
    return S2D(draft.config, exits, thresholds, rule, most), draft.params


def _thresholds(
    options: MethodOptions, exits: tuple[int, ...], target: Model, draft: Model, resources: Resources
) -> jax.Array:
    """As in the file named, else as in the one beside the model, else the paper's."""
    numbers = [_THRESHOLD] * (len(exits) - 1)
    path = None
    if options.thresholds is not None or resources.directory is not None:
        name = method_files.thresholds_name(draft.fingerprint)
        path = _file(options.thresholds, target, resources, name)
    if path is not None and (options.thresholds is not None or path.is_file()):
        numbers = method_files.read_thresholds(path, target.fingerprint, draft.fingerprint, exits)
    return jnp.asarray(numbers, jnp.float32)


def _directories(target: Model, resources: Resources) -> list[Path]:
    """Where files of a model's methods are looked for, in this order: first where commands write them now, so that
    what was found last counts; none for a model made in memory."""
    beside = resources.directory
    if beside is None:
        return []
    # A fingerprint takes a moment; most users have no such files.
    if not has_user_data():
        return [beside]
    own = model_data(target.fingerprint)
    return [beside, own] if home(beside, target.name, target.fingerprint) == beside else [own, beside]


def _file(named: str | None, target: Model, resources: Resources, name: str) -> Path | None:
    """The file that the user named; else the first of this name in `_directories`, or where it would lie beside the
    model; None for a model made in memory."""
    if named is not None:
        return Path(named)
    if resources.directory is None:
        return None
    paths = (directory / name for directory in _directories(target, resources))
    return next((path for path in paths if os.path.isfile(path)), resources.directory / name)


def _no_such_probe(path: Path, exit_layer: int, law: str, directories: Sequence[Path]) -> str:
    """What to say where the probe of an exit and a law is missing, but not all of them may be."""
    found = sorted({(other, layer) for one in directories for layer, other in method_files.probes_in(one)})
    layers = [str(layer) for other, layer in found if other == law]
    remedy = "train one with `python -m training.probe`, or give probe=FILE"
    if layers:
        return (
            f"there is no probe for exit_layer={exit_layer} ({law}), only for {', '.join(layers)}; "
            f"give one of these, or {remedy}"
        )
    others = (
        f"; the model's probes are for {', '.join(sorted({other for other, _ in found}))}" if found else ""
    )
    return f"no probe {path}{others}; {remedy}"


def _ngram(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    reference = None
    if options.reference:
        joined: list[int] = []
        for path in options.reference:
            joined += [*resources.encode(read_text(path, "`reference` must be a text file")), BREAK]
        reference = jnp.asarray(np.array(joined, np.int32))
    longest = options.ngram_max if options.ngram_max is not None else (3 if reference is None else 5)
    shortest = options.ngram_min if options.ngram_min is not None else 1
    if not 1 <= shortest <= longest <= MOST_DRAFT_TOKENS:
        raise ValueError(
            f"ngram_min={shortest} and ngram_max={longest} do not fit; "
            f"give 1 <= min <= max <= {MOST_DRAFT_TOKENS}"
        )
    drafter = NGram(
        reference=reference,
        match=options.match or "latest",
        ngram_max=longest,
        ngram_min=shortest,
        num_draft_tokens=_num_draft_tokens(options, 10 if reference is None else 20),
    )
    return drafter, None


_BUILDERS: dict[Method, Callable[[MethodOptions, Model, Resources], tuple[Drafter, Any]]] = {
    "autoregressive": _autoregressive,
    "ngram": _ngram,
    "draft-model": _draft_model,
    "asd": _asd,
    "draft-verify": _draft_verify,
    "layerskip": functools.partial(_layerskip, "layerskip"),
    "adaspeed": functools.partial(_layerskip, "adaspeed"),
    "adaspeed-probe": functools.partial(_layerskip, "adaspeed-probe"),
    "s2d": _s2d,
}


def _no_probe() -> Probe:
    raise ValueError(
        "stop_rule='probe' needs a draft that always exits at one layer; choose layerskip, adaspeed or adaspeed-probe"
    )


def _stopping(
    method: Method, options: MethodOptions, probe: Callable[[], Probe] = _no_probe
) -> tuple[StopRule, int]:
    """The stop rule, and K: a rule that ends drafts early wants room for those that go well."""
    names = stop_rules(method, options)
    most = _num_draft_tokens(options, 5 if set(names) == {"constant"} else 12)
    thresholds = {"confidence": 0.6, "product": 0.8, "probe": 0.8}
    rules: list[StopRule] = []
    for name in names:
        if name == "adaptive-length":
            rules.append(AdaptiveLength(jnp.int32(5), jnp.int32(2), jnp.int32(1), jnp.int32(most)))
        elif name != "constant":
            gamma = _gamma(options, thresholds[name], most)
            if name == "confidence":
                rules.append(ConfidenceBelow(gamma))
            else:
                rules.append(ProductBelow(gamma, probe()) if name == "probe" else ProductBelow(gamma))
    if not rules:
        return Constant(), most
    return rules[0] if len(rules) == 1 else AnyOf(tuple(rules)), most


# Field of `AdaptiveGamma` → option.
_CONSTANTS = {name: f"gamma_{name}" for name in ("alpha", "beta1", "beta2", "epsilon")}


def _gamma(options: MethodOptions, usual: float, most: int) -> Any:
    """γ, fixed or adaptive.

    Raises:
      ValueError: it, or a constant of its adaptation, is no number from 0 to 1, or is given for nothing.
    """
    given = options_given(options)
    for field in ("gamma", *_CONSTANTS.values()):
        if not 0 <= given.get(field, 0) <= 1:
            raise ValueError(f"{field} is {given[field]}; give a number from 0 to 1")
    first = jnp.float32(given.get("gamma", usual))
    if not options.adaptive_gamma:
        for field in ADAPTIVE:
            if field in given:
                raise ValueError(f"`{field}` belongs to an adaptive γ; leave out adaptive_gamma=False")
        return first
    paper = AdaptiveGamma()
    constants = {
        field: jnp.float32(given.get(name, getattr(paper, field))) for field, name in _CONSTANTS.items()
    }
    edge = jnp.int32(most) if options.gamma_edge == "code" else None
    return AdaptiveGamma(first, **constants, most=edge, carries=options.carry_gamma)


def _num_draft_tokens(options: MethodOptions, default: int) -> int:
    count = default if options.num_draft_tokens is None else options.num_draft_tokens
    if count < 1:
        raise ValueError(f"num_draft_tokens is {count}; a drafting method needs at least 1")
    if count > MOST_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens is {count}; give at most {MOST_DRAFT_TOKENS}")
    return count
