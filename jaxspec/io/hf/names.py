"""Normalises the names of tensors in Hugging Face checkpoints, and recognises other models by them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.hf.layout import EMBED, HEAD
from jaxspec.io.tensors import DTYPES, Tensors

# The parts that torch.compile, FSDP and activation checkpointing insert into the names of wrapped modules.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BASE = "model."
# Names of tensors that only heads have.
_OF_HEADS = re.compile(r"(medusa_heads\.)?blocks\.\d+\.layers\.|\d+\.\d+\.linear\.|hydra_mlp\.")
# The layers that transformers adds to a base model for classification.
_OF_CLASSIFIERS = re.compile(r"(score|classifier|qa_outputs)\.(weight|bias)")


def plainly_named(directory: Path, found: Tensors) -> Tensors:
    """Returns the tensors by their names in `LlamaForCausalLM`.

    Prefixes that all names share and those of wrappers are removed. The names of a base model that was saved without
    its prefix get the prefix.

    Raises:
      ValueError: two tensors would have one name.
    """
    names = {name: _renamed(_WRAPPERS.sub("", name)) for name in (*found, *found.left_out)}
    prefix = _prefix(names.values())
    if prefix is not None:
        names = {name: _without_prefix(plain, prefix) for name, plain in names.items()}
    if len(set(names.values())) < len(names):
        raise ValueError(f"{directory}: without the prefixes of their names two tensors have one name")
    if all(name == plain for name, plain in names.items()):
        return found
    renamed = Tensors()
    renamed.update({names[name]: tensor for name, tensor in found.items()})
    renamed.left_out = {names[name]: code for name, code in found.left_out.items()}
    return renamed


def _renamed(name: str) -> str:
    """Returns the name in Llama of a tensor of an older file, see `families.Family.renamed`."""
    for family in FAMILIES.values():
        for pattern, new in family.renamed:
            name = re.sub(pattern, new, name)
    return name


def _prefix(names: Collection[str]) -> str | None:
    """Returns the prefix that all names except the head's share in a base model; None if it is the usual one."""
    embeddings = [name for name in names if name.endswith(EMBED.removeprefix(_BASE))]
    if EMBED in names or len(embeddings) != 1:
        return None
    prefix = embeddings[0].removesuffix(EMBED.removeprefix(_BASE))
    shared = prefix.removesuffix(_BASE)
    return prefix if all(name.startswith(shared) for name in names) else None


def _without_prefix(name: str, prefix: str) -> str:
    rest = name.removeprefix(prefix.removesuffix(_BASE))
    return rest if rest == HEAD or prefix.endswith(_BASE) else _BASE + rest


def refuse_classifier(directory: Path, found: Tensors) -> None:
    """Refuses a classifier, because its language-model head, if any, was not trained with it.

    Raises:
      ValueError: there is a tensor of a classifier; the message names it.
    """
    for name in sorted(filter(_OF_CLASSIFIERS.fullmatch, (*found, *found.left_out))):
        raise ValueError(
            f"{directory} is a classifier, such as a reward model (it has {name}), and cannot generate text; give "
            "the model that it was made from"
        )


def missing(name: str, found: Tensors) -> str:
    """Returns an error message for a tensor that cannot be used."""
    if name in found.left_out:
        return (
            f"tensor {name} is {found.left_out[name]}; quantised weights are not supported, give a model with one of "
            f"{', '.join(DTYPES)}"
        )
    if any(other.rpartition("model.")[2] == "fc.weight" for other in found):
        return "this is an EAGLE head, not a model; it drafts with method='eagle3' or method='eagle'"
    if any(_OF_HEADS.match(other) for other in found):
        return (
            "these are heads of Medusa or Hydra, no model; they draft with method='medusa' or method='hydra'"
        )
    if any(".lora_A." in other for other in found):
        return "these are weights of LoRA that are not merged; give the model, and their directory as its adapter"
    near = min((other for other in found if other.endswith(EMBED.removeprefix(_BASE))), default=None, key=len)
    if name == EMBED and near is not None:
        return f"tensor {name} is missing, and {near} is there: this is a part of another model"
    return f"tensor {name} is missing"
