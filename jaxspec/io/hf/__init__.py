"""Checkpoints in the format of Hugging Face.

- `huggingface`: finds, reads and writes a directory.
- `config_json`, `generation_json`: read `config.json` and `generation_config.json`.
- `keys`, `values`: check the keys and the values of both files.
- `layout`: maps the tensors of a file to the parameters.
- `names`: normalises the names of tensors.
"""
