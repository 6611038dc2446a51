"""Grammars, and their tables over the tokens of a tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.grammar.automaton import GrammarError, Nodes, deterministic
from jaxspec.grammar.calls import Calls, Markers
from jaxspec.grammar.json_schema import JsonSchema, read_schema
from jaxspec.grammar.regex import Regex
from jaxspec.grammar.table import TokenTable, token_table
from jaxspec.io.gguf.ends import END_TEXTS
from jaxspec.io.tokenizers.tokenizer import Tokenizer

# The depth of `Grammar.json_object`, and the most characters of a grammar and of the marker before it.
OBJECT_DEPTH = 5
MAX_SIZE, MAX_MARKER = 2**18, 2**8


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A description of the texts that a model may generate.

    Attributes:
      kind: `json_schema`, `json_object`, `choices` or `regex`; with `calls` also `text`, which is free outside of the
        calls, and `calls`, which has nothing else.
      source: the schema's JSON text, the choices, or the expression.
      after: a text that the model writes first, such as `</think>`: everything up to it is free. A pair, such as
        `("<think>", "</think>")`: the model may begin with the one, and everything up to the other is free then. None:
        the text begins at once.
      calls: calls of functions that the text may have instead of a document.

    Examples:
      >>> Grammar.choices(["yes", "no"]).source
      ('yes', 'no')
    """

    kind: str
    source: str | tuple[str, ...] = ""
    after: str | tuple[str, str] | None = None
    calls: Calls | None = None

    def __post_init__(self) -> None:
        after = self.after if isinstance(self.after, tuple) else (self.after, self.after)
        right = [isinstance(text, str) and 0 < len(text) <= MAX_MARKER for text in after]
        if self.after is not None and right != [True, True]:
            raise GrammarError(
                f"`after` is {self.after!r:.60}; give a text of 1 to {MAX_MARKER} characters such as </think>, a pair "
                "of them, or None"
            )
        texts = [*self.source, *itertools.chain(*(self.calls.functions if self.calls else ()))]
        if (size := sum(map(len, texts))) > MAX_SIZE:
            raise GrammarError(f"the grammar has {size} characters; at most {MAX_SIZE} are possible")

    @classmethod
    def json_schema(cls, schema: Any, after: str | tuple[str, str] | None = None) -> Grammar:
        """Returns the grammar of a JSON schema: its JSON text, a mapping, a boolean, or a pydantic class.

        Raises:
          GrammarError: it is none of them, or no JSON.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if not isinstance(schema, (str, Mapping, bool)):
            raise GrammarError(
                f"the JSON schema is a {type(schema).__name__}; give a mapping, JSON text or a pydantic class"
            )
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls("json_schema", text, after)

    @classmethod
    def json_object(cls, after: str | tuple[str, str] | None = None) -> Grammar:
        """Returns the grammar of any JSON object with at most `OBJECT_DEPTH` objects or arrays inside each other."""
        return cls("json_object", "", after)

    @classmethod
    def choices(cls, texts: Sequence[str], after: str | tuple[str, str] | None = None) -> Grammar:
        """Returns the grammar of some texts.

        Raises:
          GrammarError: there are none, or they are not strings.
        """
        listed = isinstance(texts, Sequence) and not isinstance(texts, str)
        if not listed or not texts or not all(isinstance(text, str) for text in texts):
            raise GrammarError(f"choices is {texts!r}; expected a list of strings, such as ['yes', 'no']")
        return cls("choices", tuple(texts), after)

    @classmethod
    def regex(cls, pattern: str, after: str | tuple[str, str] | None = None) -> Grammar:
        """Returns the grammar of the texts that a regular expression matches as a whole.

        Raises:
          GrammarError: it is not a string.
        """
        if not isinstance(pattern, str):
            raise GrammarError(f"regex is {pattern!r}; give a regular expression")
        return cls("regex", pattern, after)


def compile_grammar(spec: Grammar, tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
    """Returns the table of a grammar; the latest tables are kept.

    A thread can call it while others work: no call of NumPy in it takes long. Its work is limited, see
    `grammar.automaton` and `grammar.table`.

    Args:
      spec: the grammar.
      tokenizer: the tokenizer of the model.
      vocab_size: the number of the model's ids; those without a token are forbidden.

    Raises:
      GrammarError: the grammar is wrong, cannot be expressed, or is too large; one line.
    """
    return _compiled(spec, _Vocabulary.of_tokenizer(tokenizer), vocab_size)


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a tokenizer; two are equal if all tokens are.

    Attributes:
      key: a hash of the tokens.
      tokens: the bytes of each token inside a text; None for special and added ones.
      added: the ids of the added tokens that may stand before the text, by text: neither ends nor padding.
    """

    key: str
    tokens: list[bytes | None] = dataclasses.field(compare=False)
    added: dict[str, int] = dataclasses.field(compare=False)

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of_tokenizer(tokenizer: Tokenizer) -> _Vocabulary:
        given, added = tokenizer.token_bytes()
        # No text has the bytes that stand for added tokens.
        tokens = [None if token and max(token) >= Markers.FIRST else token for token in given]
        never = END_TEXTS.union(text for text in tokenizer.special_tokens.values() if isinstance(text, str))
        added = {text: index for text, index in added.items() if text not in never}
        return _Vocabulary(hashlib.sha256(repr((tokens, added)).encode()).hexdigest(), tokens, added)


