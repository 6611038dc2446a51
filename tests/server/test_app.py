"""The application's answers: forms of requests and responses, errors, keys, and what it counts."""

from __future__ import annotations

import functools
import json
import re
import threading
import urllib.parse

import jax
import pytest

from jaxspec import methods
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods import registry
from jaxspec.requests.text import Token, row_text
from jaxspec.serving.openai import ApiRequest, Part, Responses, scored
from jaxspec.testing import language_model
from tests.commands import CONFIG
from tests.files.test_tokenizer import byte_ids, tokenizer
from tests.server import TEMPLATE, FakeScheduler, Scripted, application, client, model

URL, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def http():
    with client(application()[0]) as made:
        yield made


@pytest.fixture(scope="module")
def lm():
    return model()


def asked(http, url, **body):
    answer = http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(http, url, **body):
    """The chunks of a stream, which ends with [DONE]."""
    answer = http.post(url, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab", "cd e"], [0, 12, 9], [[0, 12, 9], [3, 4]]], ids=["text", "texts", "ids", "several ids"]
)  # fmt: skip
def test_a_completion_is_the_text_of_generate(http, lm, prompt):
    prompts = prompt if isinstance(prompt[0], (str, list)) and prompt != "ab" else [prompt]
    results = lm.generate(prompts, max_new_tokens=6)
    found = asked(http, URL, prompt=prompt, max_tokens=6, model="tiny")
    assert (found["object"], found["model"], found["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    reasons = {"eos": "stop", "length": "length"}
    expected = [(row, one.text, reasons[one.finish_reason]) for row, one in enumerate(results)]
    assert [(one["index"], one["text"], one["finish_reason"]) for one in found["choices"]] == expected
    num_prompt = sum(result.statistics.num_prompt_tokens for result in results)
    num_tokens = sum(len(result.tokens) for result in results)
    counts = [found["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    assert counts == [num_prompt, num_tokens, num_prompt + num_tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_texts_are_those_of_generate(http, lm, stream):
    options = {"n": 2, "seed": 3, "temperature": 1.0, "top_k": 5}
    results = lm.generate(["ab", "cd"], max_new_tokens=6, **options)
    body, texts = {"prompt": ["ab", "cd"], "max_tokens": 6, **options}, ["", "", "", ""]
    for one in chunks(http, URL, **body) if stream else [asked(http, URL, **body)]:
        for choice in one["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [result.text for result in results]
    assert len(set(texts)) > 1


def test_a_chat_streams_role_text_reason_and_usage(http, lm):
    result = lm.generate(messages=MESSAGES, max_new_tokens=9)
    usage = {"stream_options": {"include_usage": True}}
    found = chunks(http, CHAT, messages=MESSAGES, max_completion_tokens=9, **usage)
    *texts, last = found
    assert {(one["object"], one["id"]) for one in found} == {("chat.completion.chunk", last["id"])}
    deltas = [one["choices"][0]["delta"] for one in texts]
    assert (deltas[0], deltas[-1]) == ({"role": "assistant", "content": ""}, {})
    assert "".join(delta.get("content", "") for delta in deltas) == result.text
    reasons = [one["choices"][0]["finish_reason"] for one in texts]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    assert all(one["usage"] is None for one in texts)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
    assert last["metrics"]["time_to_first_token_ms"] > 0
    whole = asked(http, CHAT, messages=MESSAGES, max_tokens=9)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": result.text, "refusal": None}
    assert "usage" not in chunks(http, CHAT, messages=MESSAGES, max_tokens=3)[-1]


def test_log_probabilities(http, lm):
    result = lm.generate("ab", max_new_tokens=8, logprobs=True)
    numbers = [token.log_prob for token in result.token_records]
    body = {"prompt": "ab", "max_tokens": 8}
    choice = asked(http, URL, temperature=0, logprobs=1, **body)["choices"][0]
    found = choice["logprobs"]
    assert found["token_logprobs"] == pytest.approx(numbers, abs=1e-5)
    assert "".join(found["tokens"]) == choice["text"] == result.text
    assert [max(top.values()) for top in found["top_logprobs"]] == found["token_logprobs"]
    for text, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(text)
    streamed = [one["choices"][0]["logprobs"] for one in chunks(http, URL, logprobs=0, **body)]
    for name in ("tokens", "text_offset"):
        assert [one for part in streamed if part for one in part[name]] == found[name]
    chat = asked(http, CHAT, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=1)
    content = chat["choices"][0]["logprobs"]["content"]
    raw = bytes(byte for one in content for byte in one["bytes"])
    assert raw.decode() == chat["choices"][0]["message"]["content"]
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in content)
    assert asked(http, URL, temperature=9e-6, logprobs=1, **body)["choices"][0]["logprobs"] == found


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_prompts_as_lm_eval_reads_them(http, lm, stream):
    context = lm.encode("ab")
    greedy = lm.generate(context, max_new_tokens=4).tokens
    other = [*greedy[:-1], (greedy[-1] + 1) % 13]
    body = {"prompt": [context + greedy, context + other], "max_tokens": 1, "logprobs": 1}
    body |= {"echo": True, "temperature": 0, "seed": 1234}
    choices = asked(http, URL, **body)["choices"]
    if stream:
        parts = [choice for one in chunks(http, URL, **body) for choice in one["choices"]]
        first, last = (
            [one for one in parts if one["logprobs"] and one["index"] == index] for index in (0, 1)
        )
        choices = [
            {"logprobs": {name: [v for p in own for v in p["logprobs"][name]] for name in own[0]["logprobs"]}}
            for own in (first, last)
        ]
    for choice, continuation in zip(choices, (greedy, other), strict=True):
        score = lm.score(context, continuation)
        numbers = choice["logprobs"]["token_logprobs"]
        assert numbers[0] is None
        assert numbers[len(context) : -1] == pytest.approx(score.log_probs, abs=1e-5)
        top = [max(one.values()) for one in choice["logprobs"]["top_logprobs"][len(context) : -1]]
        assert [a == b for a, b in zip(numbers[len(context) : -1], top, strict=True)] == score.greedy
        assert len(choice["logprobs"]["tokens"]) == len(context) + 4 + 1


@functools.cache
def byte_model():
    """A model whose tokenizer has a token for each byte, without weights: its texts are those of `Scripted`."""
    return LanguageModel(CONFIG, {}, tokenizer=tokenizer("byte_level"), name="bytes", device=jax.devices()[0])


@pytest.mark.parametrize(
    ("data", "stop", "text", "tokens", "raws"),
    [
        (b"A sky", " is", "A sky", ["A", " ", "s", "k", "y"], [[65], [32], [115], [107], [121]]),
        (b"A is", " is", "A", ["A", "", "", ""], [[65], [], [], []]),
        ("a€b".encode(), "€z", "a€b", ["a", "", "", "€", "b"], [[97], [0xE2], [0x82], [0xAC], [98]]),
        ("a€b".encode(), "€", "a", ["a", "", "", ""], [[97], [], [], []]),
        (b"a\xe2\x82", "b", "a\ufffd", ["a", "", "\ufffd"], [[97], [0xE2], [0x82]]),
        ("\ufffd\n".encode(), "\n", "\ufffd", ["", "", "\ufffd", ""], [[0xEF], [0xBF], [0xBD], []]),
        (b"\x80a", "\na", "\ufffda", ["\ufffd", "a"], [[0x80], [97]]),
    ],
)
def test_tokens_beside_a_stop_and_inside_a_character(data, stop, text, tokens, raws):
    """One token, one text: those of the tokens are the choice's, each with its place and its own bytes."""
    lm = byte_model()
    made = functools.partial(Scripted, lm.tokenizer, byte_ids("byte_level", data))
    body = {"max_tokens": len(data), "stop": stop, "temperature": 0}
    with client(application(made, lm=lm)[0]) as http:
        choice = asked(http, URL, prompt=[5], logprobs=0, **body)["choices"][0]
        streamed = [one["choices"][0] for one in chunks(http, URL, prompt=[5], logprobs=0, **body)]
    found = choice["logprobs"]
    assert (choice["text"], found["tokens"]) == (text, tokens)
    assert found["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert found["token_logprobs"] == [-1.0 - at for at in range(len(tokens))]
    for name, values in found.items():
        assert [one for part in streamed if part["logprobs"] for one in part["logprobs"][name]] == values
    shown = ""
    for part in streamed:  # no token comes before its text
        shown += part["text"]
        assert all(offset <= len(shown) for offset in (part["logprobs"] or {}).get("text_offset", ()))
    assert shown == text
    chat = Responses(ApiRequest(CHAT, logprobs=True), "1", 0, "bytes")
    row = row_text(lm.tokenizer, [5], [stop])
    ids = byte_ids("byte_level", data)
    gained, used, _ = row.push(ids, True)
    pushed = (
        row_text(lm.tokenizer, [5], [stop])
        .by_token()
        .push([Token(i, log_prob=-1.0) for i in ids[:used]], gained, True)
    )
    content = chat.chunks(Part(0, gained, scored(pushed, 0)))[0]["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content] == raws


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_new_tokens(http, lm, stream):
    """The prompts with their scores, and nothing is generated."""
    prompts = ["ab cd", [0, 12, 9], "a"]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0, "n": 2}
    if stream:
        parts = [one for chunk in chunks(http, URL, **body) for one in chunk["choices"]]
        choices = sorted(parts, key=lambda one: one["index"])
    else:
        whole = asked(http, URL, **body)
        choices = whole["choices"]
        assert (whole["usage"]["completion_tokens"], whole["usage"]["prompt_tokens"]) == (0, 3 + 3 + 2)
    assert [one["text"] for one in choices] == ["ab cd", "ab cd", "ab cd", "ab cd", "a", "a"]
    assert [one["finish_reason"] for one in choices] == ["length"] * 6
    for choice, ids in zip(choices[::2], (lm.encode("ab cd"), [0, 12, 9], lm.encode("a")), strict=True):
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(lm.score(ids[:1], ids[1:]).log_probs, abs=1e-5)
    plain = asked(http, URL, prompt=[5] * 512, max_tokens=0, echo=True)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (lm.tokenizer.decode([5] * 512), None)
    assert http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 0}).status_code == 400
    unknown = http.post(CHAT, json={"messages": MESSAGES, "prompt": "ab"}).json()["error"]
    assert unknown["message"] == "unknown field 'prompt'"
    # The prompt is shown as it was given; BOS that the tokenizer adds has no text.
    body = {"prompt": "ab</s>cd", "max_tokens": 3, "echo": True, "logprobs": 0}
    choice = asked(http, URL, **body)["choices"][0]  # the engine goes on
    tokens = choice["logprobs"]["tokens"]
    assert tokens[:4] == ["", "ab", "</s>", "cd"]
    assert "".join(tokens) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]


def test_seeds_of_64_bits(http, lm):
    """Each has its own text, always the same; those of 32 bits that of `generate`."""
    options = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    seeds = (0, 2**32 - 1, 2**32, 2**64 - 1, -1, -(2**32), -(2**63))
    texts = [asked(http, URL, prompt="ab", seed=seed, **options)["choices"][0]["text"] for seed in seeds]
    assert len({*texts}) == len(seeds)
    assert asked(http, URL, prompt="ab", seed=-1, **options)["choices"][0]["text"] == texts[4]
    known = lm.generate("ab", max_new_tokens=30, temperature=1.0, ignore_eos=True, seed=2**32 - 1).text
    assert texts[1] == known


@pytest.mark.parametrize("name", ["org/tiny", "/models/tiny one", "50%"])
def test_a_model_by_its_name(name):
    """Names may have slashes, escaped or not; a server may have several. The last request has a line of the log."""
    lines: list[str] = []
    options = {"lm": language_model(name=name), "names": (name, "b"), "report": lines.append}
    with client(application(FakeScheduler, **options)[0]) as http:
        first, second = http.get("/v1/models").json()["data"]
        assert (first["id"], second["id"], http.get("/v1/models/b").json()) == (name, "b", second)
        for path in (urllib.parse.quote(name, safe=""), urllib.parse.quote(name)):
            answer = http.get(f"/v1/models/{path}")
            assert (answer.status_code, answer.json()) == (200, first)
        assert http.get("/v1/models/").json()["data"] == [first, second]
        for other in ("nope", "tiny/other", "org"):
            answer = http.get(f"/v1/models/{other}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert error["message"] == f"model is {other!r}; this server has {name!r}, 'b'"
        assert asked(http, URL, prompt="ab", max_tokens=2, model="b", n=2)["model"] == name
        assert http.post(URL, json={"prompt": "ab", "model": "tiny"}).status_code == 404
    line, refused = lines
    counts = r"2 prompt tokens, 4 tokens in .* s \(.* tokens/s\), 0 of 0 draft tokens accepted"
    assert re.fullmatch(rf"{URL}: {counts}", line)
    assert refused == f"{URL}: status 404: model is 'tiny'; this server has {name!r}, 'b'"


def test_stop_echo_and_minimum(http, lm):
    text = lm.generate("ab", max_new_tokens=12).text
    body = {"prompt": "ab", "max_tokens": 12, "stop": text[3:5], "echo": True}
    found = asked(http, URL, **body)["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("ab" + text[: text.find(text[3:5])], "stop")
    assert "".join(one["choices"][0]["text"] for one in chunks(http, URL, **body)) == found["text"]
    assert asked(http, URL, prompt="ab", max_tokens=9, min_tokens=9)["usage"]["completion_tokens"] == 9


def test_the_method_of_a_request_and_what_it_counts(http, lm):
    def counter(name):
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        return float(found[1])

    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    before = [counter(f"spec_decode_{name}_total") for name in names]
    method = {"name": "ngram", "num_draft_tokens": 3, "ngram_min": 1}
    body = {"prompt": "ab ab ab ab", "max_tokens": 24}
    metrics = asked(http, URL, **body, method=method)["metrics"]
    counts = lm.generate(
        body["prompt"], max_new_tokens=24, method="ngram", num_draft_tokens=3, ngram_min=1
    ).statistics
    assert metrics["method"] == "ngram"
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": counts.mean_acceptance_length_drafting,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "acceptance_histogram": list(counts.acceptance_histogram),
        "num_spec_steps": counts.num_drafts,
        "num_accepted_draft_tokens": counts.num_accepted_tokens,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": 3,
    }
    assert metrics["tokens_per_round"] == counts.mean_acceptance_length
    assert metrics["compile_time_ms"] > 0  # a draft of 3 tokens has a program of its own
    after = [counter(f"spec_decode_{name}_total") for name in names]
    gained = [one - other for one, other in zip(after, before, strict=True)]
    assert gained == [counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens]
    assert 'position="2"' in http.get("/metrics").text
    assert counter("num_requests_running") == 0
    assert asked(http, URL, **body, method=method)["metrics"]["compile_time_ms"] == 0
    plain = asked(http, URL, **body, method="autoregressive")
    assert plain["metrics"]["speculative_decoding"] is None
    assert asked(http, URL, **body, n=2, temperature=1)["metrics"] is None


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"frobnicate": 1}, "frobnicate", "unknown field 'frobnicate'"),
        ({"\ud800": 1}, r"\ud800", "unknown field"),
        ({"max_new_tokens": 3}, "max_new_tokens", "perhaps you meant max_tokens"),
        ({"tools": [{}]}, "tools", "tools is not supported"),
        ({"logit_bias": {"99": 1}}, "logit_bias", "logit_bias has 99, which is outside the vocabulary"),
        ({"logit_bias": {"9": 101}}, "logit_bias", "logit_bias of 9 is 101.0; give a number from -100 to 100"),
        ({"logit_bias": [9]}, "logit_bias", "logit_bias is [9]; give numbers by token id"),
        ({"response_format": {"type": "xml"}}, "response_format", "give an object with the type text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "give an object with the type text"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs",
         "unknown field 'grammar' of structured_outputs; give json, json_object, regex, choice"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "structured_outputs",
         "structured_outputs.disable_any_whitespace is not supported; leave it out"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format",
         "unknown field 'schema' of response_format of the type text; give type"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format",
         "unknown field 'json_schema' of response_format of the type json_object; give type, schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}}, "response_format",
         "unknown field 'strikt' of response_format.json_schema; give schema, name, description, strict"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options",
         "stream_options.continuous_usage_stats is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
         "response_format", "strict is 'yes'"),
        ({"stream": True, "stream_options": []}, "stream_options", "an object with include_usage"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around inside"),
        ({"guided_regex": 5}, "guided_regex", "regex is 5"),
        ({"guided_choice": []}, "guided_choice", "choices is []"),
        ({"structured_outputs": {"choice": {"a": 1}}}, "structured_outputs", "choices is {"),
        ({"guided_choice": ["x"]}, "guided_choice", "no text of the grammar can be written"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "got both guided_regex and guided_choice"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; give at least 1, or echo: true"),
        ({"max_tokens": "many"}, "max_tokens", "give a whole number"),
        ({"max_tokens": 1000}, "prompt", "exceed the model's context of 512"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "from 0 to max_tokens"),
        ({"prompt": [99]}, "prompt", "prompt has the token id 99; ids are whole numbers from 0 to 12"),
        ({"prompt": []}, "prompt", "prompt is []"),
        ({"prompt": [["a"]]}, "prompt", "prompt has ['a']"),
        ({"prompt": None}, "prompt", "prompt is null or missing"),
        ({"prompt": "\ud800"}, "prompt", "not text in UTF-8"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"temperature": [0.5]}, "temperature", "give one value"),
        ({"top_p": 2}, "top_p", "top_p is 2"),
        ({"seed": 2**64}, "seed", "seed is 18446744073709551616; give a number from -9223372036854775808"),
        ({"seed": -(2**63) - 1}, "seed", "seed is -9223372036854775809"),
        ({"seed": 0.5}, "seed", "seed is 0.5"),
        ({"max_tokens": 0, "echo": True, "prompt": [[]]}, "prompt", "the prompt is empty"),
        ({"max_tokens": 0, "echo": True, "prompt": [5] * 513}, "prompt", "has 513 tokens"),
        ({"n": 0}, "n", "n is 0; give a number from 1 to 128"),
        ({"n": 100}, "n", "give at most 16"),
        ({"stop": [3]}, "stop", "give a string"),
        ({"stop": ["a"] * 17}, "stop", "give at most 16"),
        ({"stream": "yes"}, "stream", "give True or False"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"logprobs": 21}, "logprobs", "give a number from 0 to 20"),
        ({"logprobs": 5, "echo": True}, "logprobs", "with echo, only the likeliest token is reported"),
        ({"method": "nope"}, "method", "unknown method 'nope'"),
        ({"method": {"name": "ngram", "exit_layer": 2}}, "method", "method ngram has no option"),
        ({"method": {"name": "ngram", "prompt": "x"}}, "method", "unknown option prompt"),
        ({"method": {"name": "draft-model", "draft": "/etc"}}, "method", "a file of the server"),
        ({"method": {"name": "ngram", "reference": ["/etc/passwd"]}}, "method", "a file of the server"),
        ({"method": "medusa"}, "method", "head"),
        ({"model": "gpt-5"}, "model", "this server has 'tiny'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_wrong_request_names_its_field(http, body, param, said):
    answer = http.post(URL, content=json.dumps({"prompt": "ab", **body}))
    error = answer.json()["error"]
    assert answer.status_code == (404 if "model" in body else 400)
    assert said in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "\n" not in error["message"]


def test_a_body_that_is_no_request(http):
    for content in (b"{", b"[]", b"\xff", b'{"prompt": ' + b"[" * 5000, b" " * (5 * 2**20)):
        answer = http.post(URL, content=content)
        assert answer.status_code == (413 if len(content) > 2**20 else 400)
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field",
    [{"guided_choice": ["abcd", "cd e"]}, {"structured_outputs": {"regex": "abcd|cd e"}}],
    ids=lambda field: next(iter(field)),
)
def test_a_grammar_holds_in_texts_and_streams(http, lm, field):
    body = {"prompt": "ab", "max_tokens": 9, "temperature": 0, "logprobs": 1, **field}
    result = lm.generate("ab", max_new_tokens=9, choices=["abcd", "cd e"], method="autoregressive")
    (choice,) = asked(http, URL, **body)["choices"]
    assert choice["text"] == result.text
    assert result.text in ("abcd", "cd e")
    assert (choice["finish_reason"], result.finish_reason) == ("stop", "eos")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    streamed = [one["choices"][0] for one in chunks(http, URL, **body)]
    assert "".join(one["text"] for one in streamed) == choice["text"]
    drawn = asked(http, URL, **body | {"n": 3, "temperature": 1.0})["choices"]
    assert {one["text"] for one in drawn} <= {"abcd", "cd e"}
    assert {one["finish_reason"] for one in drawn} == {"stop"}
    # A stop string and the budget end a text inside the grammar.
    (cut,) = asked(http, URL, **body | {"stop": choice["text"][-1]})["choices"]
    assert (cut["text"], cut["finish_reason"]) == (choice["text"][:-1], "stop")
    (short,) = asked(http, URL, **body | {"max_tokens": 1})["choices"]
    assert short["finish_reason"] == "length"
    assert choice["text"].startswith(short["text"])


def test_neutral_and_null_fields_are_accepted(http):
    body = {"tools": [], "logit_bias": {}, "best_of": 1, "user": "me", "stop": None, "top_k": -1}
    body |= {"response_format": {"type": "text"}, "guided_json": None}
    body |= {"skip_special_tokens": True, "metadata": {"a": "b"}, "store": True, "priority": 3}
    asked(http, URL, prompt="ab", max_tokens=2, **body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_scheduler_refuses_is_not_an_aborted_one(stream):
    class Refusing(FakeScheduler):
        def add(self, **arguments):
            raise ValueError("the prompt is too long")

    lines: list[str] = []
    app, _ = application(Refusing, report=lines.append)
    with client(app) as http:
        answer = http.post(URL, json={"prompt": "ab", "max_tokens": 2, "stream": stream})
        assert (answer.status_code, lines) == (400, ["/v1/completions: status 400: the prompt is too long"])
        assert "request_success_total{" not in http.get("/metrics").text


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.3, "seed": 3, "presence_penalty": 1}]
)
def test_the_likeliest_tokens(http, lm, options):
    """Under the model's own distribution, whatever the sampling; lists begin with the most likely token."""
    result = lm.generate("ab", max_new_tokens=6, top_logprobs=20, **options)
    body = {"prompt": "ab", "max_tokens": 6, **options}
    found = asked(http, URL, logprobs=20, **body)["choices"][0]["logprobs"]
    for place, token in enumerate(result.token_records):
        of = found["top_logprobs"][place]
        assert of[found["tokens"][place]] == found["token_logprobs"][place]
        assert sorted(of.values()) == pytest.approx(sorted(number for _, number in token.top), abs=1e-4)
        assert {lm.tokenizer.alone(id)[0] for id, _ in token.top if id != token.id} <= of.keys()
    few = asked(http, URL, logprobs=2, **body)["choices"][0]["logprobs"]
    assert few["tokens"] == found["tokens"]
    assert all(2 <= len(top) <= 3 for top in few["top_logprobs"])
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4, "max_tokens": 6, **options}
    for one in asked(http, CHAT, **chat)["choices"][0]["logprobs"]["content"]:
        numbers = [top["logprob"] for top in one["top_logprobs"]]
        assert (numbers, len(numbers)) == (sorted(numbers, reverse=True), 4)
        assert all(bytes(top["bytes"]).decode() == top["token"] for top in one["top_logprobs"])


