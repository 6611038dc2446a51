"""Checkpoints in the format of llama.cpp.

- `gguf`: configuration and dequantised weights.
- `container`: metadata and offsets of the tensors.
- `gguf_tokenizer`: the tokenizer in the metadata.
- `bounds`: checks the vocabulary.
- `ends`: finds the end tokens.
"""
