"""Damaged and malicious files, by kind, and the reader of each kind."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.cli.options import read_messages
from jaxspec.heads import torch_file
from jaxspec.host.files import read_json
from jaxspec.io import tensors as io_tensors
from jaxspec.io.gguf import gguf, gguf_tokenizer
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import cost_files, method_files
from jaxspec.io.methods.acceptance_file import Acceptances
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.methods.vocabulary_file import read_vocabulary
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.prompt_files import read_tasks
from jaxspec.measuring.line_log import LineLog
from training.data import packing
from training.loop import checkpoints
from training.option_files import yaml_words
from training.reports import metrics
from training.run import read_run

LONG = "x" * 100_000
CONTROL = "\x1b[2J\nevil\x00\ud800"
VALUES = (None, True, -1, 10**400, math.nan, math.inf, "x", LONG, CONTROL, [], [[]], {}, [math.nan], [10**30])
JSON = {
    "empty": b"",
    "truncated": b'{"format": "jaxspec.pl',
    "null": b"null",
    "list": b"[]",
    "number": b"3",
    "text": b'"x"',
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "UTF-16": '{"format": 1}'.encode("utf-16"),
    "NUL": b"\0" * 100,
    "NUL behind": b"{}\0",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b'{"format":' + b"[" * 900 + b"]" * 900 + b"}",
    "many digits": b'{"format": ' + b"9" * 5000 + b"}",
    "large exponent": b'{"format": 1e999999}',
    "NaN": b'{"format": NaN}',
    "long text": json.dumps({"format": LONG}).encode(),
    "control characters": json.dumps({"format": CONTROL}).encode(),
    "long key": json.dumps({LONG: 1}).encode(),
    "empty object": b"{}",
}


def changed(content: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yields a good JSON object with one value after another replaced by a bad one."""
    for key in content:
        for number, value in enumerate(VALUES):
            yield f"{key} {number}", json.dumps({**content, key: value}).encode()


def json_cases(content: Mapping[str, Any]) -> dict[str, bytes]:
    return JSON | dict(changed(content))


# PyTorch's archives


