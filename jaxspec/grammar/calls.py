"""Calls of functions in texts, and the markers before and after them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxspec.grammar.automaton import GrammarError, Node, Nodes
from jaxspec.grammar.json_schema import JsonSchema, read_schema
from jaxspec.grammar.regex import Regex

# The marker before the arguments of a call that begins with its name, and what may be between a marker and a text.
ARGS, _SPACES = "[ARGS]", (b"\n\n", b"\n", b" ")


@dataclasses.dataclass(frozen=True)
class Form:
    """How the models of a family write calls.

    Attributes:
      begin: the text before a call or a list of calls.
      end: the text after it; "" where it ends the answer.
      mark: a text of the family's chat templates.
      written: as JSON objects with `name` and arguments, as a `list` of them, `bare` where an answer may begin with
        such an object without `begin`, or `named`: the name, `[ARGS]` and the arguments.
      arguments: the key of the arguments.
    """

    begin: str
    end: str
    mark: str
    written: Literal["objects", "list", "bare", "named"] = "objects"
    arguments: str = "arguments"


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls that a text may have.

    Attributes:
      form: how they are written.
      functions: the name of each function, and the JSON text of the schema of its arguments.
      several: whether there may be several calls.
    """

    form: Form
    functions: tuple[tuple[str, str], ...]
    several: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of the form."""
        return self.form.begin, self.form.end, ARGS

    def start(self, nodes: Nodes, markers: Markers, end: int, free: bool, document: Node) -> Node:
        """Returns the node that reads a text with calls.

        Args:
          nodes, markers: where the automaton is built.
          end: the end of the text.
          free: whether the text is free outside of calls, and may have none.
          document: the node of a document, which the text may be in place of calls; None for none.

        Raises:
          GrammarError: the arguments of a function cannot be expressed.
        """
        form, after = self.form, nodes.fresh()
        inner = self._body(
            nodes, markers, markers.spaced(markers.literal(form.end, after)) if form.end else after
        )
        body = markers.spaced(inner)
        group = markers.literal(form.begin, body)
        places = markers.search(form.begin, body, end) if free else [group]
        goes_on = free and form.end
        more = self.several and (goes_on or form.written in ("objects", "named"))
        nodes.close(after, end, markers.spaced(places[0] if goes_on else group) if more else None)
        if form.written != "bare":
            return nodes.either(places[0], document)
        if not free:
            return nodes.either(inner, group, document)
        # A text that begins with a brace is a call.
        begin = nodes.fresh()
        spaces, edges = b" \n\r\t", nodes.edges[places[0]]  # type: ignore[index]
        kept = [edge for edge in edges if edge[0] not in (*spaces, *b"{")]
        nodes.edges[begin] = (*kept, *((byte, byte, begin) for byte in spaces))
        return nodes.close(begin, end, inner)

    def _body(self, nodes: Nodes, markers: Markers, end: Node) -> Node:
        """Returns the node that reads what is between the markers."""
        if self.form.written != "list":
            return nodes.either(*(self._call(nodes, markers, *one, end) for one in self.functions))
        after = nodes.fresh()
        call = nodes.either(*(self._call(nodes, markers, *one, after) for one in self.functions))
        comma = nodes.literal(b",", nodes.either(call, nodes.literal(b" ", call)))
        nodes.close(after, nodes.literal(b"]", end), comma if self.several else None)
        return nodes.literal(b"[", call)

    def _call(self, nodes: Nodes, markers: Markers, name: str, schema: str, end: Node) -> Node:
        named = self.form.written == "named"
        try:
            inside = JsonSchema(read_schema(schema), nodes).document(
                end if named else nodes.literal(b"}", end)
            )
        except GrammarError as error:
            raise GrammarError(f"function {name}: {error}") from None
        if named:
            return nodes.literal(name.encode(), markers.literal(ARGS, inside))
        head = rf'\{{"name": ?"{re.escape(name)}", ?"{self.form.arguments}":'
        return Regex(head, nodes).whole(inside)


class Markers:
    """Markers of texts. Those with a token in the vocabulary are bytes from `FIRST` on, which UTF-8 does not have.

    Args:
      nodes: where the automaton is built.
      known: the bytes of the markers with a token, by text.
    """

    # The first of these bytes, and that of all other added tokens.
    FIRST, OTHER = 0xF8, 0xFF

    def __init__(self, nodes: Nodes, known: Mapping[str, int]) -> None:
        self._nodes, self._known = nodes, known

    @classmethod
    def among(cls, texts: Iterable[str | None], added: Iterable[str]) -> dict[str, int]:
        """Returns the bytes of the texts that are among the added tokens of a vocabulary."""
        known = dict.fromkeys(text for text in texts if text and text in added)
        return {text: cls.OTHER - 1 - at for at, text in enumerate(known)}

    def literal(self, text: str, end: Node) -> Node:
        """Returns the node that reads a marker: its token, or its bytes if it has none."""
        token = self._known.get(text)
        return self._nodes.literal(text.encode() if token is None else bytes([token]), end)

    def spaced(self, start: Node) -> Node:
        """Returns the node that reads a text, perhaps after a space."""
        return self._nodes.either(start, *(self._nodes.literal(space, start) for space in _SPACES))

    def search(self, text: str, found: Node, *ends: int) -> list[int]:
        """Returns nodes that read any text and then a marker, as its token or its bytes; the first one begins.

        Args:
          text: the marker.
          found: the node after it.
          ends: where the text may end before the marker.
        """
        nodes, marker = self._nodes, text.encode()
        places = [nodes.fresh() for _ in marker]
        after = [*places, found]
        rows: list[list[int]] = []  # the place after each byte, for each place
        back = 0  # the place after the bytes from the second on
        for at, byte in enumerate(marker):
            rows.append(list(rows[back]) if at else [0] * self.FIRST)
            rows[at][byte] = at + 1
            back = rows[back][byte] if at else 0
        tokens: list[tuple[int, Node]] = [(self.OTHER, places[0])]
        tokens += [(byte, found if name == text else places[0]) for name, byte in self._known.items()]
        for place, row in zip(places, rows, strict=True):
            targets = [*((byte, after[to]) for byte, to in enumerate(row)), *tokens]
            nodes.edges[place] = tuple((byte, byte, to) for byte, to in targets if to is not None)
            nodes.close(place, *ends)
        return places
