"""Runs the tasks of lm-evaluation-harness (the package `lm-eval`) with a model and a method of this library.

The command is that of lm-eval, in which the model is called `jaxspec`:

    python -m jaxspec.serving.lm_eval run --model jaxspec --model_args model=smollm2,method=ngram --tasks gsm8k
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs, postprocess_generated_text

from jaxspec.engine.drafters import AnyMethod
from jaxspec.engine.language_model import LanguageModel, load

# The arguments of `load` that `--model_args` may contain; others belong to the method.
_LOADING = (
    *("dtype", "weights", "kv_cache_dtype", "adapter", "mesh"),
    *("chat_template", "compilation_cache", "prefix_cache"),
)
# The generation settings of tasks that `generate` has too.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("jaxspec")
class JaxspecLM(TemplateLM):  # type: ignore[misc,unused-ignore]  # lm-eval need not be installed
    """A model for `lm_eval.simple_evaluate`.

    Args:
      model: as in `jaxspec.load`, or a loaded `LanguageModel`.
      method: as in `LanguageModel.generate`.
      batch_size: the number of rows; "auto" for 8.
      max_length: the most tokens of a text. Default: the model's context.
      max_gen_toks: the most new tokens of a text, for tasks that give no number.
      device: as in `jaxspec.load`.
      max_batch_size: ignored; lm-eval gives it to all models.
      **options: other arguments of `jaxspec.load`, and options of the method.

    Attributes:
      results: the results of all generated texts so far, in order of the requests, with their statistics.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LanguageModel | None = None,
        method: AnyMethod | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, LanguageModel):
            self.model = model
        else:
            loading = {name: options.pop(name) for name in _LOADING if name in options}
            self.model = load(model, device=device, **loading)
        if self.model.tokenizer is None:
            raise ValueError(f"{self.model.name} has no tokenizer; lm-eval gives prompts as texts")
        self.batch_size = 8 if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = int(max_length or self.model.config.context_length)
        self.max_gen_toks = int(max_gen_toks)
        self._method, self._options = method, options
        self.results: list[Any] = []
        self._tokens = self.model.tokenizer.special_tokens

    @property
    def eot_token_id(self) -> int:
        """The first end token of the model."""
        return self.model.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the BOS token, or else an end token."""
        assert self.model.tokenizer is not None
        bos = self.model.tokenizer.special_id(self._tokens.get("bos_token", ""))
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the token ids of a text; a BOS token that the tokenizer adds is left out on request."""
        tokens = self.model.encode(string)
        without = add_special_tokens is False and tokens[:1] == self.model.encode("")[:1] != []
        return tokens[1:] if without else tokens

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts, continuations = [], []
        for _, context, continuation in requests:
            kept = continuation[-self.max_length :]
            contexts.append(context[-(self.max_length + 1 - len(kept)) :])
            continuations.append(kept)
        scores = self.model.score(contexts, continuations, max_batch=self.batch_size) if requests else []
        assert isinstance(scores, list)
        found = [(score.log_prob, score.is_greedy) for score in scores]
        for (pair, *_), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows of `max_length` tokens."""
        windows = [
            [
                utils.make_disjoint_window(window)
                for window in utils.get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        flat = [(("", ""), *window) for window in itertools.chain.from_iterable(windows)]
        scores = iter(self._loglikelihood_tokens(flat))
        return [sum(log_prob for log_prob, _ in itertools.islice(scores, len(own))) for own in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that each prompt is continued with, up to a stop string of its task."""
        texts = []
        for settings, group in itertools.groupby(requests, key=lambda request: request.args[1]):
            texts += self._generate([request.args[0] for request in group], settings)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generate(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Returns the texts after contexts with the same settings."""
        given: Any = normalize_gen_kwargs(settings, self.max_gen_toks)
        sampling = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        if sampling.get("temperature") == 0:
            sampling = {"temperature": 0.0}
        until = [text for text in given["until"] if text]
        cut = [
            maybe_truncate(self.tok_encode(context), given["max_gen_toks"], self.max_length)
            for context in contexts
        ]
        results = self.model.generate(
            [tokens for tokens, _ in cut],
            method=self._method,
            stop=until,
            max_new_tokens=[budget for _, budget in cut],
            max_batch=self.batch_size,
            **sampling,
            **self._options,
        )
        self.results += results
        return [postprocess_generated_text(result.text or "", until, None) for result in results]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation."""
        chat = self.model.tokenizer and self.model.tokenizer.chat
        if not chat:
            raise ValueError(f"{self.model.name} has no chat template; omit apply_chat_template")
        return chat.render(chat_history, ask=add_generation_prompt, go_on=not add_generation_prompt).text

    @property
    def tokenizer_name(self) -> str:
        """A name for the files in which lm-eval keeps requests."""
        return self.model.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the chat template, for the report of lm-eval."""
        chat = self.model.tokenizer and self.model.tokenizer.chat
        return chat.template if chat and chat_template else None


def main() -> None:
    """Runs the command of lm-eval, in which `jaxspec` is a model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
