"""Batches: every line gets one answer, whatever the process survives; the answer is the text of the line alone."""

from __future__ import annotations

import json
import random

import pytest

from jaxspec.engine.scheduler import Scheduler
from jaxspec.serving.batch import Batch
from jaxspec.serving.batch_files import ALL, Results, Shard, read_lines, shard_of
from tests import refused, tiny

TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"
OPTIONS = {"max_new_tokens": 5, "ignore_eos": True}
PLAIN = [{"id": number, "prompt": "ab cd" * (number % 3) + "ab"[: 1 + number % 2]} for number in range(12)]


@pytest.fixture(scope="module")
def chat_lm():
    return tiny.language_model(chat_template=TEMPLATE)


def written(path, records):
    """Writes a file of prompts; text and bytes are written as they are."""
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def run(lm, path, shard=ALL, stop=None, **options):
    """Answers a file, or stops after `stop` answers as if the process were killed; returns the results' file."""
    output = shard.path(path.with_name("results.jsonl"))
    batch = Batch(lm, **{"method": "autoregressive", "max_batch": 2, "options": OPTIONS} | options)

    def look(counts):
        if stop is not None and counts.answered >= stop:
            raise KeyboardInterrupt

    with Results(output, batch.job) as results:
        try:
            batch.run(read_lines(path, shard), results, look)
        except KeyboardInterrupt:
            assert stop is not None
    return output


def answers(output):
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_plain_record_has_the_text_of_generate(tmp_path, lm):
    records = [
        {"id": "a", "prompt": "ab"},
        {"id": {"b": 1}, "prompt": [3, 4], "max_new_tokens": 3, "logprobs": True},
        {"prompt": "ab", "temperature": 1.0, "seed": 3, "method": "ngram", "num_draft_tokens": 3},
        {"id": "a", "prompt": "ab"},
        {"id": "stopped", "prompt": "ab", "stop": " ad", "max_new_tokens": 6},
    ]
    found = answers(run(lm, written(tmp_path / "in", records)))
    assert len({one["key"] for one in found}) == len(found) == 5
    by_id = {json.dumps(one["id"]): one for one in found}
    for record in records:
        options = {name: value for name, value in record.items() if name not in ("id", "prompt")}
        result = lm.generate(record["prompt"], **OPTIONS | options)
        one = by_id[json.dumps(record.get("id"))]
        assert (one["text"], one["finish_reason"]) == (result.text, result.finish_reason)
        counts = result.statistics
        assert (one["num_prompt_tokens"], one["num_tokens"]) == (counts.num_prompt_tokens, counts.num_tokens)
        assert ("logprobs" in one) == ("logprobs" in options)