def test_other_paths(http, lm):
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get(URL).status_code == 405
    for path, said in {
        "nothing": "Not Found",
        "embeddings": "a model that",
        "responses": "the server keeps",
    }.items():
        answer = http.post(f"/v1/{path}", json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "invalid_request_error")
        assert error["message"].startswith(f"POST /v1/{path}: {said}")

    def tokens(**body):
        return asked(http, "/tokenize", **body)["tokens"]

    assert tokens(prompt="ab cd") == lm.encode("ab cd")
    assert tokens(messages=MESSAGES) == lm.encode(MESSAGES)
    plain = asked(http, "/tokenize", prompt="ab cd", add_special_tokens=False)
    assert (plain["tokens"], plain["count"]) == (lm.encode("ab cd")[1:], 2)
    assert asked(http, "/detokenize", tokens=plain["tokens"]) == {"prompt": "ab cd"}
    ids = tokens(prompt="ab</s>cd<s> a")
    assert asked(http, "/detokenize", tokens=ids) == {"prompt": "<s>ab</s>cd<s> a"}
    assert tokens(prompt="<s>ab</s>cd<s> a") == ids
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<s>", "</s>", TEMPLATE)


def test_a_key_and_the_host():
    with client(application(key="secret")[0]) as http:
        for given in (
            None,
            "",
            "Bearer",
            "Bearer wrong",
            "secret",
            "Basic secret",
            "Bearersecret",
            "Bearer secret x",
        ):
            answer = http.get("/v1/models", headers={} if given is None else {"authorization": given})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), given
            assert answer.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer secret", "bearer secret", "BEARER  secret"):
            answer = http.get("/v1/models", headers={"authorization": given, "host": "x.org"})
            assert answer.status_code == 200
        assert http.get("/metrics").status_code == 401
        assert http.get("/health").status_code == 200
    hosts = "127.0.0.1:80 127.0.0.2:8000 [::1] [::1]:8000 localhost:8000"
    others = "evil.org [localhost 127.0.0.1@evil.org 127.0.0.1.evil.org:80 192.168.0.1 localhost.evil.org"
    pages = "https://evil.org http://localhost.evil.org null chrome-extension://localhost"
    with client(application()[0]) as http:
        for header, allowed, refused in (("host", hosts, others), ("origin", "http://localhost:3000", pages)):
            for value in (allowed + " " + refused).split():
                status = http.get("/v1/models", headers={header: value}).status_code
                assert status == (200 if value in allowed.split() else 403), value


