"""A loaded model: its parameters, tokenizer, files, devices and compiled programs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jaxspec.costs.rounds import StepCosts
from jaxspec.engine import exactness
from jaxspec.host.arguments import num_bytes
from jaxspec.io.hf.generation_json import SAMPLING
from jaxspec.io.methods import cost_files
from jaxspec.io.methods.method_files import Sampled
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.io.trained_for import TrainedFor
from jaxspec.loading.drafts import Drafts, place
from jaxspec.loading.loading import check_mesh
from jaxspec.methods import LoadedModel
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, num_params
from jaxspec.model.lora import unadapted
from jaxspec.model.sharding import automatic
from jaxspec.programs import memory
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Executables
from jaxspec.programs.jax_settings import needed
from jaxspec.session.auto import Auto
from jaxspec.session.prefix import PrefixStore
from jaxspec.texts.requests import NO_TEMPLATE, Messages, check_text


class Model:
    """The model of a `LanguageModel`, whose arguments these are.

    Attributes:
      loaded: its config and parameters, as the methods take them.
      executables: its compiled programs.
      prefixes: the kept texts; None without `prefix_cache`.
      autos: its drafters of method `auto` with the identity of their files, by the method and the distributions.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> language_model().precision
      'float32'
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
        self.autos: dict[Any, tuple[Any, Auto]] = {}
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

    def loop(self, exact: bool = False) -> Loop:
        """Returns the compiled loop; `exact`: that of texts with this option."""
        config = self.loaded.exact.config if exact else self.config
        return Loop(self.executables, config, self.mesh, self.device)

    @property
    def _cost_key(self) -> dict[str, Any]:
        return cost_files.key(self.device_kind, self.platform, self.config, self.precision)

    @functools.cached_property
    def step_costs(self) -> StepCosts | None:
        """The measured costs of steps of this model on this kind of device; None if there are no measurements."""
        return cost_files.read(self._cost_key)


def _defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a generation config, without its sampling parameters unless do_sample is set."""
    if generation.get("do_sample"):
        return {"temperature": 1.0} | {name: n for name, n in generation.items() if name != "do_sample"}
    return {name: n for name, n in generation.items() if name != "do_sample" and name not in SAMPLING}