def line(name, url="completions", **body):
    """Returns a line of OpenAI's form."""
    return {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": body}


def test_lines_of_openai(tmp_path, chat_lm):
    messages = [{"role": "user", "content": "ab"}]
    usual = chat_lm.generate([3, 4], max_new_tokens=16, ignore_eos=True).text
    given = {"prompt": [3, 4], "logprobs": 0, "ignore_eos": True}
    chat = {"model": "m", "messages": messages, "max_completion_tokens": 4, "ignore_eos": True}
    records = [
        line("chat", "chat/completions", **chat),
        line("two", prompt=["ab", "cd"], n=2, temperature=1, seed=4, max_tokens=4, echo=True),
        line("usual", **given),
        line("held", **given, stop=[usual[2:9] + "!"], seed=-1),
    ]
    output = run(chat_lm, written(tmp_path / "in", records), options={})
    found = {one["custom_id"]: one for one in answers(output)}
    bodies = {name: one["response"]["body"] for name, one in found.items()}
    assert {one["error"] for one in found.values()} == {None}
    assert {one["response"]["status_code"] for one in found.values()} == {200}
    expected = chat_lm.generate(messages=messages, max_new_tokens=4, ignore_eos=True)
    message = {"role": "assistant", "content": expected.text, "refusal": None}
    assert bodies["chat"]["choices"][0]["message"] == message
    drawn = chat_lm.generate(["ab", "cd"], n=2, temperature=1, seed=4, max_new_tokens=4)
    prompts = ["ab", "ab", "cd", "cd"]
    assert [choice["text"] for choice in bodies["two"]["choices"]] == [
        prompt + one.text for prompt, one in zip(prompts, drawn, strict=True)
    ]
    usage = bodies["two"]["usage"]
    assert usage["prompt_tokens"] == sum(one.statistics.num_prompt_tokens for one in drawn[::2])
    assert usage["completion_tokens"] == sum(len(one.tokens) for one in drawn)
    assert len(bodies["usual"]["choices"][0]["logprobs"]["tokens"]) == 16  # OpenAI's default
    # A stop string that began and did not end leaves every token its text.
    held, wanted = (bodies[name]["choices"][0] for name in ("held", "usual"))
    for name in ("tokens", "text_offset"):
        assert held["logprobs"][name] == wanted["logprobs"][name]
    # Rows of one batch may differ in the last bits.
    numbers = held["logprobs"]["token_logprobs"], wanted["logprobs"]["token_logprobs"]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
    assert (held["text"], held["finish_reason"]) == (wanted["text"], wanted["finish_reason"])


BAD = [
    (b"{", "not valid JSON"),
    (b"\xff", "not valid JSON"),
    (b"3", "give a JSON object"),
    ({"id": 1}, "give `prompt` or `messages`"),
    ({"prompt": "ab", "messages": []}, "give `prompt` or `messages`"),
    ({"prompt": "ab", "temperatur": 1}, "temperatur"),
    ({"prompt": "ab", "n": 2}, "no option n"),
    ({"prompt": ["ab", "cd"]}, "2 prompts"),
    ({"prompt": "ab", "max_new_tokens": 10**9}, "context"),
    ({"prompt": "ab", "method": "mine"}, "mine"),
    ({"prompt": "ab", "self": 1}, "unknown option self"),
    ({"prompt": "ab", "acceptor": [1]}, "unknown acceptor [1]"),
    (b'{"id": NaN, "prompt": "ab"}', "not valid JSON: Out of range"),
    ({"custom_id": "x", "url": [], "body": {}}, "the url is []"),
    (line("x", prompt="a", n=10**30), "n is 1000000000000000000000000000000; give a number from 1 to 128"),
    ({"messages": [{"role": "user", "content": "ab"}]}, "chat template"),
    (line("x", "embeddings"), "/v1/embeddings"),
    (line("x", prompt="a", tools=[1]), "tools is not supported"),
    (line("x", prompt="a", max_tokens=0), "max_tokens is 0"),
    (line("x", prompt="a", max_tokens=0, echo=True), "a batch answers no prompt alone"),
    (line("x", prompt="a", stream=True), "no streams"),
    (line("x", prompt=["a", "b" * 600]), "context"),
    ({"url": "/v1/completions", "body": {"prompt": [99]}}, "prompt has the token id 99"),
    ({"prompt": "ab", "method": {"name": "ngram"}}, "give its name, and its options as fields"),
    ({"prompt": "ab", "method": "auto", "among": 3}, "among is 3; give a text or several"),
    ({"prompt": "ab", "method": "hybrid", "first": []}, "first is []; give a text"),
    (line("x", prompt="a", method={"name": "auto", "among": [{}]}), "among[0] is {}"),
]


@pytest.mark.full
def test_grammars_of_lines_and_of_the_job(tmp_path, chat_lm):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {"type": "null"}}}}
    records = [
        line("own", prompt="ab", max_tokens=9, guided_regex="a{3}"),
        line("job's", prompt="ab", max_tokens=9),
        line("bad", prompt="ab", max_tokens=9, guided_regex="("),
        line("unknown", prompt="ab", max_tokens=9, response_format=form),
    ]
    records += [{"id": "record", "prompt": "ab", "regex": "e{2}"}, {"id": "job", "prompt": "ab"}]
    output = run(chat_lm, written(tmp_path / "in", records), options={"choices": ["cd", "dd"]})
    found = {one.get("custom_id") or one["id"]: one for one in answers(output)}
    texts = [found[name]["response"]["body"]["choices"][0]["text"] for name in ("own", "job's")]
    texts += [found[name]["text"] for name in ("record", "job")]
    assert (texts[0], texts[2]) == ("aaa", "ee")
    assert {texts[1], texts[3]} <= {"cd", "dd"}
    for name, param in (("bad", "guided_regex"), ("unknown", "response_format")):
        assert found[name]["response"]["body"]["error"]["param"] == param


