"""Tables of grammars, beside Python's `re`, an independent validator of JSON Schema, and enumeration."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import itertools
import json
import random
import re
import threading
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Optional

import jsonschema
import numpy as np
import pytest

from jaxspec.grammar import Grammar, GrammarError, TokenTable, automaton, compile_grammar
from jaxspec.grammar.automaton import Nodes, deterministic
from jaxspec.grammar.numbers import between
from jaxspec.grammar.regex import Regex
from jaxspec.grammar.table import token_table
from jaxspec.io.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.files.test_tokenizer import directory as small_directory
from tests.files.test_tokenizer import tokenizer as small_tokenizer
from tests.grammar.schemas import PERSON, REFUSED, SCHEMAS, random_schema, random_value

SMOLLM2 = (
    Path(__file__).parents[3] / "shared/data/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
)


class Bytes:
    """A tokenizer whose tokens are the 256 bytes, and some more."""

    vocab_size = 256

    def __init__(self, added: Sequence[str] = ()) -> None:
        self._tokens = [*(bytes([byte]) for byte in range(256)), *(None for _ in added)]
        self._added = {text: 256 + at for at, text in enumerate(added)}

    def token_bytes(self):
        return self._tokens, self._added

    @property
    def special_tokens(self):
        return {"pad_token": "<pad>"}


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


EXPRESSIONS = r"""a ab|cd (a|b)*c a{2,4} a{0}b? [^a]b (?:ab)+? \d{2} é+x? [à-ü]{1,2} (a|aa)*
    ^ab$ (^a|b$) ^ab$|^c$ a.c [\w-]+ (?i)aB|[x-z] \Sx (a*)*b (?:) a||b [^\W\d] (?s).
    ^(?=.*[a-d])(?=.*[1x]).{2,}$ ^(?!^[ab]*$)(?!.*c)a|x$ ^(?!a|b$)(?=.)b?|^(?=)b ^(?!$)((?=ab)a|c) a(?!)|(?<!)c|b
    日|本[x日] (?P<n>a)b (?<n>a)b (a|b)*a(a|b){3}"""


@pytest.mark.parametrize("pattern", EXPRESSIONS.split())
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


@pytest.mark.parametrize("pattern", [r"\s", r"\S", r"[^\s]", r"[^\S]"])
def test_spaces_of_other_standards_are_in_no_class(pattern):
    made = table(Grammar.regex(pattern))
    assert [accepts(made, text.encode()) for text in "\xa0\u2028\ufeff"] == [False] * 3
    assert [accepts(made, text.encode()) for text in " a"] == [bool(re.match(pattern, text)) for text in " a"]


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


@pytest.mark.parametrize("seed", range(40))
def test_random_schemas(seed):
    rng = random.Random(seed)
    schema = random_schema(rng)
    check = jsonschema.Draft202012Validator(schema)
    values = [random_value(rng) for _ in range(300)]
    made = table(Grammar.json_schema(schema))
    for _ in range(10):
        value = json.loads(bytes(walk(made, rng)))
        check.validate(value)
        assert all(accepts(made, text.encode()) for text in layouts(value))
    for value in values:
        assert check.is_valid(value) or not any(accepts(made, text.encode()) for text in layouts(value))
    # As constants, exactly the values that match are allowed, in any order of their keys.
    values = [{}, *values[:40], *[value for value in values if check.is_valid(value)][:8]]
    constants = {"allOf": [schema, {"enum": values}]}
    if any(map(check.is_valid, values)):
        made = table(Grammar.json_schema(constants))
        for value in values:
            assert accepts(made, json.dumps(value, ensure_ascii=False).encode()) == check.is_valid(value)
    else:
        with pytest.raises(GrammarError, match="no text matches"):
            table(Grammar.json_schema(constants))


def text_ids(used, text: str) -> list[int]:
    """The tokens of a text that follows another."""
    if used is BYTES:
        return list(text.encode())
    for before in ("", "a", "a\n"):
        ids = used.encode(before + text)[len(used.encode(before)) :]
        if text_after(used, ids) == text:
            return ids
    raise AssertionError(f"{text!r} has no tokens after a text")


def text_after(used, ids: list[int]) -> str:
    stream = used.stream(used.encode("a"))
    return stream.push(ids) + stream.flush()


@pytest.mark.parametrize(("schema", "line"), REFUSED, ids=str)
def test_what_cannot_be_expressed_has_one_line(schema, line):
    with pytest.raises(GrammarError, match=line) as raised:
        table(Grammar.json_schema(schema))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("pattern", ["(ab|é)*c?", "a{1,3}(日|b)", "[^ab]b*", "(a|b)*a(a|b)"])
def test_every_path_of_tokens_is_one_of_bytes(pattern):
    """All texts of up to four tokens, some of them parts of characters, over a vocabulary that lacks some bytes."""
    parts = b"\xc3", b"\xa9", "日".encode()[:2], "日".encode()[2:]
    tokens = [b"a", b"b", b"ab", b"aa", *parts, "é".encode(), b"c", None, b""]
    nodes = Nodes()
    end = nodes.fresh()
    made = token_table(*deterministic(nodes, Regex(pattern, nodes).whole(end), end), tokens)
    accepted, begun = set(), set()
    for length in range(6):
        for ids in itertools.product(range(10), repeat=length):
            text = b"".join(tokens[index] for index in ids).decode(errors="surrogateescape")
            if re.fullmatch(pattern, text) and text.isprintable():
                accepted.add(ids)
                begun |= {ids[:at] for at in range(length + 1)}
    for length in range(4):  # two more tokens complete any text of these expressions
        for ids in itertools.product(range(len(tokens)), repeat=length):
            state = state_after(made, ids)
            assert (state >= 0) == (ids in begun), ids
            assert (state >= 0 and made.final[state]) == (ids in accepted), ids


def test_tokens_without_which_no_text_ends_are_forbidden():
    nodes = Nodes()
    end = nodes.fresh()
    start = nodes.either(nodes.literal(b"ab", end), nodes.literal(b"ac", end))
    automaton = deterministic(nodes, start, end)
    made = token_table(*automaton, [b"a", b"b", b"x", b"ac"])
    assert made.next.shape == (3, 4)
    assert [state_after(made, ids) >= 0 for ids in ([0], [1], [2], [3], [0, 1])] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert token_table(*automaton, [b"x", b"ac", b"a"]).next.shape[0] == 2
    with pytest.raises(GrammarError, match="no text of the grammar can be written with the tokens"):
        token_table(*automaton, [b"a", b"x", None])


@pytest.mark.parametrize("name", VOCABULARIES[:3])
def test_bytes_of_tokens_add_up_to_the_text(name):
    used = tokenizer(name)
    tokens, added = used.token_bytes()
    assert len(tokens) == used.vocab_size
    assert all(tokens[index] is None for index in [*added.values(), *used.special_ids])
    known = [index for index, token in enumerate(tokens) if token is not None]
    assert len(known) >= used.vocab_size - len(added) - 3
    rng = random.Random(0)
    for text in ["Hello, wörld!\n  two  spaces", "日本語 🎉é", "a\tb"]:
        ids = text_ids(used, text)
        assert b"".join(tokens[index] for index in ids).decode() == text
    for _ in range(200):
        ids = rng.choices(known, k=rng.randrange(1, 5))
        joined = b"".join(tokens[index] for index in ids).decode(errors="replace")
        assert joined.replace("\ufffd", "") == text_after(used, ids).replace("\ufffd", "")


@pytest.mark.parametrize("marker", ["</t>", "<<t>"])
def test_text_before_the_marker_is_free(marker):
    used = Bytes([marker, "<t>", "<pad>", "</s>"])
    made = compile_grammar(Grammar.choices(["yes", "no"], after=marker), used, 270)
    assert not made.final[0]
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(
            rng.choice(["<", "/", "t", ">", marker, "yes", "\n", " ", "é", "<" + marker]) for _ in range(6)
        )
        thought, found, rest = text.partition(marker)
        expected = bool(found) and rest in ("yes", " yes", "\nyes", "\n\nyes")
        assert accepts(made, text.encode()) == expected, text
        ids = [257, *thought.encode(), 256, *rest.encode()]  # special tokens do the same
        assert accepts(made, ids) == expected, text
    free = [state_after(made, [index]) >= 0 for index in range(256, 270)]
    assert free == [True, True] + [False] * 12  # neither ends nor padding
    assert state_after(made, [256, 257]) < 0
    assert state_after(made, b"\xf7\xf6") == 0
    assert state_after(made, b"\xff") < 0  # in no text
    assert compile_grammar(Grammar.regex("a", after="<t>"), Bytes(), 256).final.any()


@pytest.mark.parametrize("added", [["<t>", "</t>"], []])
def test_a_text_may_begin_with_free_text(added):
    used = Bytes(added)
    made = compile_grammar(Grammar.choices(["yes", "no"], after=("<t>", "</t>")), used, 258)
    for text, right in {
        "yes": True,
        "<t></t>no": True,
        "<t>Hm. <t> </thin </t>\n\nno": True,
        "<t>no": False,
        "Hm.</t>no": False,
        "</t>no": False,
        "<t>Hm.</t>Hm.": False,
    }.items():
        assert accepts(made, text.encode()) == (right and not (added and text[0] == "<")), text
        if added:
            ids = [one for part in re.split("(</?t>)", text) for one in _marked(part, added)]
            assert accepts(made, ids) == right, text


def _marked(text, added):
    return [256 + added.index(text)] if text in added else list(text.encode())


HOSTILE = [
    Grammar.regex(".{1,100000}"),
    Grammar.regex("((a{1,100}){1,100}){1,100}"),
    Grammar.regex("(a|b)*a(a|b){30}"),
    Grammar.regex("(a?){2000}"),
    Grammar.regex("(" * 5000 + "a" + ")" * 5000),
    Grammar.regex("a{0,4000000}"),
    Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
    Grammar.json_schema({"type": "array", "items": {"enum": []}, "maxItems": 10**9}),
    Grammar.json_schema({"type": "array", "minItems": 10**9}),
    Grammar.json_schema({"type": "string", "maxLength": 10**9}),
    Grammar.json_schema(
        {"type": "object", "maxProperties": 10**9, "additionalProperties": {"type": "integer"}}
    ),
    Grammar.json_schema('{"items":' * 900 + "1" + "}" * 900),
    Grammar.json_schema(
        {
            "$defs": {
                f"d{at}": {"prefixItems": [{"$ref": f"#/$defs/d{at + 1}"}] * 10, "minItems": 10}
                for at in range(9)
            }
            | {"d9": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    ),
    Grammar.json_schema(
        {"allOf": [{"anyOf": [{"minLength": at}, {"maxLength": at + 5}]} for at in range(20)]}
    ),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda one: str(one.source)[:30])
def test_hostile_grammars_are_refused(grammar, monkeypatch):
    monkeypatch.setattr(automaton, "MAX_WORK", automaton.MAX_WORK // 8)
    with pytest.raises(GrammarError, match=r"shorten its repetitions|nested too deeply") as raised:
        table(grammar)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "pattern", ["(a|aa)*b", "((a*)*)*", "(x+x+)+y", "(a?){300}a{300}", ".*a.*b.*c.*d.*e.*f.*g.*h"]
)
def test_expressions_that_are_slow_elsewhere_are_small(pattern):
    assert len(table(Grammar.regex(pattern)).final) < 1000


def test_tables_are_kept_by_content():
    first = table(Grammar.json_schema(PERSON), "byte_fallback")
    again = load_tokenizer(small_directory("byte_fallback"))
    assert again is not tokenizer("byte_fallback")
    assert compile_grammar(Grammar.json_schema(json.dumps(PERSON)), again, again.vocab_size) is first
    padded = table(Grammar.json_schema(PERSON), "byte_fallback", padding=9)
    assert len(padded.class_of) == len(first.class_of) + 9
    assert padded.key != first.key
    assert (padded.next[:, padded.class_of[-9:]] == -1).all()
    assert first.nbytes == first.class_of.nbytes + first.next.nbytes + first.final.nbytes
    found: list[TokenTable] = []
    threads = [
        threading.Thread(target=lambda: found.append(table(Grammar.regex("[ab]{2,7}c"), "byte_fallback")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.key for one in found} == {table(Grammar.regex("[ab]{2,7}c"), "byte_fallback").key}
    assert len(found) == 4


def test_any_object_and_the_other_kinds():
    made = table(Grammar.json_object())
    for text in ("{}", '{"a": [1, {"b": [[null]]}], "é": "x"}'):
        assert accepts(made, text.encode())
    assert not accepts(made, b"[]")
    assert not accepts(made, b'{"a": [[[[[]]]]]}')
    assert all(isinstance(json.loads(text), dict) for text in walk_texts(made))
    named = table(Grammar.json_schema(SCHEMAS["others"][0]))
    assert not accepts(named, b'{"id": 1, "id": "a name that the schema has"}')
    assert accepts(table(Grammar.choices(["", "a\nb"])), b"")
    assert accepts(table(Grammar.json_schema({"type": "string", "maxLength": None, "enum": ["a"]})), b'"a"')
    host = table(Grammar.json_schema({"type": "string", "format": "hostname"}))
    assert accepts(host, json.dumps(".".join(["a-b9"] * 8)).encode())
    assert not any(accepts(host, json.dumps(text).encode()) for text in ("a" * 64, ".".join(["a" * 30] * 9)))
    itself: dict[str, object] = {}
    itself["self"] = itself
    for wrong, line in (
        (lambda: Grammar.choices([]), "expected a list of strings"),
        (lambda: Grammar.choices("yes"), "expected a list of strings"),
        (lambda: Grammar.json_schema({"a": object()}), "cannot be written as JSON"),
        (lambda: Grammar.regex("a" * 300_000), "has 300000 characters; at most"),
        (lambda: Grammar.json_schema(itself), "cannot be written as JSON: Circular"),
        (lambda: Grammar.regex("a", after=""), "`after` is ''; give a text of 1 to 256 characters"),
        (lambda: Grammar.regex("a", after=("", "x")), "a pair of them, or None"),
        (lambda: Grammar.regex("a", after="x" * 300), "`after` is 'xx.*; give a text of 1 to 256 characters"),
        (lambda: Grammar.regex("a", after=5), "`after` is 5; give a text"),
        (lambda: table(Grammar.regex("a", after="\ud800")), "a character that is no text"),
        (lambda: table(Grammar("xml")), "kind is 'xml'; expected json_schema"),
        (lambda: table(Grammar.regex("a(?!b)")), "has a look-around inside, which cannot be expressed"),
    ):
        with pytest.raises(GrammarError, match=line):
            wrong()


def walk_texts(made: TokenTable, count: int = 20) -> list[str]:
    rng = random.Random(0)
    return [bytes(walk(made, rng)).decode() for _ in range(count)]


def test_a_pydantic_class():
    pydantic = pytest.importorskip("pydantic")

    class Item(pydantic.BaseModel):
        kind: Literal["item"]
        name: str = pydantic.Field(min_length=1)
        price: float = pydantic.Field(ge=0, le=10)
        page: pydantic.HttpUrl | None = None

    class Gift(pydantic.BaseModel):
        kind: Literal["gift"] = "gift"
        day: datetime.date | None
        pair: tuple[int, Literal["a", 1]]

    class Order(pydantic.BaseModel):
        number: uuid.UUID
        items: list[Annotated[Item | Gift, pydantic.Field(discriminator="kind")]] = pydantic.Field(
            max_length=2
        )
        first: Optional[Optional[Gift]] = None  # noqa: UP045 as users write it
        note: str | None = None
        code: pydantic.constr(pattern=r"^[A-Z]{2}\d$") = "AB1"
        sizes: pydantic.conlist(int, min_length=1, max_length=3) = pydantic.Field([1])
        total: Decimal = pydantic.Field(ge=0, default=Decimal("1.5"))
        host: ipaddress.IPv4Address | None = None
        extra: dict[str, bool] | None = None

    made = table(Grammar.json_schema(Order))
    for text in walk_texts(made, 10):
        Order.model_validate_json(text)
    gift = {"kind": "gift", "day": "2024-02-28", "pair": [1, "a"]}
    item = {"kind": "item", "name": "a", "price": 0.5, "page": "https://example.org/a"}
    order = Order(
        number=uuid.UUID(int=5), items=[gift, item], first=gift, host="127.0.0.1", extra={"b": True}
    )
    assert accepts(made, order.model_dump_json().encode())
    for given, line in (
        (set[int], r"\$\.uniqueItems"),
        (dict[pydantic.constr(pattern="^a"), int], r"\$\.patternProperties"),
    ):
        with pytest.raises(
            GrammarError, match=f"{line} cannot be expressed as a finite table; write the schema without"
        ):
            table(Grammar.json_schema(pydantic.TypeAdapter(given).json_schema()))
