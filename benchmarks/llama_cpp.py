"""llama.cpp on the prompts of `jaxspec bench`: `python -m benchmarks.llama_cpp FILE.gguf` prints JSON.

What a user of a CPU would otherwise take, through the Python package xllamacpp, whose wheels hold llama.cpp. Its
speed is counted as ours is: new tokens after the first, divided by the time that they took; greedy, one text at a
time, nothing kept of the text before. Without `float32` the file runs as it is, so a file of four bits is compared
with decoding in four bits.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from tyro.conf import Positional

from benchmarks import command
from jaxspec.bench import prompts
from jaxspec.bench.timing import OnProgress
from jaxspec.io.gguf_file import is_gguf

# What goes before a tensor's data in a file: the writer says these itself.
_WRITTEN = ("general.architecture", "general.file_type")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """llama.cpp's speed on chats, by category and over all.

    Attributes:
      file: a GGUF file.
      float32: with the same weights in float32, as jaxspec computes on a CPU.
      speculation: llama.cpp's own drafts from the text so far (`simple`: its ngram-simple), or none.
      max_new_tokens: of each text.
      limit: prompts of each kind.
      threads: by default one for each processor.
    """

    file: Positional[Path]
    float32: bool = False
    speculation: Literal["none", "simple"] = "none"
    max_new_tokens: int = 128
    limit: int | None = None
    threads: int | None = None

    def __post_init__(self):
        for name in ("max_new_tokens", "limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give a whole number of at least 1")
        if not self.file.is_file() or not is_gguf(self.file):
            raise ValueError(f"{self.file} is no GGUF file; give one, such as model.Q8_0.gguf")


def in_float32(source: Path, target: Path) -> None:
    """Writes a GGUF file again with all of its tensors in float32.

    Args:
      source: a GGUF file.
      target: the file to write.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _WRITTEN:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        writer.add_tensor(
            tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(options: Options, on_progress: OnProgress) -> dict[str, Any]:
    """Runs every prompt once.

    Args:
      options: which file, and how.
      on_progress: is told which prompt runs.

    Returns:
      `tokens_per_second` by kind of prompt and of all; `first_token_ms`, the median; the file's name and the options.

    Raises:
      ValueError: xllamacpp is not installed.
    """
    try:
        import xllamacpp
    except ImportError as error:
        raise ValueError("this needs xllamacpp, which brings llama.cpp: pip install xllamacpp") from error
    threads = options.threads or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        file = options.file
        if options.float32:
            on_progress("writing the weights in float32")
            file = Path(folder) / "float32.gguf"
            in_float32(options.file, file)
        server = xllamacpp.Server(_params(xllamacpp, file, options.speculation, threads))
        chosen = {kind: texts[: options.limit] for kind, texts in prompts.load().items()}
        timings: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for kind, texts in chosen.items():
            for number, text in enumerate(texts, 1):
                on_progress(f"{kind}, prompt {number} of {len(texts)}")
                answer = server.handle_chat_completions(
                    {
                        "messages": [{"role": "user", "content": text}],
                        "max_tokens": options.max_new_tokens,
                        "temperature": 0,
                        "cache_prompt": False,
                    }
                )
                timings[kind].append(answer["timings"])
    every = [timing for some in timings.values() for timing in some]
    return {
        "file": options.file.name,
        "float32": options.float32,
        "speculation": options.speculation,
        "threads": threads,
        "tokens_per_second": {kind: speed(some) for kind, some in {**timings, "all": every}.items()},
        "first_token_ms": statistics.median(timing["prompt_ms"] for timing in every),
    }


def speed(timings: Sequence[Mapping[str, float]]) -> float:
    """Tokens after the first of each text per second.

    Args:
      timings: of texts, as llama.cpp's server reports them: `predicted_n` tokens, the first of which comes from the
        prompt's pass, in `predicted_ms`.

    Examples:
      >>> speed([{"predicted_n": 11, "predicted_ms": 100.0}, {"predicted_n": 21, "predicted_ms": 200.0}])
      100.0
    """
    tokens = sum(timing["predicted_n"] - 1 for timing in timings)
    return 1000 * tokens / sum(timing["predicted_ms"] for timing in timings)


def _params(xllamacpp: Any, file: Path, speculation: str, threads: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    if speculation == "simple":
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    return params


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return command.run("benchmarks.llama_cpp", Options, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
