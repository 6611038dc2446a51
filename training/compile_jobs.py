"""The jobs that `training.compile` compiles: what a job trains, and its programs, as shapes with shardings."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.host.messages import shown
from jaxspec.measuring.aot.programs import part_bytes
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantisation import quantise
from jaxspec.model.sharding import param_shardings, spread_config
from jaxspec.sampling import seed_key
from training import layerskip
from training.data.sizing import Auto
from training.heads import train as heads
from training.loop import optimizer, state_sharding, step
from training.losses import base
from training.losses.exits import layerskip_loss, soft_loss
from training.option_files import parse_plain, yaml_words
from training.reports import card, evaluation
from training.run_options import JobOptions, RematPolicy, RunOptions, TargetWeights

Phase = Literal["init", "step", "evaluation", "export"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles a training job for TPUs or GPUs that need not be there, and reports the memory of its phases.

    Without a recipe the job is sorted fine-tuning (SoFT). The draft has the layers of the shape up to its last exit. A
    single exit gives the ordinary next-token loss.

    Attributes:
      topology: type and number of chips: v5e:4x4, v6e:2x4, v5p:2x2x1, h100:8 and so on, as in `jaxspec compile`.
      shape: shape of the model whose first layers are trained, or that a head drafts for: 1b, 1.2b, 7b, 8b and so on,
        as in `jaxspec compile`.
      recipe: a YAML file of options of a training command. It takes precedence over the options below, from exits on.
      job: the training command of the recipe.
      layers: keep only this many first layers of shape and target, to compile a part of a large job.
      phases: the programs to compile; none, with the option alone, for the figures that need no compiler.
      exits: number of layers at each exit, ascending. Default: the whole model.
      target: shape of the target, with the same vocabulary; None for none.
      distil_weight: weight of the divergence from the target in the loss.
      target_weights: weights of the target; `auto`: as `compute`.
      mesh: arrangement of the chips, such as data=8,model=2. Default, as in training: all of them along data.
      window: tokens per row.
      batch: rows per micro-batch.
      accumulate: micro-batches per step.
      compute: dtype of the matrix products.
      weights: dtype of the trained parameters.
      algorithm: the optimiser.
      moments: dtype of its first moment.
      remat: recompute layers in the backward pass: less memory, about a third more time.
      remat_policy: recompute, but store the results that this policy names, as in training.
      json: print one JSON object and nothing else.
    """

    topology: str
    shape: str
    recipe: Path | None = None
    job: Literal["soft", "sft", "layerskip", "heads"] = "soft"
    layers: int | None = None
    phases: tuple[Phase, ...] = PHASES
    exits: tuple[int, ...] = ()
    target: str | None = None
    distil_weight: float = 0.0
    target_weights: TargetWeights = "auto"
    mesh: str | None = None
    window: int = 1024
    batch: int = 16
    accumulate: int = 1
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    weights: Literal["float32", "bfloat16"] = "float32"
    algorithm: Literal["adamw", "muon", "adafactor"] = "adamw"
    moments: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    remat_policy: RematPolicy | None = None
    json: bool = False


class Trained(NamedTuple):
    """The training state of a job, as shapes with shardings.

    Attributes:
      params: the trained parameters.
      loss: the loss.
      exits: the exits, or the single depth, of a model.
      target: parameters of the frozen model, or None.
      config: shape of the model; None for a head.
      measure: the measurement of a checkpoint; None for a head.
    """

    params: Params
    loss: base.Loss
    exits: tuple[int, ...] = ()
    target: Params | None = None
    config: LlamaConfig | None = None
    measure: Any = None


