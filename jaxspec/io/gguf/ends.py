"""The end tokens of a GGUF file: the tokens that the file names, and those whose text ends a turn.

Older conversions name only the end of a document, so a chat model would continue after its answer. llama.cpp finds the
end of a turn by the text of a token. The list here is that of its `llama-vocab.cpp`, without the ends of unsupported
architectures and without fill-in-the-middle tokens.
"""

from __future__ import annotations

from jaxspec.io.gguf.container import GGUFFile, token_ids

END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
        *("<|im_end|>", "<|endoftext|>"),  # ChatML, Qwen
        *("<|end|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>"),
    }
)


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text: eos, eot and eom if the file names them, then those found by text.

    Raises:
      ValueError: the file names a token by something other than a number.
    """
    ids, tokens = token_ids(file), file.metadata.get("tokenizer.ggml.tokens")
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    listed = enumerate(tokens if isinstance(tokens, list) else ())
    return tuple(dict.fromkeys([*named, *(index for index, text in listed if text in END_TEXTS)]))
