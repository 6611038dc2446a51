"""Answers the prompts of a batch file: rows are refilled as texts end, and a bad line gets an error as its answer."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.engine.scheduler import Scheduler
from jaxspec.host.messages import fitted, shown
from jaxspec.methods import registry
from jaxspec.methods.acceptors import LOSSY
from jaxspec.requests.generation_options import GRAMMARS
from jaxspec.requests.results import Result
from jaxspec.requests.text import likeliest
from jaxspec.serving.batch_files import Line, Results
from jaxspec.serving.openai import (
    ApiRequest,
    BadField,
    Responses,
    bad_field,
    error_of,
    request_of,
)
from jaxspec.serving.translation import Choice, Prompts, encoded, rows_of, used

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.engine.prepare import AnyMethod

_LOG = logging.getLogger(__name__)
# Texts that are read ahead, per row: so that a free row finds a request of its group. Because their number is limited,
# and the largest group runs, a small group runs when enough of its requests have been read, or the others have ended.
_AHEAD = 4
_OPENAI = ("custom_id", "method", "url", "body")
# Keys of a plain record that are no options of `generate`.
_RECORD = ("id", "prompt", "messages")


@dataclasses.dataclass
class Counts:
    """The progress of a batch.

    Attributes:
      answered, errors: lines that this process has answered, and those of them with an error.
      skipped, skipped_errors: lines that had a result already, and those of them whose result is an error.
      tokens: tokens that this process has generated.
      read: the bytes of the prompts that have been read.
    """

    answered: int = 0
    errors: int = 0
    skipped: int = 0
    skipped_errors: int = 0
    tokens: int = 0
    read: int = 0


@dataclasses.dataclass
class _Job:
    """A line, and the results of its texts so far: those of the first prompt first.

    `request` is None for a plain record, and `prompts` are those of the request.
    """

    line: Line
    request: ApiRequest | None = None
    results: list[Result | None] = dataclasses.field(default_factory=list)
    prompts: Prompts = dataclasses.field(default_factory=Prompts)


class Batch:
    """Answers lines with one model.

    Args:
      lm: the model.
      method: the method of lines that name none.
      options: options of `LanguageModel.generate` for lines that do not give them; `seed` makes the seeds of lines
        without one, together with the line.
      system: a system prompt for conversations without one, and for the prompts of plain records; None for none.
      max_batch: the maximum number of rows of lines that share compiled programs.

    Attributes:
      counts: the progress.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        method: AnyMethod | None = None,
        options: Mapping[str, Any] | None = None,
        system: str | None = None,
        max_batch: int = 8,
    ) -> None:
        self._lm, self._method, self._system = lm, method, system
        self._options = dict(options or {})
        self._seed = self._options.pop("seed", 0)
        self._scheduler = Scheduler(lm, max_batch=max_batch, turns=False)
        self._depth = _AHEAD * max_batch
        # For each text: its job and its place in the job's results.
        self._running: dict[int, tuple[_Job, int]] = {}
        self.counts = Counts()

    @property
    def job(self) -> dict[str, Any]:
        """The properties on which results depend besides the lines. Methods are not among them: they are lossless."""
        acceptor = self._options.get("acceptor")
        chat = self._lm.tokenizer and self._lm.tokenizer.chat
        return {
            "model": self._lm.fingerprint,
            "precision": self._lm.precision,
            "eos_token_ids": self._lm.config.eos_token_ids,
            "defaults": self._lm.defaults,
            "chat_template": chat.template if chat else None,
            **({"tool_use": chat.tool_use} if chat and chat.tool_use else {}),
            "options": self._options | {"acceptor": acceptor if acceptor in LOSSY else None},
            "seed": self._seed,
            "system": self._system,
        }

    def run(
        self, lines: Iterable[Line], results: Results, on_look: Callable[[Counts], None] = lambda counts: None
    ) -> Counts:
        """Answers the lines that have no result yet; `on_look` is called after each step.

        Raises:
          OSError: the results cannot be written.
        """
        unread = iter(lines)
        while True:
            while len(self._running) < self._depth and (line := next(unread, None)) is not None:
                self.counts.read = line.end
                if line.digest in results.done:
                    self.counts.skipped += 1
                    self.counts.skipped_errors += line.digest in results.errors
                else:
                    self._begin(line, results)
            if not self._running:
                return self.counts
            for number, piece in self._scheduler.step():
                if isinstance(piece, Exception):
                    self._fail(number, str(piece), results)
                elif piece.result is not None and number in self._running:
                    self._take(number, piece.result, results)
            results.look()
            on_look(self.counts)

    def _begin(self, line: Line, results: Results) -> None:
        job = _Job(line)
        added: list[int] = []
        try:
            for arguments in self._requests(job):
                number = self._scheduler.add(**arguments)
                self._running[number] = job, len(job.results)
                job.results.append(None)
                added.append(number)
        except Exception as error:
            for number in added:
                self._scheduler.cancel(number)
                del self._running[number]
            if not isinstance(error, (ValueError, OSError)):
                self._answer_failure(job, error, results)
                return
            if job.request is not None and isinstance(error, ValueError) and not isinstance(error, BadField):
                error = bad_field(error, job.request)
            self._answer_error(job, 400, str(error), getattr(error, "param", None), results)

    def _take(self, number: int, result: Result, results: Results) -> None:
        job, at = self._running.pop(number)
        job.results[at] = result
        self.counts.tokens += len(result.tokens)
        if result.error is not None:
            self._running[number] = job, at
            self._fail(number, result.error, results)
        elif None not in job.results:
            found = [one for one in job.results if one is not None]
            try:
                plain = job.request is None
                record = self._plain(job, found[0]) if plain else self._response(job, found, results)
            except Exception as error:
                self._answer_failure(job, error, results)
            else:
                self._answer(job, record, results)

    def _fail(self, number: int, message: str, results: Results) -> None:
        """Answers the line of a text with an error, and stops its other texts."""
        if number not in self._running:
            return
        job, _ = self._running[number]
        for other in [one for one, (of, _) in self._running.items() if of is job]:
            self._scheduler.cancel(other)
            del self._running[other]
        self._answer_error(job, 500, message, None, results)

    def _requests(self, job: _Job) -> list[dict[str, Any]]:
        """Returns the arguments of `Scheduler.add` for the texts of a line, and completes the job."""
        line = job.line
        if line.content is None:
            raise ValueError(line.error)
        content = line.content
        seed = hashlib.sha256(f"{self._seed} ".encode() + line.digest).digest()
        options = {"method": self._method, **self._options, "seed": int.from_bytes(seed[:4])}
        if "body" not in content:
            return [self._record(content, options)]
        for name in content:
            if name not in _OPENAI:
                raise ValueError(
                    f"unknown field {shown(name)} of the line; the fields are {', '.join(_OPENAI)}"
                )
        if content.get("method", "POST") != "POST":
            raise ValueError(f"method is {shown(content['method'])}; give POST")
        request = job.request = request_of(content.get("url", ""), content["body"])
        if request.stream:
            raise BadField("stream is true; a batch has no streams", "stream")
        if request.echo and request.logprobs:
            raise BadField("a batch has no log-probabilities of prompts; leave out echo or logprobs", "echo")
        return self._api(job, request, options)

    def _api(self, job: _Job, request: ApiRequest, options: dict[str, Any]) -> list[dict[str, Any]]:
        if request.method is not None:
            options["method"] = registry.make(request.method, request.method_options)
        messages = self._with_system(list(request.messages))
        request = dataclasses.replace(request, messages=messages, options={**options, **request.options})
        if request.only_echo:
            raise BadField("a batch answers no prompt alone; give max_tokens of at least 1", "max_tokens")
        job.prompts = encoded(self._lm, request)
        return rows_of(self._lm, request, job.prompts)

    def _record(self, content: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in content.items() if name not in _RECORD}
        for name in ("stream", "n", "max_batch"):
            if name in given:
                raise ValueError(f"a record has no option {name}; leave it out")
        if isinstance(method := given.get("method"), Mapping):
            raise ValueError(
                f"method is {shown(method)}; give its name, and its options as fields of the record"
            )
        if ("prompt" in content) == ("messages" in content):
            raise ValueError(
                "give `prompt` or `messages` in each record, or `url` and `body` of OpenAI's format"
            )
        prompt, messages = content.get("prompt"), content.get("messages")
        if messages is None and isinstance(prompt, str) and self._system is not None:
            prompt, messages = None, [{"role": "user", "content": prompt}]
        if messages is not None:
            messages = self._with_system(messages)
        if messages is None and "chat" not in given:
            options.pop("chat_template_kwargs", None)  # of no use without a template
        if not given.keys().isdisjoint(GRAMMARS):
            options = {name: value for name, value in options.items() if name not in GRAMMARS}
        return options | given | {"prompt": prompt, "messages": messages}

    def _with_system(self, messages: Any) -> Any:
        """Returns a conversation with the system prompt, unless it has its own."""
        if self._system is None or not isinstance(messages, list) or not messages:
            return messages
        first = messages[0]
        if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _answer(self, job: _Job, record: dict[str, Any], results: Results) -> None:
        """Appends an answer; its key comes first."""
        key, content = results.key(job.line), job.line.content or {}
        if "body" in content:
            head = {"id": f"batch_req_{key}", "custom_id": content.get("custom_id")}
            record = {"response": None, "error": None} | record
            if record["response"] is not None:
                record["response"] = {"request_id": key} | record["response"]
        else:
            head = {"key": key, "id": content.get("id")}
        results.add(job.line, head | record)
        self.counts.answered += 1

    def _answer_failure(self, job: _Job, error: Exception, results: Results) -> None:
        """Answers a line with an error of this program; the other lines go on."""
        _LOG.error("line %d failed", job.line.number, exc_info=error)
        self._answer_error(job, 500, fitted(f"{type(error).__name__}: {error}"), None, results)

    def _answer_error(
        self, job: _Job, status: int, message: str, param: str | None, results: Results
    ) -> None:
        self.counts.errors += 1
        if "body" not in (job.line.content or {}):
            self._answer(job, {"error": message, "line": job.line.number}, results)
            return
        kind = "invalid_request_error" if status == 400 else "server_error"
        body = error_of(message, kind, param)
        record = {
            "response": {"status_code": status, "body": body},
            "error": {"code": kind, "message": message, "line": job.line.number},
        }
        self._answer(job, record, results)

    def _plain(self, job: _Job, result: Result) -> dict[str, Any]:
        record: dict[str, Any] = {"text": result.text}
        if result.text is None:
            record["tokens"] = result.tokens
        if result.token_records[0].log_prob is not None:
            record["logprobs"] = [token.log_prob for token in result.token_records]
        if result.token_records[0].top:
            record["top_logprobs"] = [likeliest(one, self._lm.tokenizer) for one in result.token_records]
        return record | {
            "finish_reason": result.finish_reason,
            "num_prompt_tokens": result.statistics.num_prompt_tokens,
            "num_tokens": result.statistics.num_tokens,
        }

    def _response(self, job: _Job, found: list[Result], results: Results) -> dict[str, Any]:
        request = job.request
        assert request is not None
        parts = []
        for index, result in enumerate(found):
            part = Choice(index, request.logprobs, job.prompts.reader(request)).part(result)
            prompt = job.prompts.texts[index // request.n] if request.echo else ""
            parts.append(dataclasses.replace(part, text=prompt + part.text))
        usage = used(request, job.prompts, [result.statistics for result in found])
        made = Responses(request, results.key(job.line), int(time.time()), self._lm.name)
        return {"response": {"status_code": 200, "body": made.whole(parts, usage)}}
