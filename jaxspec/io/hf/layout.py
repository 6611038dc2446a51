"""The table of the tensors of a checkpoint and their places in jaxspec's parameters.

jaxspec fuses matrices that are multiplied together (`model.llama`), so one leaf contains one to three tensors of a
checkpoint. Reading and writing both use this table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxspec.io.hf.families import FAMILIES, Family
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import is_shape, param_shapes

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Source:
    """A Hugging Face tensor of `shape`, and its `index` in a leaf that is reshaped to `split`.

    If only a part of the tensor belongs there, it is `stored_index` of the tensor reshaped to `stored_split`.
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    index: tuple[slice, ...] = ()
    stored_split: tuple[int, ...] = ()
    stored_index: tuple[slice, ...] = ()

    def part(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of the part of the tensor that belongs to the leaf."""
        return tensor.reshape(self.stored_split)[self.stored_index] if self.stored_split else tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """The names and the order of the tensors of a checkpoint.

    Attributes:
      prefix: of the names within a layer, with `{}` for its number.
      names: names without `.weight` and `.bias`, by leaf, or by part of a leaf.
      interleaved: whether rotated pairs are neighbours in the rows of queries and keys, not halves.
    """

    prefix: str
    names: Mapping[str, str]
    interleaved: bool


_NAMES = {
    "embed": EMBED.removesuffix(".weight"),
    "norm": "model.norm",
    "head": HEAD.removesuffix(".weight"),
    **{f"attention/{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")},
    "attention/out": "self_attn.o_proj",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "gate_up")},
    "mlp/down": "mlp.down_proj",
}
# The norms of a layer, by their placement.
_NORMS = {
    "pre": {"attention/norm": "input_layernorm", "mlp/norm": "post_attention_layernorm"},
    "post": {
        "attention/post_norm": "post_attention_layernorm",
        "mlp/post_norm": "post_feedforward_layernorm",
    },
    "sandwich": {
        "attention/norm": "input_layernorm",
        "attention/post_norm": "post_attention_layernorm",
        "mlp/norm": "pre_feedforward_layernorm",
        "mlp/post_norm": "post_feedforward_layernorm",
    },
}


def _family(config: LlamaConfig) -> Family:
    return FAMILIES.get(config.model_type, FAMILIES["llama"])


def _hugging_face(config: LlamaConfig) -> Layout:
    family = _family(config)
    names = {**_NAMES, **_NORMS[config.norm_placement], **family.names}
    return Layout("model.layers.{}.", names, family.interleaved)


def sources_of(
    config: LlamaConfig, leaf: str, shape: tuple[int, ...], layout: Layout | None = None
) -> list[Source]:
    """Returns the tensors of a leaf such as `layers/0/attention/qkv`; k and v occur once for each copy.

    `layout`: of the checkpoint; None for the Hugging Face files of the model's family.
    """
    layout, in_one = layout or _hugging_face(config), _family(config).fused
    prefix, kind = "", leaf
    if leaf.startswith("layers/"):
        _, layer, kind = leaf.split("/", 2)
        prefix = layout.prefix.format(layer)
    suffix = "bias" if kind.endswith("_bias") else "weight"
    kind = kind.removesuffix("_bias")

    def named(part: str) -> str:
        return f"{prefix}{layout.names[part]}.{suffix}"

    if kind == "mlp/gate_up":
        if "gate_up" in in_one:
            return [Source(named("gate_up"), (2 * shape[1], *shape[2:]), shape)]
        return [
            Source(named(name), shape[1:], shape, (slice(i, i + 1),)) for i, name in enumerate(("gate", "up"))
        ]
    if kind != "attention/qkv":
        stored = (math.prod(shape),) if "wide" in kind else shape
        return [Source(named(kind.replace("wide_", "")), stored, shape)]
    group, copies, rest, hd = config.group_size, config.kv_copies, shape[2:], config.head_dim
    split, counts = (
        (config.num_kv_heads, copies, group + 2, hd, *rest),
        (config.num_heads, config.num_kv_heads),
    )
    fused, first = "qkv" in in_one, {"q": 0, "k": counts[0], "v": sum(counts)}

    def part(name: str, heads: int, copy: slice, begin: int, end: int) -> list[Source]:
        tensor = named("qkv" if fused else name)
        total, before = (counts[0] + 2 * counts[1], first[name]) if fused else (heads, 0)
        stored, where = (total * hd, *rest), (slice(None), copy, slice(begin, end))
        if fused:
            cut = slice(before, before + heads)
            return [Source(tensor, stored, split, where, (total, hd, *rest), (cut,))]
        if name == "v" or not layout.interleaved:
            return [Source(tensor, stored, split, where)]
        # The first and second members of the rotated pairs of a head, and what is not rotated.
        turned = config.rotary_dim or hd
        cuts = [(slice(at * turned // 2, (at + 1) * turned // 2), slice(at, turned, 2)) for at in (0, 1)]
        cuts += [(slice(turned, hd), slice(turned, hd))] if turned < hd else []
        members = (config.num_kv_heads, copies if name == "q" else 1, end - begin, hd, *rest)
        both = slice(None), slice(None)
        return [
            Source(
                *(tensor, stored, split, (slice(None), copy, slice(begin + at, begin + at + 1), ours)),
                *(members, (*both, slice(at, at + 1), theirs)),
            )
            for at in range(end - begin)
            for ours, theirs in cuts
        ]

    queries = part("q", config.num_heads, slice(None), 0, group)
    return queries + [
        source
        for name, at in (("k", group), ("v", group + 1))
        for copy in range(copies)
        for source in part(name, config.num_kv_heads, slice(copy, copy + 1), at, at + 1)
    ]


def leaves(
    config: LlamaConfig, layout: Layout | None = None
) -> Iterator[tuple[str, tuple[int, ...], list[Source]]]:
    """Yields the name, shape and sources of every leaf, in tree order; `layout` as in `sources_of`."""
    flat, _ = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    for path, shape in flat:
        leaf = jax.tree_util.keystr(path, simple=True, separator="/")
        yield leaf, shape, sources_of(config, leaf, shape, layout)
