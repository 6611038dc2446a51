"""Logits that are NaN or infinite: a text ends there and says so, and what is no part of it cannot spoil it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

from jaxspec.cli import main
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import checkpoint
from jaxspec.io.hf import huggingface, peft
from jaxspec.model import cache as kv
from jaxspec.model.sharding import automatic, param_shardings
from jaxspec.sampling import Sampling
from jaxspec.testing import reference
from tests import gguf_files, refused, tiny
from tests.commands import CONFIG, write_tokenizer
from tests.engine.test_adapter import write_adapter
from tests.heads import files as heads
from tests.heads.test_medusa import medusa

PROMPTS = ((1, 3, 1, 3, 1, 4), (5, 2), (7, 7, 6, 1))
BUDGET = 12
# So few tokens that some do not come up.
SHORT = 5
each = pytest.mark.parametrize("combination", tiny.families(), ids=str)


def damaged(params, token: int):
    """Parameters whose model comes to NaN wherever it is fed `token`."""
    return {**params, "embed": params["embed"].at[token].set(jnp.nan)}


def greedy_loop(combination: tiny.Combination, token: int) -> tiny.Loop:
    """Of a target that cannot be fed `token`; a draft with parameters of its own is whole."""
    loop = tiny.loop(combination, Sampling(jnp.zeros(len(PROMPTS))))
    return dataclasses.replace(
        loop, weights=loop.weights._replace(target=damaged(loop.weights.target, token))
    )


def plain_texts(combination: tiny.Combination) -> list[list[int]]:
    config = tiny.config_of(combination.drafter)
    return [tiny.greedy(prompt, BUDGET, config=config) for prompt in PROMPTS]


@pytest.mark.representatives("draft-model-probe-rejection", "eagle-tree-rejection")
@each
def test_a_text_ends_where_its_logits_are_not_finite(combination):
    """All that comes before stands; the other rows go on."""
    texts = plain_texts(combination)
    fed = {token for prompt in PROMPTS for token in prompt}
    said = [token for text in texts for token in text[1:-1] if token not in fed]
    loop = greedy_loop(combination, said[0])
    state, emitted = loop.begin(PROMPTS, BUDGET)
    assert emitted.count.tolist() == [1, 1, 1]
    state, emitted = loop.go_on(state)
    expected = [text[: text.index(said[0]) + 1] if said[0] in text else text for text in texts]
    assert tiny.generated(state, PROMPTS) == expected
    assert state.done.all()
    assert emitted.broken.tolist() == [len(text) < BUDGET for text in expected]
    assert any(emitted.broken)


@each
def test_a_token_that_is_not_in_the_text_cannot_spoil_it(combination):
    """Not as padding, not as a draft that is rejected, not in the slots that either leaves."""
    texts = [text[:SHORT] for text in plain_texts(combination)]
    there = {token for text in (*PROMPTS, *texts) for token in text}
    absent = [token for token in range(tiny.TARGET.vocab_size) if token not in there]
    assert absent
    for token in absent:
        loop = greedy_loop(combination, token)
        state, _ = loop.go_on(loop.begin(PROMPTS, SHORT)[0])
        assert not state.broken.any()
        assert tiny.generated(state, PROMPTS) == texts


@each
def test_logits_of_a_prompt_that_are_not_finite_give_no_token(combination):
    """The row ends before it begins, beside others that do not."""
    loop = greedy_loop(combination, 5)
    state, emitted = loop.begin(PROMPTS, BUDGET)
    assert emitted.count.tolist() == [1, 0, 1]
    assert emitted.broken.tolist() == emitted.done.tolist() == [False, True, False]
    state, emitted = loop.go_on(state)
    assert emitted.count[1] == 0
    assert tiny.generated(state, PROMPTS)[1] == []


@pytest.mark.parametrize("harm", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("harmed", ["key", "value"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_harmful_key_or_value_is_seen_by_who_sees_its_slot(dtype, harmed, harm):
    """A score of -inf would leave nothing but slots that are not seen, and their stale values look sound."""
    stale = (jnp.ones((1, 8, 4), dtype), jnp.full((1, 8, 4), 5, dtype))
    stale += (jnp.ones((1, 8, 1)), jnp.ones((1, 8, 1))) if dtype == jnp.int8 else ()
    new = {"key": jnp.ones((1, 1, 1, 4)), "value": jnp.ones((1, 1, 1, 4))}
    new[harmed] = new[harmed].at[..., 0].set(harm)
    start = jnp.zeros(1, jnp.int32)
    layer = kv.write(stale, new["key"], new["value"], start, merged=True)
    mixed = kv.attend(jnp.ones((1, 1, 1, 1, 4)), layer, start[:, None], None, merged=True)
    assert jnp.isnan(mixed).all()
    assert all(jnp.isfinite(x).all() for x in layer[1::2])
    sound = kv.attend(jnp.ones((1, 1, 1, 1, 4)), layer, start[:, None] + 1, 1, merged=True)
    assert jnp.isfinite(sound).all()


OWN = [("draft-model", "constant"), ("draft-model", "any_of"), ("s2d", "adaptive")]


@pytest.mark.representatives("all-draft-model-constant", "one-draft-model-constant")
@pytest.mark.parametrize(("drafter", "rule"), OWN)
@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one"])
def test_a_damaged_draft_does_not_harm_a_greedy_text(drafter, rule, everywhere):
    loop = tiny.loop(tiny.Combination(drafter, rule, "greedy"))
    own = loop.weights.drafter
    own = {**own, "norm": own["norm"] * jnp.nan} if everywhere else damaged(own, 3)
    loop = dataclasses.replace(loop, weights=loop.weights._replace(drafter=own))
    state, _ = loop.go_on(loop.begin(PROMPTS, BUDGET)[0])
    assert tiny.generated(state, PROMPTS) == [tiny.greedy(prompt, BUDGET) for prompt in PROMPTS]
    assert not state.broken.any()
    assert not everywhere or state.stats.num_draft_tokens.tolist() == [0, 0, 0]


FOUR = dataclasses.replace(
    tiny.TARGET, vocab_size=4, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1
)


@pytest.mark.representatives("block")
@pytest.mark.parametrize("acceptor", ["rejection", "block"])
def test_a_damaged_draft_does_not_bias_a_sampled_text(acceptor):
    """A draft that comes to NaN after some of its tokens, against every text there is."""
    many, budget, prompt = 8_000, 4, (1, 3)
    loop = tiny.loop(tiny.Combination("draft-model", "constant", acceptor), Sampling(jnp.ones(many)), FOUR)
    loop = dataclasses.replace(loop, weights=loop.weights._replace(drafter=damaged(loop.weights.drafter, 2)))
    state, _ = loop.go_on(loop.begin([prompt] * many, budget, capacity=16)[0])
    texts = tiny.generated(state, [prompt] * many)
    assert state.stats.num_draft_tokens.min() < state.stats.num_draft_tokens.max()

    def next_probs(prefix: tuple[int, ...]) -> np.ndarray:
        return tiny.warp(reference.forward(FOUR, tiny.params(FOUR), [*prompt, *prefix])[-1])

    assert tiny.chi_square(list(map(tuple, texts)), tiny.text_distribution(next_probs, budget)) > 1e-3


def broken_model(dtype=jnp.float32) -> LanguageModel:
    """NaN in one weight; in float16, numbers that are too large for it."""
    params = tiny.params()
    mlp = params["layers"][-1]["mlp"]
    down = mlp["down"] * 1e4 if dtype == jnp.float16 else mlp["down"].at[0, 0].set(jnp.nan)
    mlp = {**mlp, "gate_up": mlp["gate_up"] * 30, "down": down}
    params = {**params, "layers": [*params["layers"][:-1], {**params["layers"][-1], "mlp": mlp}]}
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    assert dtype == jnp.float32 or all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    return LanguageModel(tiny.engine_config(), params, tiny.tokenizer())


@pytest.mark.representatives("0.0-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_result_says_that_its_text_ended_in_an_error(dtype, temperature):
    lm = broken_model(dtype)
    with pytest.warns(RuntimeWarning, match=r"after 0 tokens of output are not finite"):
        results = lm.generate(["ab", "cd e"], max_new_tokens=6, temperature=temperature, method="ngram")
    for result in results:
        assert (result.finish_reason, result.tokens, result.text) == ("error", [], "")
        assert result.statistics.num_tokens == 0
        assert result.statistics.tokens_per_second is None
    pieces = list(lm.stream("ab", logprobs=True))
    assert [piece.result.finish_reason for piece in pieces] == ["error"]


@pytest.mark.full
def test_a_text_keeps_what_came_before_the_error():
    whole = tiny.language_model()
    expected = whole.generate("ab", max_new_tokens=8, ignore_eos=True)
    prompt = whole.encode("ab")
    token = next(token for token in expected.tokens if token not in prompt)
    lm = LanguageModel(tiny.engine_config(), damaged(tiny.params(), token), tiny.tokenizer())
    with pytest.warns(RuntimeWarning, match="not finite"):
        result = lm.generate("ab", max_new_tokens=8, ignore_eos=True)
    assert result.tokens == expected.tokens[: expected.tokens.index(token) + 1]
    assert expected.text.startswith(result.text)
    assert str(len(result.tokens)) in result.error
    assert expected.error is None


def write_gguf(path, config, params) -> None:
    path.mkdir()
    gguf_files.write(path / "model.gguf", config, params)


def load_weights(path, config, dtype=np.float32, place=None) -> None:
    checkpoint.load_params(path / "model.gguf" if "gguf" in path.name else path, config, dtype, place)


def load_sharded(path, config) -> None:
    mesh = automatic(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model")))
    flat, _ = jax.tree.flatten_with_path(param_shardings(mesh, config))
    load_weights(
        path, config, place={jax.tree_util.keystr(at, simple=True, separator="/"): one for at, one in flat}
    )


READERS = {
    "bfloat16 in float32": (lambda *given: huggingface.save(*given, jnp.bfloat16), load_weights),
    "float32 in bfloat16": (
        huggingface.save,
        lambda path, config: load_weights(path, config, jnp.bfloat16),
    ),
    "float16": (lambda *given: huggingface.save(*given, np.float16), load_weights),
    "a mesh": (huggingface.save, load_sharded),
    "gguf": (write_gguf, load_weights),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused_by_the_tensors_name(tmp_path, kind, number):
    """At load, in one line; the largest finite numbers are weights like others."""
    write, load = READERS[kind]
    for name, value in {"sound": 6e4, "broken": number}.items():
        params = jax.tree.map(np.array, tiny.params())
        params["layers"][1]["mlp"]["down"][-1, -1] = value
        write(tmp_path / f"{name} {kind}", tiny.TARGET, params)
    load(tmp_path / f"sound {kind}", tiny.TARGET)
    tensor = "blk.1.ffn_down.weight" if kind == "gguf" else "model.layers.1.mlp.down_proj.weight"
    with refused(f"broken {kind}.*: tensor {tensor} has numbers that are not finite"):
        load(tmp_path / f"broken {kind}", tiny.TARGET)


def test_weights_beyond_the_range_of_the_dtype_are_refused(tmp_path):
    params = jax.tree.map(np.array, tiny.params())
    params["norm"][0] = 1e5
    huggingface.save(tmp_path, tiny.TARGET, params)
    with refused(r"tensor model\.norm\.weight has numbers beyond the range of float16; give"):
        load_weights(tmp_path, tiny.TARGET, np.float16)


def test_a_head_or_an_adapter_that_is_no_number_is_refused(tmp_path):
    content, tensors = medusa()
    tensors["1.0.linear.weight"][2, 3] = np.nan
    lm = LanguageModel(tiny.engine_config(heads.TARGET), tiny.params(heads.TARGET), tiny.tokenizer())
    draft = str(heads.write(tmp_path / "head", (content, tensors)))
    with refused(r"head: tensor blocks\.1\.layers\.0\.weight has numbers that are not finite"):
        lm.generate("ab", method="medusa", draft=draft)
    huggingface.save(tmp_path / "base", tiny.TARGET, tiny.params(), np.float32)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base")
    numbers = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    next(reversed(numbers.values()))[-1, -1] = np.nan
    safetensors.numpy.save_file(numbers, adapter / "adapter_model.safetensors")
    with refused(r"adapter: tensor base_model\..*lora_.\.weight has numbers that are not"):
        peft.read_adapter(adapter, tiny.TARGET)


def test_a_result_says_that_its_method_drafted_nothing():
    """The text is that of plain decoding."""
    lm, broken = tiny.language_model(), jax.tree.map(lambda leaf: leaf * jnp.nan, tiny.params())
    draft = LanguageModel(tiny.engine_config(), broken, tiny.tokenizer())
    results = [
        lm.generate("ab", max_new_tokens=8, ignore_eos=True, method="draft-model", draft=one)
        for one in (draft, lm)
    ]
    assert results[0].drafted_by == "draft-model: no draft in 7 rounds"
    assert results[1].drafted_by == "draft-model"
    assert results[0].tokens == results[1].tokens
    plain = lm.generate("ab", max_new_tokens=8, ignore_eos=True, method="autoregressive")
    assert plain.drafted_by == "autoregressive"


@pytest.mark.full
def test_the_command_says_so_in_one_line(tmp_path, capfd):
    params = jax.tree.map(np.float32, reference.random_params(CONFIG, 1))
    params["layers"][0]["mlp"]["gate_up"] *= 1e30  # the product of both halves is infinite
    huggingface.save(tmp_path, CONFIG, params)
    write_tokenizer(tmp_path)
    arguments = ["generate", "Once", "--model", str(tmp_path), "--max-new-tokens", "5"]
    assert main(arguments) == 1
    captured = capfd.readouterr()
    assert captured.out == "\n"
    expected = "jaxspec: error: the model's logits after 0 tokens of output are not finite"
    assert [line.startswith(expected) for line in captured.err.splitlines()[-1:]] == [True]
    assert main([*arguments, "--json"]) == 1
    captured = capfd.readouterr()
    report = json.loads(captured.out)
    assert (report["finish_reason"], report["tokens"], report["text"]) == ("error", [], "")
    assert captured.err.splitlines()[-1].startswith(expected)
