"""Reads and writes the files of models and of drafting methods.

- `checkpoint`: a model in any of the formats.
- `tensors`: safetensors files.
- `archives`, `pickle_values`: checks and readers for the files that PyTorch saves.
- `directories`, `model_files`: recognise the files in a directory.
- `embedded`: the models that are installed with jaxspec.
- `user_data`: files about a model whose own directory cannot be written to.
- `hf`, `gguf`, `methods`, `tokenizers`: a folder for each group of formats.
"""
