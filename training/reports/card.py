"""Writes the card of a trained model: its shape, training, quality and samples."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.measuring.bench import prompts
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.sampling import seed_key
from training.data.packing import Windows
from training.losses.base import layer_outputs
from training.reports.evaluation import NUM_DRAFT_TOKENS

TEMPERATURE = 0.7
PROMPT = "Once upon a time"
# Tokens of each sample in the card.
SAMPLE_TOKENS = 160


def prompts_for(kinds: Mapping[str, Windows], words: Tokenizer) -> list[str]:
    """Chooses a prompt per task type: a held-out question, or one of the project's own prompts for open text."""
    known = prompts.load()
    found = []
    for kind, windows in kinds.items():
        question = _question(windows)
        if question is not None:
            found.append(words.decode(question))
        elif kind in known:
            found.append(known[kind][0])
    return found or [PROMPT]


def _question(windows: Windows) -> list[int] | None:
    """Returns the tokens before the answer of the first text that has both; None if all tokens are learned."""
    for tokens, segments, learn in zip(
        *(windows[name] for name in ("tokens", "segments", "learn")), strict=True
    ):
        for segment in range(1, int(segments.max()) + 1):
            (places,) = np.nonzero(segments == segment)
            first = int(learn[places].argmax())
            # The first token of a text, BOS, is not learned anywhere.
            if first > 1:
                return list(map(int, tokens[places[:first]]))
    return None


