"""Checks whether rows of a model are independent of each other, to the last bit, with the kernels of this machine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.host.progress import Progress
from jaxspec.methods import LoadedModel
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.tree import Shape, Tree
from jaxspec.programs.executables import Executables

# The numbers of tokens of the text before those that are compared, and of these, of which the last ones are on this
# path through this tree. They are in the second block of attention; the first capacity has fewer slots than two blocks.
_BEFORE, _TOKENS, _TREE, _PATH = 150, 20, Shape((-1, -1, 0, 0, 2, 1, 4)), (0, 2, 4, 6)
_CAPACITIES = (192, 512)


def refusal(
    model: LoadedModel, executables: Executables, device: jax.Device, mesh: Mesh | None
) -> str | None:
    """Returns why texts of a model cannot be exact; None if they can.

    XLA chooses kernels by the processor and by the sizes of the model. Therefore one layer and the head run over the
    end of a text token by token, then in one pass beside other texts, and along a path of a tree; the logits must be
    the same bits.

    Args:
      model: with an `exact` config.
      executables: runs the programs.
      device: the device of the parameters.
      mesh: several devices, or None.
    """
    dtype, name = model.params["embed"].dtype, model.name or "the model"
    where = device.platform if mesh is None else "a mesh"
    if where != "cpu" or dtype not in (jnp.float32, jnp.bfloat16):
        alone = "" if mesh is None else "without a mesh, "
        return (
            f"exact needs one CPU device and float32 or bfloat16; {name} is in {dtype} on {where}; leave exact out, or "
            f"load the model {alone}with device='cpu' and dtype='float32'"
        )
    with Progress("checking products"):
        if is_exact(model, executables):
            return None
    return (
        f"exact is not possible for {name} in {dtype} on this processor: products of a row depend on other rows; "
        "leave exact out"
    )


def is_exact(model: LoadedModel, executables: Executables) -> bool:
    """Returns whether the check of `refusal` succeeds for a model on a CPU.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> lm = language_model()
      >>> is_exact(lm.loaded.exact, lm.executables)
      True
    """
    # The layer with the most arrays: an adapter may have matrices of some layers only.
    layer = max(model.params["layers"], key=lambda one: len(jax.tree.leaves(one)))
    config, params = model.config.truncated(1), {**model.params, "layers": [layer]}
    small, large = _CAPACITIES
    shape = (3, _BEFORE + _TOKENS)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)

    def fed(
        rows: np.ndarray, first: int, cache: KVCache, tree: Tree | None = None
    ) -> tuple[np.ndarray, KVCache]:
        start = np.full(len(rows), first, np.int32)
        logits, cache = executables.call(_step, params, rows, start, cache, tree, config=config)
        return np.asarray(logits), cache

    def begun(rows: np.ndarray, capacity: int) -> KVCache:
        cache = kv.create(config, len(rows), capacity, params["embed"].dtype)
        return fed(rows[:, :_BEFORE], 0, cache)[1]

    before = _BEFORE + _TOKENS - len(_PATH) - 1
    cache, each, at_tree = begun(tokens[:1], small), [], None
    for position in range(_BEFORE, _BEFORE + _TOKENS):
        at_tree = cache if position == before else at_tree
        logits, cache = fed(tokens[:1, position : position + 1], position, cache)
        each.append(logits[0, 0])
    alone, others = np.stack(each), np.roll(tokens, 1, axis=0)
    together, _ = fed(others[:, _BEFORE:], _BEFORE, begun(others, large))
    drafts = np.zeros((1, 1 + _TREE.num_nodes), np.int32)
    path = [0, *(1 + node for node in _PATH)]
    drafts[0, path] = tokens[0, before:]
    assert at_tree is not None
    in_tree, _ = fed(drafts, before, at_tree, Tree.from_parents(_TREE, _TREE.depth))
    return bool((together[1] == alone).all() and (in_tree[0, path] == alone[before - _BEFORE :]).all())


@functools.partial(jax.jit, static_argnames="config")
def _step(
    params: Params,
    tokens: jax.Array,
    start: jax.Array,
    cache: KVCache,
    tree: Tree | None,
    *,
    config: LlamaConfig,
) -> tuple[jax.Array, KVCache]:
    hidden, cache = llama.run_layers(
        config, params, llama.embed(config, params, tokens), start, cache, tree=tree
    )
    # The head runs over the rows that are compared; a longer pass only fills the cache.
    return llama.logits(config, params, hidden[:, -_TOKENS:]), cache