@functools.lru_cache(maxsize=16)
def _compiled(spec: Grammar, vocabulary: _Vocabulary, vocab_size: int) -> TokenTable:
    after = spec.after if isinstance(spec.after, tuple) else (spec.after,)
    wanted = (*after, *(spec.calls.markers if spec.calls else ()))
    known = Markers.among(wanted, vocabulary.added)
    try:
        following, final = _automaton(spec, known)
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar has a character that is no text: {error.reason}") from None
    tokens = (vocabulary.tokens + [None] * vocab_size)[:vocab_size]
    for text, index in vocabulary.added.items():
        if index < vocab_size:
            tokens[index] = bytes([known.get(text, Markers.OTHER)])
    return token_table(following, final, tokens)


def _automaton(spec: Grammar, known: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    nodes = Nodes()
    end, markers = nodes.fresh(), Markers(nodes, known)
    start: int | None = None
    if spec.kind == "choices":
        start = nodes.either(*(nodes.literal(text.encode(), end) for text in spec.source))
    elif spec.kind == "regex":
        start = Regex(str(spec.source), nodes).whole(end)
    elif spec.kind == "json_object":
        start = JsonSchema({"type": "object"}, nodes, OBJECT_DEPTH - 1).document(end)
    elif spec.kind == "json_schema":
        start = JsonSchema(read_schema(str(spec.source)), nodes).document(end)
    elif spec.kind not in ("text", "calls") or spec.calls is None:
        raise GrammarError(f"kind is {spec.kind!r}; expected json_schema, json_object, choices or regex")
    if spec.calls is not None:
        start = spec.calls.start(nodes, markers, end, spec.kind == "text", start)
    if start is None:
        raise GrammarError("no text matches the grammar")
    if isinstance(spec.after, str):
        start = markers.search(spec.after, markers.spaced(start))[0]
    elif spec.after is not None and (spec.kind != "text" or spec.after[0] in known):
        thought = markers.search(spec.after[1], markers.spaced(start))[0]
        if spec.kind == "text":  # without the token of the reasoning, or the table would have both at once
            free = nodes.close(nodes.fresh(), *nodes.empty[start])
            nodes.edges[free] = tuple(edge for edge in nodes.edges[start] if edge[0] != known[spec.after[0]])
            start = free
        start = nodes.either(start, markers.literal(spec.after[0], thought))
        assert start is not None
    return deterministic(nodes, start, end)
