"""Conversations: the text of each turn is that of `generate`, and only new tokens are fed."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.model.config import RopeScaling
from jaxspec.programs import buckets, compiled
from jaxspec.programs.executables import Executables
from tests import refused, tiny

TEMPLATE = (
    "{% for one in messages %}{{ one.content }}{{ '</s>' if one.role == 'assistant' else 'd' }}{% endfor %}"
)
# It drops all but the end of earlier answers.
FORGETS = TEMPLATE.replace(
    "{{ one.content }}", "{{ one.content[-2:] if one.role == 'assistant' else one.content }}"
)
TURNS = ("ab", "cab ed", "dd")
OPTIONS = {"max_new_tokens": 10, "ignore_eos": True}
REPRESENTATIVES = ("autoregressive", "ngram", "layerskip", "draft-model", "eagle3", "choosing")
OTHERS = (
    *("s2d", "eagle-tree", "clasp", "knapspec", "choosing-heads", "dflash", "dspark", "kangaroo"),
    *("suffix", "token-recycling", "asd", "s2d-target", "medusa-tree"),
    *("choosing-asd", "draft-model-pairs", "draft-verify", "s2d-vocab", "hydra", "eagle-vocab"),
)


EXECUTABLES = Executables()


def model(config=tiny.TARGET, template: str = TEMPLATE) -> LanguageModel:
    lm = LanguageModel(tiny.engine_config(config), tiny.params(config), tiny.tokenizer(template))
    lm.executables = EXECUTABLES
    return lm


@pytest.fixture
def lm():
    return model()


def common(first, second) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def turns(lm, conversation, texts=TURNS, **options):
    """Sends messages; yields each answer, that of `generate`, and the tokens that both turns have in common."""
    held = []
    for text in texts:
        messages = [*conversation.messages, {"role": "user", "content": text}]
        answer = conversation.send(text)
        yield answer, lm.generate(messages=messages, **OPTIONS | options), common(held, conversation.prompt)
        assert conversation.messages == [*messages, {"role": "assistant", "content": answer.text}]
        held = [*conversation.prompt, *answer.tokens]


@pytest.mark.representatives(*REPRESENTATIVES)
@pytest.mark.parametrize("name", [*REPRESENTATIVES, *OTHERS])
def test_every_turn_equals_a_text_of_its_own(name, monkeypatch):
    """Not only the tokens: the drafts of each round are the same, so the drafter's caches are the same too."""
    config = tiny.config_of(name)
    lm, method = model(config), tiny.drafter_of(name, config=config)
    fed, call = [], lm.executables.call

    def counting(function, *arguments, **static):
        if function is compiled.prefill:
            request = arguments[2]
            fed.append(int(request.length[0]) - (0 if request.start is None else int(request.start[0])))
        return call(function, *arguments, **static)

    monkeypatch.setattr(lm.executables, "call", counting)
    for answer, fresh, same in turns(lm, lm.chat(method=method, **OPTIONS), method=method):
        assert answer.tokens == fresh.tokens
        if (
            name.partition("-")[0] != "asd" and name != "choosing-asd"
        ):  # their mask follows the tokens that were fed
            assert answer.token_records == fresh.token_records
        counts = answer.statistics
        # The last common token is fed again.
        assert counts.num_reused_tokens == max(same - 1, 0)
        assert fed == [counts.num_prompt_tokens - counts.num_reused_tokens, counts.num_prompt_tokens]
        fed.clear()


@pytest.mark.full
@pytest.mark.representatives("forgets")
@pytest.mark.parametrize("template", [TEMPLATE, FORGETS], ids=["usual", "forgets"])
def test_auto_reuses_caches(template):
    lm = model(template=template)
    candidates = {"among": ("ngram", "suffix")}
    conversation = lm.chat(method="auto", **candidates, **OPTIONS)
    for answer, fresh, same in turns(lm, conversation, method="auto", **candidates):
        assert answer.tokens == fresh.tokens
        assert answer.statistics.num_reused_tokens == max(same - 1, 0)
        lm.executables.wait()


