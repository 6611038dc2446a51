"""Tables of grammars, beside Python's `re`, an independent validator of JSON Schema, and enumeration."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from decimal import Decimal
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from jaxspec.grammar import Grammar, GrammarError, TokenTable, compile_grammar
from jaxspec.grammar.automaton import Nodes, deterministic
from jaxspec.grammar.numbers import between
from jaxspec.io.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.files.test_tokenizer import tokenizer as small_tokenizer
from tests.grammar.schemas import REFUSED, SCHEMAS

SMOLLM2 = (
    Path(__file__).parents[3] / "shared/data/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
)


class Bytes:
    """A tokenizer whose tokens are the 256 bytes, and some more."""

    vocab_size = 256

    def __init__(self, *more: bytes | None, **added: int) -> None:
        self._tokens, self._added = [*(bytes([byte]) for byte in range(256)), *more], added

    def token_bytes(self):
        return self._tokens, self._added


BYTES = Bytes()


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return BYTES
    if name == "smollm2":
        if not SMOLLM2.is_file():
            pytest.skip("the shared data is not here")
        return load_tokenizer(SMOLLM2)
    return small_tokenizer(name)


def table(grammar: Grammar, name: str = "bytes", padding: int = 0) -> TokenTable:
    used = tokenizer(name)
    return compile_grammar(grammar, used, used.vocab_size + padding)


def state_after(table: TokenTable, ids) -> int:
    state = 0
    for index in ids:
        if state >= 0:
            state = table.next[state, table.class_of[index]]
    return int(state)


def accepts(table: TokenTable, ids) -> bool:
    state = state_after(table, ids)
    return state >= 0 and bool(table.final[state])


def walk(table: TokenTable, rng: random.Random, most: int = 40) -> list[int]:
    """Random allowed tokens to a final state; after `most` of them those that lead there soonest."""
    distance = distances(table)
    state, ids = 0, []
    while not (table.final[state] and (rng.random() < 0.2 or len(ids) > most)):
        classes = np.flatnonzero(table.next[state] >= 0)
        if not len(classes):
            break
        if len(ids) > most:
            classes = [min(classes, key=lambda one: distance[table.next[state, one]])]
        chosen = rng.choice(list(classes))
        ids.append(rng.choice(np.flatnonzero(table.class_of == chosen).tolist()))
        state = table.next[state, chosen]
    assert table.final[state]
    return ids


@functools.lru_cache(maxsize=4)
def distances(table: TokenTable) -> np.ndarray:
    """The number of tokens from each state to a final one."""
    found = np.where(table.final, 0, 10**6)
    for _ in range(len(found)):
        through = np.where(table.next >= 0, found[table.next], 10**6).min(1, initial=10**6) + 1
        if (through >= found).all():
            break
        found = np.minimum(found, through)
    return found


PATTERNS = [
    *(
        "a",
        "ab|cd",
        "(a|b)*c",
        "a{2,4}",
        "a{0}b?",
        "[^a]b",
        "(?:ab)+?",
        r"\d{2}",
        "é+x?",
        "[à-ü]{1,2}",
        "(a|aa)*",
    ),
    *(
        "^ab$",
        "(^a|b$)",
        "a.c",
        r"[\w-]+",
        "(?i)aB|[x-z]",
        r"\Sx",
        "(a*)*b",
        "(?:)",
        "a||b",
        r"[^\W\d]",
        "(?s).",
    ),
    *("日|本[x日]", "(?P<n>a)b", "(?<n>a)b", "(a|b)*a(a|b){3}"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_are_those_that_the_expression_matches(pattern):
    rng = random.Random(pattern)
    expected = re.compile(pattern.replace("?<n", "?P<n"), re.ASCII)
    whole = table(Grammar.regex(pattern))
    quoted = table(Grammar.json_schema({"type": "string", "pattern": pattern}))
    texts = [
        "".join(rng.choice('aabbcd1Ax-é日本à\n"\\ ') for _ in range(rng.randrange(6))) for _ in range(500)
    ]
    texts += [rng.choice(["", text]) + text for text in ("ab", "a1c", "12", "日x", "xz", "aab", "aaaa", "cc")]
    for text in texts:
        assert accepts(whole, text.encode()) == bool(expected.fullmatch(text)), text
        # Python's $ also matches before a line break at the end.
        if "$" not in pattern or not text.endswith("\n"):
            written = json.dumps(text, ensure_ascii=False).encode()
            assert accepts(quoted, written) == bool(expected.search(text)), text


BOUNDS = [None, *map(Decimal, ("0", "1", "-1", "12", "0.5", "-0.5", "99.5", "100", "-12.25", "0.05", "1000"))]
NUMBERS = [
    f"{sign}{whole}{rest}"
    for sign in ("", "-")
    for whole in (*range(14), 99, 100, 101, 1000, 12345)
    for rest in ("", ".0", ".00", ".1", ".05", ".5", ".50", ".25", ".251", ".249", ".9", ".001")
    if Decimal(f"{whole}{rest}") or not sign
]


@pytest.mark.parametrize("low", BOUNDS, ids=str)
def test_numbers_between_bounds(low):
    values = [Decimal(text) for text in NUMBERS]
    for high, low_open, high_open, whole in itertools.product(BOUNDS, (0, 1), (0, 1), (0, 1)):
        nodes = Nodes()
        end = nodes.fresh()
        bounds = [
            None if bound is None else (bound, bool(is_open))
            for bound, is_open in ((low, low_open), (high, high_open))
        ]
        start = between(nodes, *bounds, bool(whole), end)
        following, final = deterministic(nodes, start, end) if start is not None else (None, None)
        for text, value in zip(NUMBERS, values, strict=True):
            state = 0 if start is not None else -1
            for byte in text.encode():
                state = following[state, byte] if state >= 0 else -1
            expected = (
                (low is None or value > low or (value == low and not low_open))
                and (high is None or value < high or (value == high and not high_open))
                and not (whole and "." in text)
            )
            assert (state >= 0 and final[state]) == expected, (text, high, low_open, high_open, whole)


def layouts(value):
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, indent=2),
        " " + json.dumps(value, ensure_ascii=False),
    ]


VOCABULARIES = ("stories260K", "byte_fallback", "smollm2", "bytes")


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        pytest.param(schema, name, marks=() if place % 4 == at else pytest.mark.full)
        for place, schema in enumerate(SCHEMAS)
        for at, name in enumerate(VOCABULARIES)
    ],
)
def test_a_schema_allows_its_values_and_no_others(schema, name):
    given, values = SCHEMAS[schema]
    made, used = table(Grammar.json_schema(given), name), tokenizer(name)
    validator = jsonschema.Draft4Validator if schema == "draft 4" else jsonschema.Draft202012Validator
    check = validator(given, format_checker=validator.FORMAT_CHECKER)
    for text in itertools.chain.from_iterable(map(layouts, values)):
        assert accepts(made, text_ids(used, text)), text
    rng = random.Random(schema)
    for _ in range(12):
        ids = walk(made, rng)
        text = bytes(ids).decode() if name == "bytes" else text_after(used, ids)
        value = json.loads(text)
        check.validate(value)
        assert accepts(table(Grammar.json_schema(given)), text.encode())


def text_ids(used, text: str) -> list[int]:
    """The tokens of a text that follows another."""
    if used is BYTES:
        return list(text.encode())
    before = used.encode("a")
    ids = used.encode("a" + text)
    if ids[: len(before)] != before:  # a token crosses the boundary
        ids = used.encode("a\n" + text)[len(before) :]
        return ids[1 + len(used.encode("a\n")) - len(before) - 1 :]
    return ids[len(before) :]


def text_after(used, ids: list[int]) -> str:
    stream = used.stream(used.encode("a"))
    return stream.push(ids) + stream.flush()


@pytest.mark.parametrize(("schema", "line"), REFUSED, ids=str)
def test_what_cannot_be_expressed_has_one_line(schema, line):
    with pytest.raises(GrammarError, match=line) as raised:
        table(Grammar.json_schema(schema))
    assert "\n" not in str(raised.value)