def with_recipe(options: Options) -> tuple[Options, RunOptions | None]:
    """Replaces the options that a recipe names; returns also the recipe's options.

    Raises:
      ValueError: the recipe does not suit its command, or leaves a size open.
    """
    if options.recipe is None:
        return options, None
    name = f"training.{options.job}"
    kind: Any = importlib.import_module("training.heads.train" if options.job == "heads" else name)
    given: RunOptions = parse_plain(kind.Options, yaml_words(options.recipe), name)
    more = vars(given) | vars(given.data) | vars(given.optimizer)
    if isinstance(given, layerskip.Options):
        more["exits"] = ()
    elif options.job == "sft":
        more["exits"] = () if more["start_layers"] is None else (more["start_layers"],)
    if given.compute == "auto":
        more["compute"] = "bfloat16"
    same = {field.name for field in dataclasses.fields(options)} - {"target", "layers", "mesh"}
    changed = {name: value for name, value in more.items() if name in same}
    still = [name for name, value in changed.items() if isinstance(value, Auto)]
    if still:
        raise ValueError(f"{options.recipe} leaves {', '.join(still)} open; give numbers there")
    return dataclasses.replace(options, **changed), given


def check(options: Options) -> None:
    """Refuses exits and targets that do not suit the shape.

    Raises:
      ValueError: see above.
    """
    config, _ = draft(options)
    if options.distil_weight and options.target is None:
        raise ValueError("distil_weight needs a model to distil from; name its shape with --target")
    seen = config if options.target is None else _shape(options.target)
    if seen.vocab_size != config.vocab_size:
        raise ValueError(
            f"target is {options.target} with {seen.vocab_size} tokens, {options.shape} has {config.vocab_size}; "
            "give shapes with the same vocabulary"
        )


def trained(options: Options, given: RunOptions | None, mesh: Mesh) -> Trained:
    """Describes what a job trains; `options` and `given` are of `with_recipe`."""
    return _head(options, given, mesh) if isinstance(given, heads.Options) else _model(options, given, mesh)


def _shapes(mesh: Mesh, config: LlamaConfig, dtype: str) -> Params:
    """Returns the shapes of a model's parameters with their shardings; `int8`: quantised, the rest bfloat16."""
    params: Params = jax.eval_shape(
        lambda: llama.init_params(config, seed_key(0), dtype="bfloat16" if dtype == "int8" else dtype)
    )
    if dtype == "int8":
        params = jax.eval_shape(functools.partial(quantise, config), params)
    placed: Params = state_sharding.placed_shapes(mesh, params)
    return placed


def _model(options: Options, given: RunOptions | None, mesh: Mesh) -> Trained:
    """Describes a job that trains a model."""
    config, exits = draft(options)
    target, seen = None, None if options.target is None else _shape(options.target, options.layers)
    if seen is not None:
        target = _shapes(mesh, seen, _target_dtype(options))
    recompute, measured = options.remat_policy or options.remat, exits
    if isinstance(given, layerskip.Options):
        recipe = layerskip.recipe(given)
        loss = layerskip_loss(config, recipe, 1000, recompute)
        measured = layerskip.usual_exits(config.num_layers)
    else:
        loss = soft_loss(config, exits, recompute, seen, options.distil_weight)
    measure = evaluation.measure_batch(config, measured, exits, seen or config)
    return Trained(_shapes(mesh, config, options.weights), loss, exits, target, config, measure)


def _head(options: Options, given: heads.Options, mesh: Mesh) -> Trained:
    """Describes a job that trains a head of the shape."""
    config = _shape(options.shape, options.layers)
    target = _shapes(mesh, config, _target_dtype(options))
    size = given.head.draft_vocab_size
    # Which tokens a head has is data of the program; their number is not.
    part = None if size is None else np.arange(size, dtype=np.int32)
    networks: list[Any] = []

    def init(params: Params) -> Params:
        network, own = given.made.init(given.head, config, params, part, 0)
        networks.append(network)
        return jax.tree.map(lambda leaf: leaf.astype(options.weights), own)

    params = state_sharding.placed_shapes(mesh, jax.eval_shape(init, target))
    return Trained(params, given.made.loss(networks[0], given.head, part), target=target)


def _target_dtype(options: Options) -> str:
    return options.compute if options.target_weights == "auto" else options.target_weights


def step_flops(step: Any, accumulate: int) -> float:
    """Counts the operations of a step, of the program `operations`, whose loop over micro-batches counts once."""
    flops: float = step.cost_analysis()["flops"]
    return flops * accumulate


