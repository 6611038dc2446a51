"""Batches of prompts in Ray Data: an actor with one model answers the rows of a dataset. Needs the extra `ray`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.engine.scheduler import Scheduler
from jaxspec.texts.requests import Messages
from jaxspec.texts.results import Result


class Generate:
    """Generates a text for each row; a callable class for `ray.data.Dataset.map_batches`.

    Ray makes one instance, and so one model, per actor. A row with a wrong prompt gets an error, and does not end the
    job. The text of a row does not depend on its block: rows without a seed have one made from their prompt. So a
    block that Ray runs again, after a lost machine, has the same rows. An error of the engine, such as too little
    memory, is raised: it ends the job, unless Ray's `DataContext` has `actor_task_retry_on_errors` or
    `max_errored_blocks`.

    Args:
      model: a model, or the `model` of `load`.
      load_options: the other arguments of `load`, such as `{"device": "tpu"}`.
      prompt: the column of prompts: texts or token ids. A column `messages` of conversations has precedence.
      columns: columns with an option for each row, such as "seed" or "max_new_tokens".
      max_batch: the maximum number of texts decoded at once.
      **options: options of `LanguageModel.generate`, such as `method` and `max_new_tokens`.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> answers = Generate(language_model(), max_new_tokens=6, method="ngram")({"prompt": np.array(["ab", ""])})
      >>> answers["text"].tolist(), answers["num_tokens"].tolist()
      (['ab adeab a', ''], [6, 0])
      >>> answers["error"].tolist()
      ['', 'the prompt is empty; give at least one token']
    """

    def __init__(
        self,
        model: LanguageModel | str | None = None,
        load_options: Mapping[str, Any] | None = None,
        *,
        prompt: str = "prompt",
        columns: Sequence[str] = (),
        max_batch: int = 8,
        **options: Any,
    ) -> None:
        self._lm = model if isinstance(model, LanguageModel) else load(model, **(load_options or {}))
        self._prompt, self._columns, self._options = prompt, tuple(columns), options
        self._max_batch = max_batch

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the rows of a batch with more columns.

        Args:
          batch: columns of equal length, by name.

        Returns:
          The columns, and `text`, `finish_reason`, `num_prompt_tokens`, `num_tokens` and `error`. A row without an
          error has the error "", and one with an error the text "". With None, files of blocks would differ in type.
        """
        name = "messages" if "messages" in batch else self._prompt
        prompts = [_plain(one) for one in batch[name]]
        scheduler = Scheduler(self._lm, max_batch=self._max_batch)
        results: list[Result | str] = [""] * len(prompts)
        rows: dict[int, int] = {}
        for row, prompt in enumerate(prompts):
            own = {column: _plain(batch[column][row]) for column in self._columns}
            given = {"seed": _seed(prompt), **self._options, **own}
            given["messages" if name == "messages" else "prompt"] = prompt
            try:
                rows[scheduler.add(**given)] = row
            except (ValueError, OSError) as error:
                results[row] = str(error)
        while not scheduler.idle:
            for event in scheduler.step():
                if event.error is not None:
                    raise event.error
                if event.result is not None:
                    results[rows[event.id]] = event.result.error or event.result
        return dict(batch) | _columns(results)


def _columns(results: Sequence[Result | str]) -> dict[str, np.ndarray]:
    texts = [None if isinstance(one, str) else one for one in results]
    return {
        "text": np.array(["" if one is None else str(one) for one in texts], object),
        "finish_reason": np.array(["error" if one is None else one.finish_reason for one in texts], object),
        "num_prompt_tokens": np.array(
            [0 if one is None else one.statistics.num_prompt_tokens for one in texts], np.int64
        ),
        "num_tokens": np.array([0 if one is None else one.statistics.num_tokens for one in texts], np.int64),
        "error": np.array([one if isinstance(one, str) else "" for one in results], object),
    }


def _plain(value: Any) -> Any:
    """Returns a cell of a column as values of Python."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _seed(prompt: str | Sequence[int] | Messages) -> int:
    return int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:4])
