"""From the arguments of a call to its texts: for `generate`, `stream`, `chat`, warm-up and the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxspec.engine.keywords import MethodName
from jaxspec.host import processes
from jaxspec.host.arguments import whole
from jaxspec.host.messages import shown
from jaxspec.io.methods.method_files import distribution_name
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.methods import LoadedModel, Method, Resources, registry
from jaxspec.methods.acceptors import LOSSY, AcceptorName, build_acceptor
from jaxspec.methods.auto import Auto
from jaxspec.methods.files import files_of
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import MAX_PROGRAMS
from jaxspec.protocol import Acceptor, Drafter, Weights
from jaxspec.requests.generation_options import NAMES, GenerationOptions, split
from jaxspec.requests.pieces import Moment, Row
from jaxspec.requests.reading import RowRequest, Stops, needs_sampling, read_requests
from jaxspec.requests.results import Piece
from jaxspec.requests.text import row_text
from jaxspec.session.auto import BuiltAuto, Chosen
from jaxspec.session.prefix import Prefix
from jaxspec.session.session import Session
from jaxspec.session.strategies import Strategy, for_drafter

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

# A name, a method, or a drafter, alone or with its parameters.
AnyMethod = MethodName | Method | Drafter | tuple[Drafter, Any]
# The most rounds between two host polls: of a stream, and of a text whose pieces nobody reads.
STREAM_ROUNDS, QUIET_ROUNDS = 8, 64
# The arguments of `generate` that are not options of a method; suggestions for misspelt options include them.
_ARGUMENTS = ("prompts", "options", "messages", "attention_mask", "method", *NAMES)


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


def read_method(
    method: AnyMethod | None, options: GenerationOptions | None, given: Mapping[str, Any]
) -> tuple[AnyMethod, GenerationOptions]:
    """Returns the method of a call, made with its options, and the other options."""
    common, rest = split(options, given)
    return choose_method(registry.DEFAULT if method is None else method, rest), common


def choose_method(method: AnyMethod | str, options: Mapping[str, Any]) -> AnyMethod:
    """Returns the method; if it is given by name, it is made with these options."""
    if isinstance(method, str):
        return registry.make(method, options, _ARGUMENTS)
    if options:
        registry.check_known(options, _ARGUMENTS)
        raise ValueError(
            f"{min(options)} belongs to a method's name; {type(method).__name__} carries its own options"
        )
    return method


def start_texts(
    lm: LanguageModel,
    rounds: int,
    prompts: Any,
    messages: Any,
    attention_mask: Any,
    method: AnyMethod,
    options: GenerationOptions,
    prefix: Prefix | None = None,
) -> tuple[Session, Iterator[Piece], bool]:
    """Checks the arguments of `generate`, and returns its session, its pieces and whether there is a single text.

    `rounds`: the most rounds between two host polls, unless stop strings need more polls.
    """
    requests, stops, single = read_requests(lm, prompts, messages, attention_mask, options)
    texts = texts_of(lm, requests, method, options, prefix)
    return texts.session, _run(texts, stops, STREAM_ROUNDS if stops.strings else rounds), single


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


def texts_of(
    lm: LanguageModel,
    requests: Sequence[RowRequest],
    method: AnyMethod,
    options: GenerationOptions,
    prefix: Prefix | None = None,
    elastic: bool = False,
    in_chunks: bool = True,
) -> Texts:
    """Returns the texts of a batch with their session; one with `prefix` has a single row.

    `elastic`, `in_chunks`: see `Session`.
    """
    if options.exact:
        lm.check_exact()
    max_batch = whole("max_batch", options.max_batch)
    accept = acceptor_of(method, options, requests)
    distributions = tuple(distribution_name(r.temperature, r.top_k, r.top_p, r.min_p) for r in requests)
    target = lm.loaded.exact if options.exact else lm.loaded
    loop = Loop(lm.executables, target.config, lm.mesh, lm.device)
    strategy: Strategy
    if isinstance(method, Auto):
        auto = auto_drafter(lm, method, distributions, target)
        params = auto.params
        if auto.names:
            # Plain decoding must not change a sampled text, and all processes must run the same program.
            same = accept.coupled or not needs_sampling(requests)
            alone = len(requests) == 1 and not elastic and loop.mesh is None
            strategy = Chosen(loop, auto, method.explain, waits=not (alone and same))
        else:
            strategy = for_drafter(loop, auto.drafter)
            strategy.name = "auto: plain decoding, no method is offered"
    else:
        drafter, params = drafter_of(lm, method, distributions, lm.directory, target)
        strategy = for_drafter(loop, drafter)
        strategy.name = method.name if isinstance(method, Method) else type(strategy.drafter).__name__
    if prefix is not None:
        fed = prefix.start(requests[0].prompt, strategy.drafter, lm.config)
        requests, prefix = [dataclasses.replace(requests[0], start=fed)], prefix if fed else None
    session = Session(
        loop,
        Weights(lm.params, params),
        strategy,
        accept,
        requests,
        max_batch=max_batch,
        prefix=prefix,
        prefixes=None if options.exact else lm.prefixes,  # their caches are not exact
        elastic=elastic,
        in_chunks=in_chunks,
    )
    session.check_memory(requests, max_batch)
    return Texts(session, lm.tokenizer, options.acceptor in LOSSY and strategy.drafter.num_draft_tokens > 0)


def acceptor_of(method: AnyMethod, options: GenerationOptions, requests: Sequence[RowRequest]) -> Acceptor:
    """Returns the acceptor of a batch; greedy texts and sampled ones with the default have the same."""
    # The choices of `auto` depend on prices and other rows, and must not change the text of a seed.
    default: AcceptorName = "coupled" if isinstance(method, Auto) else "block"
    return build_acceptor(options.acceptor, needs_sampling(requests), default)


def drafter_of(
    lm: LanguageModel,
    method: AnyMethod,
    distributions: tuple[str, ...],
    directory: Path | None,
    target: LoadedModel,
) -> tuple[Drafter, Any]:
    """Returns the drafter of a method for a target, or the drafter given, and its parameters."""
    drafter: Any
    if isinstance(method, Method):
        drafter, params = method.build(target, resources(lm, distributions, directory))
    else:
        drafter, params = method if isinstance(method, tuple) and len(method) == 2 else (method, None)
        if target.config.exact and getattr(drafter, "config", None) == lm.config:
            raise ValueError(
                f"{type(drafter).__name__} runs the model with a config that is not exact; make it "
                "with lm.loaded.exact.config, or give a method by name"
            )
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"method is {shown(method)}; give a name ({', '.join(registry.names())}), an instance of one of "
            "jaxspec.methods, or a subclass of jaxspec.protocol.Drafter"
        )
    needed = drafter.num_nodes + 1
    if drafter.verify_widths[-1] != needed or drafter.reach < needed:
        raise ValueError(
            f"{type(drafter).__name__} proposes up to {needed - 1} tokens and has "
            f"verify_widths={drafter.verify_widths} and reach={drafter.reach}; let verify_widths end with "
            f"{needed}, and reach be at least {needed}"
        )
    return drafter, params


def auto_drafter(
    lm: LanguageModel, method: Auto, distributions: tuple[str, ...], target: LoadedModel
) -> BuiltAuto:
    """Returns the drafter of `auto`, made once for all texts with these sampling distributions and these files."""
    names = tuple(sorted(set(distributions)))
    key = dataclasses.replace(method, explain=False), names, target is lm.loaded
    files = files_read(lm, method)
    with contextlib.suppress(TypeError):  # an option that cannot be a key
        if key in lm.autos and lm.autos[key][0] == files:
            return lm.autos[key][1]
    inputs = resources(lm, names, lm.directory)
    candidates = method.candidates(target, inputs)
    drafter, params = method.built(candidates, target, inputs)
    if lm.mesh is None:  # otherwise each call of the loop would transfer the drafter's arrays again
        drafter = jax.device_put(drafter, lm.device)
    found = BuiltAuto(drafter, params, tuple(one.name for one in candidates))
    with contextlib.suppress(TypeError):
        while len(lm.autos) >= MAX_PROGRAMS:
            del lm.autos[next(iter(lm.autos))]
        lm.autos[key] = files, found
    return found


def files_read(lm: LanguageModel, method: AnyMethod) -> tuple[Any, ...]:
    """Returns the identity of the files that a method may read; () for a drafter, and with several processes."""
    if not isinstance(method, Method) or processes.several():
        return ()
    return files_of(method, lm.loaded, resources(lm, (), lm.directory))


def resources(lm: LanguageModel, distributions: tuple[str, ...], directory: Path | None) -> Resources:
    """Returns the inputs with which the methods of a model are built."""
    return Resources(
        lm.drafts.load,
        lm.encode,
        directory,
        distributions,
        lm.platform,
        lm.drafts.load_head,
        lm.drafts.quantised,
        lm.step_costs,
    )