@pytest.mark.parametrize("key", [None, "secret"])
def test_pages_of_this_machine_may_read_answers(key):
    """A browser asks before it sends a header such as Authorization, and asks without it."""
    local, other = "http://localhost:3000", "https://evil.org"
    asks = {"access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization, content-type"
    with client(application(key=key)[0]) as http:
        for origin in (local, "http://127.0.0.1", "http://[::1]:8080"):
            answer = http.options(URL, headers=asks | {"origin": origin})
            assert answer.status_code == 200
            allowed = answer.headers["access-control-allow-headers"]
            assert {"authorization", "content-type"} <= set(allowed.lower().split(", "))
            assert answer.headers["access-control-allow-origin"] == origin
        for headers in ({"authorization": "Bearer secret"}, {"authorization": "wrong"}):
            answer = http.get("/v1/models", headers=headers | {"origin": local})
            assert answer.headers["access-control-allow-origin"] == local
        for asked_by in (other, "http://localhost.evil.org", "null"):
            for answer in (
                http.options(URL, headers=asks | {"origin": asked_by}),
                http.get("/v1/models", headers={"authorization": "Bearer secret", "origin": asked_by}),
            ):
                assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-origin" not in http.get("/health").headers


def test_the_operator_may_restrict_methods_and_their_options(monkeypatch):
    monkeypatch.setattr(registry, "DEFAULT", "autoregressive")
    ngram, layerskip, plain = (
        methods.NGram(ngram_max=3),
        methods.LayerSkip(exit_layer=1),
        methods.Autoregressive(),
    )
    used = []

    class Scheduler(FakeScheduler):
        def add(self, **arguments):
            used.append(arguments["method"])
            return super().add(**arguments)

    def taken(http, method):
        asked(http, URL, prompt="ab", max_tokens=2, method=method)
        return used[-1]

    with client(application(Scheduler, allowed=[ngram, layerskip])[0]) as http:
        assert taken(http, None) == taken(http, "autoregressive") == plain
        assert taken(http, "layerskip") == layerskip
        for method in ("ngram", {"name": "ngram"}, {"name": "ngram", "ngram_max": 3}):
            assert taken(http, method) == ngram
        options = ({"ngram_max": 4}, {"num_draft_tokens": 3}, {"nonsense": 3})
        wrong = ["suffix", "auto", *({"name": "ngram"} | one for one in options)]
        for method in (*wrong, {"name": "layerskip", "exit_layer": [1]}, {"name": "autoregressive", "x": 1}):
            answer = http.post(URL, json={"prompt": "ab", "method": method})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "method")
            assert "this server allows autoregressive, ngram, layerskip" in error["message"]
    with client(application(Scheduler, allowed=[])[0]) as http:
        assert http.post(URL, json={"prompt": "ab", "method": "ngram"}).status_code == 400
        assert taken(http, "autoregressive") == plain
    with client(application(Scheduler)[0]) as http:
        assert taken(http, {"name": "ngram", "ngram_max": 4}) == methods.NGram(ngram_max=4)


