"""`jaxspec convert`: a checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from jaxspec.cli.options import Dtype
from jaxspec.cli.terminal import Progress

if TYPE_CHECKING:
    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.llama import Params


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a checkpoint as a Hugging Face directory, in another dtype if asked.

    Its tokenizer goes with it.

    Attributes:
      src: a Hugging Face directory (one file or shards), a GGUF file, a hub id such as owner/model or
        owner/model:FILE.gguf, or a directory that jaxspec saved through Orbax.
      dst: the directory to write; made if missing. It may not hold a model yet.
      dtype: of the weights in the new files. Default: as they are; float32 for quantised ones.
    """

    src: Annotated[str, Positional]
    dst: Annotated[str, Positional]
    dtype: Dtype | None = None

    def run(self) -> int:
        """Converts; returns the exit status."""
        from jaxspec.io import checkpoint, huggingface, tokenizer

        destination = Path(self.dst)
        if (destination / "config.json").exists():
            raise ValueError(f"{destination} holds a model already; remove it or choose another directory")
        with Progress() as progress:
            progress(f"reading {self.src}")
            source = checkpoint.resolve(self.src)
            config, params = _read(source, self.dtype)
            progress(f"writing {destination}")
            generation = checkpoint.generation_defaults(source)
            trained = (source / "config.json").is_file()
            exits = checkpoint.read_exits(source, config.num_layers) if trained else ()
            huggingface.save(destination, config, params, generation=generation, exits=exits)
            tokenizer.copy_files(source, destination)
        return 0


def _read(source: Path, dtype: Dtype | None) -> tuple[LlamaConfig, Params]:
    """The model in a directory or file of any kind, in host memory."""
    import jax
    import numpy as np

    from jaxspec.io import checkpoint, orbax

    kind = None if dtype is None else np.dtype(dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        if (source / "params").is_dir():
            return orbax.restore(source, kind)
        config = checkpoint.read_config(source)
        kind = checkpoint.stored_dtype(source) if kind is None else kind
        return config, checkpoint.load_params(source, config, kind)
