"""Runs requests of one model as they arrive: rows are refilled, and requests of different methods take turns."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from typing import Any

from jaxspec.engine import prepare
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.prepare import STREAM_ROUNDS, AnyMethod, Texts
from jaxspec.host import processes
from jaxspec.host.arguments import whole
from jaxspec.io.methods.method_files import distribution_name
from jaxspec.methods import Method
from jaxspec.programs.jax_settings import needed
from jaxspec.requests.generation_options import GenerationOptions
from jaxspec.requests.reading import RowRequest, needs_sampling, read_requests
from jaxspec.requests.results import Piece
from jaxspec.requests.row_settings import Shapes

# The groups without requests whose drafters are kept for later requests.
IDLE_GROUPS = 16


@dataclasses.dataclass
class _Group:
    """Requests that share compiled programs.

    Attributes:
      texts: their texts and their session.
      method: kept, because the key of the group may contain its `id`.
      ids: the requests that have not ended.
    """

    texts: Texts
    method: AnyMethod
    ids: set[int] = dataclasses.field(default_factory=set)


class Scheduler:
    """Runs requests of one model as they arrive. It is used from one thread.

    Requests with the same method, options of the method and acceptor form two groups, the greedy and the sampled ones,
    each of which shares a batch. Both have the same programs; they are separate because a sampled row makes the other
    rows of its batch slower. All other options are numbers of the rows, except the rare ones, see
    `requests.row_settings.Shapes`, and `exact`. Each step runs one group, see `turns`. The batch of a group begins with
    the rows that its requests need (1, 4, 16 …; on a CPU with one, which the others join), gets more when requests
    wait, as far as memory allows, and fewer when most are free. When its last request ends, its caches are freed.

    Greedy text does not depend on the other requests, up to rounding (see `exact`). Sampled text with a seed depends
    only on the programs. Sampled requests whose drafts would depend on the other rows (a shared mask, or `auto` with
    an acceptor other than coupled) run one after another.

    Args:
      lm: the model.
      max_batch: the maximum number of rows of a group.
      max_rounds: the maximum number of rounds of a step.
      turns: whether groups with requests take turns, and long prompts are fed in chunks between rounds. Else the group
        with the most requests runs, and a prompt is fed as a whole: rows are fuller, the requests of a small group wait
        as long as larger ones get new requests, and texts wait for the prompts of others.

    Raises:
      ValueError: a number is below 1.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> scheduler = Scheduler(language_model())
      >>> number = scheduler.add("ab", max_new_tokens=6, method="ngram")
      >>> text = ""
      >>> while not scheduler.idle:
      ...     for number, piece in scheduler.step():
      ...         text += piece.text
      >>> text
      'ab adeab a'
    """

    def __init__(
        self, lm: LanguageModel, *, max_batch: int = 8, max_rounds: int = STREAM_ROUNDS, turns: bool = True
    ) -> None:
        for name, number in {"max_batch": max_batch, "max_rounds": max_rounds}.items():
            if whole(name, number) < 1:
                raise ValueError(f"{name} is {number}; give at least 1")
        self._lm, self._max_batch, self._max_rounds, self._turns = lm, max_batch, max_rounds, turns
        # In order of their last step: the one that has waited longest comes first.
        self._groups: OrderedDict[Any, _Group] = OrderedDict()
        self._group_of: dict[int, _Group] = {}
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """The number of requests without a row."""
        return sum(group.texts.session.num_waiting for group in self._groups.values())

    @property
    def num_running(self) -> int:
        """The number of requests with a row."""
        return len(self._group_of) - self.num_waiting

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._group_of

    def add(
        self,
        /,  # an option may be called `self`, and is refused like other unknown ones
        prompt: Any = None,
        *,
        messages: Any = None,
        method: AnyMethod | None = None,
        stream: int = 0,
        **options: Any,
    ) -> int:
        """Adds one request.

        Args:
          prompt: a text, token ids or messages.
          messages: a conversation, instead of `prompt`.
          method: as in `LanguageModel.generate`.
          stream: the number of the random stream: requests with the same prompt, the same `seed` and the streams
            0 … n − 1 have the texts of `LanguageModel.generate` with this `n`.
          **options: the other options of `LanguageModel.generate`, without `n` and `max_batch`.

        Returns:
          The id of the request in the results of `step`.

        Raises:
          ValueError, FileNotFoundError: as `LanguageModel.generate`; or several prompts are given.
        """
        for name, instead in {
            "n": "add each text with its own `stream`",
            "max_batch": "give it to Scheduler",
        }.items():
            if name in options:
                raise ValueError(f"a request has no option {name}; {instead}")
        with needed():
            made, common = prepare.read_method(method, None, options)
            common = dataclasses.replace(common, max_batch=self._max_batch)
            requests, stops, single = read_requests(self._lm, prompt, messages, None, common)
            if not single:
                raise ValueError(f"got {len(requests)} prompts; add them one by one")
            if whole("stream", stream) < 0:
                raise ValueError(f"stream is {stream}; give at least 0")
            request = dataclasses.replace(requests[0], stream=stream)
            group = self._group(made, common, request)
        processes.check_same(self._lm.mesh, "a request", repr((request, stops, common)))
        number = next(self._numbers)
        group.ids.add(number)
        self._group_of[number] = group
        group.texts.begin(number, request, stops, group.texts.now())
        group.texts.session.add(number, request)
        return number

    def warm_up(
        self, max_tokens: int | None = None, *, method: AnyMethod | None = None, **options: Any
    ) -> None:
        """Compiles the programs of a method, so that no later request with it compiles any.

        They serve all numbers of rows up to `max_batch`, and all options but those that have programs of their own, see
        `LanguageModel.warm_up`.

        Args:
          max_tokens: the most tokens of a text, with its prompt. Default: the context.
          method: as in `LanguageModel.generate`.
          **options: as in `add`.

        Raises:
          ValueError, FileNotFoundError: as `add`.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> scheduler = Scheduler(lm, max_batch=1)
          >>> scheduler.warm_up(method="ngram")
          >>> compiled = lm.executables.num_compilations
          >>> number = scheduler.add("ab", max_new_tokens=6, method="ngram", temperature=0.5)
          >>> while not scheduler.idle:
          ...     pieces = scheduler.step()
          >>> lm.executables.num_compilations - compiled
          0
        """
        context = self._lm.config.context_length
        longest = context if max_tokens is None else whole("max_tokens", max_tokens)
        if not 3 <= longest <= context:
            raise ValueError(f"max_tokens is {longest}; give a number from 3 to the context of {context}")
        number = self.add([0], method=method, max_new_tokens=2, ignore_eos=True, **options)
        try:
            self._group_of[number].texts.session.warm_up(longest)
        finally:
            self.cancel(number)

    def cancel(self, id: int) -> None:
        """Ends a request without further pieces; its row is free before the next step. Ended requests are ignored."""
        if id in self._group_of:
            self._group_of[id].texts.cancel(id)
            self._forget(id)

    def step(self) -> list[tuple[int, Piece | Exception]]:
        """Runs one host poll of one group, and returns its new pieces, each after the id of its request.

        The last piece of a request has its result. An error, such as too little memory, ends all requests of the group:
        each has the error in place of a piece. The list is empty if there is no request or nothing new.
        """
        keys = [key for key, group in self._groups.items() if group.ids]
        if not keys:
            return []
        key = keys[0] if self._turns else max(keys, key=lambda one: len(self._groups[one].ids))
        self._groups.move_to_end(key)
        return self._step(key, self._groups[key])

    def _step(self, key: Any, group: _Group) -> list[tuple[int, Piece | Exception]]:
        try:
            pieces = group.texts.step(self._max_rounds)
        except Exception as error:
            # The caches of the group may be gone; the other groups go on.
            del self._groups[key]
            ended = list(group.ids)
            for number in ended:
                self._forget(number)
            return [(number, error) for number in ended]
        for piece in pieces:
            if piece.result is not None:
                self._forget(piece.index)
        return [(piece.index, piece) for piece in pieces]

    def _forget(self, number: int) -> None:
        self._group_of.pop(number).ids.remove(number)

    def _group(self, method: AnyMethod, options: GenerationOptions, request: RowRequest) -> _Group:
        """Returns the group of a request, a new one if necessary."""
        numbers = request.temperature, request.top_k, request.top_p, request.min_p
        by_distribution = isinstance(method, Method) and method.by_distribution
        key = (
            prepare.files_read(self._lm, method),
            _key(method),
            type(prepare.acceptor_of(method, options, [request])),
            bool(options.exact),
            Shapes.from_requests([request]),
            needs_sampling([request]),
            distribution_name(*numbers) if by_distribution else None,
        )
        if key not in self._groups:
            idle = [one for one, group in self._groups.items() if not group.ids]
            for place, one in enumerate(idle):  # the oldest ones, and those that read other files
                if place < len(idle) - IDLE_GROUPS + 1 or one[1:] == key[1:]:
                    del self._groups[one]
            texts = prepare.texts_of(
                self._lm, [request], method, options, elastic=True, in_chunks=self._turns
            )
            self._groups[key] = _Group(texts, method)
        # A row needs its own cache while its prompt is fed.
        self._groups[key].texts.session.check_memory([request], 1)
        return self._groups[key]


def _key(method: AnyMethod) -> Any:
    """Returns the method, or its id if it cannot be hashed."""
    try:
        hash(method)
    except TypeError:
        return id(method)
    return method
