"""Packs the tables of requests into the arrays with which the compiled loop follows their grammars."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.allowed_tokens import Grammars
from jaxspec.grammar.table import TokenTable
from jaxspec.model.numerics import TPU_LANES
from jaxspec.model.sharding import put_on_mesh

if TYPE_CHECKING:
    from jaxspec.requests.reading import RowRequest

# The masks that are unfolded at once, and the most bytes of the masks of a table.
_CHUNK, _MOST_BYTES = 64, 2**27
# A table, with the end tokens of its row.
Key = tuple[TokenTable, tuple[int, ...]]


class Packed(NamedTuple):
    """The arrays of one table, see `Grammars`. Its last state is the one after an end token."""

    next: np.ndarray
    states: np.ndarray
    class_of: np.ndarray
    masks: np.ndarray


@functools.lru_cache(16)
def packed(table: TokenTable, eos_ids: tuple[int, ...], vocab_size: int) -> Packed:
    """Returns the arrays of a table; end tokens are possible in its final states and nowhere else.

    Raises:
      ValueError: the text could not go on at some state; one line.
    """
    num_states, num_classes = table.next.shape
    # Two more classes: end tokens, and tokens that the table does not have.
    class_of = np.full(vocab_size, num_classes + 1, np.int32)
    known = min(vocab_size, len(table.class_of))
    class_of[:known] = table.class_of[:known]
    class_of[list(eos_ids)] = num_classes
    after = np.full((num_states + 1, num_classes + 2), -1, np.int16)
    after[:-1, :num_classes] = table.next
    after[:-1, num_classes] = np.where(table.final, num_states, -1)
    # States with the same allowed classes share a mask.
    _, first, mask = np.unique(
        np.packbits(after >= 0, axis=1), axis=0, return_index=True, return_inverse=True
    )
    kinds, mask = after[first] >= 0, mask.reshape(-1)
    words = -(-vocab_size // (32 * TPU_LANES)) * TPU_LANES  # of whole lanes
    if (size := 4 * words * len(kinds)) > _MOST_BYTES:
        raise ValueError(
            f"the grammar needs {size >> 20} MiB of masks, at most {_MOST_BYTES >> 20} are possible; shorten its "
            "repetitions, alternatives or nesting"
        )
    masks = np.zeros((len(kinds), words), np.uint32)
    for begin in range(0, len(kinds), _CHUNK):
        part = kinds[begin : begin + _CHUNK]
        bits = np.zeros((len(part), 32 * words), bool)
        bits[:, :vocab_size] = part[:, class_of]
        for at in range(32):
            masks[begin : begin + _CHUNK] |= bits[:, at * words : (at + 1) * words].astype(np.uint32) << at
    sizes = np.bincount(class_of, minlength=num_classes + 2)
    going_on = kinds[:, :num_classes] @ sizes[:num_classes]
    stuck = (going_on == 0) & ~(kinds[:, num_classes] & (sizes[num_classes] > 0))
    if stuck[mask[0]] or np.any(stuck[mask[:-1]] & ~table.final):
        raise ValueError(
            "the grammar allows no text with these end tokens; give another grammar, or other `stop_token_ids`"
        )
    member = np.zeros(num_classes + 2, np.int32)
    member[class_of[::-1]] = np.arange(vocab_size)[::-1]
    only = member[np.argmax(kinds[:, :num_classes] & (sizes[:num_classes] > 0), axis=1)]
    certain = np.where((going_on == 1) & ~kinds[:, num_classes], only, -1)[mask]
    if table.certain is not None:
        certain[:-1] = np.where(np.isin(table.certain, eos_ids), -1, table.certain)
    states = np.stack([mask, certain, (going_on == 0)[mask]], axis=1)
    return Packed(after, states.astype(np.int32), class_of, masks)


class Tables:
    """The tables of requests on the devices of a loop, packed together.

    Their sizes are powers of two and never fall, so that other tables are other data, and not another program.

    Args:
      place: the device or sharding of the arrays.
      vocab_size: V.
    """

    def __init__(self, place: Any, vocab_size: int) -> None:
        self._place, self._vocab_size = place, vocab_size
        # The lengths of the arrays: enough for some ordinary JSON schemas.
        self._sizes: tuple[int, ...] = 2**20, 2**12, 8, 2**10, 8
        self._held: tuple[dict[Key, Packed], tuple[Any, ...]] = {}, ()

    def pack(self, requests: Sequence[RowRequest]) -> Grammars | None:
        """Returns the grammars of a batch with one row for each of these requests; None if none of them has one."""
        keys = [None if one.grammar is None else (one.grammar, one.eos_ids) for one in requests]
        if not (wanted := dict.fromkeys(key for key in keys if key is not None)):
            return None
        held, arrays = self._held
        if not wanted.keys() <= held.keys():
            # The tables of earlier requests stay while there is space.
            held = {key: held.get(key) or packed(*key, self._vocab_size) for key in wanted} | held
            while (sizes := _sizes(arrays := self._stacked(held), self._sizes)) != self._sizes:
                if len(held) == len(wanted):
                    break
                held.popitem()
            padded = (_padded(one, size) for one, size in zip(arrays, sizes, strict=True))
            self._sizes, arrays = sizes, put_on_mesh(tuple(padded), self._place)
            self._held = held, arrays
        places = {key: place for place, key in enumerate(held, start=1)}
        which = np.array([0 if key is None else places[key] for key in keys], np.int32)
        return Grammars(*arrays, *put_on_mesh((which, np.zeros_like(which)), self._place))

    def _stacked(self, packs: Mapping[Key, Packed]) -> tuple[np.ndarray, ...]:
        """Returns the first five arrays of `Grammars`. In the state of table 0 every token is allowed."""
        after, states, tables = [np.zeros(1, np.int16)], [np.array([[0, -1, 0]], np.int32)], [(0, 1, 0)]
        words = next(iter(packs.values())).masks.shape[1]
        class_of, masks = [np.zeros(self._vocab_size, np.int32)], [np.full((1, words), 2**32 - 1, np.uint32)]
        for pack in packs.values():
            tables.append((sum(map(len, after)), pack.next.shape[1], sum(map(len, states))))
            after.append(pack.next.ravel())
            states.append(pack.states + np.array([sum(map(len, masks)), 0, 0], np.int32))
            class_of.append(pack.class_of)
            masks.append(pack.masks)
        whole = np.concatenate(after), np.concatenate(states), np.stack(class_of), np.concatenate(masks)
        return *whole, np.array(tables, np.int32)


def _sizes(arrays: Sequence[np.ndarray], least: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths of the arrays, rounded up to powers of two and at least `least`."""
    return tuple(max(size, 1 << (len(one) - 1).bit_length()) for one, size in zip(arrays, least, strict=True))


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    """Returns the array with `size` entries, zeros at the end."""
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])


@functools.cache
def tables_on(place: Any, vocab_size: int) -> Tables:
    """Returns the tables of this process on the devices of a loop."""
    return Tables(place, vocab_size)


def is_complete(request: RowRequest, tokens: Sequence[int]) -> bool:
    """Whether the grammar of a request allows nothing but the end after tokens without end tokens."""
    if (table := request.grammar) is None:
        return False
    state = 0
    for token in tokens:
        state = int(table.next[state, table.class_of[token]])
        if state < 0:
            return False
    allowed = table.next[state][table.class_of] >= 0
    allowed[[index for index in request.eos_ids if index < len(allowed)]] = False
    return not allowed.any()
