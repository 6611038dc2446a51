"""The application: its paths, the API key, and limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.arguments import flag
from jaxspec.host.files import parse_json
from jaxspec.host.messages import shown
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.methods import Method
from jaxspec.programs.background import Worker
from jaxspec.serving.openai import CHAT, COMPLETIONS, ApiRequest, BadField, Responses, request_of
from jaxspec.serving.server.answers import Answer, method_of
from jaxspec.serving.server.engine_thread import EngineThread
from jaxspec.serving.server.metrics import Metrics, summary
from jaxspec.serving.server.refusals import EXPECTED, Refused, refused
from jaxspec.serving.server.responding import Exchange
from jaxspec.serving.translation import Prompts, checked_ids, encoded, rows_of

T = TypeVar("T")
MAX_BODY_BYTES = 4 * 2**20
# How long the body of a request may take.
BODY_S = 30.0
# Paths of OpenAI's API that are not served, with the reason.
_ABSENT = {
    "/v1/embeddings": "a model that generates text has no embeddings; serve an embedding model by another program",
    "/v1/responses": f"the server keeps no conversations; send all messages to {CHAT}",
}
# nginx's status for a client that has gone; nobody reads it.
_GONE = 499


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a host.

    Examples:
      >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("0.0.0.0")
      (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local(netloc: str) -> bool:
    """Whether a host, with or without a port, is a loopback one; an IPv6 address is in brackets."""
    try:
        return is_loopback(urllib.parse.urlsplit(f"//{netloc}").hostname or "")
    except ValueError:  # brackets around something else
        return False


def _is_local_page(origin: str) -> bool:
    """Whether the origin of a page, or a host, is a loopback one."""
    return _is_local(origin.removeprefix("http://").removeprefix("https://"))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the application.

    Attributes:
      method: the method of requests that name none.
      api_key: the key that each request but those to /health must have; None for none. Without a key, only requests to
        a local name are answered, and of pages in a browser only those of a local name: any page can send requests to
        this machine, also under another name.
      time_limit_s: the maximum number of seconds from a request to the end of its response.
      allowed: the methods, with their options, that requests may name beside `method`; None for all.
      names: the names under which requests may name the model, the first in responses; () for the model's own.
      report: called with a line at the end of each request for texts, also of one that is refused.
    """

    method: Method
    api_key: str | None = None
    time_limit_s: float = 600.0
    allowed: Sequence[Method] | None = None
    names: tuple[str, ...] = ()
    report: Callable[[str], None] = lambda line: None