@pytest.fixture
def tokenised(monkeypatch):
    """The threads in which the tokenizer has worked so far, and the lengths of what it worked on."""
    worked, library = [], type(model().tokenizer._loaded)

    def recording(before):
        def work(tokenizer, given, *args, **more):
            worked.append((threading.current_thread().name, len(given)))
            return before(tokenizer, given, *args, **more)

        return work

    for name in ("encode", "decode"):
        monkeypatch.setattr(library, name, recording(getattr(library, name)))
    return worked


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (URL, {"prompt": "ab " * 10000}, "prompt"),
        (URL, {"prompt": ["a", "é" * 10000], "echo": True}, "prompt"),
        (URL, {"prompt": [[3] * 512], "echo": True}, "prompt"),
        (URL, {"prompt": ["a"] * 17}, "n"),
        (CHAT, {"messages": [{"role": "user", "content": "ab " * 10000}]}, "messages"),
        ("/tokenize", {"prompt": "ab " * 10000}, "prompt"),
        ("/tokenize", {"prompt": ["ab", "cd"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "ab " * 10000}]}, "messages"),
    ],
)
def test_what_can_never_fit_is_refused_before_it_is_tokenised(http, tokenised, url, body, param):
    answer = http.post(url, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert re.search("the model's context is 512|asks for 17 texts|has 2 texts; give one", error["message"])
    assert max((length for _, length in tokenised), default=0) <= 1


def test_no_route_uses_the_tokenizer_in_the_event_loop(http, tokenised):
    asked(http, URL, prompt="ab cd", max_tokens=4, echo=True, temperature=0, logprobs=1)
    asked(http, URL, prompt=[3, 4, 5], max_tokens=4, echo=True, logprobs=0)
    chunks(http, CHAT, messages=MESSAGES, max_tokens=4, logprobs=True)
    asked(http, "/tokenize", prompt="ab cd", add_special_tokens=False)
    asked(http, "/detokenize", tokens=[3, 4, 5] * 1000)
    assert {length for _, length in tokenised} >= {5, 3, 3000}
    threads = {re.sub(r"[-_ ]?\d+.*", "", name) for name, _ in tokenised}
    assert threads <= {"tokenizer", "engine", "asyncio"}  # the last is that of `asyncio.to_thread`


@pytest.mark.parametrize("one", [99, 13, -1, True, 1.0, 2**70, "a", None])
@pytest.mark.parametrize(("url", "field"), [("/tokenize", "prompt"), ("/detokenize", "tokens")])
def test_token_ids_are_checked(http, url, field, one):
    answer = http.post(url, json={field: [0, one]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert re.search(f"has the token id '?{one}'?; ids are|give a text, token ids, or", error["message"])
    assert "\n" not in error["message"]


def test_a_chat_without_a_template_is_refused_for_clients_of_the_api():
    with client(application(lm=language_model())[0]) as http:
        for url in (CHAT, "/tokenize"):
            answer = http.post(url, json={"messages": MESSAGES})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "messages")
            assert "no chat template; send a prompt to /v1/completions" in error["message"]
            assert "chat_template=" not in error["message"]
