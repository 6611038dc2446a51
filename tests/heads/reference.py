"""Slow, obvious heads in float64 NumPy, on the tensors and config of a published checkpoint.

No cache, no batch, no loader: each draft token runs the head anew over the whole text. It shares nothing with
`jaxspec.model` and `jaxspec.heads.files` but what the papers and their authors' files say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.model.config import LlamaConfig
from jaxspec.testing import reference


def aux_hidden_states(
    target: LlamaConfig, params: dict[str, Any], tokens: Sequence[int], aux_layers: Sequence[int | str]
) -> np.ndarray:
    """Returns the target's auxiliary hidden states of N tokens, concatenated: float64[N, len(aux_layers) · D]."""
    stream: list[np.ndarray] = []
    reference.forward(target, params, tokens, stream=stream)
    last = _norm(stream[-1], reference.as_float64(params)["norm"], target.rms_norm_eps)
    # The stream is shown at the start and after each of a layer's two sublayers.
    return np.concatenate(
        [last if layer == "final" else stream[2 * int(layer)] for layer in aux_layers], axis=-1
    )


def draft_logits(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    params: dict[str, Any],
    tokens: Sequence[int],
    drafts: Sequence[int],
    true: np.ndarray,
) -> np.ndarray:
    """Returns the logits from which a head draws each draft token, float64[len(drafts) + 1, V]; −inf where it has none.

    Args:
      content: the head's `config.json`, of a Llama.
      tensors: the head's, by their published names.
      target, params: of the target.
      tokens: the n committed tokens, the last of which is pending.
      drafts: those drafted so far; the last row is for the one after them.
      true: the auxiliary hidden states of the first n − 1 tokens, as from `aux_hidden_states`.
    """
    own = {name.replace("midlayer.", "layers.0."): np.asarray(t, np.float64) for name, t in tensors.items()}
    wide = reference.as_float64(params)
    eagle3 = "layers.0.hidden_norm.weight" in own
    eps = content.get("rms_norm_eps", 1e-6)
    head = own["lm_head.weight"] if eagle3 else wide["embed"] if target.tie_embeddings else wide["head"]
    embedding = own.get("embed_tokens.weight", wide["embed"])
    known = list(true)
    if eagle3:
        known = [own["fc.weight"] @ _before_fc(content, own, one, eps) for one in known]
    masked = None  # of P-EAGLE, which draws every token from masks instead of the draft tokens before it
    if "mask_hidden" in own:
        masked = own["fc.weight"] @ _before_fc(content, own, own["mask_hidden"].ravel(), eps)
        drafts = [content["mask_token_id"]] * len(drafts)
    rows = []
    for count in range(len(drafts) + 1):
        text = [*tokens, *drafts[:count]]
        embedded = embedding[text[1:]]
        hidden = _layers(content, own, embedded, np.stack(known), eagle3)
        normed = _norm(hidden, own["norm.weight"], eps) if eagle3 else hidden
        rows.append(head @ normed[-1])
        fed_back = normed[-1] if content.get("norm_output") else hidden[-1]
        known.append(fed_back if masked is None else masked)
    return _spread(np.stack(rows), own, target)


def kangaroo_logits(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    params: dict[str, Any],
    tokens: Sequence[int],
    drafts: Sequence[int],
    exit_layer: int,
) -> np.ndarray:
    """Returns the logits from which an adapter of Kangaroo draws each draft token, float64[len(drafts) + 1, V].

    Args:
      content: the adapter's `config.json`, of a Llama of one layer.
      tensors, target, params, tokens, drafts: as of `draft_logits`.
      exit_layer: after how many of the target's layers it reads the stream.
    """
    own = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    wide, eps = reference.as_float64(params), content.get("rms_norm_eps", 1e-6)
    x = aux_hidden_states(target, params, [*tokens, *drafts], [exit_layer])
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in own.items()}
    x = x + _attention(content, layer, _norm(x, layer["input_layernorm.weight"], eps))
    head = wide["embed"] if target.tie_embeddings else wide["head"]
    said: np.ndarray = _norm(x, own["norm.weight"], eps) @ head.T
    return said[len(tokens) - 1 :]


