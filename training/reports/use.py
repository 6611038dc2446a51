"""The command that uses a trained model, and the speed to expect of it, for its card."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.costs.rounds import DraftCost, guessed
from jaxspec.io import checkpoint
from jaxspec.loading.loading import find_model
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import is_shape, num_params, param_shapes
from training.reports.evaluation import NUM_DRAFT_TOKENS

PROMPT = "Once upon a time"


def command(model: str, method: str = "", draft: Path | None = None) -> str:
    """Returns a command that generates a text, for a shell.

    Examples:
      >>> command("my model", "s2d", Path("draft"))
      "jaxspec generate 'Once upon a time' --model 'my model' --method s2d --draft draft"
    """
    words = ["jaxspec", "generate", PROMPT, "--model", model]
    words += ["--method", *method.split()] if method else []
    return shlex.join([*words, *([] if draft is None else ["--draft", str(draft)])])


def of_job(
    record: Mapping[str, Any],
    start: str | None,
    output: Path,
    config: LlamaConfig,
    measured: Mapping[str, float],
) -> tuple[str, str]:
    """Returns the command that uses the model of a job, and a sentence on its speed; "" if nothing was measured.

    Args:
      record: the content of run.json.
      start: the model that it started from; None for a model from scratch.
      output: the model's directory.
      config: its shape.
      measured: the measurements of its checkpoint, see `evaluation.make_measure`.
    """
    options, job = record["options"], record.get("identity", {}).get("job", "").rpartition(".")[2]
    if job == "sft" and start is not None and options.get("start_layers") is not None:
        unknown = "The share of its tokens that the model accepts was not measured; `jaxspec compare` does."
        return command(start, "draft-model", output), unknown
    if job not in ("soft", "layerskip"):
        return command(str(output)), ""
    other = (options.get("target") or start) if job == "soft" else None
    verifier = config if other is None else checkpoint.read_config(find_model(other))
    found = best(verifier, config, record["exits"], measured, itself=other is None)
    speed, length, layers = found or (0.0, 0, 0)
    exiting = f"layerskip --exit-layer {layers} --num-draft-tokens {length}" if found else ""
    line = command(other or str(output), "s2d" if job == "soft" else exiting, output if other else None)
    return line, "" if found is None else (
        f"Expected: {speed:.2f} × plain decoding with K = {length} from exit {layers} alone, by the acceptance on "
        "held-out text above, and if a pass costs the weights that it reads. `jaxspec compare` measures the speed."
    )


def best(
    target: LlamaConfig,
    draft: LlamaConfig,
    exits: Sequence[int],
    measured: Mapping[str, float],
    itself: bool = False,
) -> tuple[float, int, int] | None:
    """Returns the highest expected speed-up, its draft tokens a round and its exit; None without measurements.

    Args:
      target: the model that verifies.
      draft: the model that drafts.
      exits: its exits, in layers.
      measured: the shares `accepted_token_I/E`.
      itself: whether the target drafts for itself by an early exit, so that verification reuses these layers.
    """
    read = num_params(target) - (0 if target.tie_embeddings else target.vocab_size * target.hidden_size)
    costs = guessed(target.num_layers, 0.0, 1 - target.num_layers * _layer_size(target) / read, 0.0)
    ratio, found = _layer_size(draft) / _layer_size(target), []
    for layers in exits:
        cost = DraftCost(layers=layers * ratio, shared=layers if itself else 0.0)
        tokens = 1.0
        for number in range(1, NUM_DRAFT_TOKENS + 1):
            if (share := measured.get(f"accepted_token_{number}/{layers}")) is None:
                break
            tokens += share
            speed = tokens * DraftCost().round_ms(costs, 0) / cost.round_ms(costs, number)
            found.append((speed, number, layers))
    return max(found, default=None)


def _layer_size(config: LlamaConfig) -> int:
    shapes = jax.tree.leaves(param_shapes(config)["layers"][0], is_leaf=is_shape)
    return sum(math.prod(shape) for shape in shapes)