def test_a_template_that_shortens_earlier_answers():
    """The caches are cut back to the beginning that is still the same."""
    lm, method = model(template=FORGETS), tiny.drafter_of("eagle3")
    shorter = False
    for answer, fresh, same in turns(lm, lm.chat(method=method, **OPTIONS), method=method):
        assert answer.token_records == fresh.token_records
        assert answer.statistics.num_reused_tokens == max(same - 1, 0)
        shorter |= 0 < same < len(fresh.tokens) + answer.statistics.num_prompt_tokens - 10
    assert shorter


def test_a_stopped_answer_stays(lm):
    """The returned part stays in the conversation, and the next turn reuses the caches."""
    method = tiny.drafter_of("draft-model")
    conversation = lm.chat(method=method, **OPTIONS | {"max_new_tokens": 40})
    pieces = conversation.stream("ab")
    written = next(pieces).text + next(pieces).text
    assert conversation.messages[-1] == {"role": "assistant", "content": written}
    before = list(conversation.messages)
    answer = conversation.send("cd")
    assert next(pieces, None) is None  # it can no longer run
    fresh = lm.generate(
        messages=[*before, {"role": "user", "content": "cd"}],
        method=method,
        **OPTIONS | {"max_new_tokens": 40},
    )
    assert answer.token_records == fresh.token_records
    assert answer.statistics.num_reused_tokens > 0


def test_a_message_without_an_answer_does_not_stay(lm):
    conversation = lm.chat(**OPTIONS)
    conversation.stream("ab")
    conversation.stream("cd").close()
    assert conversation.messages == []
    with refused("not text in UTF-8"):
        conversation.send("\ud83d")
    assert len(conversation.send("ab").tokens) == 10


def test_an_interrupted_call_costs_only_the_caches(lm, monkeypatch):
    """The state of the loop is lost if Ctrl-C comes between a call and the assignment of its result."""
    method = tiny.drafter_of("eagle3")
    conversation = lm.chat(method=method, **OPTIONS)
    conversation.send("ab")
    call = lm.executables.call

    def interrupted(function, *arguments, **static):
        call(function, *arguments, **static)
        raise KeyboardInterrupt

    for _ in range(2):
        monkeypatch.setattr(lm.executables, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.send("cd")
        monkeypatch.undo()
        assert len(conversation.messages) == 2
    for answer, fresh, _ in turns(lm, conversation, ("cd", "dd"), method=method):
        assert answer.tokens == fresh.tokens


@pytest.mark.slow
def test_caches_grow(lm, monkeypatch):
    """From 32 to 128 slots, by copying."""
    monkeypatch.setattr(buckets, "capacity_for", lambda size, most, platform: buckets.bucket(size))
    method = tiny.drafter_of("draft-model")
    capacities = []
    conversation = lm.chat(method=method, **OPTIONS)
    for answer, fresh, _ in turns(lm, conversation, ("ab",) * 6, method=method):
        assert answer.tokens == fresh.tokens
        assert (answer.statistics.num_reused_tokens > 0) == bool(capacities)
        capacities.append(conversation._session.capacity)
    assert sorted({*capacities}) == [32, 64, 128]
    assert capacities == sorted(capacities)


def test_the_end_of_the_context(lm):
    config = dataclasses.replace(tiny.TARGET, max_position_embeddings=24)
    short = model(config)
    conversation = short.chat(ignore_eos=True)
    first = conversation.send("cab" * 3)
    assert first.statistics.num_prompt_tokens + len(first.tokens) == 24
    before = list(conversation.messages)
    with refused(r"the conversation has \d+ tokens, the model's context is 24"):
        conversation.send("ab")
    assert conversation.messages == before
    conversation.clear()
    assert conversation.messages == []
    assert conversation.send("ab").tokens


def test_another_method_and_another_system_prompt(lm):
    conversation = lm.chat("ba", method="ngram", **OPTIONS)
    assert conversation.system == "ba"
    for name in ("ngram", "eagle3", "autoregressive", "eagle3"):
        method = tiny.drafter_of(name)
        conversation.use(method)
        answers = list(turns(lm, conversation, ("ab", "cd"), method=method))
        assert all(answer.tokens == fresh.tokens for answer, fresh, _ in answers)
        assert answers[1][0].statistics.num_reused_tokens == answers[1][2] - 1
    conversation.system = "ee"
    assert [one["role"] for one in conversation.messages[:2]] == ["system", "user"]
    for answer, fresh, _ in turns(lm, conversation, method=method):
        assert answer.tokens == fresh.tokens
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "ee"}]
    conversation.system = None
    assert conversation.messages == []
    conversation.set(max_new_tokens=2)
    for wrong in ({"temperature": -1}, {"n": 2}, {"exit_layer": 1}):
        with refused(f"{next(iter(wrong))} "):
            conversation.set(max_new_tokens=9, **wrong)
    assert len(conversation.send("ab").tokens) == 2
    with refused("perhaps you meant ngram"):
        conversation.use("ngrm")
    for options, message in (({"n": 2}, "n is 2"), ({"temperature": -1}, "temperature is -1")):
        with refused(message):
            lm.chat(**options)
    with refused("exit_layer"):
        conversation.use("layerskip", exit_layer=7)


