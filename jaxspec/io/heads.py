"""EAGLE heads in the layouts in which they are published, and in our own, which is EAGLE-3's.

    yuhuili EAGLE      fc.*, layers.0.*; a Llama config of one layer                       often only `.bin`
    yuhuili EAGLE-3    fc, midlayer.*, norm, lm_head, d2t, t2d; `draft_vocab_size`         also SpecForge's, AngelSlim's
    speculators        as EAGLE-3 with layers.0.* for midlayer.*; EAGLE-1 with fusion_fc.* and transformer.*; the Llama
                       config is `transformer_layer_config`
    vLLM               either, all names perhaps behind `model.`; a Llama config perhaps under `model`

What a directory holds is told by its tensors. A head's RoPE, widths and ε are those of its own config: the defaults of
transformers count where that is silent, not the target's values.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.io import huggingface, torch_file
from jaxspec.io.embedded import embedded_files
from jaxspec.io.files import read_json
from jaxspec.io.hf_config import config_from, errors_of, read_windows
from jaxspec.io.hf_layout import Source, sources_of
from jaxspec.io.hf_values import flag, section, whole
from jaxspec.io.huggingface import Place
from jaxspec.io.messages import shown
from jaxspec.io.tensors import DTYPES, Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.eagle import HeadConfig, param_shapes, usual_taps
from jaxspec.model.llama import FINAL, Params, is_shape
from jaxspec.model.vocabulary import Vocabulary

# Where a target's own heads lie beside it, each in a directory with the name of its method.
HEADS_NAME = "heads"
# Where a config names what is tapped.
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_BIN = "pytorch_model.bin"
_Q = "layers.0.self_attn.q_proj.weight"
# What EAGLE-3 calls its layer, and speculators the parts of EAGLE-1.
_PREFIXES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
# A tensor that only an option of the config gives a place.
_OPTIONS = {"input_norm.weight": "norm_before_fc", "fc_norm.0.weight": "fc_norm"}


@dataclasses.dataclass(frozen=True)
class Head:
    """A head as it lies in a directory.

    Attributes:
      config: what it is made of.
      target: the fingerprint of the model that it was trained for; None where it does not say.
      ids: int32[V'], the tokens of its own head, in the order of its rows; None for all.
    """

    config: HeadConfig
    target: str | None
    ids: np.ndarray | None
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False)

    def load(self, dtype: DTypeLike, place: Place | None = None) -> Params:
        """The head's parameters, see `model.eagle`; `place` as of `huggingface.load_params`."""
        order = None if self.ids is None else np.argsort(self.ids)

        def fetch(source: Source) -> np.ndarray:
            tensor = self.tensors[source.name]
            return tensor[order] if source.name == "lm_head.weight" and order is not None else tensor

        tree = jax.tree.structure(param_shapes(self.config), is_leaf=is_shape)
        placed = huggingface.place_leaves(head_leaves(self.config), np.dtype(dtype), fetch, place)
        params: Params = jax.tree.unflatten(tree, placed)
        if self.ids is not None:
            ids = jnp.asarray(self.ids[order]) if place is None else place("ids", self.ids[order])
            params["vocabulary"] = Vocabulary(params.pop("head"), ids, self.config.block.vocab_size)
        return params


def head_name(kind: str) -> str:
    """The name of the config of a target's own head of this kind, in the directory of the target's files."""
    return f"{HEADS_NAME}/{kind}/config.json"


def embedded_head(kind: str, target: str) -> Path | None:
    """The head that comes with jaxspec of this kind, for the target of this fingerprint; None if there is none."""
    for config in embedded_files(f"{HEADS_NAME}/*/config.json"):
        own = section(read_json(config), "jaxspec")
        if (own.get("kind"), own.get("target")) == (kind, target):
            return config.parent
    return None


def resolve(name: str | os.PathLike[str]) -> Path:
    """The local files of a head: the directory `name` itself, or what the Hugging Face hub has by that id.

    Raises:
      FileNotFoundError: there is no such directory, and `name` is no hub id or the hub does not give it.
    """
    text = os.fspath(name)
    if text and Path(text).expanduser().is_dir():
        return Path(text).expanduser()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text):
        raise FileNotFoundError(
            f"no directory {text!r}; give a head's directory, or a hub id such as owner/head"
        )
    import huggingface_hub  # slow to import, and needed only here

    with huggingface.on_hub(text):
        found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", "*.safetensors"]))
        if not any(found.glob("*.safetensors")):
            found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", _BIN]))
    return found