def test_a_system_prompt_is_for_conversations_without_one(tmp_path, chat_lm):
    user, own = {"role": "user", "content": "ab"}, {"role": "system", "content": "d"}
    records = [{"messages": [user]}, {"messages": [own, user]}]
    found = answers(run(chat_lm, written(tmp_path / "in", records), system="cd e"))
    expected = [[{"role": "system", "content": "cd e"}, user], [own, user]]
    assert [one["num_prompt_tokens"] for one in found] == [len(chat_lm.encode(one)) for one in expected]


def test_a_bad_line_has_an_error_as_its_answer(tmp_path, lm):
    """The other lines are answered; a second run repeats nothing, or only the errors that were removed."""
    path = written(tmp_path / "in", [one for line, _ in BAD for one in (line, {"id": 7, "prompt": "ab"})])
    output = run(lm, path)
    found = answers(output)
    assert len({one.get("key", one["id"]) for one in found}) == len(found) == 2 * len(BAD)
    errors = [one for one in found if one.get("error")]
    messages = [one["error"] if isinstance(one["error"], str) else one["error"]["message"] for one in errors]
    for _, expected in BAD:
        assert [message for message in messages if expected in message], (expected, messages)
    assert all("\n" not in message for message in messages)
    api = [one for one in errors if "custom_id" in one]
    assert {one["response"]["status_code"] for one in api} == {400}
    assert "tools" in {one["response"]["body"]["error"]["param"] for one in api}
    numbers = [one["line"] if "line" in one else one["error"]["line"] for one in errors]
    assert sorted(numbers) == list(range(1, 2 * len(BAD), 2))
    before = output.read_bytes()
    assert run(lm, path).read_bytes() == before
    kept = [line for line in before.splitlines(True) if not json.loads(line).get("error")]
    output.write_bytes(b"".join(kept))
    assert sorted(run(lm, path).read_bytes().splitlines()) == sorted(before.splitlines())


def test_an_error_of_the_program_is_the_answer_of_its_line(tmp_path, lm, monkeypatch):
    """Also if some texts of the line were accepted before."""
    before = Scheduler.add

    def add(scheduler, **options):
        if options.get("seed") == 5 and options["stream"] == 1:
            raise TypeError("no such thing")
        return before(scheduler, **options)

    monkeypatch.setattr(Scheduler, "add", add)
    wrong = line("x", prompt="ab", n=3, seed=5, temperature=1.0)
    found = answers(run(lm, written(tmp_path / "in", [{"prompt": "ab"}, wrong, {"prompt": "cd"}])))
    (error,) = (one for one in found if "custom_id" in one)
    assert error["error"] == {"code": "server_error", "message": "TypeError: no such thing", "line": 2}
    assert error["response"]["status_code"] == 500
    assert len([one for one in found if one.get("text")]) == 2


