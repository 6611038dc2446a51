"""From the arguments of a call to its session: for `generate`, `stream`, `chat`, warm-up and the scheduler."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.engine.drafters import AnyMethod, Drafters
from jaxspec.engine.model import Model
from jaxspec.host import processes
from jaxspec.host.arguments import flag, whole
from jaxspec.io.methods.method_files import distribution_name
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.methods import Method, registry
from jaxspec.methods.acceptors import LOSSY, AcceptorName, build_acceptor
from jaxspec.methods.auto import Auto
from jaxspec.protocol import Acceptor, Weights
from jaxspec.session.auto import Chosen
from jaxspec.session.prefix import Prefix
from jaxspec.session.session import Session
from jaxspec.session.strategies import Strategy, for_drafter
from jaxspec.texts.generation_options import GenerationOptions, split
from jaxspec.texts.requests import RowRequest, Stops, needs_sampling, read_requests
from jaxspec.texts.results import Piece
from jaxspec.texts.row import Moment, Row
from jaxspec.texts.text import row_text

# The most rounds between two host polls: of a stream, and of a text whose pieces nobody reads.
STREAM_ROUNDS, QUIET_ROUNDS = 8, 64


class Texts:
    """The texts of a session.

    Args:
      session: the session; its requests begin here with `begin`.
      tokenizer: None for texts without characters.
      lossy: whether texts that are drawn at random are, see `Result`.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer | None, lossy: bool) -> None:
        self.session, self._tokenizer, self._lossy = session, tokenizer, lossy
        self._rows: dict[int, Row] = {}

    def now(self) -> Moment:
        """Returns the present, the same in all processes of the session's mesh."""
        loop = self.session.loop
        seconds, blocked_ms = processes.agreed(loop.mesh, time.perf_counter(), loop.executables.blocked_ms)
        return Moment(seconds, blocked_ms, loop.executables.variants)

    def begin(self, index: int, request: RowRequest, stops: Stops, began: Moment) -> None:
        """Begins the text of the session's request `index`."""
        # A tokenizer may not know that an end token of the model's configuration is special.
        new_text = functools.partial(
            row_text, self._tokenizer, request.prompt, stops.strings, request.eos_ids
        )
        self._rows[index] = Row(request, new_text, began, lossy=self._lossy and request.temperature > 0)

    def cancel(self, index: int) -> None:
        """Ends a text before the next step, without a piece."""
        del self._rows[index]
        self.session.halt(index)
        self._end()

    def step(self, rounds: int) -> list[Piece]:
        """Runs one host poll of at most `rounds` rounds, and returns the new pieces. Ended texts are forgotten."""
        updates = self.session.step(rounds)
        now, pieces = self.now(), []
        for update in updates:
            piece = self._rows[update.index].take(update, now, self.session.drafting)
            pieces.append(piece)
            if piece.result is not None:
                del self._rows[update.index]
                if not update.done:
                    self.session.halt(update.index)
        self._end()
        return pieces

    def _end(self) -> None:
        if self.session.done:
            self.session.end()