def read_head(directory: str | os.PathLike[str], target: LlamaConfig) -> Head:
    """The head in a directory, checked to fit a target.

    Raises:
      FileNotFoundError: there is no `config.json`.
      ValueError: it is no EAGLE head, or none for such a target, or a tensor is missing, of another shape or without a
        place; one line.
    """
    directory = Path(directory)
    content = read_json(directory / "config.json")
    tensors = _renamed(directory, _open(directory))
    kind = _kind(directory, tensors)
    with errors_of(directory / "config.json"):
        config = _config(kind, content, tensors, target)
        trained_for = section(content, "jaxspec").get("target")
        if trained_for is not None and not isinstance(trained_for, str):
            raise ValueError(f"jaxspec.target is {shown(trained_for)}; expected the fingerprint of a model")
    _check(directory, config, tensors)
    return Head(config, trained_for, _ids(directory, config, tensors), tensors)


def _open(directory: Path) -> Tensors:
    """The tensors of the safetensors files, else of the `.bin` file."""
    if not any(directory.glob("*.safetensors")) and (directory / _BIN).is_file():
        return torch_file.read(directory / _BIN)
    return huggingface.open_tensors(directory, integers=True)


def _renamed(directory: Path, found: Tensors) -> Tensors:
    """Tensors by their plain names, if all could be read."""
    for name, code in sorted(found.left_out.items()):
        if _plain(name) != "t2d":  # which only repeats what d2t says
            raise ValueError(
                f"{directory}: tensor {name} is {code}; quantised heads are not supported, give one with one of "
                f"{', '.join(DTYPES)}"
            )
    tensors = Tensors()
    for name, tensor in found.items():
        if _plain(name) in tensors:
            raise ValueError(f"{directory}: two tensors are {_plain(name)}, one of them as {name}; leave one")
        tensors[_plain(name)] = tensor
    return tensors


def _plain(name: str) -> str:
    """The name of a tensor in the layout that has the fewest words of its own."""
    name = name.removeprefix("model.")
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _kind(directory: Path, tensors: Mapping[str, np.ndarray]) -> Literal["eagle", "eagle3"]:
    if "fc.weight" in tensors and _Q in tensors:
        return "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    some = ", ".join(sorted(tensors)[:3])
    if _Q in tensors:
        raise ValueError(
            f"{directory} is a whole model, not an EAGLE head; draft with it by method='draft-model'"
        )
    raise ValueError(f"{directory} is no EAGLE head: it lacks fc.weight and {_Q} (it has {some}, …)")


def _config(
    kind: Literal["eagle", "eagle3"],
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
) -> HeadConfig:
    nested = section(content, "eagle_config")
    inner = next(
        (section(content, key) for key in ("transformer_layer_config", "model") if content.get(key)), content
    )
    values = {**nested, **inner, **content}
    block = config_from({"model_type": "llama", **inner})
    if block.vocab_size != target.vocab_size:
        raise ValueError(
            f"the head has a vocabulary of {block.vocab_size} tokens, the target of {target.vocab_size}; "
            "a head fits the model that it was trained for"
        )
    # Trainers give a Llama layer a window in the words of Qwen2, which a Llama by itself does not read.
    windows = read_windows("qwen2", inner) if flag(inner, "use_sliding_window") else block.sliding_windows
    block = dataclasses.replace(block, tie_embeddings=False, sliding_windows=windows)
    read_width = block.hidden_size
    if kind == "eagle3" and values.get("target_hidden_size") is not None:
        read_width = whole(values, "target_hidden_size")
    if read_width != target.hidden_size:
        raise ValueError(
            f"the head reads features of width {read_width}, the target's are of {target.hidden_size}; "
            "a head fits the model that it was trained for"
        )
    has_head, own_embedding = "lm_head.weight" in tensors, "embed_tokens.weight" in tensors
    if block.hidden_size != target.hidden_size and not (has_head and own_embedding):
        raise ValueError(
            "a head narrower than its target needs embed_tokens.weight and lm_head.weight of its own"
        )
    if kind == "eagle":
        head_size = target.vocab_size if has_head else None
        return HeadConfig(block, (FINAL,), kind, None, head_size, own_embedding, fc_bias="fc.bias" in tensors)
    if flag(values, "norm_before_fc") and flag(values, "fc_norm"):
        raise ValueError("norm_before_fc and fc_norm are both set; expected one of them at most")
    head_size = target.vocab_size
    if values.get("draft_vocab_size") is not None:
        head_size = whole(values, "draft_vocab_size", most=target.vocab_size)
    return HeadConfig(
        block,
        _taps(content, nested, target.num_layers),
        kind,
        read_width,
        head_size if has_head else None,
        own_embedding,
        fc_bias="fc.bias" in tensors,
        feature_norm="together"
        if flag(values, "norm_before_fc")
        else "each"
        if flag(values, "fc_norm")
        else "none",
        residual_is_normed=flag(values, "norm_before_residual"),
        output_is_normed=flag(values, "norm_output"),
    )


