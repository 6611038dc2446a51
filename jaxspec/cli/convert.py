"""`jaxspec convert`: writes a model as a Hugging Face directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxspec.cli.options import Dtype
from jaxspec.console.parsing import Positional
from jaxspec.console.terminal import tell
from jaxspec.host.progress import Progress

if TYPE_CHECKING:
    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.llama import Params


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a model as a Hugging Face directory of config.json and safetensors, which `--model` and transformers read.

    The model's tokenizer, sampling defaults and exits are copied.

    Attributes:
      src: a Hugging Face directory (one file or shards), a GGUF file, a hub id such as owner/model or
        owner/model:FILE.gguf, or the name of a model that comes with jaxspec.
      dst: the directory to write, created if missing. It must not contain a model.
      dtype: dtype of the new weights. Default auto: that of the source; float32 for quantised weights.
    """

    src: Annotated[str, Positional]
    dst: Annotated[str, Positional]
    dtype: Dtype | None = None

    def run(self) -> int:
        """Converts; returns the exit status."""
        from jaxspec.io import checkpoint
        from jaxspec.io.hf import huggingface
        from jaxspec.io.hf.config_json import config_json
        from jaxspec.io.tokenizers import tokenizer
        from jaxspec.loading.loading import find_model

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
            huggingface.save(destination, config, params, generation=generation, trained_for=trained_for)
        tell(f"wrote {destination} ({_summary(config, params)})")
        return 0


def _check_destination(directory: Path) -> None:
    """Checks that the conversion would not overwrite anything, such as an incomplete model.

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
    from jaxspec.loading.loading import devices_of, dtype_named

    cpu = devices_of("cpu")[0]
    wanted = None if dtype in (None, "auto") else dtype_named(dtype, cpu)
    with jax.default_device(cpu):
        config = checkpoint.read_config(source)
        wanted = checkpoint.stored_dtype(source) if wanted is None else wanted
        return config, checkpoint.load_params(source, config, wanted)


def _summary(config: LlamaConfig, params: Params) -> str:
    import jax

    leaves = jax.tree.leaves(params)
    count, size = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    return f"{config.num_layers} layers, {count:,} parameters, {leaves[0].dtype}, {size / 1e6:,.1f} MB"
