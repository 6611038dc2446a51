"""The table of the tensors of a Hugging Face checkpoint and their places in jaxspec's parameters.

jaxspec fuses matrices that are multiplied together (`model.llama`), so one leaf contains one to three tensors of a
checkpoint. Reading and writing both use this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import is_shape, param_shapes

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Source:
    """A Hugging Face tensor of `shape`, and its `index` in a leaf that is reshaped to `split`."""

    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    index: tuple[slice, ...] = ()


_PLAIN = {
    "embed": EMBED,
    "norm": "model.norm.weight",
    "head": HEAD,
    "attention/norm": "input_layernorm.weight",
    "attention/q_norm": "self_attn.q_norm.weight",
    "attention/k_norm": "self_attn.k_norm.weight",
    "attention/out": "self_attn.o_proj.weight",
    "attention/out_bias": "self_attn.o_proj.bias",
    "mlp/norm": "post_attention_layernorm.weight",
    "mlp/down": "mlp.down_proj.weight",
    "mlp/down_bias": "mlp.down_proj.bias",
}


def sources_of(config: LlamaConfig, leaf: str, shape: tuple[int, ...]) -> list[Source]:
    """Returns the tensors of a leaf such as `layers/0/attention/qkv`; k and v occur once for each copy."""
    prefix, kind = "", leaf
    if leaf.startswith("layers/"):
        _, layer, kind = leaf.split("/", 2)
        prefix = f"model.layers.{layer}."
    if kind in _PLAIN:
        return [Source(prefix + _PLAIN[kind], shape, shape)]
    suffix = "bias" if kind.endswith("_bias") else "weight"
    if kind.startswith("mlp/gate_up"):
        return [
            Source(f"{prefix}mlp.{name}_proj.{suffix}", shape[1:], shape, (slice(i, i + 1),))
            for i, name in enumerate(("gate", "up"))
        ]
    group, copies, rest = config.group_size, config.kv_copies, shape[2:]
    split = (config.num_kv_heads, copies, group + 2, config.head_dim, *rest)

    def part(name: str, heads: int, copy: slice, begin: int, end: int) -> Source:
        stored = (heads * config.head_dim, *rest)
        tensor = f"{prefix}self_attn.{name}_proj.{suffix}"
        return Source(tensor, stored, split, (slice(None), copy, slice(begin, end)))

    queries = part("q", config.num_heads, slice(None), 0, group)
    return [queries] + [
        part(name, config.num_kv_heads, slice(copy, copy + 1), at, at + 1)
        for name, at in (("k", group), ("v", group + 1))
        for copy in range(copies)
    ]


def leaves(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...], list[Source]]]:
    """Yields the name, shape and sources of every leaf, in tree order."""
    flat, _ = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    for path, shape in flat:
        leaf = jax.tree_util.keystr(path, simple=True, separator="/")
        yield leaf, shape, sources_of(config, leaf, shape)