def _taps(content: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """What is tapped, as the layers that it enters.

    vLLM and speculators name these; SpecForge, SGLang and NVIDIA, in `eagle_config`, the layers that it leaves, one
    less. A list that begins with 1 came from there too: what it leaves of three layers by default is 1, L÷2 − 1, L − 4.
    """
    own = section(content, "jaxspec").get("taps")
    ids = own or content.get(TAP_IDS) or nested.get(TAP_IDS)
    leaves = not own and (not content.get(TAP_IDS) or (isinstance(ids, list) and ids[:1] == [1]))
    if not ids:
        taps: tuple[Any, ...] = usual_taps(num_layers)
    elif isinstance(ids, list) and all(type(one) is int for one in ids):
        taps = tuple(one + leaves for one in ids)
    else:
        raise ValueError(f"{TAP_IDS} is {shown(ids)}; expected a list of layers")
    if not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(f"the head reads what enters the layers {taps}, the target has {num_layers}")
    return taps


def head_leaves(config: HeadConfig) -> Iterator[tuple[str, tuple[int, ...], list[Source]]]:
    """Name, shape and sources of every leaf of a head, in the order of the tree."""
    own = {
        "fc": "fc.weight",
        "fc_bias": "fc.bias",
        "layers/0/attention/embed_norm": "layers.0.input_layernorm.weight",
        "layers/0/attention/norm": "layers.0.hidden_norm.weight",
    }
    one_norm = config.feature_norm == "together"
    flat, _ = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    for path, shape in flat:
        leaf = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf.startswith("fc_norms/"):
            name = "input_norm.weight" if one_norm else f"fc_norm.{leaf.split('/')[1]}.weight"
            sources = [Source(name, shape, shape)]
        elif leaf in own:
            sources = [Source(own[leaf], shape, shape)]
        else:
            theirs = sources_of(config.block, leaf, shape)
            sources = [dataclasses.replace(one, name=one.name.removeprefix("model.")) for one in theirs]
        yield leaf, shape, sources


def _check(directory: Path, config: HeadConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Refuses tensors that are not those of `config`: one that is left out would change what the head computes."""
    used = {"d2t", "t2d"} if config.kind == "eagle3" else set()
    for _, _, sources in head_leaves(config):
        for source in sources:
            used.add(source.name)
            if source.name not in tensors:
                raise ValueError(
                    f"{directory}: tensor {source.name} is missing, expected shape {source.shape}"
                )
            if tensors[source.name].shape != source.shape:
                raise ValueError(
                    f"{directory}: tensor {source.name} has shape {tensors[source.name].shape}, "
                    f"expected {source.shape} by config.json"
                )
    for name in sorted(set(tensors) - used):
        if "rotary_emb" not in name:
            hint = f"; is {_OPTIONS[name]} missing in config.json?" if name in _OPTIONS else ""
            raise ValueError(
                f"{directory}: tensor {name} has no place in an {config.kind} head of this config.json{hint}"
            )


def _ids(directory: Path, config: HeadConfig, tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The tokens of a head's own vocabulary: `d2t` is what must be added to the number of a row."""
    size = config.block.vocab_size
    rows = size if config.head_size is None else config.head_size
    if "d2t" not in tensors:
        if rows != size:
            raise ValueError(
                f"{directory}: tensor d2t is missing: which of {size} tokens the {rows} rows of lm_head are"
            )
        return None
    offsets = tensors["d2t"]
    if offsets.shape != (rows,) or offsets.dtype.kind != "i":
        raise ValueError(
            f"{directory}: tensor d2t is {offsets.dtype}{offsets.shape}, expected int64({rows},)"
        )
    ids = np.arange(rows) + offsets
    if len(set(ids.tolist())) != rows or ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f"{directory}: row + d2t must name {rows} different tokens from 0 to {size - 1}; is d2t an offset here?"
        )
    known = tensors.get("t2d")
    if known is not None and (
        known.shape != (size,) or not np.array_equal(np.flatnonzero(known), np.sort(ids))
    ):
        raise ValueError(f"{directory}: t2d marks other tokens than row + d2t names; save the head again")
    return np.asarray(ids, np.int32)
