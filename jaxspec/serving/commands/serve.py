"""`jaxspec serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from typing import Any

from jaxspec.cli.methods import made_of, method_field
from jaxspec.cli.options import ModelOptions
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import tell
from jaxspec.host import processes
from jaxspec.host.extras import require
from jaxspec.host.progress import Progress


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serve a model over HTTP, with OpenAI's API: /v1/completions and /v1/chat/completions.

    Requests may choose a method of their own. SIGTERM and Ctrl-C end the server after the requests that run.

    Attributes:
      method: how to decode for requests that name no method. The text, or its distribution, is that of plain decoding.
      host: the address to listen on. Another one than this machine's own needs --api-key.
      port: the port; 0 for any free one.
      api_key: the key that requests must have, as `Authorization: Bearer KEY`. Default: the environment variable
        JAXSPEC_API_KEY, which other users of the machine cannot see.
      max_batch: texts that are decoded at once, for each method in use.
      max_queue: texts that may wait; further requests get status 429.
      request_timeout_seconds: the time limit of a request.
      shutdown_timeout_seconds: how long running requests may take after SIGTERM; then they get an error.
      served_model_name: a name under which requests may name the model; the first is that of responses. Default: the
        model's own.
      log_requests: write a line with tokens, speed and accepted drafts at the end of each request.
      max_model_len: the most tokens of a prompt and its text together. Default: the model's context.
      prefix_cache: the memory for caches of texts, such as 512MB. Prompts that begin alike are then fed once.
      methods: methods that requests may name, with commas between, each with its default options; the one of --method
        is always allowed. Default without --run: all, with any options but files.
      runs: a method that requests may name, with its options, as in "layerskip --exit-layer 3"; beside --methods.
      chat_template: a Jinja file, or vicuna, llama-2 or chatml, for a model that has none.
    """

    method: str = method_field()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = dataclasses.field(default=None, metadata={"metavar": "KEY"})
    max_batch: int = 8
    max_queue: int = 64
    request_timeout_seconds: float = 600.0
    shutdown_timeout_seconds: float = 30.0
    served_model_name: tuple[str, ...] = dataclasses.field(default=(), metadata={"metavar": "NAME"})
    log_requests: bool = True
    max_model_len: int | None = None
    prefix_cache: str | None = dataclasses.field(default=None, metadata={"metavar": "SIZE"})
    methods: str | None = None
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    chat_template: str | None = None
    model: ModelOptions = ModelOptions()  # noqa: RUF009
    drafting: Any = None

    def run(self) -> int:
        """Serves until a signal; returns the exit status."""
        require("serve", "starlette", "uvicorn", "prometheus_client")
        from jaxspec.serving.server import run
        from jaxspec.serving.server.app import Settings, is_loopback

        if processes.several():
            raise ValueError("jaxspec serve runs in one process; start one server for each model")
        key = self.api_key or os.environ.get("JAXSPEC_API_KEY") or None
        self._check(key, is_loopback(self.host))
        allowed = made_of(self.methods, self.runs)
        bound = run.bind(self.host, self.port)
        with bound:
            with Progress("loading the model"):
                lm = self.model.load(self.chat_template, self.prefix_cache, self.max_model_len)
            if lm.tokenizer is None:
                raise ValueError(f"{lm.name} has no tokenizer; the server needs one")
            settings = Settings(
                self.drafting,
                key,
                self.request_timeout_seconds,
                None if allowed is None else tuple(allowed.values()),
                self.served_model_name,
                tell if self.log_requests else lambda line: None,
            )
            host = f"[{self.host}]" if ":" in self.host else self.host
            received = run.serve(
                lm,
                bound,
                settings,
                max_batch=self.max_batch,
                max_queue=self.max_queue,
                shutdown_timeout_s=self.shutdown_timeout_seconds,
                address=f"http://{host}:{bound.getsockname()[1]}/v1",
                report=tell,
            )
        return INTERRUPTED if received == signal.SIGINT else 0

    def _check(self, key: str | None, is_local: bool) -> None:
        if not is_local and key is None:
            raise ValueError(
                f"host is {self.host}, which other machines reach; give --api-key or JAXSPEC_API_KEY"
            )
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError(
                "api_key has a space at an end, or characters that HTTP does not allow; give letters and digits"
            )
        least = {"max_batch": 1, "max_queue": 0, "request_timeout_seconds": 1, "shutdown_timeout_seconds": 0}
        for name, number in least.items():
            if not number <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of at least {number}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; give a number from 0 to {2**16 - 1}")
