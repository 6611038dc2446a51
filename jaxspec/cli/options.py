"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from jaxspec.method_options import MethodOptions, options_given

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it runs.

    Attributes:
      model: a directory as Hugging Face lays it out, a .gguf file, a hub id such as owner/model or
        owner/model:FILE.gguf, or the name of a model that comes with jaxspec. Default: one of those.
      dtype: of weights and cache. Default float32 on CPU, bfloat16 elsewhere.
      device: Default: the fastest that JAX sees.
      chat_template: a Jinja file, for a model that has no chat template.
    """

    model: str | None = None
    dtype: Dtype | None = None
    device: Device | None = None
    chat_template: str | None = None

    def load(self) -> LanguageModel:
        """The model, loaded."""
        from jaxspec.engine.language_model import load

        return load(self.model, dtype=self.dtype, device=self.device, chat_template=self.chat_template)


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen. Where nothing is said, as the model's generation_config.json says, else greedy.

    Attributes:
      temperature: 0 takes the likeliest token, 1 draws from the model's own law.
      top_k: draw from the K likeliest tokens only; 0 for all.
      top_p: draw from the likeliest tokens that together have this probability, above 0 and at most 1.
      min_p: draw from tokens at least this times as likely as the likeliest, 0 to 1.
      seed: of the random draws; the same seed gives the same text again.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """What to write: the base of the commands that generate text.

    Attributes:
      prompt: the text to go on from; or give --prompt-file, or pipe it in.
      prompt_file: read the prompt from a file; one newline at its end is left out, as with a pipe.
      max_new_tokens: how many tokens to generate at most. Default 128, or what the context leaves.
      stop_string: end the text before this string.
      chat: the prompt is a message; put it through the model's chat template.
      ignore_eos: go on past the model's end-of-text token.
      json: print one JSON object and nothing else.
    """

    prompt: Annotated[str | None, Positional] = None
    prompt_file: str | None = None
    max_new_tokens: int | None = None
    stop_string: tuple[str, ...] = ()
    chat: bool = False
    ignore_eos: bool = False
    json: bool = False
    model: ModelOptions = ModelOptions()
    sampling: SamplingOptions = SamplingOptions()
    drafting: MethodOptions = MethodOptions()  # noqa: RUF009

    def read_prompt(self) -> str:
        """The prompt, wherever it comes from.

        Raises:
          ValueError: there is none, there are two, or it is not text.
          OSError: the file cannot be read.
        """
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("got both PROMPT and --prompt-file; give one of them")
        if self.prompt is not None:
            if not self.prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in self.prompt):
                raise ValueError("PROMPT is not text in UTF-8")
            return self.prompt
        try:
            if self.prompt_file is not None:
                text = Path(self.prompt_file).read_text(encoding="utf-8")
            elif sys.stdin is None or sys.stdin.isatty():
                raise ValueError("no prompt; give PROMPT or --prompt-file FILE, or pipe it in")
            else:
                text = sys.stdin.read()
        except UnicodeDecodeError:
            raise ValueError(f"{self.prompt_file or 'standard input'} is not text in UTF-8") from None
        return text.removesuffix("\n")

    def generation(self) -> dict[str, Any]:
        """The arguments of `LanguageModel.generate`, but for prompt, method and what the method reads."""
        return dataclasses.asdict(self.sampling) | {
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop_string,
            "ignore_eos": self.ignore_eos,
            "chat": self.chat,
        }

    def method_options(self) -> dict[str, Any]:
        """The method's options that were given."""
        return options_given(self.drafting)
