"""`jaxspec convert`: a checkpoint becomes a Hugging Face directory, or one of Orbax."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional

from jaxspec.cli.options import Dtype
from jaxspec.console.terminal import Progress

if TYPE_CHECKING:
    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.llama import Params

Layout = Literal["huggingface", "orbax"]


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a checkpoint in another layout or dtype.

    The tokenizer, the sampling defaults and the exits of the model go with it.

    Attributes:
      src: a Hugging Face directory (one file or shards), a GGUF file, a hub id such as owner/model or
        owner/model:FILE.gguf, the name of a model that comes with jaxspec, or a directory that jaxspec saved
        through Orbax.
      dst: the directory to write; made if missing. It may not hold a model yet.
      to: the layout to write. huggingface: config.json and safetensors, as `--model` and transformers read them.
        orbax: a directory `params` of Orbax beside config.json.
      dtype: of the weights in the new files. Default: as they are; float32 for quantised ones.
    """

    src: Annotated[str, Positional]
    dst: Annotated[str, Positional]
    to: Layout = "huggingface"
    dtype: Dtype | None = None

    def run(self) -> int:
        """Converts; returns the exit status."""
        from jaxspec.engine.loading import find_model
        from jaxspec.io import checkpoint, huggingface, tokenizer
        from jaxspec.io.hf_config import config_json

        save: Callable[..., None] = huggingface.save
        if self.to == "orbax":
            from jaxspec.io.orbax import save as save_orbax

            save = save_orbax

        destination = Path(self.dst)
        _check_destination(destination)
        with Progress() as progress:
            progress(f"reading {self.src}")
            source = find_model(self.src)
            config, params = _read(source, self.dtype)
            generation = checkpoint.generation_defaults(source)
            exits = checkpoint.read_exits(source, config.num_layers)
            progress(f"writing {destination}")
            config_json(config, "float32", exits)  # refused before anything is written
            # Before the model, which ends with config.json: an interrupted conversion never looks whole.
            destination.mkdir(parents=True, exist_ok=True)
            tokenizer.copy_files(source, destination)
            save(destination, config, params, generation=generation, exits=exits)
        print(f"jaxspec: wrote {destination} ({_summary(self.to, config, params)})", file=sys.stderr)
        return 0


def _check_destination(directory: Path) -> None:
    """Refuses a directory in which something would be overwritten: a model without config.json is one too, such as
    what an interrupted conversion left, and so is somebody's `params`.

    Raises:
      ValueError: it holds a file or directory of a name that is written, or is a file.
    """
    from jaxspec.io import model_files

    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give a directory")
    if found := model_files.held(directory):
        raise ValueError(
            f"{directory} holds a model already, or a part of one ({found}); remove it or choose another directory"
        )


def _read(source: Path, dtype: Dtype | None) -> tuple[LlamaConfig, Params]:
    """The model in a directory or file of any layout, in host memory."""
    import jax
    import numpy as np

    from jaxspec.engine.loading import devices_of
    from jaxspec.io import checkpoint, huggingface

    wanted = None if dtype is None else np.dtype(dtype)
    with jax.default_device(devices_of("cpu")[0]):
        if huggingface.is_orbax(source):
            from jaxspec.io import orbax

            return orbax.restore(source, wanted)
        config = checkpoint.read_config(source)
        wanted = checkpoint.stored_dtype(source) if wanted is None else wanted
        return config, checkpoint.load_params(source, config, wanted)


def _summary(layout: Layout, config: LlamaConfig, params: Params) -> str:
    import jax

    leaves = jax.tree.leaves(params)
    named = {"huggingface": "Hugging Face", "orbax": "Orbax"}[layout]
    count, size = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    return (
        f"{named}, {config.num_layers} layers, {count:,} parameters, {leaves[0].dtype}, {size / 1e6:,.1f} MB"
    )
