"""Checks the keys of `config.json` that `config_json` does not read: each is ignored, reported or refused.

The lists were checked key by key with the configuration classes of transformers 5.24, see
`tests/files/test_hf_keys.py` and `tests/peers/test_config_keys.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.host.messages import shown
from jaxspec.io.hf.families import FAMILIES, Family


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id rope_theta
    rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings quantization_config
    jaxspec"""
)
# The keys that `config_json` reads, by model type.
READ: Mapping[str, frozenset[str]] = {
    kind: _READ | {family.activation} | family.keys | family.aliases.keys()
    for kind, family in FAMILIES.items()
}
# Keys that change no output of the model: storage, training, and other programs' execution. `pretraining_tp` splits
# products into parts and adds the parts.
IGNORED = _words(
    """architectures dtype torch_dtype transformers_version name_or_path _name_or_path _commit_hash torchscript
    tokenizer_class model_max_length max_sequence_length finetuning_task task_specific_params id2label label2id
    num_labels problem_type tie_encoder_decoder is_decoder is_encoder_decoder cross_attention_hidden_size
    add_cross_attention pruned_heads tf_legacy_loss use_bfloat16 unsloth_version unsloth_fixed transformers.js_config
    is_llama_config
    initializer_range attention_dropout hidden_dropout residual_dropout attn_dropout resid_dropout embd_dropout
    resid_pdrop embd_pdrop attn_pdrop gradient_checkpointing neftune_noise_alpha _sliding_window_pattern
    use_cache pretraining_tp chunk_size_feed_forward output_attentions output_hidden_states return_dict use_return_dict
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _flash_attn_2_enabled experts_implementation _experts_implementation_internal use_flash_attn
    pad_token_id unk_token_id sep_token_id mask_token_id medusa_num_heads medusa_num_layers"""
)
# Generation parameters: transformers 5 takes them only from `generation_config.json`.
GENERATION_KEYS = _words(
    """assistant_confidence_threshold assistant_early_exit assistant_lookbehind bad_words_ids begin_suppress_tokens
    cache_config cache_implementation compile_config constraints decoder_start_token_id disable_compile
    diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty
    epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_decoder_ids
    forced_eos_token_id guidance_scale is_assistant length_penalty low_memory max_length max_matching_ngram_size
    max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits output_scores
    penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
    repetition_penalty return_dict_in_generate sequence_bias stop_strings suppress_tokens target_lookbehind
    temperature token_healing top_h top_k top_p typical_p use_model_defaults watermarking_config"""
)
# Keys of other architectures that change a model's computation, and their neutral values; null and false are always
# neutral.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    # factors of the embedding, of attention, of the residual stream and of the logits (Granite, Cohere, MiniCPM, µP)
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "scale_emb": (1,),
    "mup_input_alpha": (1,),
    "attention_multiplier": (),
    "attention_scale": (),
    "query_pre_attn_scalar": (),
    "softmax_scale": (),
    "key_multiplier": (1,),
    "residual_multiplier": (1,),
    "residual_scale": (1,),
    "scale_depth": (),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "dim_model_base": (),
    "scale_attn_weights": (True,),
    # caps and clips (Gemma, OLMo)
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    # other positions or rotations in attention
    "use_bidirectional_attention": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (0,),
    "alibi": (),
    "use_alibi": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "rope_interleaved": (),
    "rope_ratio": (1,),
    "rotary_pct": (1,),
    "use_mrope": (),
    "use_rope": (True,),
    "llama_4_scaling": (),
    # norms, activations and biases
    "hidden_activation": ("silu", "swish"),
    "layer_norm_type": ("rms_norm", "rmsnorm"),
    "norm_type": ("rms_norm", "rmsnorm"),
    "qk_norm": (),
    "qk_layernorm": (),
    "use_qk_norm": (),
    "use_bias": (),
    "use_qkv_bias": (),
    "lm_head_bias": (),
    # other layers
    "block_configs": (),
    "hc_mult": (),
    "kv_lora_rank": (),
    "layers_block_type": ([],),
    "n_routed_experts": (0, 1),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (),
    "per_layer_config": ({},),
    "q_lora_rank": (),
    "use_parallel_residual": (),
    # other storage of weights
    "compression_config": ({},),
}
_ROPE_READ = _words(
    """rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings
    partial_rotary_factor"""
)
# The keys that a type of RoPE reads beside them.
_OF_YARN = _words("attention_factor beta_fast beta_slow mscale mscale_all_dim truncate")
_ROPE_TYPES = {"yarn": _OF_YARN, "longrope": _words("attention_factor short_factor long_factor")}
_MOST_NAMED = 5


def check_keys(kind: str, content: Mapping[str, Any]) -> str | None:
    """Returns a warning about the unknown keys of a config that a model of type `kind` does not use, or None.

    Null, false and empty values have no effect and are ignored.

    Raises:
      ValueError: a key changes the model in a way that is not supported.
    """
    for key, neutral in REFUSED.items():
        if key not in READ[kind] and not _empty(content.get(key)) and content[key] not in neutral:
            usual = f"leave it out or give {shown(neutral[0])}" if neutral else "leave it out"
            raise ValueError(
                f"{key} is {shown(content[key])}; models of {kind} with it are not supported ({usual} if the model was "
                "trained without)"
            )
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    nested = [one for one in rope.values() if isinstance(one, Mapping)]
    unused = [f"rope_parameters.{key}" for one in nested or [rope] for key in _unread(FAMILIES[kind], one)]
    known = READ[kind] | IGNORED | GENERATION_KEYS | REFUSED.keys()
    unused += [
        key for key in content if key not in known and not _empty(content[key]) and _matters(key, content)
    ]
    if not unused:
        return None
    names = ", ".join(shown(name)[1:-1][:30] for name in unused[:_MOST_NAMED])
    more = f" and {len(unused) - _MOST_NAMED} more" if len(unused) > _MOST_NAMED else ""
    return f"{kind} models do not use {names}{more}; the text is wrong if this model was made with it"


def _unread(family: Family, rope: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a set of RoPE parameters that have a value and are not read."""
    type_ = str(rope.get("rope_type", rope.get("type")))
    read = _ROPE_READ | _ROPE_TYPES.get(family.synonyms.get(type_, type_), frozenset())
    if family.scales_queries:
        # The context is stated twice.
        read |= {"llama_4_scaling_beta", "max_position_embeddings"}
    return [key for key in rope if key not in read and not _empty(rope[key])]


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _matters(key: str, content: Mapping[str, Any]) -> bool:
    """Whether a key that the model's type does not use could have an effect here."""
    if key in ("sliding_window", "max_window_layers"):
        return content.get("use_sliding_window") is not False and content.get("sliding_window") is not None
    types = content[key]
    return not (
        key == "layer_types" and isinstance(types, list) and set(map(str, types)) == {"full_attention"}
    )
