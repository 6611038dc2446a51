"""The files of a model's methods: skip plans, ASD's numbers, probes and thresholds. Each names its model.

The methods find them beside the model or in the user's data directory (`user_data`); the user may also name a path.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from jaxspec.host.files import no_file
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io import tensors
from jaxspec.io.hf.layout import leaves
from jaxspec.io.records import ModelRecord, check_origin
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.lora import unadapted
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import fetched, without_copies
from jaxspec.sampling import is_greedy

PROBE_FORMAT = "jaxspec.probe/1"
# Their names beside a model.
PLAN_NAME, ASD_NAME, PROBES_NAME = "jaxspec.plan.json", "jaxspec.asd.json", "probes"
THRESHOLDS_NAME = "thresholds"
# Config fields that are not part of a model's identity, because they concern only its text or its cache.
_TEXT_FIELDS = ("bos_token_id", "eos_token_ids", "model_type", "max_position_embeddings", "kv_cache_dtype")
# The fields of the first files with fingerprints. A newer field counts if its value is not the default, which all
# models had before.
_FIRST_FIELDS = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    ),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "tie_embeddings", "qkv_bias", "output_bias", "mlp_bias"),
    *("sliding_windows", "kind", "factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
# Numbers of each parameter's first and last row that go into a fingerprint.
_SAMPLED = 8
# The sampled rows of each leaf, by its name, see `sampled_rows`.
Sampled = Mapping[str, Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class ProbeFile:
    """A linear probe σ(v·h + b) of the state h after an early exit and the final norm.

    Attributes:
      v: float32[D].
      b: float.
      exit_layer: E, the number of layers before the exit.
      distribution: the sampling distribution of the texts that it was fitted on, see `distribution_name`.
    """

    v: np.ndarray
    b: float
    exit_layer: int
    distribution: str


@dataclasses.dataclass(frozen=True)
class Kind:
    """The mask of one kind of prompts, in a plan's file.

    Attributes:
      kind: its name.
      skip_attention, skip_mlp: 0-based layers.
      centres: vectors of such prompts, C × D, see `drafting.draft_verify_drafter.Chosen`.
    """

    kind: str
    skip_attention: tuple[int, ...]
    skip_mlp: tuple[int, ...]
    centres: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class _Plan(ModelRecord):
    """A plan's file, with 0-based layers: the best mask for all prompts, and the best for each kind, or no kinds."""

    FORMAT, MADE_BY = "jaxspec.plan/1", "jaxspec search"
    num_layers: int
    skip_attention: tuple[int, ...]
    skip_mlp: tuple[int, ...]
    kinds: tuple[Kind, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Thresholds(ModelRecord):
    """A file of thresholds, one for each exit."""

    FORMAT, MADE_BY, MODEL = "jaxspec.thresholds/1", "jaxspec tune --method s2d", "target"
    draft: str
    exits: tuple[int, ...]
    thresholds: tuple[float, ...]


def fingerprint(config: LlamaConfig, params: Params, sampled: Sampled | None = None) -> str:
    """Returns a hash of a model's shape and of a sample of its weights, the same in float32 and bfloat16.

    `sampled`: for quantised `params`, the unquantised rows of each leaf by its name. A quantised model thus has the
    fingerprint of the original, and uses the same files. A model with an adapter has another one.
    """
    params, adapters = unadapted(params)
    shape = {name: value for name, value in identity(config.plain).items() if name not in _TEXT_FIELDS}
    digest = hashlib.sha256(repr(sorted(shape.items())).encode())
    read = None if sampled is None else [row for name, _, _ in leaves(config) for row in sampled[name]]
    if read is None and config.kv_copies == 1 and all(map(_on_host, jax.tree.leaves(params))):
        # NumPy's views need no compilation.
        read = [row for leaf in jax.tree.leaves(params) for row in sampled_rows(np.asarray(leaf))]
    for row in read or fetched(_sampled_rows(config, params)):
        digest.update(np.ascontiguousarray(row).tobytes())
    for leaf in fetched([array for one in adapters for array in (one.a, one.b)]):
        digest.update(b"".join(row.tobytes() for row in sampled_rows(leaf)))
    return digest.hexdigest()[:16]


def identity(record: Any) -> dict[str, Any]:
    """Returns the fields of a configuration, and of the records in it, in which models differ.

    A field that is newer than the first files is part of it if its value is not the default.
    """
    return {
        field.name: identity(value) if dataclasses.is_dataclass(value) else value
        for field in dataclasses.fields(record)
        if (value := getattr(record, field.name)) != field.default or field.name in _FIRST_FIELDS
    }


def _on_host(leaf: Any) -> bool:
    """Whether an array is in the memory of the host as a whole."""
    if not isinstance(leaf, jax.Array):
        return True
    devices: list[jax.Device] = list(leaf.devices())
    return len(devices) == 1 and devices[0].platform == "cpu"


def sampled_rows(leaf: np.ndarray, copies: int = 1) -> list[np.ndarray]:
    """Returns the rows of a leaf that are part of a fingerprint.

    Args:
      leaf: a parameter.
      copies: the copies of each key/value head in a bias [KV · copies, ·]; 1 for another parameter.
    """
    # The last head of the model without copies begins in the first of its copies.
    ends = [leaf[(at,) * (leaf.ndim - 1)][:_SAMPLED] for at in (0, -copies)]
    return [np.ascontiguousarray(row.astype(ml_dtypes.bfloat16)).view(np.uint16) for row in ends]


@functools.partial(jax.jit, static_argnums=0)
def _sampled_rows(config: LlamaConfig, params: Params) -> list[jax.Array]:
    params = without_copies(config, params)
    rows = [
        leaf[(at,) * (leaf.ndim - 1)][:_SAMPLED].astype(jnp.bfloat16)
        for leaf in jax.tree.leaves(params)
        for at in (0, -1)
    ]
    return [jax.lax.bitcast_convert_type(row, jnp.uint16) for row in rows]


def write_plan(
    path: str | os.PathLike[str],
    model: str,
    plan: LayerPlan,
    found_by: dict[str, Any],
    kinds: tuple[Kind, ...] = (),
) -> None:
    """Writes a plan, or a bank of plans for `kinds` of prompts.

    `model` is the model's fingerprint, `found_by` describes the search.
    """
    _Plan(plan.num_layers, plan.skip_attention, plan.skip_mlp, kinds).write(path, model, found_by)


def read_plan(path: str | os.PathLike[str], model: str, num_layers: int) -> LayerPlan:
    """Returns the plan for all prompts in a file, see `read_plans`."""
    return read_plans(path, model, num_layers)[0]


@brief_errors()
def read_plans(
    path: str | os.PathLike[str], model: str, num_layers: int, width: int | None = None
) -> tuple[LayerPlan, list[tuple[LayerPlan, np.ndarray]]]:
    """Returns the plan for all prompts, and for each kind of prompts its plan and its centres float32[C, width].

    Raises:
      FileNotFoundError, ValueError: the file is missing, damaged or of another model; one line with the remedy.
    """
    found = _Plan.read(path, model)
    if found.num_layers != num_layers:
        raise ValueError(
            f"{path} is a plan for {found.num_layers} layers, the model has {num_layers}; make one with "
            f"`{_Plan.MADE_BY}`"
        )
    plans: list[LayerPlan] = []
    masks: tuple[_Plan | Kind, ...] = (found, *found.kinds)
    for one in masks:
        try:
            plans.append(LayerPlan.skipping(num_layers, one.skip_attention, one.skip_mlp))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        check_plan(plans[-1], str(path))
    for kind in found.kinds if width is not None else ():
        sizes = sorted({len(centre) for centre in kind.centres})
        if sizes != [width]:
            raise ValueError(
                f"{path} has centres of {' and '.join(map(str, sizes)) or 'no'} numbers for {shown(kind.kind)}, the "
                f"model's hidden states have {width}; make one with `{_Plan.MADE_BY} --by-kind`"
            )
    centres = (np.array(kind.centres, np.float32) for kind in found.kinds)
    return plans[0], list(zip(plans[1:], centres, strict=True))


def check_plan(plan: LayerPlan, name: str) -> None:
    """Refuses a plan that skips every sublayer: a draft would then depend on its last token only."""
    if not any(attention or mlp for attention, mlp in plan.run):
        raise ValueError(f"{name} skips every sublayer; a draft must run at least one")


def distribution_name(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> str:
    """Returns the name of a sampling distribution in a probe's file: `greedy`, `temperature-0.6-top_p-0.9`, …"""
    if is_greedy(temperature):
        return "greedy"
    parts = [f"temperature-{temperature:g}"]
    parts += [f"top_k-{top_k}"] if top_k > 0 else []
    parts += [f"top_p-{top_p:g}"] if top_p < 1 else []
    parts += [f"min_p-{min_p:g}"] if min_p > 0 else []
    return "-".join(parts)


def probe_name(exit_layer: int, distribution: str) -> str:
    """Returns the name of a probe's file in the directory of its model."""
    return f"{PROBES_NAME}/exit-{exit_layer}-{distribution}.safetensors"


def probe_path(directory: Path, exit_layer: int, distribution: str) -> Path:
    """Returns the path of a probe in the directory of its model."""
    return directory / probe_name(exit_layer, distribution)


def probes_in(directory: Path) -> list[tuple[int, str]]:
    """Returns the exit layer and distribution of every probe in the directory of a model, from the file names."""
    names = (path.name for path in (directory / PROBES_NAME).glob("exit-*-*.safetensors"))
    found = (re.fullmatch(r"exit-(\d+)-(.+)\.safetensors", name) for name in names)
    return [(int(match[1]), match[2]) for match in found if match]


def write_probe(path: str | os.PathLike[str], model: str, probe: ProbeFile) -> None:
    """Writes a probe; `model` is the fingerprint of its model."""
    numbers = {"v": np.asarray(probe.v, np.float32), "b": np.asarray(probe.b, np.float32)}
    metadata = {
        "format": PROBE_FORMAT,
        "model": model,
        "exit_layer": str(probe.exit_layer),
        "law": probe.distribution,
    }
    tensors.save(path, numbers, metadata)


@brief_errors()
def read_probe(
    path: str | os.PathLike[str], model: str, hidden_size: int, exit_layer: int, distribution: str
) -> ProbeFile:
    """Returns the probe in a file, checked to be for this model, exit layer and distribution.

    Raises:
      FileNotFoundError, ValueError: the file is missing, damaged or does not fit; one line with the remedy.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{no_file(path)}; train a probe with `python -m training.probe`")
    try:
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            v, b = np.asarray(file.get_tensor("v"), np.float32), float(file.get_tensor("b"))
    except (safetensors.SafetensorError, TypeError, ValueError):
        raise ValueError(f"{path} is not a probe: expected safetensors with v and b") from None
    check_origin(path, metadata, PROBE_FORMAT, "python -m training.probe", model)
    if metadata.get("exit_layer") != str(exit_layer):
        raise ValueError(
            f"{path} is a probe of exit layer {metadata.get('exit_layer')}, the draft exits after {exit_layer}; "
            "give that `exit_layer`, or another `probe`"
        )
    if metadata.get("law") != distribution:
        raise ValueError(
            f"{path} is a probe for the distribution {metadata.get('law')}, the text follows {distribution}; "
            "sample as the probe was trained, or give another `probe`"
        )
    if v.shape != (hidden_size,):
        raise ValueError(f"{path} has v of shape {v.shape}, expected ({hidden_size},)")
    if not (np.isfinite(v).all() and np.isfinite(b)):
        raise ValueError(
            f"{path} has numbers that are not finite; train the probe again with `python -m training.probe`"
        )
    return ProbeFile(v, b, exit_layer, distribution)


def thresholds_name(draft: str) -> str:
    """Returns the name of a thresholds file in the directory of a target.

    `draft`: the fingerprint of the draft's layers up to its last exit.
    """
    return f"{THRESHOLDS_NAME}/{draft}.json"


def write_thresholds(
    path: str | os.PathLike[str],
    target: str,
    draft: str,
    exits: Sequence[int],
    thresholds: Sequence[float],
    found_by: dict[str, Any],
) -> None:
    """Writes a threshold for each exit of a draft except the last, which is unconditional and gets a 0 in the file.

    `target` and `draft` are fingerprints.
    """
    _Thresholds(draft, tuple(exits), (*thresholds, 0.0)).write(path, target, found_by)


@brief_errors()
def read_thresholds(
    path: str | os.PathLike[str], target: str, draft: str, exits: Sequence[int]
) -> list[float]:
    """Returns the thresholds in a file, one for each exit except the last, checked to be for these models and exits.

    Raises:
      FileNotFoundError, ValueError: the file is missing, damaged or does not fit; one line with the remedy.
    """
    found, made_by = _Thresholds.read(path, target), _Thresholds.MADE_BY
    if (found.draft, found.exits) != (draft, tuple(exits)):
        raise ValueError(
            f"{path} is for another draft ({found.draft} with exits {list(found.exits)}, this one is "
            f"{draft} with {list(exits)}); make one with `{made_by}`"
        )
    numbers = found.thresholds
    if len(numbers) != len(exits) or numbers[-1] != 0 or not all(0 <= number <= 1 for number in numbers):
        raise ValueError(
            f"{path} has the thresholds {list(numbers)}; expected a number from 0 to 1 for each of {len(exits)} exits, "
            f"0 for the last; make them with `{made_by}`"
        )
    return list(numbers[:-1])
