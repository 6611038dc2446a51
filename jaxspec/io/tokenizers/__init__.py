"""Tokenizers and chat templates.

- `tokenizer`: converts between text and token ids.
- `tokenizer_file`: reads `tokenizer.json` without transformers.
- `chat`: reads and renders chat templates.
"""
