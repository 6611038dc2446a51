"""The shape of a Llama-type model: one frozen, hashable record, static under `jax.jit`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

# More than any model has. A larger number in a file is refused before it costs memory.
MAX_LAYERS = 10_000
KVCacheDtype = Literal["auto", "int8"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the length of the original training.

    Attributes:
      kind: `linear` (positions ÷ factor), `dynamic` (NTK, the base grows with the live length), `llama3` (low
        frequencies ÷ factor, high ones kept, smooth between), `yarn` (the same, between two numbers of rotations) or
        `longrope` (a factor for each frequency, of one list up to the original length, of another beyond it).
      factor: the scaling factor.
      low_freq_factor: `llama3` only; wavelengths above `original ÷ low` are divided by `factor`.
      high_freq_factor: `llama3` only; wavelengths below `original ÷ high` are kept.
      original_max_position_embeddings: `llama3`, `yarn` and `longrope`; the length of the original training, tokens.
      beta_fast, beta_slow: `yarn` only; frequencies with more rotations than `beta_fast` in the original length are
        kept, those with fewer than `beta_slow` are divided by `factor`.
      truncate: `yarn` only; whether the two bounds are whole indices of frequencies.
      attention_factor: `yarn` and `longrope`; the factor of cosine and sine.
      short_factors, long_factors: `longrope` only; a divisor for each frequency.
      query_beta: β of Ministral 3: a query at position p is multiplied by 1 + β·log(1 + ⌊p ÷ original⌋).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_beta: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scores:
    """How attention computes its scores from queries and keys.

    Attributes:
      scale: the factor of the products; None for hd^-½.
      cap: c, with which a score s becomes c·tanh(s ÷ c); None for none.
    """

    scale: float | None = None
    cap: float | None = None


@dataclasses.dataclass(frozen=True)
class LayerType:
    """The choices in which the layers of one model differ. Layers of one type share programs.

    Attributes:
      window: the attention window in positions; None for all.
      rope_theta: the base of the rotary frequencies; None for no rotation.
      rope_scaling: see `RopeScaling`; None for none.
    """

    window: int | None
    rope_theta: float | None
    rope_scaling: RopeScaling | None


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The Llama block and models that differ from it in a few choices: one architecture with flags.

    The defaults of the flags are Llama's. `io.hf.families` has the flags of each family.

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
      qk_norm: whether queries and keys are normed before rotation, each head (Qwen3).
      sliding_windows: the attention window of each layer in positions, None for all; () for all in every layer.
      bos_token_id: the token put before a text, or None.
      eos_token_ids: any of them ends a text; may be empty.
      model_type: the family's name in `config.json`, written to saved files.
      kv_copies: copies of each key/value head in parameters and cache, adjacent, each for an equal part of its query
        heads, so that a mesh can use more than KV devices (`model.sharding`). Not stored in files.
      exact: whether the numbers of a row do not depend, to the last bit, on the other rows of a pass, their number, the
        capacity of the cache or the slots of a tree, on a CPU. Layers with a window then keep the whole text in the
        cache. Not stored in files.
      max_model_len: the maximum number of tokens of prompt and output together, if it is less than the model's context.
        Not stored in files.
      kv_cache_dtype: dtype of keys and values in the cache: auto, that of the weights, or int8, with a scale for each
        slot and key/value head. Not stored in files.
      draft_window: the slots that a pass reads in layers without a window, as (sinks, last): the first `sinks` of a
        text, and of each token the last `last`, its own included; None for all. Only configurations of drafts have it.
      norm_placement: the norms of a sublayer: of its input (`pre`), of its output before the sum (`post`, OLMo 2), or
        both (`sandwich`, Gemma 2).
      norm_offset: a number that is added to the weights of all norms, which then multiply in float32 (Gemma: 1).
      qk_norm_over_heads: whether a norm of `qk_norm` is over all heads together (OLMo 2).
      scores: how attention computes its scores (Granite: scale, Gemma 2: scale and cap).
      logit_cap: c, with which a logit z becomes c·tanh(z ÷ c); None for none (Gemma 2).
      embedding_multiplier, residual_multiplier, logit_multiplier: factors of the embedding (Granite, Gemma), of the
        output of each sublayer, and of the logits (Granite).
      rotary_dim: the number of leading coordinates of a head that are rotated; None for all (Phi-4-mini, GLM-4).
      rotated: whether each layer rotates queries and keys; () for all (SmolLM3, EXAONE 4).
      window_rope_theta: the base of the rotary frequencies, without scaling, in layers with a window; None if these do
        not differ (Gemma 3, OLMo 3).
      activation: of the gate: `silu`, or `gelu_tanh`, GELU by tanh (Gemma).
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
    draft_window: tuple[int, int] | None = None
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    norm_offset: float = 0.0
    qk_norm_over_heads: bool = False
    scores: Scores = Scores()
    logit_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    rotary_dim: int | None = None
    rotated: tuple[bool, ...] = ()
    window_rope_theta: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"

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
        for name in ("sliding_windows", "rotated"):
            if (count := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(
                    f"{name} has {count} entries for {self.num_layers} layers; give one entry per layer, or () for none"
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
        """The same configuration with one copy of each key/value head, not `exact`, with the whole context."""
        return dataclasses.replace(self, kv_copies=1, exact=False, max_model_len=None, draft_window=None)

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of prompt and output together, for each scaling of RoPE by its own meaning.

        Linear and dynamic scaling lengthen `max_position_embeddings`, YaRN the original length (a YaRN that is added to
        a file, as for Qwen 2.5 and 3, leaves `max_position_embeddings`). Llama 3's scaling, LongRoPE and linear scaling
        of the layers without a window alone (Gemma 3) are counted in `max_position_embeddings`. As in vLLM.
        """
        scaling, length, factor = self.rope_scaling, self.max_position_embeddings, 1.0
        if scaling is not None and scaling.kind == "yarn":
            length, factor = scaling.original_max_position_embeddings, scaling.factor
        elif scaling is not None and scaling.kind in ("linear", "dynamic"):
            factor = (
                1.0 if scaling.kind == "linear" and self.window_rope_theta is not None else scaling.factor
            )
        length = int(round(length * factor, 3))  # a factor may be a quotient of two lengths
        return length if self.max_model_len is None else min(length, self.max_model_len)

    @property
    def rope_limit(self) -> int | None:
        """The length beyond which the rotation of a token depends on the length of the text; None for none."""
        if self.rope_scaling is None or self.rope_scaling.kind not in ("dynamic", "longrope"):
            return None
        if self.rope_scaling.kind == "dynamic":
            return self.max_position_embeddings
        return self.rope_scaling.original_max_position_embeddings

    def window(self, layer: int) -> int | None:
        """Returns the attention window of `layer` in positions; None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def layer_type(self, layer: int) -> LayerType:
        """Returns the choices of `layer`."""
        window, theta, scaling = self.window(layer), self.rope_theta, self.rope_scaling
        if window is not None and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, None
        if self.rotated and not self.rotated[layer]:
            return LayerType(window, None, None)
        return LayerType(window, theta, scaling)

    def block(self, num_layers: int = 1, **changes: Any) -> LlamaConfig:
        """Returns a plain Llama of `num_layers` layers with this model's vocabulary, sizes and RoPE, as heads have."""
        names = ["vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"]
        names += ["max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"]
        names += ["bos_token_id", "eos_token_ids", "kv_cache_dtype"]
        return LlamaConfig(**{name: getattr(self, name) for name in names} | changes, num_layers=num_layers)

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
        windows, rotated = self.sliding_windows[:num_layers], self.rotated[:num_layers]
        # The form in which a saved model is read back.
        windows, rotated = windows if any(windows) else (), () if all(rotated) else rotated
        theta = self.window_rope_theta if windows else None
        changed: dict[str, Any] = {"sliding_windows": windows, "rotated": rotated, "window_rope_theta": theta}
        return dataclasses.replace(self, num_layers=num_layers, **changed)
