"""The public face: `load` a model, `generate` text."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec import methods
from jaxspec.engine.executables import Executables
from jaxspec.engine.loading import find_model, find_tokenizer, place_params, resolve_placement
from jaxspec.engine.results import Piece, Result
from jaxspec.engine.row import Row
from jaxspec.engine.session import START_CAPACITY, RowRequest, Session, bucket, needs_sampling
from jaxspec.engine.text import RowText
from jaxspec.io import huggingface, memory
from jaxspec.io.hf_config import check_exits
from jaxspec.io.method_files import law_name
from jaxspec.io.tokenizer import Tokenizer
from jaxspec.methods import MethodOptions, Model
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Drafter, Weights

Prompt = str | Sequence[int]
# Rounds between two looks of the host: while a text is watched (streamed, stop strings), and otherwise.
STREAM_ROUNDS, QUIET_ROUNDS = 8, 64
# Tokens generated where nobody says how many.
DEFAULT_BUDGET = 128


def load(
    model: str | os.PathLike | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    mesh: Mesh | None = None,
    chat_template: str | os.PathLike | None = None,
) -> LanguageModel:
    """Loads a Llama-type model.

    Args:
      model: a Hugging Face directory, the name of an embedded model, or a hub id; None for the embedded model
        of `loading.EMBEDDED`.
      dtype: float32, bfloat16 or float16; by default float32 on CPU and bfloat16 on accelerators.
      device: cpu, gpu or tpu; by default JAX's default device.
      mesh: with axes `data` and `model`, to spread the model over several devices instead.
      chat_template: a Jinja file, for a model that has none.

    Raises:
      FileNotFoundError, ValueError: one line that says what is wrong and what to do.
    """
    directory = find_model(model)
    config = huggingface.read_config(directory)
    if mesh is not None:
        # The loop leaves the spreading of what it computes to the compiler: axes of type Auto.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    place_on, kind = resolve_placement(dtype, device, mesh)
    if mesh is None:
        memory.check_fits(config, kind, batch_size=1, capacity=START_CAPACITY, device=place_on)
    tokenizer = find_tokenizer(directory, chat_template)
    params = place_params(directory, config, kind, place_on, mesh)
    return LanguageModel(
        config,
        params,
        tokenizer,
        name=os.fspath(model) if model is not None else directory.name,
        directory=directory,
        device=place_on,
        mesh=mesh,
        defaults=huggingface.generation_defaults(directory),
        exits=huggingface.read_exits(directory, config.num_layers),
    )


class LanguageModel:
    """A model ready to generate: `load` makes one; parameters made in memory do as well.

    Args:
      config: the model.
      params: its parameters.
      tokenizer: None if only token ids are used.
      name: how it is called in reports.
      directory: where it was loaded from, and where the files of its methods lie; None if it was not.
      device: where params are; None for JAX's default device.
      mesh: over which params are spread; None for one device.
      defaults: sampling numbers used where none are given, as in `generation_config.json`.
      exits: those it was trained for, in layers run (SoFT).
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        name: str = "model",
        directory: Path | None = None,
        device: jax.Device | None = None,
        mesh: Mesh | None = None,
        defaults: dict[str, Any] | None = None,
        exits: Sequence[int] = (),
    ) -> None:
        self.config, self.params, self.tokenizer, self.name = config, params, tokenizer, name
        self.directory = directory
        self.device, self.mesh = device or jax.devices()[0], mesh
        self.defaults = _sampling_defaults(defaults or {})
        self._as_target = Model(config, params, name, check_exits(exits, config.num_layers))
        self.executables = Executables()
        self._drafts: dict[str, Model] = {}
        # By method and options: the drafter that the last text left, where something is carried over.
        self._carried: dict[Any, Drafter] = {}

    @property
    def dtype(self) -> str:
        """The dtype of the parameters, by name."""
        return str(self.params["embed"].dtype)

    @property
    def exits(self) -> tuple[int, ...]:
        """Those it was trained for, in layers run (SoFT)."""
        return self._as_target.exits

    @property
    def fingerprint(self) -> str:
        """Names the model in the files of its methods, see `io.method_files.fingerprint`."""
        return self._as_target.fingerprint

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Token ids of a text, or of a user's message in the model's chat template."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; give prompts as token ids")
        return self.tokenizer.encode_chat(text) if chat else self.tokenizer.encode(text)

    @overload
    def generate(self, prompts: str, *, stream: Literal[False] = False, **options: Any) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> list[Result]: ...
    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, stream: Literal[True], **options: Any
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompts: Any,
        *,
        method: str | Drafter | tuple[Drafter, Any] = "autoregressive",
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float | Sequence[float] | None = None,
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] | None = None,
        min_p: float | Sequence[float] | None = None,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        chat: bool = False,
        stream: bool = False,
        max_batch: int = 8,
        **method_options: Any,
    ) -> Result | list[Result] | Iterator[Piece]:
        """Generates a text after each prompt.

        Args:
          prompts: a text or a list of token ids, or a list of such.
          method: a name in `methods.METHODS`, or a drafter (with its parameters, if it has some).
          max_new_tokens: the budget, for all or per prompt; None for 128, or what the context leaves.
          temperature: 0 for greedy; like the three below for all or per prompt, and by default what the
            model's generation_config.json says, else greedy without filters.
          top_k, top_p, min_p: see `sampling.Sampling`.
          seed: of the randomness; each prompt of a list has a stream of its own. One seed a prompt: a prompt's
            text then does not depend on its place in the list.
          stop: strings that end a text, found across token borders; the text ends before them.
          ignore_eos: go on to the budget.
          logprobs: report each token's log-probability under the model's raw law.
          chat: put each prompt as a user's message through the chat template.
          stream: yield pieces as they come, instead of returning results.
          max_batch: most prompts at once; the others take the rows that become free.
          **method_options: see `methods.MethodOptions`.

        Returns:
          A `Result` for one prompt, a list for a list; with `stream` an iterator of `Piece`s, of which the
          last of each prompt carries the result. A text whose logits become NaN or infinite ends there:
          its `finish_reason` is "error", and a `RuntimeWarning` says so unless it is streamed.

        Raises:
          ValueError, FileNotFoundError: one line that says what was got, what was expected, what to do.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
        batch = [prompts] if single else list(prompts)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; stop strings need one")
        if "" in stops:
            raise ValueError("a stop string is empty; give at least one character")
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; give at least 1")
        law = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        requests = self._requests(batch, max_new_tokens, law, seed, ignore_eos, chat)
        chosen = self._options(method_options)
        laws = tuple(law_name(r.temperature, r.top_k, r.top_p, r.min_p) for r in requests)
        acceptor = methods.build_acceptor(chosen, needs_sampling(requests))
        drafter, weights = self._method(method, chosen, laws, self.directory)
        # What is carried over belongs to a method, its options and its laws.
        carried = (method, chosen, frozenset(laws)) if chosen.carry_gamma else None
        if carried is not None:
            drafter = methods.carried_over(drafter, self._carried.get(carried))
        self._check_memory(requests, max_batch, drafter.reach)
        session = Session(
            self.executables,
            self.config,
            weights,
            drafter,
            acceptor,
            requests,
            max_batch=max_batch,
            log_probs=logprobs,
            static_plans=chosen.static,
            carries=methods.carries(drafter),
            mesh=self.mesh,
            device=self.device,
        )
        rounds = STREAM_ROUNDS if stream or stops else QUIET_ROUNDS
        pieces = self._run(session, requests, stops, rounds, carried)
        if stream:
            return pieces
        results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        ordered = [results[index] for index in range(len(batch))]
        for result in ordered:
            if result.error is not None:
                warnings.warn(result.error, RuntimeWarning, stacklevel=2)
        return ordered[0] if single else ordered

    def drafter(self, method: str, *, beside: bool = True, **method_options: Any) -> tuple[Drafter, Any]:
        """The drafter of a method's name and its parameters: what `generate` makes of them for greedy texts.

        `beside`: whether the files that lie beside the model count.

        Raises:
          ValueError, FileNotFoundError: as `generate`.
        """
        directory = self.directory if beside else None
        drafter, weights = self._method(method, self._options(method_options), ("greedy",), directory)
        return drafter, weights.drafter

    def _requests(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int] | None,
        law: dict[str, Any],
        seed: int | Sequence[int],
        ignore_eos: bool,
        chat: bool,
    ) -> list[RowRequest]:
        if not prompts:
            raise ValueError("there is no prompt; give at least one")
        count = len(prompts)
        given = {name: self.defaults.get(name) if value is None else value for name, value in law.items()}
        numbers = {name: _per_row(name, v, count) for name, v in given.items() if v is not None}
        budgets = [None] * count
        if max_new_tokens is not None:
            budgets = _per_row("max_new_tokens", max_new_tokens, count)
        seeds = [seed] * count if isinstance(seed, int) else _per_row("seed", seed, count)
        requests = []
        for index, prompt in enumerate(prompts):
            ids = self.encode(prompt, chat=chat) if isinstance(prompt, str) else [int(i) for i in prompt]
            if not ids or (isinstance(prompt, str) and not prompt):
                raise ValueError("the prompt is empty; give at least one token")
            outside = [i for i in ids if not 0 <= i < self.config.vocab_size]
            if outside:
                raise ValueError(
                    f"token id {outside[0]} is outside the vocabulary; ids are from 0 to {self.config.vocab_size - 1}"
                )
            context, asked = self.config.context_length, budgets[index]
            budget = max(1, min(DEFAULT_BUDGET, context - len(ids))) if asked is None else int(asked)
            if budget < 1:
                raise ValueError(f"--max-new-tokens is {budget}; give at least 1")
            if len(ids) + budget > context:
                raise ValueError(
                    f"prompt ({len(ids)} tokens) and --max-new-tokens ({budget}) exceed the model's context of "
                    f"{context}; shorten one of them"
                )
            requests.append(
                _checked(
                    RowRequest(
                        prompt=tuple(ids),
                        max_new_tokens=budget,
                        eos_ids=() if ignore_eos else self.config.eos_token_ids,
                        seed=int(seeds[index]),
                        # With a seed of its own a row does not depend on its place in the list.
                        stream=index if isinstance(seed, int) else 0,
                        **{name: values[index] for name, values in numbers.items()},
                    )
                )
            )
        return requests

    def _check_memory(self, requests: Sequence[RowRequest], max_batch: int, reach: int) -> None:
        """Refuses a batch whose cache cannot fit beside the model, before anything is computed."""
        if self.mesh is None:
            longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
            rows = min(max_batch, len(requests))
            memory.check_cache_fits(
                self.config, self.params["embed"].dtype, rows, bucket(longest + reach), self.device
            )

    def _options(self, options: dict[str, Any]) -> MethodOptions:
        """The options of a method that a call gave."""
        known = {field.name for field in dataclasses.fields(MethodOptions)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option {unknown[0]}; method options are {', '.join(sorted(known))}")
        for name in ("stop_rule", "reference"):
            if isinstance(options.get(name), str):
                options = {**options, name: (options[name],)}
        draft = options.get("draft")
        if isinstance(draft, os.PathLike):
            options = {**options, "draft": os.fspath(draft)}
        if isinstance(draft, LanguageModel):
            self._check_draft(draft.name, draft.config, draft.tokenizer)
            options = {**options, "draft": draft.name}
            self._drafts[draft.name] = draft._as_target
        return MethodOptions(**options)

    def _method(
        self,
        method: str | Drafter | tuple[Drafter, Any],
        chosen: MethodOptions,
        laws: tuple[str, ...],
        directory: Path | None,
    ) -> tuple[Drafter, Weights]:
        if not isinstance(method, str):
            foreign = sorted(set(methods.options_given(chosen)) - {"acceptor"})
            if foreign:
                raise ValueError(
                    f"{foreign[0]} belongs to a method's name; a Drafter object carries its own numbers"
                )
            drafter, params = method if isinstance(method, tuple) else (method, None)
        else:
            resources = methods.Resources(self._load_draft, self.encode, directory, laws)
            drafter, params = methods.build(method, chosen, self._as_target, resources)
        return drafter, Weights(self.params, params)

    def _load_draft(self, name: str) -> Model:
        if name not in self._drafts:
            directory = find_model(name)
            config, tokenizer = huggingface.read_config(directory), find_tokenizer(directory)
            self._check_draft(name, config, tokenizer)
            dtype = self.params["embed"].dtype
            if self.mesh is None:
                memory.check_fits(config, dtype, batch_size=1, capacity=START_CAPACITY, device=self.device)
            params = place_params(directory, config, dtype, self.device, self.mesh)
            exits = huggingface.read_exits(directory, config.num_layers)
            self._drafts[name] = Model(config, params, name, exits)
        return self._drafts[name]

    def _check_draft(self, name: str, config: LlamaConfig, tokenizer: Tokenizer | None) -> None:
        """Refuses a draft whose tokens mean something else."""
        if config.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"draft {name} has a vocabulary of {config.vocab_size} tokens, the target of "
                f"{self.config.vocab_size}; a draft must have the target's"
            )
        if self.tokenizer and tokenizer and not self.tokenizer.same_vocabulary(tokenizer):
            raise ValueError(
                f"draft {name} has another vocabulary than the target, of the same size; "
                "a draft must share the target's tokenizer"
            )

    def _run(
        self,
        session: Session,
        requests: Sequence[RowRequest],
        stops: tuple[str, ...],
        rounds: int,
        carried: Any,
    ) -> Iterator[Piece]:
        began, variants = time.perf_counter(), self.executables.variants
        rows = [
            Row(
                request,
                RowText(self.tokenizer.stream(request.prompt) if self.tokenizer else None, stops),
                began,
            )
            for request in requests
        ]
        while not session.done:
            for update in session.step(rounds):
                counts = self.executables.variants - variants
                piece = rows[update.index].take(update, self.executables.blocked_ms, counts)
                if piece.result is not None and not update.done:
                    session.halt(update.index)
                if piece.result is not None and carried is not None:
                    self._carried[carried] = session.drafter
                yield piece


def _per_row(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (int, float, np.number)):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} prompts; give one, or one a prompt")
    return values


def _checked(request: RowRequest) -> RowRequest:
    if not (request.temperature >= 0 and math.isfinite(request.temperature)):
        raise ValueError(f"--temperature is {request.temperature}; give 0 (greedy) or a positive number")
    if not 0 < request.top_p <= 1:
        raise ValueError(f"--top-p is {request.top_p}; give a number above 0 and at most 1")
    if not 0 <= request.top_k < 2**31:
        raise ValueError(f"--top-k is {request.top_k}; give 0 (all tokens) or a positive number")
    if not 0 <= request.seed < 2**32:
        raise ValueError(f"--seed is {request.seed}; give a number from 0 to {2**32 - 1}")
    if not 0 <= request.min_p <= 1:
        raise ValueError(f"--min-p is {request.min_p}; give a number from 0 to 1")
    return request


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a generation config, which count only where it samples."""
    if not generation.get("do_sample"):
        return {}
    return {"temperature": 1.0} | {name: n for name, n in generation.items() if name != "do_sample"}
