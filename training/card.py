"""The card of a trained model: what it is, how it was made, how good it is, what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training.losses import layer_outputs

TEMPERATURE = 0.7
PROMPT = "Once upon a time"


def sample(
    config: LlamaConfig, params: Params, words: Tokenizer, count: int, prompt: str = PROMPT, limit: int = 200
) -> list[str]:
    """Texts drawn after `prompt`: the first greedily, the others at `TEMPERATURE`, by whole forward passes.

    Deliberately the simplest sampler there is: it shares nothing with the decoder it might be compared to.

    Args:
      config: the model.
      params: float32 parameters.
      words: the tokenizer.
      count: how many texts.
      prompt: how they begin.
      limit: most tokens of each, prompt included.
    """
    if count < 1:
        return []
    start = words.encode(prompt).ids
    limit = min(max(limit, len(start)), config.context_length)

    @jax.jit
    def draw(key: jax.Array, params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(limit), tokens.shape)
        batch = {"tokens": tokens, "positions": positions, "segments": jnp.ones_like(tokens)}
        hidden = layer_outputs(config, params, batch)[-1]
        last = jax.lax.dynamic_index_in_dim(hidden, length - 1, axis=1, keepdims=False)
        logits = llama.logits(config, params, last)
        drawn = jax.random.categorical(key, logits / TEMPERATURE)
        return jnp.where(jnp.arange(count) == 0, jnp.argmax(logits, axis=-1), drawn)

    tokens = np.zeros((count, limit), np.int32)
    tokens[:, : len(start)] = start
    done = np.zeros(count, bool)
    length = len(start)
    while length < limit and not done.all():
        key = jax.random.fold_in(jax.random.key(0), length)
        following = np.asarray(draw(key, params, tokens, jnp.int32(length)))
        tokens[:, length] = np.where(done, config.eos_token_ids[0], following)
        done |= np.isin(tokens[:, length], config.eos_token_ids)
        length += 1
    return [words.decode(row[:length].tolist(), skip_special_tokens=True) for row in tokens]


def write(
    name: str,
    config: LlamaConfig,
    record: dict[str, Any],
    metrics: Sequence[dict[str, float]],
    step: int,
    loss: float,
    stories: Sequence[str],
) -> str:
    """The card as Markdown.

    Args:
      name: of the model.
      config: its shape.
      record: what the training command wrote into run.json.
      metrics: the records of metrics.jsonl.
      step: of the exported checkpoint.
      loss: its held-out loss, nats a token.
      stories: samples; the first is the greedy one.
    """
    until = [entry for entry in metrics if entry["step"] <= step]
    seconds = sum(entry["step_seconds"] for entry in until)
    seen = int(sum(entry["tokens"] for entry in until))
    files = ", ".join(str(file).rsplit("/", 1)[-1] for file in record["options"]["data"]["data"])
    tokens = record["tokens"]
    lines = [
        f"# {name}",
        "",
        f"A Llama of {record['parameters'] / 1e6:.1f} million parameters, trained from "
        f"`{record['options']['source']}` by this project's own trainer.",
        "",
        "| | |",
        "|---|---|",
        f"| shape | {config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads "
        f"({config.num_kv_heads} key/value) of {config.head_dim}, MLP {config.intermediate_size}, "
        f"vocabulary {config.vocab_size}, context {config.max_position_embeddings} |",
        f"| data | {files}: {record['documents']:,} documents, {tokens['training']:,} tokens to train on; "
        f"{tokens['held_out']:,} tokens held out (documents chosen by hash) |",
        f"| training | {step:,} steps, {seen:,} tokens predicted, {seconds / 60:.0f} minutes |",
        f"| held-out loss | {loss:.4f} nats a token (perplexity {np.exp(loss):.2f}) |",
        "| weights | bfloat16, trained in float32 |",
        "",
        "Made by"
        if len(record["commands"]) == 1
        else "Made by these commands, each going on where the last was stopped:",
        "",
        "```",
        *record["commands"],
        "```",
        "",
        f"## Samples after “{PROMPT}”",
        "",
    ]
    for index, story in enumerate(stories):
        how = "greedy" if index == 0 else f"temperature {TEMPERATURE}"
        body = story.strip().replace("\n", "\n> ")
        lines += [f"*{how}*", "", f"> {body}", ""]
    return "\n".join(lines)