def programs(
    options: Options, given: RunOptions | None, found: Trained, mesh: Mesh
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Returns the programs of a job by phase, to be lowered, and bytes on a chip of what is held beside them.

    `operations` is the step without a mesh, for this machine. The bytes also contain `loading`; `state` and `batch` of
    a step; and `best`, the checkpoint's parameters.
    """
    how = optimizer.OptimizerOptions(options.algorithm, options.moments) if given is None else given.optimizer
    still = given.held if isinstance(given, JobOptions) else ()
    transform = optimizer.make_optimizer(how, 1000, still)
    loss = base.in_dtype(base.holding(found.loss, still), jnp.dtype(options.compute))

    def init(params: Params) -> step.TrainState:
        return step.init_state(params, transform)

    params, target, config = found.params, found.target, found.config
    state = state_sharding.placed_shapes(mesh, jax.eval_shape(init, params))
    batch = state_sharding.batch_shapes(mesh, (options.accumulate, options.batch, options.window), 1)
    rows = state_sharding.batch_shapes(mesh, (options.batch, options.window), 0)
    step_fn: Any = step.make_step(loss, transform, 0)
    programs: dict[str, Callable[[], Any]] = {
        "init": lambda: state_sharding.maker(mesh, init, params, donate=True).lower(params),
        "step": lambda: step_fn.lower(state, batch, target),
        # The compiler of a chip that is not there counts no operations before compilation.
        "operations": lambda: _undivided(lambda: step_fn.lower(*jax.tree.map(_bare, (state, batch, target)))),
    }
    if config is not None:
        programs["evaluation"] = lambda: found.measure.lower(params, target, rows)
        programs["export"] = _export(config, mesh)
    beside = part_bytes(target)
    # A step that does not read the target has it beside its arguments.
    reads = options.distil_weight > 0 or config is None
    return programs, {
        "loading": part_bytes(params) + beside,
        "init": beside,
        "step": 0 if reads else beside,
        "evaluation": part_bytes(state) - part_bytes(params),
        "best": part_bytes(params),
        "state": part_bytes(state),
        "batch": part_bytes(batch),
    }


def _undivided(lower: Callable[[], Any]) -> Any:
    """Lowers losses in one piece, because a loop's body is counted once."""
    with base.undivided():
        return lower()


def _bare(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _export(config: LlamaConfig, mesh: Mesh) -> Callable[[], Any]:
    """Returns the program that draws the card's samples, with the exported model along `model`."""
    row = state_sharding.along_model(list(mesh.devices.flat))
    whole = NamedSharding(row, PartitionSpec())
    spread = spread_config(row, config)
    tokens = jax.ShapeDtypeStruct(
        (2, min(2 * card.SAMPLE_TOKENS, config.context_length)), jnp.int32, sharding=whole
    )
    length = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    key = jax.eval_shape(lambda: seed_key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
    shapes = jax.eval_shape(lambda: llama.init_params(spread, seed_key(0)))
    exported = jax.tree.map(
        lambda one, place: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place),
        shapes,
        param_shardings(row, spread),
    )
    drawn: Any = card.make_draw(spread)
    return lambda: drawn.lower(key, exported, tokens, length)


def _shape(name: str, layers: int | None = None) -> LlamaConfig:
    if name not in SHAPES:
        raise ValueError(f"unknown shape {shown(name)}; give one of {', '.join(SHAPES)}")
    return SHAPES[name] if layers is None else SHAPES[name].truncated(layers)


def draft(options: Options) -> tuple[LlamaConfig, tuple[int, ...]]:
    """Returns the shape to train, truncated after its last exit, and the exits."""
    whole = _shape(options.shape, options.layers)
    exits = options.exits or (whole.num_layers,)
    if sorted(set(exits)) != list(exits) or not 1 <= exits[0] <= exits[-1] <= whole.num_layers:
        raise ValueError(
            f"exits is {exits}, and {options.shape} has {whole.num_layers} layers; give numbers of layers from 1 to "
            f"{whole.num_layers}, rising, such as --exits 6 9 12"
        )
    return whole.truncated(exits[-1]), exits
