"""Where a turn ends in a GGUF file: the tokens that the file names, and those that have the text of such an end.

Older conversions name only the end of a document, so that a chat model would go on past its answer. llama.cpp finds
the end of a turn by its text; the list here is that of its `llama-vocab.cpp`, without the ends of architectures that
are not supported and the tokens of fill-in-the-middle.
"""

from __future__ import annotations

from jaxspec.io.gguf_file import GGUFFile, token_ids

END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
        *("<|im_end|>", "<|endoftext|>"),  # ChatML, Qwen
        *("<|end|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>"),
    }
)


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ids of the tokens that end a text: eos, eot and eom where the file names them, then the others by their texts.

    Raises:
      ValueError: one that the file names is no number.
    """
    ids, tokens = token_ids(file), file.metadata.get("tokenizer.ggml.tokens")
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    listed = enumerate(tokens if isinstance(tokens, list) else ())
    return tuple(dict.fromkeys([*named, *(index for index, text in listed if text in END_TEXTS)]))
