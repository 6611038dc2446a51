"""Acceptors by name: how a draft is verified. Only those in `LOSSY` change the law of the text."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Literal

from jaxspec.io.messages import shown

if TYPE_CHECKING:
    from jaxspec.protocol import Acceptor

AcceptorName = Literal["greedy", "rejection", "block", "coupled", "typical"]
# Those with which sampled text follows another law than the model's.
LOSSY: frozenset[AcceptorName] = frozenset({"typical"})


def build_acceptor(name: AcceptorName | None, sampling: bool) -> Acceptor:
    """Returns the acceptor of a name; without a name greedy for greedy texts and block for sampled ones.

    One in `LOSSY` is never returned unless it is named. Where no text is drawn at random it is the greedy one, whose
    text it has.

    Args:
      name: of the acceptor.
      sampling: whether any text is drawn at random.

    Raises:
      ValueError: there is no such acceptor, or it is the greedy one and texts are drawn at random.

    Examples:
      >>> build_acceptor(None, sampling=False)
      GreedyAcceptor()
    """
    from jaxspec.acceptance import BlockAcceptor, CoupledAcceptor, GreedyAcceptor, RejectionAcceptor
    from jaxspec.lossy import TypicalAcceptor

    known = typing.get_args(AcceptorName)
    if name is not None and not (isinstance(name, str) and name in known):
        raise ValueError(f"unknown acceptor {shown(name)}; give one of {', '.join(known)}")
    name = name or ("block" if sampling else "greedy")
    if name == "greedy" and sampling:
        raise ValueError(
            "acceptor='greedy' would not follow the law at a temperature above 0; choose rejection, block or coupled"
        )
    of_sampled: dict[str, type[Acceptor]] = {
        "rejection": RejectionAcceptor,
        "block": BlockAcceptor,
        "coupled": CoupledAcceptor,
        "typical": TypicalAcceptor,
    }
    # Without sampling, all acceptors give the same text up to near-ties, and the greedy one is the cheapest.
    if name == "greedy" or (not sampling and name in ("coupled", "typical")):
        return GreedyAcceptor()
    return of_sampled[name]()
