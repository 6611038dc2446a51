"""The public face: `load` a model, `generate` or `stream` text."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.choosing.costs import StepCosts
from jaxspec.engine import compilation_cache as persistent_cache
from jaxspec.engine.alternatives import Alternatives
from jaxspec.engine.buckets import START_CAPACITY, bucket
from jaxspec.engine.drafts import Drafts, place
from jaxspec.engine.executables import Executables
from jaxspec.engine.jax_settings import needed
from jaxspec.engine.loading import (
    check_mesh,
    find_model,
    find_tokenizer,
    fit_to_mesh,
    place_params,
    resolve_mesh,
    resolve_placement,
    resolve_weights,
    unlisted_end,
)
from jaxspec.engine.requests import (
    Conversation,
    Integers,
    Numbers,
    Prompt,
    Prompts,
    RowRequest,
    Stops,
    batch_of,
    check_text,
    drawn_apart,
    is_text_or_ids,
    needs_sampling,
    requests_of,
    stops_of,
    unpadded,
    warn_of_no_effect,
)
from jaxspec.engine.results import Piece, Result
from jaxspec.engine.row import Row
from jaxspec.engine.session import Session
from jaxspec.engine.switching import Plan
from jaxspec.engine.text import RowText
from jaxspec.io import checkpoint, cost_files, memory, processes
from jaxspec.io.arguments import flag, whole
from jaxspec.io.hf_config import check_exits
from jaxspec.io.hf_generation import SAMPLING, Rules
from jaxspec.io.messages import shown
from jaxspec.io.method_files import Sampled, law_name
from jaxspec.io.tokenizer import Tokenizer
from jaxspec.methods import LoadedModel, Method, Resources, registry
from jaxspec.methods.acceptors import LOSSY, AcceptorName, build_acceptor
from jaxspec.methods.auto import Auto
from jaxspec.methods.base import Candidate
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, num_params
from jaxspec.model.sharding import automatic
from jaxspec.protocol import Drafter, Weights

# Rounds between two host polls: while a text is watched (streamed, stop strings, a file of choices), and otherwise.
STREAM_ROUNDS, QUIET_ROUNDS = 8, 64
_NO_TEMPLATE = "chat_template_kwargs is for a chat template; give messages, or a text with chat"
# A name, or a drafter, alone or with its parameters.
AnyMethod = str | Method | Drafter | tuple[Drafter, Any]


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    mesh: Mesh | str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    compilation_cache: bool = True,
) -> LanguageModel:
    """Loads a Llama-type model.

    Args:
      model: a Hugging Face directory, a `.gguf` file, the name of an embedded model, or a hub id (of one file:
        `owner/model:FILE.gguf`); None for the embedded model of `io.embedded.EMBEDDED`.
      dtype: float32, bfloat16 or float16; by default float32 on CPU and bfloat16 on accelerators.
      weights: "int8" holds the matrices, and those of draft models, in int8 with a scale for each output channel, and
        computes in `dtype`; they are quantised one by one while loading. Every method then writes the text that plain
        decoding writes with these weights, which is not always that of the weights as they were. None for `dtype`.
      device: cpu, gpu or tpu; by default JAX's default device.
      mesh: several devices instead, over which the model is spread: such as "data=2,model=4", over the first devices
        of that kind, or a `jax.sharding.Mesh` with these axes.
      chat_template: a Jinja file, for a model that has none.
      compilation_cache: let JAX keep compiled programs in the user's cache directory, for this whole process, so
        that another process need not compile them again. JAX keeps its own settings if it has a cache directory
        already; the environment variable `JAXSPEC_CACHE` names another directory, or `off`.

    Raises:
      FileNotFoundError, ValueError: one line that says what is wrong and what to do.

    Examples:
      >>> lm = load("small")
      >>> lm.name, lm.config.num_layers
      ('small', 12)
    """
    if compilation_cache:
        persistent_cache.enable()
    if model is not None and not isinstance(model, (str, os.PathLike)):
        raise ValueError(
            f"model is {shown(model)}; give a directory, a hub id or the name of an embedded model"
        )
    mesh = resolve_mesh(mesh, device)
    directory = find_model(model)
    config = checkpoint.read_config(directory)
    name = os.fspath(model) if model is not None else directory.name
    if mesh is not None:
        config = fit_to_mesh(mesh, config, name)
    place_on, wanted = resolve_placement(dtype, device, mesh)
    bits = resolve_weights(weights)
    if mesh is None:
        memory.check_fits(config, wanted, batch_size=1, capacity=START_CAPACITY, device=place_on, bits=bits)
    tokenizer = find_tokenizer(directory, chat_template)
    if tokenizer is not None and (warning := unlisted_end(tokenizer, config)):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    if ignored := checkpoint.unapplied_settings(directory):
        warnings.warn(
            f"generation_config.json of {shown(name)} asks for {', '.join(ignored)}, which jaxspec does not apply",
            RuntimeWarning,
            stacklevel=2,
        )
    with needed():
        params, sampled = place_params(directory, config, wanted, place_on, mesh, bits)
    return LanguageModel(
        config,
        params,
        tokenizer,
        name=name,
        directory=checkpoint.directory_of(directory),
        device=place_on,
        mesh=mesh,
        defaults=checkpoint.generation_defaults(directory),
        exits=checkpoint.read_exits(directory, config.num_layers),
        sampled=sampled,
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
      mesh: the devices over which params are spread by `model.sharding.spread`; None for one device.
      defaults: default settings of requests, as in `generation_config.json`: sampling parameters, penalties, and
        suppressed tokens (see `io.hf_generation`).
      exits: the exits that it was trained for, in layers run (SoFT).
      sampled: of quantised parameters, what was read of each leaf for the fingerprint, see `methods.LoadedModel`.

    Examples:
      >>> from jaxspec.testing import TARGET, params
      >>> LanguageModel(TARGET, params(), name="mine")
      <LanguageModel mine: 2 layers, 4,336 parameters, float32, on device ...>
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
        sampled: Sampled | None = None,
    ) -> None:
        self.config, self.params, self.tokenizer, self.name = config, params, tokenizer, name
        self.directory = directory
        if mesh is not None:
            check_mesh(mesh)
            mesh = automatic(mesh)
            device = mesh.devices.flat[0]
        self.device, self.mesh = device or jax.local_devices()[0], mesh
        self.defaults = _defaults(defaults or {})
        self.loaded = LoadedModel(config, params, name, check_exits(exits, config.num_layers), sampled)
        self.executables = Executables()

    def __repr__(self) -> str:
        size = num_params(self.config)
        count = f"{size:,}" if size < 1e6 else f"{size / 1e6:.1f}M" if size < 1e9 else f"{size / 1e9:.1f}B"
        held = "" if self.weights is None else f" with {self.weights} weights"
        return (
            f"<LanguageModel {self.name}: {self.config.num_layers} layers, {count} parameters, "
            f"{self.dtype}{held}, on {place(self.device, self.mesh)}>"
        )

    @property
    def _pad_ids(self) -> set[int]:
        """Tokens that callers use for padding: the tokenizer's, and the end-of-text tokens, which many use instead."""
        pad = None if self.tokenizer is None else self.tokenizer.pad_id
        return {*self.config.eos_token_ids, *(() if pad is None else (pad,))}

    @functools.cached_property
    def _drafts(self) -> Drafts:
        dtype = self.params["embed"].dtype
        return Drafts(self.config, self.tokenizer, dtype, self.device, self.mesh, self.loaded.bits)

    @property
    def dtype(self) -> str:
        """The dtype of the parameters, by name."""
        return str(self.params["embed"].dtype)

    @property
    def weights(self) -> str | None:
        """What the matrices are held as, by name, where that is not the dtype: int8."""
        bits = self.loaded.bits
        return None if bits is None else f"int{bits}"

    @property
    def precision(self) -> str:
        """What a report says of the numbers: the dtype, and what the weights are held as where that is not it.

        Such as float32, or "float32, int8 weights".
        """
        return self.dtype if self.weights is None else f"{self.dtype}, {self.weights} weights"

    @property
    def platform(self) -> str:
        """The platform that the model runs on: cpu, gpu or tpu."""
        platform: str = self.device.platform
        return platform

    @property
    def device_kind(self) -> str:
        """What the model runs on, for a report: the kind of its device, and its mesh if it is spread over several."""
        kind: str = self.device.device_kind
        if self.mesh is None:
            return kind
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return f"{kind} × {self.mesh.size} ({axes})"

    @property
    def exits(self) -> tuple[int, ...]:
        """The exits that the model was trained for, in layers run (SoFT)."""
        return self.loaded.exits

    @property
    def fingerprint(self) -> str:
        """The name of the model in the files of its methods, see `io.method_files.fingerprint`."""
        return self.loaded.fingerprint

    def encode(
        self,
        text: str | Conversation,
        *,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a text as it is, of a text in the chat template (with `chat`), or of messages.

        `chat_template_kwargs`: as in `generate`.

        Raises:
          ValueError: the model has no tokenizer or no chat template, the text is not valid UTF-8, or variables are
            given and no template is used.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> language_model().encode("ab cd")
          [0, 12, 9]
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; give prompts as token ids")
        if isinstance(text, str):
            check_text("the prompt", text)
            if not chat:
                if chat_template_kwargs:
                    raise ValueError(_NO_TEMPLATE)
                return self.tokenizer.encode(text)
        return self.tokenizer.encode_chat(text, chat_template_kwargs)

    # A str is a Sequence[str] too; the first that fits is meant.
    @overload
    def generate(
        self,
        prompts: Prompt | Conversation | None = None,
        *,
        messages: Conversation | None = None,
        attention_mask: Any = None,
        method: AnyMethod = "autoregressive",
        acceptor: AcceptorName | None = None,
        max_new_tokens: Integers = None,
        temperature: Numbers = None,
        top_k: Integers = None,
        top_p: Numbers = None,
        min_p: Numbers = None,
        repetition_penalty: Numbers = None,
        presence_penalty: Numbers = None,
        frequency_penalty: Numbers = None,
        seed: Integers = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Integers = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_batch: int = 8,
        **options: Any,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Conversation] | None = None,
        *,
        messages: Sequence[Conversation] | None = None,
        attention_mask: Any = None,
        method: AnyMethod = "autoregressive",
        acceptor: AcceptorName | None = None,
        max_new_tokens: Integers = None,
        temperature: Numbers = None,
        top_k: Integers = None,
        top_p: Numbers = None,
        min_p: Numbers = None,
        repetition_penalty: Numbers = None,
        presence_penalty: Numbers = None,
        frequency_penalty: Numbers = None,
        seed: Integers = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Integers = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_batch: int = 8,
        **options: Any,
    ) -> list[Result]: ...
    @overload
    def generate(self, prompts: np.ndarray | jax.Array, **options: Any) -> Any: ...

    def generate(self, prompts: Any = None, **options: Any) -> Any:
        """Generates a text after each prompt.

        Args:
          prompts: a text, token ids or the messages of a conversation, or a list of such; arrays are lists. The result
            of a transformers tokenizer, `input_ids` with `attention_mask`, is accepted too.
          messages: the same for conversations only: messages with `role` and `content` each, which go through the
            chat template, or a list of such conversations. A content is a text, or a list of parts such as
            `{"type": "text", "text": "Hi"}`, which are joined by line ends into one text. A last message of the
            assistant is continued.
          attention_mask: for padded token ids, 0 for each id that is padding and 1 for the others; padding is removed
            from the prompts. An array of two dimensions with padding and without a mask is refused.
          method: a name in `jaxspec.METHODS`, an instance of one of `jaxspec.methods`, or a drafter (with its
            parameters, if it has some).
          acceptor: how drafts are accepted. With greedy, rejection, block and coupled the text keeps its distribution;
            with coupled (Daliri et al. 2024) it equals the text that plain decoding draws with the same seed. With
            typical, which is lossy, sampled text follows another distribution (see `lossy.TypicalAcceptor`), and
            `Result.lossy` is true. None for greedy at temperature 0, else block (coupled with method `auto`).
          max_new_tokens: the budget, for all or per prompt; None for 128, or what the context leaves.
          temperature: 0 for greedy; like the three below for all or per prompt, and where it is None what the
            model's generation_config.json says, else greedy without filters.
          top_k, top_p, min_p: see `sampling.Sampling`. At temperature 0 they have no effect, and a `RuntimeWarning`
            reports it.
          repetition_penalty, presence_penalty, frequency_penalty: see `penalties.Penalties`; for all or per prompt.
            None for the value in the model's generation_config.json. They are part of the model's sampling
            distribution with every method: draft tokens count as text for the tokens after them.
          seed: of the randomness; each prompt of a list has a stream of its own. With one seed per prompt a
            prompt's text does not depend on its place in the list. With method `auto` and an acceptor that is not
            coupled it does, because the choices are made for the whole batch, and prompts with one seed use different
            random streams.
          stop: strings that end a text, found across token borders; they are not part of the text. If a string is the
            text of a special token, the text ends at that token. None for none.
          stop_token_ids: ids of tokens that end a text, and are not part of it; an id or a list, for all prompts.
          ignore_eos: continue after the model's end tokens, up to the budget. End tokens are the `eos_token_id`s of
            config.json and of generation_config.json together; transformers uses only the latter.
          logprobs: report each token's log-probability under the model's raw law.
          chat: put each prompt as a user's message through the chat template.
          chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}` for Qwen3.
          max_batch: most prompts at once; the others take the rows that become free.
          **options: of the method that is given by name: the fields of its class in `jaxspec.methods`.

        Returns:
          A `Result` for one prompt, a list for a list. A text whose logits become NaN or infinite ends there: its
          `finish_reason` is "error", and a `RuntimeWarning` says so.

        Raises:
          ValueError, FileNotFoundError: one line that says what was got, what was expected, what to do.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> result = lm.generate("ab", max_new_tokens=6)
          >>> result.text, result.finish_reason
          ('ab adeab a', 'length')
        """
        if "stream" in options:
            raise ValueError(
                "generate has no option stream; call LanguageModel.stream, which yields pieces as they come"
            )
        with needed():
            pieces, single = self._start(QUIET_ROUNDS, prompts, **options)
        results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        ordered = [results[index] for index in range(len(results))]
        for result in ordered:
            if result.error is not None:
                warnings.warn(result.error, RuntimeWarning, stacklevel=2)
        return ordered[0] if single else ordered

    def stream(
        self,
        prompts: Prompts | None = None,
        *,
        messages: Conversation | Sequence[Conversation] | None = None,
        attention_mask: Any = None,
        method: AnyMethod = "autoregressive",
        acceptor: AcceptorName | None = None,
        max_new_tokens: Integers = None,
        temperature: Numbers = None,
        top_k: Integers = None,
        top_p: Numbers = None,
        min_p: Numbers = None,
        repetition_penalty: Numbers = None,
        presence_penalty: Numbers = None,
        frequency_penalty: Numbers = None,
        seed: Integers = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Integers = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_batch: int = 8,
        **options: Any,
    ) -> Iterator[Piece]:
        """Generates a text after each prompt, and yields its pieces as they come.

        Args:
          prompts: a text, token ids or messages, or a list of such.
          **options: as in `generate`, like all the arguments between. They are checked before this returns.

        Returns:
          An iterator of `Piece`s, of which the last of each prompt carries the result: the one that `generate`
          returns. Nothing runs before the first is asked for.

        Raises:
          ValueError, FileNotFoundError: as `generate`.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> "".join(piece.text for piece in lm.stream("ab", max_new_tokens=6))
          'ab adeab a'
        """
        with needed():
            pieces, _ = self._start(
                STREAM_ROUNDS,
                prompts,
                messages=messages,
                attention_mask=attention_mask,
                method=method,
                acceptor=acceptor,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                seed=seed,
                stop=stop,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
                logprobs=logprobs,
                chat=chat,
                chat_template_kwargs=chat_template_kwargs,
                max_batch=max_batch,
                **options,
            )
        return pieces

    def _start(
        self,
        rounds: int,
        prompts: Any,
        *,
        messages: Any = None,
        attention_mask: Any = None,
        method: AnyMethod = "autoregressive",
        acceptor: AcceptorName | None = None,
        max_new_tokens: Any = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        min_p: Any = None,
        repetition_penalty: Any = None,
        presence_penalty: Any = None,
        frequency_penalty: Any = None,
        seed: Any = 0,
        stop: Any = (),
        stop_token_ids: Any = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_batch: int = 8,
        **options: Any,
    ) -> tuple[Iterator[Piece], bool]:
        """Checks the arguments of `generate`; returns its pieces, and whether there is a single prompt.

        `rounds`: between two host polls, where there is no stop string.
        """
        ignore_eos, logprobs = flag("ignore_eos", ignore_eos), flag("logprobs", logprobs)
        chat = flag("chat", chat)
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise ValueError(
                f"chat_template_kwargs is {shown(chat_template_kwargs)}; give variables of the template by name"
            )
        prompts = unpadded(prompts, attention_mask, self._pad_ids)
        batch, single = batch_of(prompts, messages)
        special = self.tokenizer.special_id if self.tokenizer is not None else lambda text: None
        stops = stops_of(stop, stop_token_ids, special, self.config.vocab_size)
        if stops.strings and self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; stop strings need one")
        if chat_template_kwargs and all(is_text_or_ids(one) and not isinstance(one, str) for one in batch):
            raise ValueError(_NO_TEMPLATE)
        rows = whole("max_batch", max_batch)
        if rows < 1:
            raise ValueError(f"max_batch is {rows}; give at least 1")
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
        }
        requests = requests_of(
            batch,
            functools.partial(self.encode, chat=chat, chat_template_kwargs=chat_template_kwargs),
            self.config,
            max_new_tokens=max_new_tokens,
            law={name: self.defaults.get(name) if value is None else value for name, value in given.items()},
            seed=seed,
            ignore_eos=ignore_eos,
            stop_ids=stops.ids,
            rules=Rules.of(self.defaults),
            name="prompts" if messages is None else "messages",
        )
        warn_of_no_effect(requests, given)
        laws = tuple(law_name(r.temperature, r.top_k, r.top_p, r.min_p) for r in requests)
        method = self._made(method, options)
        if acceptor is None and isinstance(method, Auto):
            # The choices depend on measured times, and must not change the text that a seed gives.
            acceptor = "coupled"
        accept = build_acceptor(acceptor, needs_sampling(requests))
        drafter, weights = self._parts(method, laws, self.directory)
        self._check_memory(requests, rows, drafter.reach)
        plan = self._plan(method, laws, drafter.num_draft_tokens, requests, rows)
        mixed = plan is not None or drafter.shared_mask
        requests = drawn_apart(requests) if mixed and not accept.coupled else requests
        session = Session(
            self.executables,
            self.config,
            weights,
            drafter,
            accept,
            requests,
            max_batch=rows,
            log_probs=logprobs,
            mesh=self.mesh,
            device=self.device,
            plan=plan,
        )
        lossy = acceptor in LOSSY and drafter.num_draft_tokens > 0
        # Rows that become free wait for a poll: it comes as often where choices are made again as where they were made.
        watched = stops.strings or (plan is not None and plan.file is not None)
        return self._run(session, requests, stops, STREAM_ROUNDS if watched else rounds, lossy), single

    def drafter(
        self,
        method: str | Method,
        *,
        beside: bool = True,
        laws: tuple[str, ...] = ("greedy",),
        **method_options: Any,
    ) -> tuple[Drafter, Any]:
        """Returns the drafter of a method's name and its parameters: what `generate` makes of them.

        `beside`: whether the files that lie beside the model count; `laws`: of the texts, by their names (see
        `io.method_files.law_name`).

        Raises:
          ValueError, FileNotFoundError: as `generate`.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> drafter, params = language_model().drafter("ngram", ngram_max=4)
          >>> drafter.num_draft_tokens, params
          (10, None)
        """
        directory = self.directory if beside else None
        with needed():
            drafter, weights = self._parts(self._made(method, method_options), laws, directory)
        return drafter, weights.drafter

    def _check_memory(self, requests: Sequence[RowRequest], max_batch: int, reach: int) -> None:
        """Refuses a batch whose cache cannot fit beside the model, before anything is computed."""
        if self.mesh is None:
            longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
            rows = min(max_batch, len(requests))
            # Rows that are refilled have a cache beside the batch's until their prompts are through.
            rows += min(rows, len(requests) - rows)
            memory.check_cache_fits(
                self.config, self.params["embed"].dtype, rows, bucket(longest + reach), self.device
            )

    def _made(self, method: AnyMethod, options: Mapping[str, Any]) -> AnyMethod:
        """Returns a method; one that is given by its name made with these options."""
        if isinstance(method, str):
            return registry.make(method, options, _ARGUMENTS)
        if options:
            raise ValueError(
                f"{min(options)} belongs to a method's name; {type(method).__name__} carries its own options"
            )
        return method

    def _resources(self, laws: tuple[str, ...], directory: Path | None) -> Resources:
        drafts = self._drafts
        return Resources(
            *(drafts.load, self.encode, directory, laws, self.platform, drafts.load_head, drafts.quantised)
        )

    def _plan(
        self,
        method: AnyMethod,
        laws: tuple[str, ...],
        longest: int,
        requests: Sequence[RowRequest],
        max_batch: int,
    ) -> Plan | None:
        """Returns what a text may change between; None for a method of one drafter, and where nothing can be."""
        if not isinstance(method, Auto):
            return None
        if self.mesh is not None:
            warnings.warn(
                "method auto chooses nothing on a mesh: texts are decoded plainly",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        return self._alternatives.plan(method, laws, self.step_costs, longest, requests, max_batch)

    @functools.cached_property
    def _alternatives(self) -> Alternatives:
        device = self.device if self.mesh is None else None
        return Alternatives(self.loaded, functools.partial(self._resources, directory=self.directory), device)

    @functools.cached_property
    def step_costs(self) -> StepCosts | None:
        """The costs of steps that were measured for such a model on such a device; None where none were."""
        key = cost_files.key(self.device_kind, self.platform, self.config, self.precision)
        path = cost_files.path_of(key)
        try:
            return None if path is None or not path.is_file() else cost_files.read(path, key)
        except (OSError, ValueError):
            return None

    def candidates(self, method: Auto, laws: tuple[str, ...] = ("greedy",)) -> tuple[Candidate, ...]:
        """Returns what method `auto` chooses among, looked for and made once for all texts.

        `laws`: of the texts, see `drafter`.

        Raises:
          ValueError, FileNotFoundError: as `generate`.

        Examples:
          >>> from jaxspec.methods import Auto
          >>> from jaxspec.testing import language_model
          >>> [one.name for one in language_model().candidates(Auto())]
          ['ngram', 'suffix']
        """
        with needed():
            return self._alternatives.candidates(method, laws)

    def compiled_early(self) -> contextlib.AbstractContextManager[None]:
        """Within it method `auto` compiles whatever a text may change to at once, in the background, not only what
        pays: for those who take times, once `executables.wait()` has returned.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> with lm.compiled_early():
          ...     text = lm.generate("ab", method="auto", among="ngram", max_new_tokens=4)
          ...     lm.executables.wait()
        """
        return self._alternatives.compiled_early()

    def _parts(
        self, method: AnyMethod, laws: tuple[str, ...], directory: Path | None
    ) -> tuple[Drafter, Weights]:
        """Returns the drafter of a method, or the one that is given, and the parameters of the loop."""
        drafter: Any
        if isinstance(method, Method):
            drafter, params = method.build(self.loaded, self._resources(laws, directory))
        else:
            drafter, params = method if isinstance(method, tuple) and len(method) == 2 else (method, None)
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"method is {shown(method)}; give a name ({', '.join(registry.names())}), an instance of one of "
                "jaxspec.methods, or a subclass of jaxspec.protocol.Drafter"
            )
        needed = drafter.num_nodes + 1
        if drafter.verify_widths[-1] != needed or drafter.reach < needed:
            raise ValueError(
                f"the drafter {type(drafter).__name__} proposes up to {needed - 1} tokens and has "
                f"verify_widths={drafter.verify_widths} and reach={drafter.reach}; let verify_widths end with "
                f"{needed}, and reach be at least {needed}"
            )
        return drafter, Weights(self.params, params)

    def _run(
        self,
        session: Session,
        requests: Sequence[RowRequest],
        stops: Stops,
        rounds: int,
        lossy: bool,
    ) -> Iterator[Piece]:
        variants = self.executables.variants
        processes.check_same(
            self.mesh, "the prompts, or options of the texts,", repr((requests, stops, rounds))
        )
        began, waited = processes.agreed(self.mesh, time.perf_counter(), self.executables.blocked_ms)
        rows = [
            Row(
                request,
                RowText(self.tokenizer.stream(request.prompt) if self.tokenizer else None, *stops),
                began,
                lossy=lossy and request.temperature > 0,
            )
            for request in requests
        ]
        while not session.done:
            updates = session.step(rounds)
            now, blocked_ms = processes.agreed(self.mesh, time.perf_counter(), self.executables.blocked_ms)
            for update in updates:
                counts = self.executables.variants - variants
                gamma = functools.partial(session.gamma, update.row)
                blocked = blocked_ms - waited
                piece = rows[update.index].take(update, now, blocked, counts, gamma, session.switching)
                if piece.result is not None and not update.done:
                    session.halt(update.index)
                yield piece


def _defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a generation config; without do_sample its sampling parameters are left out."""
    if generation.get("do_sample"):
        return {"temperature": 1.0} | {name: n for name, n in generation.items() if name != "do_sample"}
    return {name: n for name, n in generation.items() if name != "do_sample" and name not in SAMPLING}


# What `generate` takes beside a method's options, for the guess at what a misspelt one means.
_ARGUMENTS = tuple(inspect.signature(LanguageModel.stream).parameters)[1:-1]
