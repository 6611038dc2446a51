"""Generates with llama.cpp through the Python package xllamacpp, whose wheels contain llama.cpp."""

from __future__ import annotations

import functools
import http.client
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from jaxspec.host.progress import OnProgress
from jaxspec.texts.results import Result, Statistics
from jaxspec.texts.text import Token

# Types of weights besides that of the given file. The file is the source of both, so all runs have the same model.
CONVERTED = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32)
# llama.cpp's own drafts from the text so far, with its default options.
_LOOKUP = "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"
# Keys that the writer writes itself.
_WRITTEN = ("general.architecture", "general.file_type")
# (token ids of a prompt, number of new tokens) → the text.
Generate = Callable[[Sequence[int], int], Result]


def llama_cpp_runs(
    file: Path, folder: Path, context: int, threads: int, on_progress: OnProgress
) -> dict[str, Generate]:
    """Loads a file into llama.cpp as it is, in Q8_0 and in float32, each without and with llama.cpp's lookup.

    Decoding is greedy, one text at a time, without reuse of prefixes. End tokens are suppressed, so each text has the
    asked number of tokens.

    Args:
      file: a GGUF file.
      folder: a directory for the files in Q8_0 and float32.
      context: the largest number of tokens of a prompt and its text.
      threads: number of threads.
      on_progress: called with the current step.

    Returns:
      Functions (token ids of a prompt, number of new tokens) → `Result`, by the name of their run.

    Raises:
      ValueError: xllamacpp is not installed.
    """
    try:
        import xllamacpp
    except ImportError:
        raise ValueError("it needs the package xllamacpp: pip install xllamacpp") from None
    files = {file_type(file): file}
    for wanted in CONVERTED:
        if wanted.name not in files:
            on_progress(f"writing the weights in {wanted.name}")
            files[wanted.name] = folder / f"{wanted.name}.gguf"
            convert(file, files[wanted.name], wanted)
    runs: dict[str, Generate] = {}
    for name, path in files.items():
        for suffix, lookup in {"": False, " lookup": True}.items():
            on_progress(f"loading {name} into llama.cpp")
            server = xllamacpp.Server(_params(xllamacpp, path, context, threads, lookup))
            runs[f"llama.cpp {name}{suffix}"] = functools.partial(_generate, server)
    return runs


def file_type(file: Path) -> str:
    """The type of most weights of a GGUF file, such as "Q4_1"."""
    field = gguf.GGUFReader(file).fields.get("general.file_type")
    if field is None:
        return file.stem
    return gguf.LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def convert(source: Path, target: Path, wanted: GGMLQuantizationType) -> None:
    """Copies a GGUF file with its matrices in another type; vectors, and rows that do not fit into blocks, in float32.

    Args:
      source: a GGUF file.
      target: the file to write.
      wanted: F32, or a type that the package gguf can quantise, such as Q8_0.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _WRITTEN:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if len(shape) > 1 and shape[-1] % block == 0 and wanted != GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if wanted == GGMLQuantizationType.F32 else 'MOSTLY'}_{wanted.name}"]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def result_of(answer: dict[str, Any]) -> Result:
    """The text and counts of an answer of llama.cpp's server.

    The first token comes from the prompt's pass. Its time is `prompt_ms`, and `predicted_ms` is the time of the others.

    Examples:
      >>> timings = {"prompt_ms": 20.0, "predicted_n": 11, "predicted_ms": 100.0}
      >>> result_of({"content": "a", "tokens": [3] * 11, "timings": timings}).statistics.tokens_per_second
      100.0
    """
    timings = answer["timings"]
    count, drafted, accepted = (
        timings.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted")
    )
    spent = Statistics(
        num_tokens=count,
        num_rounds=count - 1 - accepted,
        num_drafts=0,  # not reported
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        acceptance_histogram=(),
        elapsed_ms=timings["prompt_ms"] + timings["predicted_ms"],
        decode_ms=timings["predicted_ms"],
        compile_ms=0.0,
    )
    return Result(answer["content"], list(map(Token, answer["tokens"])), "length", spent)


def _generate(server: Any, prompt: Sequence[int], max_new_tokens: int) -> Result:
    request = {
        "prompt": list(prompt),
        "n_predict": max_new_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    # Only this request returns token ids. The times in the answer do not include the transfer.
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)
    connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "timings" not in answer:
        raise ValueError(f"llama.cpp answers {str(answer)[:200]}; leave it out of `peers`")
    return result_of(answer)


def _params(xllamacpp: Any, file: Path, context: int, threads: int, lookup: bool) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity = context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    if lookup:
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, _LOOKUP)]
    return params