class Api:
    """The handlers of all paths.

    Args:
      lm: the model, with a tokenizer.
      engine: the thread that generates.
      metrics: the counts of the server.
      settings: see `Settings`.
    """

    def __init__(self, lm: LanguageModel, engine: EngineThread, metrics: Metrics, settings: Settings) -> None:
        self._lm, self._engine, self._metrics, self._settings = lm, engine, metrics, settings
        self._created = int(time.time())
        self._names = settings.names or (lm.name,)
        # One thread, because several may not share a tokenizer; long prompts do not block the event loop.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        # The first check of `exact`, and a new grammar, take seconds, in which the texts of others go on.
        self._slow = Worker("slow work")

    def app(self) -> Starlette:
        """Returns the application; the engine thread starts and ends with it."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            *(
                Route(url, _Endpoint(functools.partial(self.generate, url)), methods=["POST"])
                for url in (COMPLETIONS, CHAT)
            ),
        ]
        handlers: Mapping[Any, Any] = {
            Refused: _respond,
            HTTPException: _respond,
            ClientDisconnect: _respond,
            Exception: _respond,
        }
        middleware = [
            Middleware(_LocalPages, allow_methods=["*"], allow_headers=["*"], expose_headers=["retry-after"]),
            Middleware(_Keyed, key=self._settings.api_key),
        ]
        return Starlette(
            routes=routes, exception_handlers=handlers, middleware=middleware, lifespan=self._life
        )

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await self._engine.stop()
            self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def health(self, request: Request) -> Response:
        """Returns status 200, or 503 while programs are compiled and after the engine has failed."""
        error = self._engine.error
        if error is not None:
            return JSONResponse({"status": "failed", "error": f"{type(error).__name__}: {error}"}, 503)
        ready = self._engine.is_ready
        return JSONResponse({"status": "ok" if ready else "loading"}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Returns the counts for Prometheus."""
        return Response(self._metrics.read(self._engine), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Returns the list with the only model, under each of its names."""
        return JSONResponse({"object": "list", "data": list(map(self._model, self._names))})

    async def model(self, request: Request) -> Response:
        """Returns the model of a name, which may have slashes."""
        if not request.path_params["name"]:
            return await self.models(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model(request.path_params["name"]))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxspec",
            "max_model_len": self._lm.config.context_length,
        }

    async def tokenizer_info(self, request: Request) -> Response:
        """Returns the special tokens and the chat template, for clients such as lm-eval."""
        special, chat = self._tokenizer.special_tokens, self._tokenizer.chat
        found = {
            name: None if special.get(name) is None else str(special[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        return JSONResponse(found | {"chat_template": None if chat is None else chat.template})

    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of a `prompt` or of `messages`; `add_special_tokens` is true by default."""
        api = None
        try:
            body = dict(await self._object(request))
            special = flag("add_special_tokens", body.pop("add_special_tokens", True))
            api = request_of(CHAT if "messages" in body else COMPLETIONS, body)
            self._check_model(api.model)
            if not api.is_chat and len(api.prompts) != 1:
                raise BadField(f"prompt has {len(api.prompts)} texts; give one", "prompt")
            ids = await self._in_thread(self._token_ids, api, special)
        except (ValueError, OSError) as error:
            raise refused(error, api) from None
        return JSONResponse(
            {"count": len(ids), "max_model_len": self._lm.config.context_length, "tokens": ids}
        )

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of `tokens`, special ones included, as the field `prompt`."""
        try:
            given = (await self._object(request)).get("tokens")
            return JSONResponse({"prompt": await self._in_thread(self._decoded, given)})
        except (ValueError, OSError) as error:
            raise refused(error) from None

    async def generate(self, url: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for completions."""
        deadline = asyncio.get_running_loop().time() + self._settings.time_limit_s
        request, api, job, line = Request(scope, receive), None, None, None
        try:
            async with asyncio.timeout_at(deadline):
                api = await asyncio.to_thread(request_of, url, await self._body(request))
                self._check(api)
                prompts = await self._in_thread(self._encoded, api)
                method = method_of(api, self._settings.method, self._settings.allowed)
                make = functools.partial(
                    rows_of, self._lm, api, prompts, method=method, seed=secrets.randbits(32)
                )
                slow = prompts.grammar is not None
                rows = await asyncio.wrap_future(self._slow.submit(make)) if slow else make()
                if flag("exact", api.options.get("exact", False)):
                    await asyncio.wrap_future(self._slow.submit(self._lm.check_exact))
                job = self._engine.submit(rows, prompts.ids if api.echo and api.logprobs else ())
            responses = Responses(api, secrets.token_hex(12), int(time.time()), self._names[0])
            exchange = Exchange(api, job, Answer(self._lm, api, prompts, job), responses, deadline)
            await exchange.respond(scope, receive, send)
        except EXPECTED as error:
            found = refused(error, api)
            line = f"status {found.status}: {found}"
            raise found from None
        finally:
            if job is not None:
                self._engine.leave(job)
                line = line or summary(job)
            if line:
                self._settings.report(f"{url}: {line}")

    def _check(self, api: ApiRequest) -> None:
        self._check_model(api.model)
        count = api.n * (1 if api.is_chat else len(api.prompts))
        if count > self._engine.max_open:
            raise BadField(f"the request asks for {count} texts; give at most {self._engine.max_open}", "n")

    def _check_model(self, name: str | None) -> None:
        if name not in (None, *self._names):
            said = f"model is {shown(name)}; this server has {', '.join(map(shown, self._names))}"
            raise Refused(404, said, "model", "model_not_found")

    def _encoded(self, api: ApiRequest) -> Prompts:
        if api.is_chat and not self._tokenizer.has_chat_template:
            raise BadField(
                f"{self._lm.name} has no chat template; send a prompt to {COMPLETIONS}, or start jaxspec serve with "
                "--chat-template",
                "messages",
            )
        return encoded(self._lm, api)

    def _token_ids(self, api: ApiRequest, special: bool) -> list[int]:
        ids = list(self._encoded(api).ids[0])
        added = self._tokenizer.encode("")
        return ids if special or ids[: len(added)] != added else ids[len(added) :]

    def _decoded(self, ids: Any) -> str:
        return self._tokenizer.decode(checked_ids(self._lm, "tokens", ids), special=True)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Returns the result of work with the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *args)

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self._lm.tokenizer is not None
        return self._lm.tokenizer

    async def _object(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        if not isinstance(body, dict):
            raise BadField(f"the body is {shown(body)}; give a JSON object")
        return body

    async def _body(self, request: Request) -> Any:
        """Returns the value of a JSON body."""
        data = bytearray()
        too_long = Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes; send less")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise too_long
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > MAX_BODY_BYTES:
                        raise too_long
        except TimeoutError:
            said = f"the body has not come within {BODY_S:g} seconds; send it again"
            raise Refused(408, said, code="timeout") from None
        try:
            return await asyncio.to_thread(parse_json, bytes(data))
        except ValueError as error:
            raise BadField(f"the body is not valid JSON ({error})") from None


class _Endpoint:
    """An endpoint that writes its response itself; Starlette takes functions for other endpoints."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _LocalPages(CORSMiddleware):
    """Tells browsers that pages of a local name may read answers; those of other names may not."""

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether a page of this origin may read answers."""
        return _is_local_page(origin)


class _Keyed:
    """Answers only requests with the key; without a key, only those to a local name."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := self._refusal(scope)) is not None:
            await found.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = dict(scope["headers"])
        if self._key is None:
            for name, default in (b"host", b""), (b"origin", b"localhost"):
                value = headers.get(name, default).decode("latin-1")
                if not _is_local_page(value):
                    said = f"the {name.decode()} is {shown(value)}"
                    return Refused(403, f"{said}; without an API key only local names are answered")
        elif scope["path"] != "/health":
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(given.strip(b" "), self._key.encode())
            if not (is_right and scheme.lower() == b"bearer"):
                said = "the API key is missing or wrong; send the header `Authorization: Bearer KEY`"
                return Refused(401, said, code="invalid_api_key")
        return None


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    if isinstance(error, HTTPException):
        said = f"{request.method} {request.url.path}: {_ABSENT.get(request.url.path, error.detail)}"
        return Refused(error.status_code, said).response()
    return refused(error).response()