def test_a_sampled_conversation(lm):
    """A seed gives the text of plain decoding, turn by turn, with a coupled acceptor."""
    options = {"temperature": 1.0, "seed": 3, "acceptor": "coupled", "stop": ["ee"]}
    method = tiny.drafter_of("eagle3")
    for answer, fresh, _ in turns(lm, lm.chat(method=method, **OPTIONS, **options), TURNS * 2, **options):
        assert answer.tokens == fresh.tokens


def test_dynamic_rope_feeds_a_long_conversation_whole():
    """Beyond the original context, angles depend on the length of the prompt."""
    config = dataclasses.replace(
        tiny.TARGET, max_position_embeddings=32, rope_scaling=RopeScaling("dynamic", 4.0)
    )
    lm, reused = model(config), []
    conversation = lm.chat(**OPTIONS)
    for answer, fresh, _ in turns(lm, conversation, TURNS * 2, method="autoregressive"):
        assert answer.tokens == fresh.tokens
        long = answer.statistics.num_prompt_tokens > 32
        assert not (long and answer.statistics.num_reused_tokens)
        reused.append(answer.statistics.num_reused_tokens)
    assert reused[1] > 0 == reused[-1]
    conversation.clear()
    (answer, fresh, _), *_ = turns(lm, conversation, ("ab cd ab", "ab"), method="autoregressive")
    assert (answer.tokens, answer.statistics.num_reused_tokens) == (fresh.tokens, 0)


def test_the_least_length_ends_with_the_context():
    lm = model(dataclasses.replace(tiny.TARGET, max_position_embeddings=24))
    given = {"method": "autoregressive", "max_new_tokens": 10}
    conversation = lm.chat(**given, min_new_tokens=10)
    conversation.send("ab")
    assert len(conversation.send("cb db e").tokens) < 10
    with refused("min_new_tokens is 11; give a number from 0 to max_new_tokens"):
        lm.chat(**given, min_new_tokens=11)
    with refused("chat_template_kwargs is 5; give variables"):
        lm.chat(chat_template_kwargs=5)


def test_clear_ends_the_answer_that_is_being_generated(lm):
    conversation = lm.chat(max_new_tokens=20, ignore_eos=True)
    conversation.send("ab")
    pieces = conversation.stream("cd")
    next(pieces)
    conversation.clear()
    assert list(pieces) == []
    assert (conversation.messages, conversation.statistics) == ([], [])


def test_a_model_without_a_template():
    with refused("no chat template; give one with chat_template=FILE"):
        tiny.language_model().chat()
    bare = LanguageModel(tiny.TARGET, tiny.params())
    with refused("has no tokenizer"):
        bare.chat()