def medusa_logits(
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    params: dict[str, Any],
    true: np.ndarray,
    num_heads: int,
) -> np.ndarray:
    """Returns the logits from which each of Medusa's heads draws its token, float64[num_heads, V].

    Args:
      tensors: of the authors' `medusa_lm_head.pt`.
      target, params: of the target.
      true: the auxiliary hidden state "final" of the tokens before the pending one, as from `aux_hidden_states`.
      num_heads: how many heads draft.
    """
    wide = reference.as_float64(params)
    rows = []
    for head in range(num_heads):
        own = {name: np.asarray(t, np.float64) for name, t in tensors.items() if name.startswith(f"{head}.")}
        x, block = true[-1], 0
        while f"{head}.{block}.linear.weight" in own:
            x = x + _silu(own[f"{head}.{block}.linear.weight"] @ x + own[f"{head}.{block}.linear.bias"])
            block += 1
        last = wide["embed"] if target.tie_embeddings else wide["head"]
        rows.append(own.get(f"{head}.{block}.weight", last) @ x)
    return np.stack(rows)


def hydra_logits(
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    params: dict[str, Any],
    tokens: Sequence[int],
    drafts: Sequence[int],
    true: np.ndarray,
) -> np.ndarray:
    """Returns the logits from which Hydra's heads draw each draft token, float64[len(drafts) + 1, V].

    Args:
      tensors: of the authors' `hydra_lm_head.pt`, of Hydra or Hydra++.
      target, params, tokens, drafts: as of `draft_logits`.
      true: the auxiliary hidden state "final" of the first n − 1 tokens, as from `aux_hidden_states`.
    """
    own = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    embedding = reference.as_float64(params)["embed"]
    prefixed = {
        name.removeprefix("prefix_embeding_layer."): tensor
        for name, tensor in own.items()
        if name.startswith("prefix_embeding_layer.")
    }
    seen = true
    if prefixed:
        # Their layer is a whole Llama layer, of the target's config.
        content = {
            "hidden_size": target.hidden_size,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "rope_theta": target.rope_theta,
        }
        eps = target.rms_norm_eps
        p = {name.removeprefix("layers.0."): tensor for name, tensor in prefixed.items()}
        seen = seen + _attention(content, p, _norm(seen, p["input_layernorm.weight"], eps))
        normed = _norm(seen, p["post_attention_layernorm.weight"], eps)
        seen = _norm(seen + _mlp(p, normed), prefixed["norm.weight"], eps)
    rows = []
    for head in range(len(drafts) + 1):
        x = np.concatenate([seen[-1], *embedding[[tokens[-1], *drafts[:head]]]])
        for number in range(100):  # Dropouts between the blocks have numbers too
            p = {
                name.removeprefix(f"hydra_mlp.{head}.{number}."): tensor
                for name, tensor in own.items()
                if name.startswith(f"hydra_mlp.{head}.{number}.")
            }
            if p:
                straight = x
                if "res_connection.weight" in p:
                    straight = p["res_connection.weight"] @ x + p["res_connection.bias"]
                x = straight + _silu(p["linear.weight"] @ x + p["linear.bias"])
        last = f"hydra_lm_head.{head}."
        last = f"{last}1." if f"{last}1.weight" in own else last
        rows.append(own[f"{last}weight"] @ x + own[f"{last}bias"])
    return np.stack(rows)


def dflash_logits(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    params: dict[str, Any],
    pending: int,
    masks: int,
    true: np.ndarray,
) -> np.ndarray:
    """Returns the logits of each row of a block of DFlash, float64[masks + 1, V]; row 0 gives no draft token.

    Args:
      content: the head's `config.json`.
      tensors: the head's, by their published names.
      target, params: of the target.
      pending: the token that the block begins with.
      masks: how many masks follow it.
      true: the auxiliary hidden states of the tokens before it, as from `aux_hidden_states`.
    """
    own = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    wide, eps = reference.as_float64(params), content["rms_norm_eps"]
    fused = _norm(true @ own["fc.weight"].T, own["hidden_norm.weight"], eps)
    x = wide["embed"][[pending] + masks * [content["dflash_config"]["mask_token_id"]]]
    for number in range(content.get("num_hidden_layers", 1)):
        p = {name.removeprefix(f"layers.{number}."): t for name, t in own.items()}
        seen = _block_mask(content, number, len(fused), len(x))
        x = x + _attention(content, p, _norm(x, p["input_layernorm.weight"], eps), fused, seen)
        x = x + _mlp(p, _norm(x, p["post_attention_layernorm.weight"], eps))
    head = wide["embed"] if target.tie_embeddings else wide["head"]
    return _spread(_norm(x, own["norm.weight"], eps) @ own.get("lm_head.weight", head).T, own, target)