def archive(pickled: bytes, parts: Mapping[str, bytes] | None = None, compression: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as opened:
        opened.writestr("a/data.pkl", pickled)
        for name, content in (parts or {}).items():
            opened.writestr(f"a/data/{name}", content)
    return file.getvalue()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def whole(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def storage(kind: str = "FloatStorage", key: str = "0") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + whole(4) + b"tQ"


def tensor(
    shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,), offset: int = 0, **kinds: str
) -> bytes:
    """Returns the opcodes with which a pickle calls the function that makes a tensor."""
    sizes = [b"(" + b"".join(map(whole, one)) + b"t" for one in (shape, strides)]
    arguments = storage(**kinds) + whole(offset) + b"".join(sizes) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def by_name(value: bytes, name: str = "w") -> bytes:
    return b"\x80\x02}(" + text(name) + value + b"u."


def shared_tuples(depth: int = 60) -> bytes:
    """Returns a tuple of two references to a tuple of two references …: hash and text take 2**depth steps."""
    rest = b"".join(b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(depth))
    return b"K\x01K\x01\x86q\x000" + rest + b"h%c" % depth


FLOATS = {"0": np.arange(4, dtype="<f4").tobytes()}


def torch_files() -> dict[str, bytes]:
    good = archive(by_name(tensor()), FLOATS)
    overlapping = good.replace(b"a/data/0", b"a/data.pk")  # a length that differs from the directory's
    pickles = {
        "key that never ends": b"\x80\x02}" + shared_tuples() + b"K\x01s.",
        "storage key that never ends": by_name(
            b"(" + text("storage") + b"ctorch\nFloatStorage\n" + shared_tuples() + b"tQ"
        ),
        "shape that never ends": by_name(
            b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + whole(0) + shared_tuples() * 2 + b"tR"
        ),
        "OrderedDict that never ends": by_name(
            b"ccollections\nOrderedDict\n(](" + shared_tuples() + b"K\x01\x86etR"
        ),
        "set that never ends": b"\x80\x04\x8f(" + shared_tuples() + b"\x90.",
        "frozenset": b"\x80\x04(" + shared_tuples() + b"\x91.",
        "deep tuples": b"\x80\x02" + b")" + b"\x85" * 500_000 + b".",
        "deep lists": b"\x80\x02" + b"]" + b"]" * 500_000 + b"a" * 500_000 + b".",
        "deep marks": b"\x80\x02" + b"(" * 1_000_000,
        "build on a tensor": by_name(tensor() + b"}" + text("shape") + b"Ns" + b"b"),
        "build with an array's state": by_name(tensor() + b"(K\x01(K\x04tNK\x00" + text("") + b"tb"),
        "build with code": by_name(b"ccollections\nOrderedDict\n)R}" + text("__class__") + b"K\x01sb"),
        "build on a function": by_name(b"ctorch._utils\n_rebuild_parameter\n}" + text("__code__") + b"Nsb"),
        "build with slots": by_name(b"ctorch._utils\n_rebuild_parameter\nN}" + text("call") + b"Ns\x86b"),
        "deep key": b"\x80\x02}" + b")" + b"\x85" * 500_000 + b"K\x01s.",
        "deep key of an OrderedDict": b"\x80\x02ccollections\nOrderedDict\n)R"
        + b")"
        + b"\x85" * 500_000
        + b"K\x01s.",
        "many arguments, many times": b"\x80\x02ctorch._utils\n_rebuild_parameter\nq\x00("
        + b"N" * 300_000
        + b"tq\x010"
        + b"h\x00h\x01R0" * 300_000
        + b".",
        "a tensor with many arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00("
        + tensor().partition(b"(")[2].removesuffix(b"tR")
        + b"N" * 300_000
        + b"tq\x010"
        + b"h\x00h\x01R0" * 300_000
        + b".",
        "system": b"cposix\nsystem\n(" + text("true") + b"tR.",
        "eval by inst": b"(" + text("1") + b"ibuiltins\neval\n.",
        "object": b"\x80\x02cbuiltins\nobject\n)\x81.",
        "getattr through a module": b"\x80\x04" + b"\x8c\x05torch\x8c\x0f_utils.os.system\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "huge LONG": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\1" * 100 + b".",
        "long digits": b"I" + b"9" * 100_000 + b"\n.",
        "huge memo": b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".",
        "absent memo": b"\x80\x02h\x07.",
        "huge text": b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b".",
        "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b".",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
        "no stop": b"\x80\x02}",
        "empty": b"",
        "pops nothing": b"\x80\x020.",
        "pops a mark": b"\x80\x02tu.",
        "list": b"\x80\x02].",
        "number for a tensor": by_name(b"K\x01"),
        "number as name": b"\x80\x02}(K\x01" + tensor() + b"u.",
        "itself": b"\x80\x02}q\0(" + text("a") + b"h\0u.",
        "shape of 2**62": by_name(tensor((2**62, 2**62), (0, 0))),
        "repeated numbers": by_name(tensor((1000, 1000, 1000), (0, 0, 0))),
        "past its numbers": by_name(tensor((5,), (1,))),
        "negative offset": by_name(tensor(offset=-1)),
        "negative stride": by_name(tensor(strides=(-1,))),
        "empty and huge": by_name(tensor((0, 2**60), (2**60, 2**60))),
        "many dimensions": by_name(tensor((1,) * 100, (1,) * 100)),
        "absent storage": by_name(tensor(key="1")),
        "storage outside": by_name(tensor(key="../../../etc/passwd")),
        "quantised storage": by_name(tensor(kind="QInt8Storage")),
        "calls a storage": by_name(b"ctorch\nFloatStorage\n(" + whole(10**12) + b"tR"),
        "long name of a function": b"c" + LONG.encode() + b"\nx\n.",
        "not a multiple of 8": by_name(tensor(kind="DoubleStorage", shape=(1,))),
    }
    found = {
        name: archive(pickled, {"0": FLOATS["0"][:15]} if "multiple" in name else FLOATS)
        for name, pickled in pickles.items()
    }
    return found | {
        "no archive": b"PK",
        "empty file": b"",
        "truncated": good[:-40],
        "directory cut": good[: len(good) // 2],
        "no pickle": archive(b"").replace(b"data.pkl", b"data.pkk"),
        "bomb": archive(by_name(tensor()), {"0": b"\0" * 10_000_000}, zipfile.ZIP_DEFLATED),
        "other name": overlapping,
        "damaged numbers": good.replace(FLOATS["0"], FLOATS["0"][::-1]),
        "list of parts past the end": good[:-6] + struct.pack("<I", len(good)) + good[-2:],
        "larger than the file": good.replace(struct.pack("<II", 16, 16), struct.pack("<II", 2**31, 2**31)),
        "encrypted": good.replace(b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"),
        "later version": good.replace(b"PK\1\2\x14\3\x14\0", b"PK\1\2\x14\3\xff\0"),
        "pointer": POINTER,
    }


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 100\n"


# GGUF files

_NUMBERS = {"B": 0, "b": 1, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
Value = tuple[str, Any]
GGUF: dict[str, Value] = {
    "general.architecture": ("s", "llama"),
    "llama.context_length": ("I", 64),
    "llama.embedding_length": ("I", 8),
    "llama.block_count": ("I", 1),
    "llama.feed_forward_length": ("I", 8),
    "llama.attention.head_count": ("I", 2),
    "llama.attention.head_count_kv": ("I", 1),
    "llama.attention.layer_norm_rms_epsilon": ("f", 1e-5),
    "llama.rope.freq_base": ("f", 10000.0),
    "llama.rope.dimension_count": ("I", 4),
    "tokenizer.ggml.model": ("s", "llama"),
    "tokenizer.ggml.tokens": ("[s", ["<unk>", "<s>", "</s>", "a", "b", "ab"]),
    "tokenizer.ggml.scores": ("[f", [0.0, 0.0, 0.0, -1.0, -2.0, -3.0]),
    "tokenizer.ggml.token_type": ("[i", [2, 3, 3, 1, 1, 1]),
}
GGUF_TENSORS: dict[str, tuple[tuple[int, ...], int]] = {
    "token_embd.weight": ((6, 8), 0),
    "output_norm.weight": ((8,), 192),
}


def _text(value: str | bytes) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: str, value: Any) -> bytes:
    if kind == "raw":
        return value
    if kind == "s":
        return struct.pack("<I", 8) + _text(value)
    if kind == "[s":
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if kind.startswith("["):
        packed = b"".join(struct.pack("<" + kind[1], one) for one in value)
        return struct.pack("<IIQ", 9, _NUMBERS[kind[1]], len(value)) + packed
    return struct.pack("<I" + kind, _NUMBERS[kind], value)


def gguf_file(
    changes: Mapping[str, Value] | None = None,
    tensors: Mapping[str, tuple[tuple[int, ...], int]] = GGUF_TENSORS,
    counts: tuple[int, int] | None = None,
    twice: str = "",
    numbers: bytes = b"\0" * 512,
) -> bytes:
    metadata = [*{**GGUF, **(changes or {})}.items()]
    metadata += [(name, value) for name, value in metadata if name == twice]
    header = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(metadata))))
    header += b"".join(_text(name) + _value(*value) for name, value in metadata)
    for name, (shape, at) in tensors.items():
        header += (
            _text(name)
            + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            + struct.pack("<IQ", 0, at)
        )
    return header + b"\0" * (-len(header) % 32) + numbers