class Preparation:
    """Makes the sessions of a model from the arguments of its calls.

    Args:
      model: the model.
      drafters: makes its drafters.

    Attributes:
      model, drafters: as given.
    """

    def __init__(self, model: Model, drafters: Drafters) -> None:
        self.model, self.drafters = model, drafters

    def read(
        self, method: AnyMethod | None, options: GenerationOptions | None, given: Mapping[str, Any]
    ) -> tuple[AnyMethod, GenerationOptions]:
        """Returns the method of a call, made with its options, and the other options."""
        common, rest = split(options, given)
        return self.drafters.made(registry.DEFAULT if method is None else method, rest), common

    def start(
        self,
        rounds: int,
        prompts: Any,
        messages: Any,
        attention_mask: Any,
        method: AnyMethod,
        options: GenerationOptions,
        prefix: Prefix | None = None,
    ) -> tuple[Session, Iterator[Piece], bool]:
        """Checks the arguments of `generate`, and returns its session, its pieces and whether there is a single prompt.

        `rounds`: the most rounds between two host polls, unless stop strings need more polls.
        """
        requests, stops, single = self.requests(prompts, messages, attention_mask, options)
        session = self.session(requests, method, options, prefix)
        rounds = STREAM_ROUNDS if stops.strings else rounds
        return session, _run(self.texts(session, options), stops, rounds), single

    def texts(self, session: Session, options: GenerationOptions) -> Texts:
        """Returns the texts of a session."""
        lossy = options.acceptor in LOSSY and session.strategy.drafter.num_draft_tokens > 0
        return Texts(session, self.model.tokenizer, lossy)

    def requests(
        self, prompts: Any, messages: Any, attention_mask: Any, options: GenerationOptions
    ) -> tuple[list[RowRequest], Stops, bool]:
        """Returns the requests of a call, see `read_requests`, after a check that `exact` is possible if it is asked."""
        if flag("exact", options.exact):
            self.model.check_exact()
        return read_requests(self.model, prompts, messages, attention_mask, options)

    def session(
        self,
        requests: Sequence[RowRequest],
        method: AnyMethod,
        options: GenerationOptions,
        prefix: Prefix | None = None,
        elastic: bool = False,
    ) -> Session:
        """Returns the session of a batch; one with `prefix` has a single row. `elastic`: see `Session`."""
        max_batch = whole("max_batch", options.max_batch)
        accept = acceptor_of(method, options, requests)
        distributions = tuple(distribution_name(r.temperature, r.top_k, r.top_p, r.min_p) for r in requests)
        target = self.model.loaded.exact if options.exact else self.model.loaded
        loop = self.model.loop(bool(options.exact))
        if isinstance(method, Auto):
            auto = self.drafters.auto(method, distributions, target)
            weights = Weights(self.model.params, auto.params)
            # Plain decoding must not change a sampled text, and all processes must run the same program.
            same = accept.coupled or not needs_sampling(requests)
            alone = len(requests) == 1 and not elastic and loop.mesh is None
            strategy: Strategy = for_drafter(loop, auto.drafter)
            if auto.names:
                strategy = Chosen(loop, auto, method.explain, waits=not (alone and same))
            else:
                strategy.name = "auto: plain decoding, no method is offered"
        else:
            drafter, weights = self.drafters.parts(method, distributions, self.model.directory, target)
            strategy = for_drafter(loop, drafter)
        strategy.name = strategy.name or (
            method.name if isinstance(method, Method) else type(strategy.drafter).__name__
        )
        if prefix is not None:
            start = prefix.start(requests[0].prompt, strategy.drafter, self.model.config)
            requests, prefix = [dataclasses.replace(requests[0], start=start)], prefix if start else None
        session = Session(
            loop,
            weights,
            strategy,
            accept,
            requests,
            max_batch=max_batch,
            prefix=prefix,
            prefixes=None if options.exact else self.model.prefixes,  # their caches are not exact
            elastic=elastic,
        )
        session.check_memory(requests, max_batch)
        return session


def acceptor_of(method: AnyMethod, options: GenerationOptions, requests: Sequence[RowRequest]) -> Acceptor:
    """Returns the acceptor of a batch; greedy texts and sampled ones with the default have the same."""
    # The choices of `auto` depend on prices and other rows, and must not change the text of a seed.
    default: AcceptorName = "coupled" if isinstance(method, Auto) else "block"
    return build_acceptor(options.acceptor, needs_sampling(requests), default)


def _run(texts: Texts, stops: Stops, rounds: int) -> Iterator[Piece]:
    """Runs a session to its end, and yields the pieces of its texts; `rounds`: between two host polls."""
    session = texts.session
    processes.check_same(
        session.loop.mesh, "the prompts, or options of the texts,", repr((session.requests, stops, rounds))
    )
    began = texts.now()
    for index, request in enumerate(session.requests):
        texts.begin(index, request, stops, began)
    while not session.done:
        yield from texts.step(rounds)
