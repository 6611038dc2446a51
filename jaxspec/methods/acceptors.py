"""Acceptors by name: rules to verify a draft. Only those in `LOSSY` change the distribution of the text."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Literal

from jaxspec.host.messages import shown

if TYPE_CHECKING:
    from jaxspec.protocol import Acceptor

AcceptorName = Literal["greedy", "rejection", "block", "coupled", "typical"]
# Acceptors whose sampled text does not follow the model's distribution.
LOSSY: frozenset[AcceptorName] = frozenset({"typical"})


def build_acceptor(name: AcceptorName | None, sampling: bool, default: AcceptorName = "block") -> Acceptor:
    """Returns the acceptor of a name. Greedy texts have the default, because at temperature 0 all acceptors are equal.

    An acceptor in `LOSSY` is only returned by name.

    Args:
      name: name of the acceptor; None for the default.
      sampling: whether any text is sampled.
      default: the name of the default.

    Raises:
      ValueError: the acceptor is unknown, or it is greedy and texts are sampled.
    """
    from jaxspec.acceptance import BlockAcceptor, CoupledAcceptor, RejectionAcceptor
    from jaxspec.lossy import TypicalAcceptor

    known = typing.get_args(AcceptorName)
    if name is not None and not (isinstance(name, str) and name in known):
        raise ValueError(f"unknown acceptor {shown(name)}; give one of {', '.join(known)}")
    if name == "greedy" and sampling:
        raise ValueError(
            "acceptor='greedy' needs temperature 0, because it does not sample; choose rejection, block or coupled"
        )
    of_sampled: dict[str, type[Acceptor]] = {
        "rejection": RejectionAcceptor,
        "block": BlockAcceptor,
        "coupled": CoupledAcceptor,
        "typical": TypicalAcceptor,
    }
    return of_sampled[name if sampling and name is not None else default]()