def gguf_files() -> dict[str, bytes]:
    good, array = gguf_file(), struct.Struct("<IIQ")
    found = {
        f"{key} {value}": gguf_file({f"llama.{key}": (kind, value)})
        for key, kind, values in (
            ("block_count", "I", (0, 10**9, 2**32 - 1)),
            ("block_count", "q", (-1, 2**62)),
            ("attention.head_count", "I", (0, 3, 2**31)),
            ("attention.head_count_kv", "I", (0, 5)),
            ("attention.key_length", "I", (0, 3, 2**31)),
            ("embedding_length", "Q", (0, 2**63)),
            ("context_length", "Q", (0, 2**63)),
            ("feed_forward_length", "?", (True,)),
            ("feed_forward_length", "f", (math.nan,)),
            ("attention.layer_norm_rms_epsilon", "f", (math.nan, math.inf, -1.0, 0.0)),
            ("attention.layer_norm_rms_epsilon", "s", (LONG,)),
            ("attention.layer_norm_rms_epsilon", "[f", ([], [1e-5, 1e-6])),
            ("rope.freq_base", "f", (math.nan, math.inf, 0.0, -1.0)),
            ("rope.scaling.factor", "f", (math.nan, math.inf, -2.0)),
            ("rope.scaling.factor", "s", ("two",)),
            ("rope.scale_linear", "d", (1e300, math.nan)),
            ("rope.scaling.type", "s", ("cubic", CONTROL, LONG)),
            ("rope.scaling.type", "[i", ([1, 2],)),
            ("expert_count", "f", (math.nan,)),
            ("attention.sliding_window", "i", (-5,)),
        )
        for value in values
    }  # fmt: skip
    tokens = "tokenizer.ggml.tokens"
    found |= {
        "token of 2,000 bytes": gguf_file({tokens: ("[s", [*"012345"[:5], "a" * 2000])}),
        "tokens of 1,000 bytes": gguf_file(
            {
                tokens: ("[s", ["a" * n for n in range(1, 1001)] * 8),
                "tokenizer.ggml.scores": ("[f", [0.0] * 8000),
                "tokenizer.ggml.token_type": ("[i", [1] * 8000),
            }
        ),
        "tokens of a number": gguf_file({tokens: ("I", 7)}),
        "tokens of numbers": gguf_file({tokens: ("[i", [1, 2, 3, 4, 5, 6])}),
        "token twice": gguf_file({tokens: ("[s", ["<unk>", "<s>", "</s>", "a", "a", "b"])}),
        "scores of NaN": gguf_file({"tokenizer.ggml.scores": ("[f", [math.nan] * 6)}),
        "scores too few": gguf_file({"tokenizer.ggml.scores": ("[f", [0.0])}),
        "scores of texts": gguf_file({"tokenizer.ggml.scores": ("[s", ["a"] * 6)}),
        "types too few": gguf_file({"tokenizer.ggml.token_type": ("[i", [1])}),
        "kind of a list": gguf_file({"tokenizer.ggml.model": ("[i", [1, 2])}),
        "architecture of a list": gguf_file({"general.architecture": ("[i", [1, 2])}),
        "architecture of control characters": gguf_file({"general.architecture": ("s", CONTROL)}),
        "architecture that is long": gguf_file({"general.architecture": ("s", LONG)}),
        "template of a number": gguf_file({"tokenizer.chat_template": ("I", 1)}),
        "template that is long": gguf_file({"tokenizer.chat_template": ("s", LONG * 20)}),
        "merges of numbers": gguf_file({"tokenizer.ggml.merges": ("[i", [1])}),
        "merges without a space": gguf_file({"tokenizer.ggml.merges": ("[s", ["ab"])}),
        "merge of absent tokens": gguf_file({"tokenizer.ggml.merges": ("[s", ["q r"])}),
        "unknown beyond": gguf_file({"tokenizer.ggml.unknown_token_id": ("I", 2**32 - 1)}),
        "bos below": gguf_file({"tokenizer.ggml.bos_token_id": ("i", -1)}),
        "eos of a text": gguf_file({"tokenizer.ggml.eos_token_id": ("s", LONG)}),
        "eos of truth": gguf_file({"tokenizer.ggml.eos_token_id": ("?", True)}),
        "2**63 metadata": gguf_file(counts=(2, 2**63)),
        "2**63 tensors": gguf_file(counts=(2**63, len(GGUF))),
        "array of 2**63 numbers": gguf_file({"a": ("raw", array.pack(9, 4, 2**63))}),
        "array of 2**63 texts": gguf_file({"a": ("raw", array.pack(9, 8, 2**63))}),
        "array of 2**61 doubles": gguf_file({"a": ("raw", array.pack(9, 12, 2**61))}),
        "array of nothing": gguf_file({"a": ("raw", array.pack(9, 99, 2**40))}),
        "nested arrays": gguf_file({"a": ("raw", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000)}),
        "array of arrays": gguf_file(
            {"a": ("raw", struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ", 4, 0) * 2)}
        ),
        "text of 2**63 bytes": gguf_file({"a": ("raw", struct.pack("<IQ", 8, 2**63))}),
        "type 99": gguf_file({"a": ("raw", struct.pack("<I", 99))}),
        "name that is not UTF-8": good.replace(b"llama.context_length", b"llama.context_lengt\xff"),
        "metadata twice": gguf_file(twice="llama.block_count"),
        "alignment 0": gguf_file({"general.alignment": ("I", 0)}),
        "alignment of 2**31": gguf_file({"general.alignment": ("I", 2**31)}),
        "alignment of a text": gguf_file({"general.alignment": ("s", LONG)}),
        "tensor twice": gguf_file(tensors=GGUF_TENSORS | {"token_embd.weighs": ((8,), 224)}).replace(
            b"weighs", b"weight"
        ),
        "tensors that overlap": gguf_file(tensors=GGUF_TENSORS | {"output_norm.weight": ((8,), 64)}),
        "tensor past the end": gguf_file(tensors=GGUF_TENSORS | {"output_norm.weight": ((8,), 2**62)}),
        "tensor of 2**62 rows": gguf_file(tensors=GGUF_TENSORS | {"output_norm.weight": ((2**62, 8), 192)}),
        "tensor of no rows": gguf_file(tensors=GGUF_TENSORS | {"output_norm.weight": ((0, 2**62), 192)}),
        "tensor of 0 dimensions": gguf_file(tensors=GGUF_TENSORS | {"output_norm.weight": ((), 192)}),
        "tensor of 1,000 dimensions": gguf_file(tensors=GGUF_TENSORS | {"output_norm.weight": ((1,) * 1000, 192)}),
        "name of 100,000 characters": gguf_file(tensors=GGUF_TENSORS | {LONG: ((2**40,), 192)}),
        "name of control characters": gguf_file(tensors=GGUF_TENSORS | {CONTROL[:8]: ((2**40,), 192)}),
        "factors of NaN": gguf_file(tensors=GGUF_TENSORS | {"rope_freqs.weight": ((2,), 256)}, numbers=b"\xff" * 512),
        "factors of 0": gguf_file(tensors=GGUF_TENSORS | {"rope_freqs.weight": ((2,), 256)}),
        "factors of another number": gguf_file(tensors=GGUF_TENSORS | {"rope_freqs.weight": ((7,), 256)}),
        "version 99": good.replace(b"GGUF\3", b"GGUF\x63"),
        "big-endian": good.replace(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"),
        "empty": b"",
        "magic alone": b"GGUF",
        "header cut": good[: len(good) // 3],
        "numbers cut": good[:-400],
        "pointer": POINTER,
    }  # fmt: skip
    return found


# Safetensors


def safetensors_file(header: Any, numbers: bytes = b"\0" * 64) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + numbers


def safetensors_files() -> dict[str, bytes]:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    found = {
        f"header: {name}": safetensors_file(content)
        for name, content in JSON.items()
        if name != "empty object"
    }
    found |= {
        f"{key} {number}": safetensors_file({"a": entry | {key: value}})
        for key in entry
        for number, value in enumerate(
            (*VALUES, [2**62], [0, 2**62], [1] * 100, [-1], [16, 0], [0, 2**63], [0, 15])
        )
    }
    return found | {
        "header of 2**63": b"\xff" * 7 + b"\x7f" + b"{}",
        "header of 50 MB": (50_000_000).to_bytes(8, "little") + b" " * 100,
        "two bytes": b"\1\0",
        "overlap": safetensors_file({"a": entry, "b": entry}),
        "past the end": safetensors_file({"a": entry | {"shape": [100], "data_offsets": [0, 400]}}),
        "long name": safetensors_file({LONG: entry | {"shape": [5]}}),
        "control name": safetensors_file({CONTROL: entry | {"shape": [5]}}),
        "pointer": POINTER,
    }


# YAML of options


def yaml_files() -> dict[str, bytes]:
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
    )
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n + 1}: &a{n + 1} {{<<: [{', '.join([f'*a{n}'] * 9)}]}}\n" for n in range(9)
    )
    texts = {
        "laughs": laughs,
        "laughs in merges": merges,
        "itself": "a: &a [*a]",
        "itself as key": "? &a [*a]\n: 1",
        "deep lists": "a: " + "[" * 3000,
        "deep and closed": "a: " + "[" * 500 + "]" * 500,
        "deep mappings": "{a: " * 3000,
        "object": "a: !!python/object/apply:os.system ['true']",
        "name": "a: !!python/name:os.system",
        "foreign tag": "a: !x 1",
        "list": "- 1",
        "text": "x",
        "empty": "",
        "NUL": "a: \0",
        "tab": "a:\n\t- 1",
        "many digits": "a: " + "9" * 5000,
        "no date": "a: 2001-99-99",
        "no end": 'a: "x',
        "list as key": "? [1]\n: 2",
        "two documents": "a: 1\n---\nb: 2",
        "large": "a: " + LONG * 20,
        "long key": f"{LONG}: [",
    }
    return {name: text.encode() for name, text in texts.items()} | {"not UTF-8": b"a: \xff"}


# Windows of a run


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def windows(rows: int = 2) -> dict[str, np.ndarray]:
    arrays = {name: np.ones((rows, 4), np.int32) for name in ("tokens", "segments", "positions")}
    return arrays | {"learn": np.ones((rows, 4), bool)}


def npz_files() -> dict[str, bytes]:
    good = {
        f"{part}|a|{name}": array for part in ("training", "held_out") for name, array in windows().items()
    }
    key = np.array("key")
    whole_file = npz(**good, key=key)
    compressed = io.BytesIO()
    np.savez_compressed(compressed, **good, key=key)
    return {
        "empty": b"",
        "truncated": whole_file[: len(whole_file) // 2],
        "end cut": whole_file[:-10],
        "text": b"hello",
        "one array": (lambda file: (np.save(file, key), file.getvalue())[1])(io.BytesIO()),
        "damaged": whole_file.replace(b"\1\0\0\0\1\0\0\0", b"\2\0\0\0\1\0\0\0"),
        "header of 2**60": whole_file.replace(
            b"'shape': (2, 4), }          ", b"'shape': (1099511627776, 4),}"[:28]
        ),
        "no key": npz(**good),
        "no held_out": npz(
            **{name: array for name, array in good.items() if "held_out" not in name}, key=key
        ),
        "no learn": npz(**{name: array for name, array in good.items() if "learn" not in name}, key=key),
        "another shape": npz(**good | {"training|a|learn": np.ones((3, 4), bool)}, key=key),
        "another type": npz(**good | {"training|a|tokens": np.ones((2, 4), np.float32)}, key=key),
        "one dimension": npz(**{name: array[0] for name, array in good.items()}, key=key),
        "name without bars": npz(x=key, key=key),
        "objects": npz(**good | {"training|a|tokens": np.array([[{}]])}, key=key),
        "compressed": compressed.getvalue(),
    }


# Prompts and logs

LINES = {
    f"line: {name}": b'{"prompt": "a", "entry_point": "b"}\n' + content
    for name, content in JSON.items()
    if content.strip()
}
Reader = Callable[[Path], Any]


def _gguf(path: Path) -> None:
    gguf.read_config(path)
    gguf_tokenizer.build(path)


def _config(path: Path) -> None:
    huggingface.read_config(path.parent)
    huggingface.generation_defaults(path.parent)


def _metrics(path: Path) -> None:
    assert metrics.read_metrics(path.parent) == [{"step": 2, "loss": 1.0}]


def _checkpoint(path: Path) -> None:
    (path.parent / "_CHECKPOINT_METADATA").write_text("{}")
    if problem := checkpoints.damage(path.parent):
        raise ValueError(f"{path.name}: {problem}"[:300])  # a problem may name a file of the list instead


PLAN = {"format": "jaxspec.plan/1", "model": "m", "num_layers": 3, "skip_attention": [1], "skip_mlp": []}
VOCABULARY = {"format": "jaxspec.vocab/1", "model": "m", "vocab_size": 10}
VOCABULARY |= {"num_counted": 5, "always": [1], "ids": [2]}
ASD = {"format": "jaxspec.asd/1", "model": "m", "alpha": 0.5, "every": 2, "keep_last": 1}
EXITS = {"target": "m", "draft": "d", "exits": [1, 2], "thresholds": [0.5, 0]}
EXITS |= {"format": "jaxspec.thresholds/1"}
ACCEPT = {"accept": [0.5]}
COSTS = {"device": "d", "model": "m", "dtype": "f", "num_layers": 2, "live": 1, "full_ms": [[1, 1, 1.0]]}
COSTS |= {"cut_layers": 1, "cut_ms": 1.0}
COSTS |= dict.fromkeys(("live_token_ms", "loop_ms", "lookup_ms", "absorb_ms"), 0.0)
RECORD = {"commands": ["x"], "identity": {}, "options": {}, "parameters": 1, "documents": {}, "tokens": {}}
MESSAGE = {"role": "user", "content": "a"}


def _within(wrapped: Callable[[Any], Any], content: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns a good object as part of a file, with one value after another replaced by a bad one."""
    return {name: json.dumps(wrapped(json.loads(one))).encode() for name, one in changed(content)}


def _probes() -> dict[str, bytes]:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    about = {"format": "jaxspec.probe/1", "model": "m", "exit_layer": "1", "law": "greedy"}
    good = {"__metadata__": about, "v": entry, "b": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]}}
    changes = {
        f"{key} {value[:9]}": safetensors_file(good | {"__metadata__": about | {key: value}}, b"\0" * 20)
        for key in about
        for value in ("", LONG, "\x1b[2J\nevil")
    }
    return safetensors_files() | changes | {"NaN": safetensors_file(good, b"\xff" * 20)}


# For each kind: the file's name, its contents, and its reader.
KINDS: dict[str, tuple[str, Callable[[], dict[str, bytes]], Reader]] = {
    "torch": ("pytorch_model.bin", torch_files, torch_file.read_torch),
    "gguf": ("model.gguf", gguf_files, _gguf),
    "safetensors": ("model.safetensors", safetensors_files, io_tensors.read_tensors),
    "config": ("config.json", lambda: JSON, _config),
    "index": (
        "model.safetensors.index.json",
        lambda: JSON | _within(lambda one: {"weight_map": one}, {"a": "../../secret"}),
        lambda path: huggingface.open_tensors(path.parent),
    ),
    "vocabulary": (
        "jaxspec.vocab.json",
        lambda: json_cases(VOCABULARY),
        lambda path: read_vocabulary(path, "m", 10),
    ),
    "plan": (
        "jaxspec.plan.json",
        lambda: json_cases(PLAN),
        lambda path: method_files.read_plan(path, "m", 3),
    ),
    "asd": ("jaxspec.asd.json", lambda: json_cases(ASD), lambda path: ASDNumbers.read(path, "m")),
    "thresholds": (
        "d.json",
        lambda: json_cases(EXITS),
        lambda path: method_files.read_thresholds(path, "m", "d", (1, 2)),
    ),
    "probe": ("probe.safetensors", _probes, lambda path: method_files.read_probe(path, "m", 4, 1, "greedy")),
    "acceptances": (
        "jaxspec.acceptance.json",
        lambda: (
            JSON
            | _within(
                lambda one: {"format": "jaxspec.acceptance/2", "model": "m", "candidates": {"a": one}}, ACCEPT
            )
            | _within(lambda one: {"format": "jaxspec.acceptance/2"} | one, {"model": "m", "candidates": {}})
        ),
        lambda path: Acceptances.read(path, "m"),
    ),
    "costs": (
        "costs.json",
        lambda: JSON | _within(lambda one: {"costs": one}, COSTS),
        lambda path: cost_files.parse(read_json(path).get("costs"), str(path)),
    ),
    "log": (
        "log.jsonl",
        lambda: {f"{name}, a line": one + b"\n" for name, one in JSON.items()},
        lambda path: LineLog(path, {"format": "x"}, of="search"),
    ),
    "messages": (
        "messages.json",
        lambda: JSON | _within(lambda one: [one], MESSAGE) | _within(lambda one: one, {"messages": []}),
        lambda path: read_messages(str(path)),
    ),
    "prompts": (
        "prompts.jsonl",
        lambda: (
            JSON
            | LINES
            | dict(changed({"turns": ["a"], "category": "c", "question_id": 1}))
            | dict(changed({"question": "a", "answer": "#### 1"}))
            | {"answer of digits": json.dumps({"question": "a", "answer": "9" * 2_000_000}).encode()}
        ),
        lambda path: read_tasks([path]),
    ),
    "own prompts": (
        "jaxspec.prompts.json",
        lambda: json_cases({"tuning": {"a": ["b"]}, "reporting": {"a": ["b"]}}),
        lambda path: prompts.load("tuning", path.parent),
    ),
    "yaml": ("options.yaml", yaml_files, yaml_words),
    "run": ("run.json", lambda: json_cases(RECORD), lambda path: read_run(path.parent, ["commands"])),
    "metrics": (
        "metrics.jsonl",
        lambda: {name: content + b'\n{"step": 2, "loss": 1.0}\n' for name, content in JSON.items()},
        _metrics,
    ),
    "checkpoint": ("checksums.json", lambda: JSON, _checkpoint),
    "windows": ("tokens.npz", npz_files, packing.stored),
}
# Valid files, and files with damage in a part that is not read.
GOOD = {
    "gguf": {"tokens of 1,000 bytes", "token twice"},
    "safetensors": {"dtype 6", "dtype 7", "dtype 8"},
}
ALL_BAD = ("torch", "gguf", "safetensors", "index", "asd", "thresholds", "probe", "yaml", "windows")


def verdict(kind: str, path: Path) -> str:
    """Returns the error message for a file, or "" if it is accepted.

    Raises:
      AssertionError: the message is not one line of at most 300 printable characters that names the file.
    """
    name, _, read = KINDS[kind]
    try:
        read(path)
    except (ValueError, OSError) as error:
        message = str(error)
        assert message.isprintable(), repr(message[:300])
        assert len(message) <= 300, len(message)
        assert name in message, message
        return message
    return ""
