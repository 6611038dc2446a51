"""Settings of a text are applied, or one line reports that they are not."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.console.errors import Guard
from jaxspec.console.terminal import printable
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.io.hf import generation_json
from jaxspec.io.hf.generation_json import Rules
from jaxspec.programs.executables import Executables
from jaxspec.requests.reading import MAX_PENALTY, RowRequest
from jaxspec.requests.row_settings import Shapes
from jaxspec.sampling import MIN_TEMPERATURE
from jaxspec.testing import reference
from tests import refused, tiny
from tests.commands import write_model

PROMPTS = [[1, 2, 3], [5], [7, 7, 2, 7], [4, 9], [6, 1, 2]]


EXECUTABLES = Executables()


def model(**changes) -> LanguageModel:
    """Returns a model that shares the programs of this file."""
    lm = tiny.language_model(**changes)
    lm.executables = EXECUTABLES
    return lm


@pytest.fixture
def lm():
    return model(eos_token_ids=())


def slow(prompt, budget, repetition=1.0, presence=0.0, frequency=0.0, suppressed=(), biases=None):
    text = list(prompt)
    while len(text) < len(prompt) + budget:
        logits = reference.forward(tiny.TARGET, tiny.params(), text, rope_length=len(prompt))[-1]
        for token in range(len(logits)):
            if token in text:
                logits[token] *= repetition if logits[token] < 0 else 1 / repetition
            times = text[len(prompt) :].count(token)
            logits[token] -= frequency * times + presence * (times > 0)
        logits[list(suppressed)] = -np.inf
        for token, bias in (biases or {}).items():
            logits[token] += bias
        text.append(int(np.argmax(logits)))
    return text[len(prompt) :]


@pytest.mark.full
@pytest.mark.representatives("ngram")
@pytest.mark.parametrize("method", ["autoregressive", "ngram", "token-recycling"])
def test_rows_that_take_the_places_of_others_have_settings_of_their_own(lm, method):
    """Prompts of different lengths share two rows, each with its own numbers."""
    repetition, presence = [1.0, 2.0, 1.3, 1.0, 4.0], [0.0, 1.0, 0.0, 0.5, -0.5]
    biases = {4: 1.5, 9: -100}
    lm.defaults |= {"suppress_tokens": [11], "frequency_penalty": 0.2}
    results = lm.generate(
        PROMPTS,
        max_new_tokens=9,
        repetition_penalty=repetition,
        presence_penalty=presence,
        logit_bias=biases,
        method=method,
        max_batch=2,
    )
    wanted = [
        slow(prompt, 9, *numbers, 0.2, [11], biases)
        for prompt, *numbers in zip(PROMPTS, repetition, presence, strict=True)
    ]
    assert [result.tokens for result in results] == wanted
    assert wanted != [slow(prompt, 9) for prompt in PROMPTS]


# Sixteen ordinary kinds of request: as data they share the programs of their numbers of rows, 1 and 4.
ORDINARY = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 4},
    {"temperature": 0.7, "min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logprobs": True},
    {"temperature": 0.7, "logprobs": True},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0.7, "n": 3},
    {"stop_token_ids": [3, 4, 5]},
    {"min_new_tokens": 5},
    {"logit_bias": {3: 5, "4": -100.0}},
    {"max_new_tokens": 200},
)


def test_ordinary_requests_share_their_programs():
    lm = tiny.language_model()
    for options in ORDINARY:
        lm.generate(PROMPTS[0], method="ngram", **{"max_new_tokens": 6} | options)
    assert lm.executables.num_compilations == 4


def test_rare_requests_have_programs_of_their_own():
    plain = RowRequest((1,), 4, (2,))
    ordinary = dataclasses.replace(
        plain, eos_ids=tuple(range(8)), rules=Rules(min_length=9), temperature=1.0, top_k=3, log_probs=3
    )
    assert Shapes.from_requests([plain]) == Shapes.from_requests([ordinary]) == Shapes()
    for rare in ({"eos_ids": tuple(range(9))}, {"rules": Rules((), (), ((3, 4),))}):
        assert Shapes.from_requests([dataclasses.replace(plain, **rare)]) != Shapes()


def test_bans_hold_where_transformers_has_them():
    rules = Rules((7,), (8,), ((9,), (3, 4), (2,)), 3, 2, 99)
    requests = [
        RowRequest((1, 5), 4, (2,), rules=rules, logit_bias=((6, 1.5),)),
        RowRequest((1,), 4, (), rules=Rules(min_length=9)),
    ]
    penalties = Shapes.from_requests(requests).penalties(requests)
    always = 2**31 - 1
    # An end-of-text token does not count as a bad word. `min_new_tokens`, here 2, has precedence over `min_length`.
    assert penalties.biased[0].tolist() == [7, 9, 8, 2, 6, -1, -1, -1]
    assert penalties.bias[0, :5].tolist() == [-np.inf] * 4 + [1.5]
    assert penalties.until[0, :5].tolist() == [always, always, 3, 4, always]
    assert penalties.biased[1].tolist() == [-1] * 8
    assert penalties.words.tolist() == [[[3, 4]], [[-1, -1]]]
    assert (penalties.ngram.tolist(), penalties.longest_ngram) == ([3, 0], 3)


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e-38, 9e-6])
def test_a_temperature_that_is_almost_0_is_greedy(lm, temperature):
    request = RowRequest((1,), 1, temperature=temperature)
    assert request.temperature == 0
    assert RowRequest((1,), 1, temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
    result = lm.generate([1, 2, 3], max_new_tokens=6, temperature=temperature)
    assert result.tokens == slow([1, 2, 3], 6)


@pytest.mark.parametrize("repetition", [1 / MAX_PENALTY, MAX_PENALTY])
@pytest.mark.parametrize("other", [-MAX_PENALTY, MAX_PENALTY])
def test_the_largest_penalties_leave_finite_logits(lm, repetition, other):
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    options = dict(zip(names, (repetition, other, other), strict=True))
    result = lm.generate([1, 2, 3], max_new_tokens=12, temperature=1.0, **options)
    assert (len(result.tokens), result.error) == (12, None)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("repetition_penalty", number) for number in (1e-40, 9e-6, 1.1e5, 1e39, float("inf"), -1.0, 0.0)),
        *(("presence_penalty", number) for number in (1.1e5, -1e39, float("nan"))),
        ("frequency_penalty", 1e39),
    ],
)
def test_penalties_beyond_float32_are_refused(lm, name, number):
    with refused(re.escape(f"{name} is {number}; give a number from")):
        lm.generate([1, 2, 3], **{name: number})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1'"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": True}, "presence_penalty is True"),
        ({"suppress_tokens": [1, -1]}, "suppress_tokens is"),
        ({"suppress_tokens": "7"}, "suppress_tokens is '7'"),
        ({"bad_words_ids": [7]}, "bad_words_ids is"),
        ({"bad_words_ids": [[]]}, "bad_words_ids is"),
        ({"bad_words_ids": [[1.5]]}, "bad_words_ids is"),
        ({"bad_words_ids": {"a": 1}}, "bad_words_ids is"),
        ({"bad_words_ids": [[1] * 100]}, "1 to 64 token ids"),
        ({"no_repeat_ngram_size": 10**6}, "no_repeat_ngram_size is 1000000"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"min_new_tokens": 2.5}, "min_new_tokens is 2.5"),
        ({"min_length": [3]}, "min_length is"),
    ],
)
def test_nonsense_in_a_generation_config_is_one_line(content, message):
    with refused(re.escape(message)) as caught:
        generation_json.defaults_of(content)
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({"typical_p": 0.9, "do_sample": True}, ["typical_p"]),
        ({"typical_p": 0.9}, []),
        ({"typical_p": 1.0, "epsilon_cutoff": 0.0, "do_sample": True}, []),
        ({"epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "do_sample": True}, ["epsilon_cutoff", "eta_cutoff"]),
        ({"num_beams": 4, "num_beam_groups": 1, "penalty_alpha": None}, ["num_beams"]),
        (
            {"forced_eos_token_id": 2, "sequence_bias": {}, "watermarking_config": None},
            ["forced_eos_token_id"],
        ),
        ({"guidance_scale": 1.5, "encoder_repetition_penalty": 1.0}, ["guidance_scale"]),
        ({"repetition_penalty": 1.1, "suppress_tokens": [3], "max_length": 20}, []),
    ],
)
def test_what_is_not_applied_is_named(content, keys):
    assert generation_json.unapplied(content) == keys


def test_one_warning_when_a_model_is_loaded(tmp_path):
    write_model(tmp_path)
    asked = {"typical_p": 0.9, "num_beams": 3, "do_sample": True, "repetition_penalty": 1.2}
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    with pytest.warns(
        RuntimeWarning, match="asks for num_beams, typical_p, which jaxspec does not"
    ) as caught:
        lm = jaxspec.load(tmp_path)
    assert len(caught) == 1
    assert lm.defaults == {"temperature": 1.0, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"top_p": 0.5}, "`top_p` has no effect at temperature 0"),
        ({"top_k": 3, "min_p": 0.1}, "`top_k` and `min_p` have no effect"),
        ({"top_p": 0.5, "temperature": 0}, "`top_p` has no effect"),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, None),
        ({"top_p": 0.5, "temperature": 0.7}, None),
        ({"temperature": 0}, None),
    ],
)
def test_filters_of_greedy_texts_have_no_effect(lm, given, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lm.stream([1, 2], max_new_tokens=2, **given)
    assert [warned in str(one.message) for one in caught] == ([] if warned is None else [True])


@pytest.mark.parametrize(
    "call",
    [
        lambda lm, **given: lm.stream([1, 2], max_new_tokens=2, **given),
        lambda lm, **given: Scheduler(lm).add([1, 2], max_new_tokens=2, **given),
        lambda lm, **given: Scheduler(lm, max_batch=1).warm_up(3, method="autoregressive", **given),
    ],
    ids=["stream", "add", "warm_up"],
)
def test_a_warning_is_about_the_line_of_the_caller(lm, call):
    with pytest.warns(RuntimeWarning, match="has no effect") as caught:
        call(lm, top_p=0.5)
    assert [one.filename for one in caught] == [__file__]


def test_a_filter_that_some_row_uses_has_an_effect(lm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.stream([[1, 2], [3]], max_new_tokens=2, top_p=0.5, temperature=[0, 0.7])


# Prompts with padding

ARRAYS = {"numpy": np.array, "jax": jnp.array}


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize(
    "rows", [[[1, 2, 10, 10], [1, 2, 3, 4]], [[10, 10, 2], [1, 2, 3]], [[1, 10], [1, 2]], [[1, 2, 10, 10]]]
)
def test_a_padded_array_needs_its_mask(array, rows):
    lm = model()  # its end-of-text token is 10
    with refused("give `attention_mask`, or lists without padding"):
        lm.generate(ARRAYS[array](rows), max_new_tokens=3)
    mask = [[int(token != 10) for token in row] for row in rows]
    plain = lm.generate([[token for token in row if token != 10] for row in rows], max_new_tokens=3)
    for given in (
        {"prompts": ARRAYS[array](rows), "attention_mask": ARRAYS[array](mask)},
        {"prompts": {"input_ids": ARRAYS[array](rows), "attention_mask": mask}},
    ):
        found = lm.generate(**given, max_new_tokens=3)
        assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [[1, 10], [3, 10]], [[10, 2]]])
def test_an_array_without_padding_is_taken(rows):
    lm = model()
    assert len(lm.generate(np.array(rows), max_new_tokens=2)) == len(rows)


@pytest.mark.parametrize(
    "mask", [[1, 1], [[1, 1]], [[1, 1, 1], [1, 1]], [[2, 1], [1, 1]], 1, "11", [["1", "1"], [1, 1]]]
)
def test_a_mask_of_another_shape_is_refused(lm, mask):
    with refused(r"attention_mask .*; give 0 or 1 for each token id"):
        lm.generate(np.array([[1, 2], [3, 4]]), attention_mask=mask)


def test_a_prompt_that_is_padding_only_is_empty(lm):
    with refused(r"prompts\[1\] is empty"):
        lm.generate(np.array([[1, 2], [3, 4]]), attention_mask=[[1, 1], [0, 0]])


# The output of a text


class Terminal(io.StringIO):
    def isatty(self):
        return True


CONTROLS = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "over\rwritten",
    "\x9b2J",
    "\u202egnp.exe",
    "a\x00b",
    "\x7f",
    "\u2066x",
]


@pytest.mark.parametrize("text", CONTROLS)
def test_control_characters_do_not_reach_a_terminal(text):
    shown = printable(text, Terminal())
    assert shown.isprintable()
    assert shown != text
    assert printable(text, io.StringIO()) == text
    assert shown.encode().decode("unicode_escape") == text


def test_what_moves_nothing_is_shown_as_it_is():
    for text in ("two\nlines\tand tabs", "é 漢字 🙂", "שלום \u200f", "a\u200db", r"\x1b"):
        assert printable(text, Terminal()) == text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_what_a_stream_cannot_encode_is_replaced(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    assert Guard("test")(lambda: print("café – 漢") or 0) == 0
    assert written.getvalue() == "café – 漢\n".encode(encoding, "replace")


def test_n_texts_of_a_prompt_are_those_of_a_list(lm):
    asked = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    expected = lm.generate([PROMPTS[0]] * 3, **asked)
    found = lm.generate(PROMPTS[0], n=3, **asked)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert len({tuple(one.tokens) for one in found}) > 1
    several = lm.generate(PROMPTS[:2], n=2, **(asked | {"max_new_tokens": [4, 6]}))
    assert [len(one.tokens) for one in several] == [4, 4, 6, 6]


def test_texts_of_one_prompt_and_seed_draw_different_numbers(lm):
    options = {"max_new_tokens": 6, "temperature": 1.0}
    found = lm.generate(PROMPTS[:2], n=2, seed=[5, 5], **options)
    assert found[0].tokens != found[1].tokens
    alone = lm.generate(PROMPTS[1], n=3, seed=5, **options)
    assert [one.tokens for one in found[2:]] == [one.tokens for one in alone[:2]]


def test_no_end_of_text_before_min_new_tokens():
    lm, method = model(eos_token_ids=tuple(range(0, tiny.TARGET.vocab_size, 2))), "ngram"
    free = lm.generate(PROMPTS, max_new_tokens=9, method=method)
    assert any(len(one.tokens) < 5 for one in free)
    asked = [5, 0, 7, None, 5]
    found = lm.generate(PROMPTS, max_new_tokens=9, min_new_tokens=asked, method=method)
    assert all(len(one.tokens) > (least or 0) for one, least in zip(found, asked, strict=True))
    assert [one.tokens for one in found][1::2] == [one.tokens for one in free][1::2]
    lm.defaults |= {"min_new_tokens": 5}
    assert lm.generate(PROMPTS[0], max_new_tokens=9, method=method).tokens == found[0].tokens


def test_a_bad_word_that_is_an_end_token_still_ends_texts():
    """As in transformers; where end tokens are ignored, it is banned as other words are."""
    lm = model(eos_token_ids=tuple(range(0, tiny.TARGET.vocab_size, 2)))
    free = lm.generate(PROMPTS[0], max_new_tokens=9)
    end = free.tokens[-1]
    assert free.finish_reason == "eos"
    lm.defaults |= {"bad_words_ids": [[end]]}
    assert lm.generate(PROMPTS[0], max_new_tokens=9).tokens == free.tokens
    assert end not in lm.generate(PROMPTS[0], max_new_tokens=9, ignore_eos=True).tokens


def test_a_minimum_of_new_tokens_comes_before_the_length_of_the_model():
    lm = model(eos_token_ids=tuple(range(0, tiny.TARGET.vocab_size, 2)))
    free = [lm.generate(prompt, max_new_tokens=9).tokens for prompt in PROMPTS]
    at = next(at for at, tokens in enumerate(free) if len(tokens) < 5)
    prompt = PROMPTS[at]
    lm.defaults |= {"min_length": len(lm.encode(prompt) if isinstance(prompt, str) else prompt) + 5}
    found = {
        least: lm.generate(prompt, max_new_tokens=9, min_new_tokens=least).tokens for least in (None, 0, 7)
    }
    assert found[0] == free[at]
    assert len(found[None]) > 5
    assert len(found[7]) > 7
    # The length counts the prompt, and a prompt that is long enough ends the ban.
    lm.defaults |= {"min_length": 1}
    assert lm.generate(prompt, max_new_tokens=9).tokens == free[at]


def test_a_token_that_must_not_begin_a_text_may_follow():
    lm = model()
    first = lm.generate(PROMPTS[0], max_new_tokens=1).tokens[0]
    allowed = {3, 4, 5} - {first}
    lm.defaults |= {"begin_suppress_tokens": sorted({*range(13)} - allowed)}
    found = lm.generate(PROMPTS[0], max_new_tokens=9, ignore_eos=True).tokens
    assert found[0] in allowed
    assert not set(found[1:]) <= allowed