def _block_mask(content: Mapping[str, Any], number: int, context: int, count: int) -> np.ndarray:
    """Returns where each row of a block of DFlash sees the tokens before it and the rows, bool[rows, tokens + rows]."""
    mask = np.ones((count, context + count), bool)
    if content.get("layer_types", ["full_attention"] * 99)[number] == "full_attention":
        return mask
    window = content["sliding_window"]
    for row, other in np.ndindex(*mask.shape):
        behind = context + row - other
        if "sliding_window_non_causal" in content:  # speculators
            mask[row, other] = other >= context - window
            causal = not content["sliding_window_non_causal"]
        else:  # the authors
            mask[row, other] = abs(behind) < window
            causal = content.get("is_causal") is None
        mask[row, other] &= behind >= 0 or not causal
    return mask


def uno_logits(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    params: dict[str, Any],
    tokens: Sequence[int],
    noise: Sequence[int],
) -> np.ndarray:
    """Returns the logits of each row of a block of Uno, float64[len(noise) + 1, V].

    Args:
      content: the adapter's `adapter_config.json`.
      tensors: the adapter's, by their published names.
      target, params: of the target.
      tokens: the committed tokens, the last of which is pending.
      noise: the tokens after them, to which the adapters apply.
    """
    wide, scale = reference.as_float64(params), content["lora_alpha"] / content["r"]
    every, group = [*tokens, *noise], target.num_heads // target.num_kv_heads
    gated = (np.arange(len(every)) >= len(tokens))[:, None]
    behind = np.tril(np.ones((len(every), len(every)), bool))
    x = wide["embed"][every]
    for number, layer in enumerate(wide["layers"]):

        def product(x: np.ndarray, name: str, weight: np.ndarray, number: int = number) -> np.ndarray:
            prefix = f"base_model.model.model.layers.{number}.{name}_proj.lora_"
            a, b = (np.asarray(tensors[f"{prefix}{one}.weight"], np.float64) for one in "AB")
            summed: np.ndarray = x @ weight.T + np.where(gated, scale * (x @ a.T @ b.T), 0)
            return summed

        p = layer["attention"]
        fused = p["qkv"].reshape(target.num_kv_heads, group + 2, target.head_dim, -1)
        normed = _norm(x, p["norm"], target.rms_norm_eps)
        heads = {}
        for name, part in (("q", fused[:, :group]), ("k", fused[:, group]), ("v", fused[:, group + 1])):
            out = product(normed, f"self_attn.{name}", part.reshape(-1, target.hidden_size))
            heads[name] = out.reshape(len(every), -1, target.head_dim).swapaxes(0, 1)
        for name in "qk" if target.qk_norm else "":
            heads[name] = _norm(heads[name], p[f"{name}_norm"], target.rms_norm_eps)
        mixed = []
        for head, query in enumerate(heads["q"]):
            query, key = (
                reference._rotate(target, target.layer_type(0), one, 1)
                for one in (query, heads["k"][head // group])
            )
            scores = np.where(behind, query @ key.T / math.sqrt(target.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed.append(weights / weights.sum(axis=-1, keepdims=True) @ heads["v"][head // group])
        x = x + product(np.concatenate(mixed, axis=-1), "self_attn.o", p["out"])
        p = layer["mlp"]
        normed = _norm(x, p["norm"], target.rms_norm_eps)
        gate_up = _silu(product(normed, "mlp.gate", p["gate_up"][0])) * product(
            normed, "mlp.up", p["gate_up"][1]
        )
        x = x + product(gate_up, "mlp.down", p["down"])
    head_matrix = wide["embed"] if target.tie_embeddings else wide["head"]
    said: np.ndarray = _norm(x, wide["norm"], target.rms_norm_eps)[len(tokens) - 1 :] @ head_matrix.T
    return said


def _silu(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x / (1 + np.exp(-x))
    return out


def _before_fc(
    content: Mapping[str, Any], own: Mapping[str, np.ndarray], aux_hidden_state: np.ndarray, eps: float
) -> np.ndarray:
    if content.get("norm_before_fc"):
        return _norm(aux_hidden_state, own["input_norm.weight"], eps)
    if content.get("fc_norm"):
        aux_layers = sum(name.startswith("fc_norm.") for name in own)
        parts = np.split(aux_hidden_state, aux_layers)
        return np.concatenate([_norm(one, own[f"fc_norm.{i}.weight"], eps) for i, one in enumerate(parts)])
    return aux_hidden_state


def _layers(
    content: Mapping[str, Any],
    own: Mapping[str, np.ndarray],
    embedded: np.ndarray,
    aux_hidden_state: np.ndarray,
    eagle3: bool,
) -> np.ndarray:
    """Returns the head's output [N, D] at N pairs of embedding and auxiliary hidden state."""
    x, eps = aux_hidden_state, content.get("rms_norm_eps", 1e-6)
    for number in range(content.get("num_hidden_layers", 1)):
        p = {name.removeprefix(f"layers.{number}."): t for name, t in own.items()}
        if number:
            seen = _norm(x, p["input_layernorm.weight"], eps)
        elif eagle3:
            normed = _norm(aux_hidden_state, p["hidden_norm.weight"], eps)
            seen = np.concatenate([_norm(embedded, p["input_layernorm.weight"], eps), normed], axis=-1)
            x = normed if content.get("norm_before_residual") else x
        else:
            x = np.concatenate([embedded, aux_hidden_state], axis=-1) @ own["fc.weight"].T + own.get(
                "fc.bias", 0.0
            )
            seen = x
        x = x + _attention(content, p, seen)
        normed = _norm(x, p["post_attention_layernorm.weight"], eps)
        x = x + _mlp(p, normed)
    return x


def _mlp(p: Mapping[str, np.ndarray], normed: np.ndarray) -> np.ndarray:
    inner = _silu(normed @ p["mlp.gate_proj.weight"].T) * (normed @ p["mlp.up_proj.weight"].T)
    out: np.ndarray = inner @ p["mlp.down_proj.weight"].T
    return out


def _attention(
    content: Mapping[str, Any],
    p: Mapping[str, np.ndarray],
    seen: np.ndarray,
    context: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Returns what attention writes at each row of `seen`, which sees those before it, or those of `mask`."""
    read = seen if context is None else np.concatenate([context, seen])
    first = len(read) - len(seen)
    heads = content["num_attention_heads"]
    size = content.get("head_dim") or content["hidden_size"] // heads
    group = heads // content.get("num_key_value_heads", heads)
    places = np.arange(len(read))[:, None] / (content.get("rope_scaling") or {"factor": 1})["factor"]
    angle = places * content.get("rope_theta", 10000.0) ** (-2 * np.arange(size // 2) / size)

    def projected(name: str) -> np.ndarray:
        rows: np.ndarray = read @ p[f"self_attn.{name}_proj.weight"].T
        rows = rows + p.get(f"self_attn.{name}_proj.bias", 0.0)
        return rows.reshape(len(read), -1, size)

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def normed(name: str) -> np.ndarray:
        weight = p.get(f"self_attn.{name}_norm.weight")
        return projected(name) if weight is None else _norm(projected(name), weight, content["rms_norm_eps"])

    query, key, value = turned(normed("q"))[first:], turned(normed("k")), projected("v")
    mixed = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // group].T / math.sqrt(size)
        if context is None:
            scores[np.triu_indices(len(seen), 1)] = -np.inf
        elif mask is not None:
            scores[~mask] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed.append(weights / weights.sum(axis=-1, keepdims=True) @ value[:, head // group])
    out: np.ndarray = np.concatenate(mixed, axis=-1) @ p["self_attn.o_proj.weight"].T
    return out


def _spread(found: np.ndarray, own: Mapping[str, np.ndarray], target: LlamaConfig) -> np.ndarray:
    """Returns logits of all tokens from those of a head's rows, each `d2t` before its token; −inf for the others."""
    if "d2t" not in own:
        return found
    whole = np.full((len(found), target.vocab_size), -np.inf)
    for row, offset in enumerate(own["d2t"].astype(int)):
        whole[:, row + offset] = found[:, row]
    return whole


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight
    return normed
