"""`jaxspec serve` as a process, with the client of OpenAI; and the errors of the command."""

from __future__ import annotations

import re
import signal
import socket
import threading
from typing import Annotated, Literal

import pytest

from tests.commands import called, one_error
from tests.server import load
from tests.server.process import ServerProcess

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}\n{% endfor %}"
)


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    sunny: bool
    degrees: Annotated[int, pydantic.Field(ge=-50, le=50)]


def structured(client, name):
    """The parser of the client, and a loop of tools: as a model with random weights calls for ever, three turns."""
    asked = {"role": "user", "content": "Rome?"}
    parsed = client.chat.completions.parse(
        model=name, messages=[asked], max_tokens=100, response_format=Weather
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    talk = [asked]
    one = {"model": name, "tools": tools, "max_tokens": 200, "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(messages=talk, tool_choice=choice, **one).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather")
        Weather.model_validate_json(call.function.arguments)
        talk += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "Sun."}]
    with client.chat.completions.stream(messages=talk, tool_choice="required", **one) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": Weather.model_json_schema()}}
    message = client.chat.completions.create(messages=talk, response_format=form, **one).choices[0].message
    calls = [call.function.arguments for call in message.tool_calls or ()]
    assert len(calls) + bool(message.content) == 1
    Weather.model_validate_json(message.content or calls[0])
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}}
    with pytest.raises(openai.BadRequestError, match="not") as refused:
        client.chat.completions.create(model=name, messages=[asked], response_format=form)
    assert refused.value.param == "response_format"


@pytest.mark.full
def test_the_client_of_openai_and_the_end_by_sigterm(model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    given = "--served-model-name gpt-4o-mini --port 0 --method ngram --max-batch 2 --prefix-cache 16MB --chat-template"
    options = (model, *given.split(), template)
    with ServerProcess(*options, JAXSPEC_API_KEY="secret", JAX_PLATFORMS="cpu") as server:
        stranger = openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0) as client:
            (name,) = (one.id for one in client.models.list())
            assert name == "gpt-4o-mini"
            messages = [{"role": "user", "content": "Once upon a time " * 24}]
            body = {"model": name, "messages": messages, "max_tokens": 12, "logprobs": True}
            free = {
                "metadata": {"run": "1"},
                "store": False,
                "reasoning_effort": "low",
                "service_tier": "auto",
            }
            method = {"name": "ngram", "ngram_max": 3}
            whole = client.chat.completions.create(
                **body, **free, safety_identifier="me", top_logprobs=20, extra_body={"method": method}
            )
            for token in whole.choices[0].logprobs.content:
                assert token.top_logprobs[0].logprob == token.logprob  # the text is greedy
                assert len(token.top_logprobs) == 20
            with pytest.raises(openai.NotFoundError, match="has no embeddings"):
                client.embeddings.create(model=name, input="Once")
            usage = {"include_usage": True}
            parts = list(client.chat.completions.create(**body, stream=True, stream_options=usage))
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert text == whole.choices[0].message.content
            assert parts[-1].usage.total_tokens == whole.usage.total_tokens
            cached = [usage.prompt_tokens_details.cached_tokens for usage in (whole.usage, parts[-1].usage)]
            assert cached == [0, whole.usage.prompt_tokens - 1]
            assert whole.model_extra["metrics"]["method"] == "ngram"
            rare = {
                "method": "ngram",
                "stop_token_ids": [*range(9)],
            }  # more than 8 have programs of their own
            one = client.completions.create(model=name, prompt="Once", max_tokens=4, extra_body=rare)
            assert one.model_extra["metrics"]["compile_time_ms"] > 0
            structured(client, name)
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=name, prompt="Once", max_tokens=4, extra_body={"beams": 2})
            assert refused.value.param == "beams"
            # SIGTERM while a text is generated: the text is finished first.
            begun, found = threading.Event(), []

            def read() -> None:
                for part in client.completions.create(model=name, prompt="Once", max_tokens=300, stream=True):
                    found.append(part.choices[0])
                    begun.set()

            reader = threading.Thread(target=read)
            reader.start()
            assert begun.wait(60)
            server.kill(signal.SIGTERM)
            reader.join(60)
            assert found[-1].finish_reason in ("length", "stop")
            assert server.wait() == 0
        lines = [line.removesuffix("\n") for line in server.lines]
        requests = [line for line in lines if line.startswith("jaxspec: /v1/")]
        served = [line for line in requests if ": status 400: " not in line]
        assert (len(served), len(requests)) == (9, 11)
        counts = r": \d+ prompt tokens, 12 tokens in .* of \d+ draft tokens accepted; ngram$"
        assert re.search(counts, served[0])
        lines = [line for line in lines if line not in requests]
        compiled = [line for line in lines if line.startswith("jaxspec: compiled ")]
        prefills = [
            line for line in compiled if re.fullmatch(r"jaxspec: compiled prefill.*: \d+ (s|min)", line)
        ]
        assert len(prefills) == 2  # for the first grammar, and for the rare request
        # While it compiles, there is a line each 30 seconds.
        *said, finishing = (line for line in lines if "compiling" not in line and line not in compiled)
        begins = f"jaxspec: {model} is at {server.url}; requests wait while the programs are compiled"
        ready = (
            rf"jaxspec: ready at {server.url} after \d+ s \(\d+ programs compiled\); Ctrl-C ends the server"
        )
        assert said[0] == begins
        assert re.fullmatch(ready, said[1])
        assert len(said) == 2
        assert lines.index(said[1]) < lines.index(compiled[0])
        # The text may be finished when the signal arrives.
        assert finishing.replace("0 requests", "1 request") == (
            "jaxspec: finishing 1 request within 30 seconds; a second SIGTERM ends the server at once"
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "give --api-key or JAXSPEC_API_KEY"),
        (("--max-batch", 0), "--max-batch is 0; give a number of at least 1"),
        (("--shutdown-timeout-seconds", "inf"), "is inf; give a number of at least 0"),
        (("--shutdown-timeout-seconds", "nan"), "is nan; give a number of at least 0"),
        (("--request-timeout-seconds", "inf"), "is inf; give a number of at least 1"),
        (("--port", 70000), "--port is 70000"),
        (("--api-key", "schlüssel"), "--api-key has"),
        (("--methods", "ngram,nope"), "unknown method 'nope'"),
        (("--run", "ngram --exit-layer 3"), "method ngram has no option"),
        (("--host", "no.such.host.invalid", "--api-key", "x"), "cannot use port 8000 of"),
    ],
)
def test_wrong_options_are_one_line(capsys, model, options, said):
    assert said in one_error(lambda *given: called(capsys, *given), "serve", "--model", model, *options)


def test_a_port_in_use_is_one_line(capsys, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = one_error(lambda *given: called(capsys, *given), "serve", "--model", model, "--port", port)
    assert f"port {port} of 127.0.0.1" in said


@pytest.mark.slow
def test_a_small_load_with_faults(model):
    report = load.run(load.Options(model=str(model), requests=160, clients=12, max_tokens=12, max_batch=2))
    assert report.problems == []
    assert report.answered == 160
