"""`jaxspec convert`: writes a checkpoint as a Hugging Face or Orbax directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from jaxspec.cli.options import Dtype
from jaxspec.console.parsing import Positional
from jaxspec.console.terminal import tell
from jaxspec.host.progress import Progress

if TYPE_CHECKING:
    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.llama import Params

Layout = Literal["huggingface", "orbax"]


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a checkpoint in another layout or dtype.

    The model's tokenizer, sampling defaults and exits are copied.

    Attributes:
      src: a Hugging Face directory (one file or shards), a GGUF file, a hub id such as owner/model or
        owner/model:FILE.gguf, the name of a model that comes with jaxspec, or an Orbax directory saved by jaxspec.
      dst: the directory to write, created if missing. It must not contain a model.
      to: the layout to write. huggingface: config.json and safetensors, for `--model` and transformers.
        orbax: config.json and an Orbax directory `params`.
      dtype: dtype of the new weights. Default auto: that of the source; float32 for quantised weights.
    """

    src: Annotated[str, Positional]
    dst: Annotated[str, Positional]
    to: Layout = "huggingface"
    dtype: Dtype | None = None

    def run(self) -> int:
        """Converts; returns the exit status."""
        from jaxspec.io import checkpoint
        from jaxspec.io.hf import huggingface
        from jaxspec.io.hf.config_json import config_json
        from jaxspec.io.tokenizers import tokenizer
        from jaxspec.loading.loading import find_model

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
            trained_for = checkpoint.read_trained_for(source, config)
            progress(f"writing {destination}")
            config_json(config, "float32", trained_for)  # raises before any file is written
            # Tokenizer files first: config.json is written last, so an interrupted conversion is not a valid model.
            destination.mkdir(parents=True, exist_ok=True)
            tokenizer.copy_files(source, destination)
            save(destination, config, params, generation=generation, trained_for=trained_for)
        tell(f"wrote {destination} ({_summary(self.to, config, params)})")
        return 0


def _check_destination(directory: Path) -> None:
    """Checks that the conversion would not overwrite anything, such as an incomplete model or a `params` directory.

    Raises:
      ValueError: the path is a file, or it contains a file or directory that the conversion would write.
    """
    from jaxspec.io import model_files

    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give a directory")
    if found := model_files.held(directory):
        raise ValueError(
            f"{directory} already contains a model, or a part of one ({found}); remove it or choose another directory"
        )


def _read(source: Path, dtype: Dtype | None) -> tuple[LlamaConfig, Params]:
    """Loads a model of any layout into host memory."""
    import jax

    from jaxspec.io import checkpoint
    from jaxspec.io.hf import huggingface
    from jaxspec.loading.loading import devices_of, dtype_named

    cpu = devices_of("cpu")[0]
    wanted = None if dtype in (None, "auto") else dtype_named(dtype, cpu)
    with jax.default_device(cpu):
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