def make_draw(config: LlamaConfig) -> Callable[[jax.Array, Params, Any, jax.Array], jax.Array]:
    """Makes the jitted function that draws a token of each row: (key, params, tokens int32[B, T], length) → int32[B].

    The first row's token is the most likely one, the others are drawn at `TEMPERATURE`.
    """

    @jax.jit
    def draw(key: jax.Array, params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        batch = {"tokens": tokens, "positions": positions, "segments": jnp.ones_like(tokens)}
        hidden = layer_outputs(config, params, batch)[-1]
        last = jax.lax.dynamic_index_in_dim(hidden, length - 1, axis=1, keepdims=False)
        logits = llama.logits(config, params, last)
        drawn = jax.random.categorical(key, logits / TEMPERATURE)
        return jnp.where(jnp.arange(len(tokens)) == 0, jnp.argmax(logits, axis=-1), drawn)

    return draw


def sample(
    config: LlamaConfig, params: Params, words: Tokenizer, count: int, prompt: str = PROMPT
) -> list[str]:
    """Draws texts after `prompt`: the first greedily, the others at `TEMPERATURE`, by whole forward passes.

    This is deliberately the simplest sampler. It shares no code with the decoder to which it may be compared.

    Args:
      config: the model.
      params: float32 parameters.
      words: the tokenizer.
      count: number of texts.
      prompt: the beginning of each text.

    Returns:
      the texts without the prompt.
    """
    if count < 1:
        return []
    start = words.encode(prompt).ids[: config.context_length - 1]
    limit = min(len(start) + SAMPLE_TOKENS, config.context_length)
    draw = make_draw(config)
    tokens = np.zeros((count, limit), np.int32)
    tokens[:, : len(start)] = start
    done = np.zeros(count, bool)
    length = len(start)
    while length < limit and not done.all():
        key = jax.random.fold_in(seed_key(0), length)
        following = np.asarray(draw(key, params, tokens, jnp.int32(length)))
        tokens[:, length] = np.where(done, config.eos_token_ids[0], following)
        done |= np.isin(tokens[:, length], config.eos_token_ids)
        length += 1
    return [words.decode(row[len(start) : length].tolist(), skip_special_tokens=True) for row in tokens]


def made_by(commands: Sequence[str]) -> list[str]:
    """Returns the lines of a card with the commands that made a model."""
    several = "Made by these commands, each of which resumed the previous one:"
    return ["Made by" if len(commands) == 1 else several, "", "```", *commands, "```"]


def write(
    name: str,
    config: LlamaConfig,
    record: Mapping[str, Any],
    metrics: Sequence[Mapping[str, float]],
    step: int,
    measured: Mapping[str, float],
    texts: Mapping[str, Sequence[str]],
    weights: str,
    use: str,
) -> str:
    """Writes the card of a model as Markdown.

    Args:
      name: name of the model.
      config: its shape.
      record: the content of run.json.
      metrics: the records of metrics.jsonl.
      step: step of the exported checkpoint.
      measured: the checkpoint's measurements: `held_out_loss` (nats per token), and more by name and task type.
      texts: samples by prompt; the first of each is the greedy one.
      weights: a description of the dtypes of the weights.
      use: the command that uses the model.
    """
    until = [entry for entry in metrics if entry["step"] <= step]
    seconds = sum(entry["step_seconds"] for entry in until)
    seen = int(sum(entry["tokens"] for entry in until))
    loss = measured["held_out_loss"]
    lines = [
        f"# {name}",
        "",
        f"A Llama of {llama.num_params(config) / 1e6:.1f} million parameters, trained from "
        f"`{record['options']['start']}` by this project's own trainer.",
        "",
        "| | |",
        "|---|---|",
        f"| shape | {config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads "
        f"({config.num_kv_heads} key/value) of {config.head_dim}, MLP {config.intermediate_size}, "
        f"vocabulary {config.vocab_size}, context {config.max_position_embeddings} |",
        f"| training | {step:,} steps, {seen:,} tokens predicted, {seconds / 60:.1f} minutes |",
        f"| held-out loss | {loss:.4f} nats per token (perplexity {np.exp(loss):.2f}) |",
        f"| weights | {weights} |",
        "",
        *_kinds_table(record, measured),
        "",
        *_positions_table(record, measured),
        *made_by(record["commands"]),
        "",
        "## Samples",
        "",
    ]
    for prompt, drawn in texts.items():
        lines += ["After", "", *_quoted(prompt), ""]
        for index, text in enumerate(drawn):
            lines += [f"*{'greedy' if index == 0 else f'temperature {TEMPERATURE}'}*", "", *_quoted(text), ""]
    return "\n".join([*lines, *used_by(use)])


def command(model: str, method: str = "", draft: Path | None = None) -> str:
    """Returns a command that generates a text, for a shell.

    Examples:
      >>> command("my model", "s2d", Path("draft"))
      "jaxspec generate 'Once upon a time' --model 'my model' --method s2d --draft draft"
    """
    words = ["jaxspec", "generate", PROMPT, "--model", model]
    words += ["--method", *method.split()] if method else []
    return shlex.join([*words, *([] if draft is None else ["--draft", str(draft)])])


def use_of_job(record: Mapping[str, Any], start: str | None, output: Path) -> str:
    """Returns the command that uses the model of a job.

    Args:
      record: the content of run.json.
      start: the model that it started from; None for a model from scratch.
      output: the model's directory.
    """
    options, job = record["options"], record.get("identity", {}).get("job", "").rpartition(".")[2]
    if job == "sft" and start is not None and options.get("start_layers") is not None:
        return command(start, "draft-model", output)
    if job == "soft" and (target := options.get("target") or start):
        return command(target, "s2d", output)
    exits = f"layerskip --exit-layer {record['exits'][0]}" if job == "layerskip" and record["exits"] else ""
    return command(str(output), exits)


def used_by(command: str, speed: str = "") -> list[str]:
    """Returns the last lines of a card: the command that uses the model, and the speed to expect."""
    return ["## Use it", "", "```bash", command, "```", "", *([speed, ""] if speed else [])]


def _kinds_table(record: Mapping[str, Any], measured: Mapping[str, float]) -> list[str]:
    """Returns a table of data and held-out figures, with a row for each task type."""
    columns = {"held-out loss": "held_out_loss/{}"}
    for layers in record["exits"]:
        columns[f"acceptance, exit {layers}"] = f"acceptance/{layers}/{{}}"
        columns[f"tokens per round, exit {layers}"] = f"mean_acceptance_length/{layers}/{{}}"
    columns = {title: key for title, key in columns.items() if any(key[:-3] in name for name in measured)}
    tokens = record["tokens"]
    lines = [
        "| data | documents | tokens | held-out tokens | " + " | ".join(columns) + " |",
        "|" + "---|" * (4 + len(columns)),
    ]
    for kind, documents in record["documents"].items():
        known = (measured.get(key.format(kind)) for key in columns.values())
        figures = ["-" if figure is None else f"{figure:.3f}" for figure in known]
        lines.append(
            f"| {kind} | {documents:,} | {tokens['training'][kind]:,} | {tokens['held_out'][kind]:,} | "
            + " | ".join(figures)
            + " |"
        )
    return lines


def _positions_table(record: Mapping[str, Any], measured: Mapping[str, float]) -> list[str]:
    """Returns a table of the exits' acceptance by position; nothing if it was not measured."""
    numbers = range(1, NUM_DRAFT_TOKENS + 1)
    rows = [
        [str(layers), *(f"{measured[f'accepted_token_{number}/{layers}']:.3f}" for number in numbers)]
        for layers in record["exits"]
        if f"accepted_token_1/{layers}" in measured
    ]
    if not rows:
        return []
    return [
        "Share of the rounds on held-out text, greedy, that accept each draft token and all before it:",
        "",
        "| exit | " + " | ".join(f"token {number}" for number in numbers) + " |",
        "|" + "---|" * (1 + NUM_DRAFT_TOKENS),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _quoted(text: str) -> list[str]:
    """Formats a sample as a code block, because it may contain Markdown."""
    fence = "````"
    return [fence + "text", *text.strip("\n").splitlines(), fence]
