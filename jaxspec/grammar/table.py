"""Automata over the tokens of a vocabulary, from automata over bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxspec.grammar.automaton import GrammarError
from jaxspec.grammar.certain import certain_tokens

# The most entries of a table; 32 MiB on the device.
MAX_ENTRIES = 2**23
# The most entries at a time, since NumPy holds Python's lock meanwhile.
_CHUNK = 2**19


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
    """A finite automaton over the tokens of a vocabulary. State 0 is the start.

    From every state a final state can be reached by tokens of the vocabulary.

    Attributes:
      class_of: the class of each token, [V] uint16; tokens of a class have equal transitions in all states.
      next: the state after a token of a class, [S, C] int32; -1 if the grammar forbids it.
      final: whether the text may end in a state, [S] bool; end tokens are allowed exactly there.
      key: a hash of the content.
      certain: the token that is drafted in each state, because all texts go on with its bytes, [S] int32; -1 for none.
        None drafts a token only where it is the only one.
    """

    class_of: np.ndarray
    next: np.ndarray
    final: np.ndarray
    key: str
    certain: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of the arrays."""
        return self.class_of.nbytes + self.next.nbytes + self.final.nbytes


def token_table(following: np.ndarray, final: np.ndarray, tokens: Sequence[bytes | None]) -> TokenTable:
    """Returns the automaton over tokens.

    A token is a function from states to states, composed of those of its bytes. All tokens are composed together, byte
    by byte, and equal functions are one: a vocabulary has few different ones, which become the classes.

    Args:
      following: the state after each byte, [S, 256] int16; -1 if it is impossible. The first state is the start.
      final: whether the text may end in a state, [S] bool.
      tokens: the bytes of each token; None or no bytes for a token that is forbidden everywhere.

    Raises:
      GrammarError: the table would have more than `MAX_ENTRIES` entries, or the vocabulary cannot write any text of the
        grammar.
    """
    num_states = len(following)
    columns, byte_class = _different(following.T)
    num_classes = len(columns)
    # The last state is the dead one.
    step = np.full((num_classes, num_states + 1), num_states, np.int16)
    step[:, :-1] = np.where(columns < 0, num_states, columns)
    functions = _Functions(num_states)
    lengths = np.array([len(token or b"") for token in tokens])
    begins = np.cumsum(lengths) - lengths
    classes = byte_class[np.frombuffer(b"".join(token or b"" for token in tokens), np.uint8)]
    found = np.where(lengths > 0, functions.identity, functions.dead)
    at = 0
    while len(active := np.flatnonzero((lengths > at) & (found != functions.dead))):
        pairs = found[active] * num_classes + classes[begins[active] + at]
        different, place = np.unique(pairs, return_inverse=True)
        found[active] = functions.composed(different // num_classes, different % num_classes, step)[place]
        at += 1
    used, class_of = np.unique(found, return_inverse=True)
    table = functions.rows[used].T.astype(np.int32)
    table[table == num_states] = -1
    trimmed = _trimmed(table, final, class_of.reshape(-1))
    certain = certain_tokens(trimmed.class_of, trimmed.next, trimmed.final, tokens)
    return dataclasses.replace(trimmed, certain=certain)


def _different(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different rows, and the number of each row among them."""
    numbers: dict[bytes, int] = {}
    place = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows])
    return rows[np.unique(place, return_index=True)[1]], place


class _Functions:
    """The different functions from states to states, each a row of `rows` with a number."""

    def __init__(self, num_states: int) -> None:
        self._numbers: dict[bytes, int] = {}
        self.rows = np.empty((64, num_states), np.int16)
        self.identity = self.number(np.arange(num_states, dtype=np.int16))
        self.dead = self.number(np.full(num_states, num_states, np.int16))

    def number(self, row: np.ndarray) -> int:
        """Returns the number of a function, [S] int16."""
        at = self._numbers.setdefault(row.tobytes(), len(self._numbers))
        if at == len(self.rows):
            if self.rows.size > MAX_ENTRIES:
                raise GrammarError(
                    f"the table of the grammar needs more than {MAX_ENTRIES} entries; shorten its repetitions, "
                    "alternatives or nesting"
                )
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)])
        self.rows[at] = row
        return at

    def composed(self, before: np.ndarray, classes: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Returns the number of each function followed by a byte of a class; `step` is [C, S + 1]."""
        found, size = np.empty(len(before), np.int64), max(_CHUNK // self.rows.shape[1], 1)
        for begin in range(0, len(before), size):
            part = slice(begin, begin + size)
            rows = step[classes[part, None], self.rows[before[part]]]
            found[part] = [self.number(row) for row in rows]
        return found


def _trimmed(table: np.ndarray, final: np.ndarray, class_of: np.ndarray) -> TokenTable:
    """Leaves out the states that are not reached, and those from which no final state is reached."""
    num_states = len(table)
    forward: list[list[int]] = []
    backward: list[list[int]] = [[] for _ in range(num_states)]
    for state, row in enumerate(table):
        reached = np.zeros(num_states + 1, bool)
        reached[row] = True  # the last place is for -1
        forward.append(np.flatnonzero(reached[:-1]).tolist())
        for target in forward[-1]:
            backward[target].append(state)
    kept = _reached([0], forward) & _reached(np.flatnonzero(final).tolist(), backward)
    if not kept[0]:
        raise GrammarError("no text of the grammar can be written with the tokens of the vocabulary")
    if not kept.all():
        number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
        table, final = number[table[kept]].astype(np.int32), final[kept]
        columns, place = _different(table.T)
        table, class_of = columns.T, place[class_of]
    class_of = class_of.astype(np.uint16 if table.shape[1] <= 2**16 else np.int32)
    table = np.ascontiguousarray(table)
    content = hashlib.sha256(repr((table.shape, class_of.dtype)).encode())
    for array in (class_of, table, final):
        content.update(array.tobytes())
    return TokenTable(class_of, table, final, content.hexdigest())


def _reached(begins: list[int], targets: list[list[int]]) -> np.ndarray:
    found = np.zeros(len(targets), bool)
    found[begins] = True
    left = list(begins)
    while left:
        new = [target for target in targets[left.pop()] if not found[target]]
        found[new] = True
        left += new
    return found