def test_a_killed_batch_goes_on(tmp_path, lm):
    """The file of results may end anywhere, also within a line."""
    path = written(tmp_path / "in", PLAIN)
    whole = run(lm, path).read_bytes()
    expected = sorted(whole.splitlines())
    for cut in (0, 1, len(whole) // 3, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1):
        (tmp_path / "results.jsonl").write_bytes(whole[:cut])
        kept = whole[:cut].rpartition(b"\n")[0]
        output = run(lm, path)
        assert output.read_bytes().startswith(kept)
        assert sorted(output.read_bytes().splitlines()) == expected
    (tmp_path / "results.jsonl").unlink()
    for stop in (1, 3, None):
        output = run(lm, path, stop=stop)
    assert sorted(output.read_bytes().splitlines()) == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
def test_a_text_does_not_depend_on_its_place(tmp_path, lm, options):
    """Of sampled lines without a seed each has its own randomness, which is the same in each run."""
    records = [*PLAIN, PLAIN[0], PLAIN[0]]
    found = []
    for seed, rows in ((0, 2), (1, 4)):
        random.Random(seed).shuffle(records)
        folder = tmp_path / str(seed)
        folder.mkdir()
        output = run(lm, written(folder / "in", records), max_batch=rows, options=OPTIONS | options)
        found.append(sorted(output.read_text().splitlines()))
    assert found[0] == found[1]
    same = [one["text"] for one in map(json.loads, found[0]) if one["id"] == 0]
    assert len(same) == 3
    assert (len(set(same)) > 1) == bool(options)


@pytest.mark.parametrize("content", [b"my only notes", b'{"prompt": "ab"}', b'{"key', b'{"key": "12'])
def test_a_file_of_something_else_is_not_emptied(tmp_path, content):
    """A last line without its end is removed only if it is the beginning of a result."""
    output = tmp_path / "output"
    output.write_bytes(content)
    if content.startswith(b'{"key'):
        with Results(output, {}):
            assert not output.read_bytes()
        return
    with refused(r"line 1 of .* is not a result of a batch; give another output"):
        Results(output, {}).__enter__()
    assert output.read_bytes() == content


def test_results_of_another_job_are_not_mixed(tmp_path, lm, chat_lm):
    assert Batch(lm).job != Batch(chat_lm).job  # of the same model with another template
    path = written(tmp_path / "in", PLAIN[:2])
    output = run(lm, path)
    run(lm, path, method="ngram", max_batch=1)  # which changes no text
    assert len(answers(output)) == 2
    for options in ({"options": OPTIONS | {"temperature": 1.0}}, {"system": "e"}):
        with refused(r"results of another model or other options; .* another output"):
            run(lm, path, **options)
    compact = [json.dumps(one, separators=(",", ":")) for one in answers(output)]  # as jq writes it
    output.write_text("".join(f"{one}\n" for one in compact))
    assert run(lm, path).read_text().splitlines() == compact
    output.write_text("text\n" + output.read_text())
    with refused(r"line 1 of .* is not a result of a batch; give another output"):
        run(lm, path)
    with (
        Results(tmp_path / "other", {}),
        refused("is in use by"),
        Results(tmp_path / "other", {}),
    ):
        pass


def test_shards_divide_the_lines(tmp_path, lm):
    records = [*PLAIN, b"{", PLAIN[0]]
    path = written(tmp_path / "in", records)
    whole = run(lm, path)
    parts = [run(lm, path, shard=Shard(index, 3)) for index in range(3)]
    assert [part.name for part in parts] == [f"results-{index}-of-3.jsonl" for index in range(3)]
    lines = [line for part in parts for line in part.read_text().splitlines()]
    assert sorted(lines) == sorted(whole.read_text().splitlines())
    assert all(part.stat().st_size for part in parts)


def test_the_shard_of_this_process():
    assert shard_of(None, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == (0, 1)
    assert shard_of("3/8", {}) == (3, 8)
    array = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}
    assert shard_of("auto", array | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == (3, 8)
    assert shard_of("auto", array | {"SLURM_ARRAY_TASK_ID": "15", "SLURM_ARRAY_TASK_STEP": "2"}) == (7, 8)
    assert shard_of("auto", {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "5"}) == (2, 5)
    for wrong in ("8/8", "-1/8", "1", "a/b", "0/0"):
        with refused(f"shard is '{wrong}'; give index/count"):
            shard_of(wrong, {})
    with refused("shard is auto, but neither"):
        shard_of("auto", {"JOB_COMPLETION_INDEX": "2"})


def test_lines_of_a_rare_kind_wait_for_more_of_their_kind(tmp_path, lm):
    """So their batch has more rows. The one in the first line runs when as few of the others are left."""
    records = [{"prompt": "ab", "id": number} for number in range(8)]
    records[0]["method"] = records[3]["method"] = "ngram"
    found = [one["id"] for one in answers(run(lm, written(tmp_path / "in", records)))]
    assert [sorted(found[at : at + 2]) for at in (0, 2, 4, 6)] == [[1, 2], [4, 5], [0, 3], [6, 7]]


def test_lines_are_read_as_they_are_needed(tmp_path, lm):
    """Neither the prompts nor the results are held in memory."""
    path = written(tmp_path / "in", [{"id": number, "prompt": "ab"} for number in range(100)])
    read = []

    def lines():
        for line in read_lines(path):
            read.append(line)
            yield line

    batch = Batch(lm, method="autoregressive", options={"max_new_tokens": 2, "ignore_eos": True}, max_batch=2)
    with Results(tmp_path / "results", batch.job) as results:
        batch.run(lines(), results, lambda counts: unanswered.append(len(read) - counts.answered))
    assert len(read) == 100
    assert max(unanswered) <= 8


unanswered: list[int] = []
