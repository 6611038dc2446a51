"""The shape of a Llama-type model: one frozen, hashable record, static under `jax.jit`."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

# More than any model has. A larger number in a file is refused before it costs memory.
MAX_LAYERS = 10_000
KVCacheDtype = Literal["auto", "int8"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the length of the original training.

    Attributes:
      kind: `linear` (positions ÷ factor), `dynamic` (NTK, the base grows with the live length)
        or `llama3` (low frequencies ÷ factor, high ones kept, smooth between).
      factor: the scaling factor.
      low_freq_factor: `llama3` only; wavelengths above `original ÷ low` are divided by `factor`.
      high_freq_factor: `llama3` only; wavelengths below `original ÷ high` are kept.
      original_max_position_embeddings: `llama3` only; the length of the original training, tokens.
    """

    kind: Literal["linear", "dynamic", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Llama 1 to 3.2, CodeLlama, Vicuna, TinyLlama, Mistral, Ministral, Qwen2, Qwen3: one architecture with flags.

    Attributes:
      vocab_size: V.
      hidden_size: D, the width of the residual stream.
      intermediate_size: F, the width of the gated MLP.
      num_layers: L.
      num_heads: H query heads.
      num_kv_heads: KV key/value heads; H is a multiple of it.
      head_dim: hd; may differ from D ÷ H.
      max_position_embeddings: positions of the original training.
      rms_norm_eps: ε of every RMS norm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: see `RopeScaling`; None for none.
      tie_embeddings: whether the embedding is also the head.
      qkv_bias, output_bias, mlp_bias: whether these products have a bias (Qwen2: qkv only).
      qk_norm: whether the queries and keys of each head are normed before rotation (Qwen3).
      sliding_windows: the attention window of each layer in positions, None for all; () for all in every layer.
      bos_token_id: the token put before a text, or None.
      eos_token_ids: any of them ends a text; may be empty.
      model_type: `llama`, `mistral`, `ministral`, `qwen2` or `qwen3`, written to saved files.
      kv_copies: copies of each key/value head in parameters and cache, adjacent, each for an equal part of its query
        heads, so that a mesh can use more than KV devices (`model.sharding`). Not stored in files.
      exact: whether the numbers of a row do not depend, to the last bit, on the other rows of a pass, their number, the
        capacity of the cache or the slots of a tree, on a CPU. Not stored in files.
      max_model_len: the maximum number of tokens of prompt and output together, if it is less than the model's context.
        Not stored in files.
      kv_cache_dtype: dtype of keys and values in the cache: auto, that of the weights, or int8, with a scale for each
        slot and key/value head. Not stored in files.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    kv_copies: int = 1
    exact: bool = False
    max_model_len: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "each key/value head serves an equal group of query heads"
            )
        if self.num_heads % self.held_kv_heads:
            raise ValueError(
                f"kv_copies {self.kv_copies} does not divide the {self.num_heads // self.num_kv_heads} query heads of "
                "each key/value head; a copy serves an equal part of them"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"sliding_windows has {len(self.sliding_windows)} entries for {self.num_layers} layers; "
                "give one entry per layer, or () for none"
            )
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; give auto or int8")

    @property
    def held_kv_heads(self) -> int:
        """Key/value heads in parameters and cache, copies included."""
        return self.num_kv_heads * self.kv_copies

    @property
    def group_size(self) -> int:
        """Query heads per held key/value head."""
        return self.num_heads // self.held_kv_heads

    @property
    def plain(self) -> LlamaConfig:
        """The same configuration without the fields that are not stored in files."""
        return dataclasses.replace(self, kv_copies=1, exact=False, max_model_len=None, kv_cache_dtype="auto")

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of prompt and output together."""
        scaling, length = self.rope_scaling, self.max_position_embeddings
        if scaling is not None and scaling.kind in ("linear", "dynamic"):
            length = int(length * scaling.factor)
        return length if self.max_model_len is None else min(length, self.max_model_len)

    def window(self, layer: int) -> int | None:
        """Returns the attention window of `layer` in positions; None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def truncated(self, num_layers: int) -> LlamaConfig:
        """Returns the configuration of the first `num_layers` layers.

        Raises:
          ValueError: `num_layers` is not in 1 … L.
        """
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(
                f"cannot keep {num_layers} layers of a model that has {self.num_layers}; "
                f"give a number from 1 to {self.num_layers}"
            )
        windows = self.sliding_windows[:num_layers]
        if all(window is None for window in windows):
            windows = ()  # the form in which a saved model is read back
        return dataclasses.replace(self, num_layers=num_layers, sliding_windows=windows)
