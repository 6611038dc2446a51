"""Self-speculation in the engine: files beside the model, static masks, the γ of a text, bad input."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decoding, stopping
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods import method_files
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.methods.method_files import ProbeFile
from jaxspec.io.trained_for import TrainedFor
from jaxspec.methods import LoadedModel, Resources, registry
from jaxspec.model.plan import LayerPlan
from jaxspec.programs.executables import MAX_VARIANTS, Executables
from jaxspec.requests.reading import drawn_apart
from jaxspec.stopping import AdaptiveGamma, AnyOf, ConfidenceBelow, Constant, FixedGamma, ProductBelow
from tests import refused, tiny

CONFIG = dataclasses.replace(tiny.DEEP, eos_token_ids=(tiny.EOS,))
PROMPTS = ([1, 2, 3], [5], [7, 1, 7, 1, 7, 2])
PLAN = LayerPlan.skipping(3, attention=[1], mlp=[0, 1])


@pytest.fixture
def beside(tmp_path):
    """A model with a directory for its methods' files."""
    lm = LanguageModel(CONFIG, tiny.params(tiny.DEEP), tiny.tokenizer(), name="deep", directory=tmp_path)
    lm.executables = shared.executables
    return lm


shared = LanguageModel(CONFIG, tiny.params(tiny.DEEP), tiny.tokenizer(), name="deep")


def generate(lm, prompts: Any = PROMPTS, **options: Any):
    return lm.generate(prompts, max_new_tokens=14, ignore_eos=True, **options)


def tokens(results) -> list[list[int]]:
    return [result.tokens for result in results]


def made(method: str, lm=shared, distributions=("greedy",), **options: Any):
    """Returns the drafter built from options."""
    resources = Resources(lambda name: None, lm.encode, lm.directory, distributions)
    target = LoadedModel(lm.config, lm.params, lm.name)
    return registry.make(method, options).build(target, resources)[0]


def sorted_draft():
    """Returns a draft with two exits."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    return LanguageModel(
        config, tiny.params(tiny.TARGET, 7), tiny.tokenizer(), trained_for=TrainedFor((1, 2))
    )


# Options become parts


def test_each_method_has_its_papers_defaults():
    asd, skip = made("asd"), made("layerskip", exit_layer=1)
    assert [float(n) for n in (asd.alpha, asd.every, asd.keep_last)] == pytest.approx([0.985, 3, 2])
    assert isinstance(asd.rule, ConfidenceBelow)
    gamma = asd.rule.gamma
    numbers = [gamma.first, gamma.alpha, gamma.beta1, gamma.beta2, gamma.epsilon]
    assert [float(number) for number in numbers] == pytest.approx([0.6, 0.9, 0.5, 0.9, 0.01])
    assert asd.num_draft_tokens == 12
    assert (type(skip.rule), skip.num_draft_tokens) == (Constant, 5)
    adaspeed = made("adaspeed", exit_layer=2)
    assert isinstance(adaspeed.rule, ProductBelow)
    assert (float(adaspeed.rule.gamma.first), adaspeed.num_draft_tokens) == (pytest.approx(0.8), 12)
    code = LanguageModel(CONFIG, shared.params, name="codellama/CodeLlama-13b-hf")
    assert [int(n) for n in (made("asd", code).every, made("asd", code).keep_last)] == [4, 3]


def test_any_stop_rule_goes_with_any_draft():
    rule = made("asd", stop_rule=("product", "adaptive-length"), gamma=0.5).rule
    assert isinstance(rule, AnyOf)
    assert isinstance(rule.rules[0].gamma, AdaptiveGamma)
    assert float(rule.rules[0].gamma.first) == 0.5
    fixed = made("layerskip", stop_rule=("confidence",), adaptive_gamma=False).rule
    assert float(fixed.gamma.gamma) == pytest.approx(0.6)
    assert isinstance(made("adaspeed", stop_rule=("constant",)).rule, Constant)


@pytest.mark.parametrize(
    ("method", "options", "line"),
    [
        ("asd", {"alpha": 0.0}, "alpha is 0.0; give a cosine similarity above 0"),
        ("asd", {"alpha": 1.5}, "alpha is 1.5"),
        ("asd", {"every": -1}, "every is -1; give 0"),
        ("asd", {"keep_last": 4}, "keep_last is 4; give a number from 0 to 3"),
        ("asd", {"every": 1, "keep_last": 0}, "skips every layer"),
        ("layerskip", {"exit_layer": 0}, "exit_layer is 0; the model has 3 layers, give 1 to 2"),
        ("adaspeed", {"exit_layer": 3}, "exit_layer is 3"),
        ("adaspeed", {"gamma": 1.2}, "gamma is 1.2; give a number from 0 to 1"),
        ("asd", {"stop_rule": ("probe",)}, "unknown stop_rule 'probe'; give one of constant, confidence"),
        ("draft-verify", {}, "draft-verify needs a plan; make one with `jaxspec search`"),
        ("adaspeed-probe", {}, "the model is in memory only and has no probe file; give probe=FILE"),
    ],
)
def test_what_does_not_fit_is_one_line(method, options, line):
    with refused(re.escape(line), (ValueError, FileNotFoundError)):
        generate(shared, method=method, **options)


WINDOWED: dict[str, dict[str, Any]] = {
    "asd": {"alpha": 0.84, "every": 2, "keep_last": 0},
    "clasp": {},
    "knapspec": {},
    "layerskip": {},
    "adaspeed": {},
    "quantised": {},
    "draft-model": {"draft_exit": 1},
    "s2d": {"draft": sorted_draft},
    "draft-verify": {},
}


@pytest.mark.parametrize("method", WINDOWED)
def test_a_draft_window_is_in_the_configuration_of_the_draft(method, beside):
    """The target's has none. If each layer has a window of its own, there is nothing to read less of."""
    plan = beside.directory / method_files.PLAN_NAME
    method_files.write_plan(plan, beside.fingerprint, PLAN, {})
    options = {name: value() if callable(value) else value for name, value in WINDOWED[method].items()}
    drafter, _ = beside.drafter(method, draft_window=(1, 4), **options)
    plain, _ = beside.drafter(method, **options)
    assert (drafter.config.draft_window, beside.config.draft_window) == ((1, 4), None)
    assert dataclasses.replace(drafter.config, draft_window=None) == plain.config
    if method in ("s2d", "draft-verify"):  # a draft and a plan are for one model
        return
    config = dataclasses.replace(CONFIG, sliding_windows=(3, 2, 3))
    narrow = LanguageModel(config, beside.params, directory=beside.directory)
    line = "each layer of the draft has a window of 3 tokens; leave it out"
    with pytest.raises(ValueError, match=line) as caught:
        narrow.drafter(method, draft_window=(1, 4), **options)
    assert "\n" not in str(caught.value)


def test_a_draft_window_changes_drafts_only():
    """A window that covers the text changes nothing. A short one leaves the text, and `layerskip` shares no layers."""
    plain = tokens(generate(shared, method="autoregressive"))
    whole = generate(shared, method="layerskip")
    covered = generate(shared, method="layerskip", draft_window=(1, 40))
    few = generate(shared, method="layerskip", draft_window=(1, 2))
    assert tokens(whole) == tokens(covered) == tokens(few) == plain
    counts = [[one.statistics.num_accepted_tokens for one in of] for of in (whole, covered, few)]
    assert counts[0] == counts[1]
    assert counts[1] != counts[2]


# Files


def test_numbers_beside_the_model_are_found_and_options_come_first(beside):
    path = beside.directory / method_files.ASD_NAME
    ASDNumbers(0.7, 2, 1).write(path, beside.fingerprint, {})
    drafter = made("asd", beside, alpha=0.8)
    assert [float(n) for n in (drafter.alpha, drafter.every, drafter.keep_last)] == pytest.approx([0.8, 2, 1])
    moved = path.rename(path.with_name("elsewhere.json"))
    assert int(made("asd", beside, asd_numbers=str(moved)).every) == 2
    moved.write_text(moved.read_text().replace('"every": 2', '"every": -1'))
    with refused(r"elsewhere\.json: every is -1; give 0"):
        made("asd", beside, asd_numbers=str(moved))
    with refused(r"missing\.json does not exist", FileNotFoundError):
        made("asd", beside, asd_numbers="missing.json")


@pytest.mark.full
def test_a_probe_beside_the_model_is_found(beside):
    v, b = np.linspace(-1, 1, CONFIG.hidden_size, dtype=np.float32), 0.25
    distribution = method_files.distribution_name(0.6, top_p=0.9)
    assert distribution == "temperature-0.6-top_p-0.9"
    path = method_files.probe_path(beside.directory, 1, distribution)
    path.parent.mkdir()
    method_files.write_probe(path, beside.fingerprint, ProbeFile(v, b, 1, distribution))
    results = generate(beside, method="adaspeed-probe", exit_layer=1, temperature=0.6, top_p=0.9)
    assert any(result.statistics.num_draft_tokens for result in results)
    estimate = made("adaspeed-probe", beside, (distribution,), exit_layer=1).rule.estimate
    np.testing.assert_allclose(estimate.direction, v * np.asarray(beside.params["norm"]), rtol=1e-6)
    with refused(r"exit-1-greedy.*python -m training\.probe", FileNotFoundError):
        generate(beside, method="adaspeed-probe", exit_layer=1)
    with refused("is a probe of exit layer 1, the draft exits after 2"):
        made("adaspeed-probe", beside, (distribution,), exit_layer=2, probe=str(path))
    with refused("is a probe for the distribution temperature"):
        made("adaspeed-probe", beside, exit_layer=1, probe=str(path))
    with refused("the texts follow different distributions"):
        generate(beside, method="adaspeed-probe", exit_layer=1, temperature=[0.0, 0.6, 0.6])
    method_files.write_probe(path, "0" * 16, ProbeFile(v, b, 1, distribution))
    with refused("belongs to another model"):
        made("adaspeed-probe", beside, (distribution,), exit_layer=1)
    method_files.write_probe(path, beside.fingerprint, ProbeFile(v[:3], b, 1, distribution))
    with refused(r"v of shape \(3,\), expected \(16,\)"):
        made("adaspeed-probe", beside, (distribution,), exit_layer=1)
    path.write_bytes(b"no probe")
    with refused("is not a probe"):
        made("adaspeed-probe", beside, (distribution,), exit_layer=1)


KIND = {"kind": "code", "skip_attention": [2], "skip_mlp": [], "centres": [[0.5] * CONFIG.hidden_size] * 2}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": "jaxspec.plan/9"}, "has the format jaxspec.plan/9"),
        ({"num_layers": 40}, "is a plan for 40 layers, the model has 3"),
        ({"model": "another"}, "belongs to another model"),
        ({"skip_mlp": [3]}, "skips layers [3]"),
        ({"skip_mlp": None}, "has None in `skip_mlp`, expected a list, each entry a whole number"),
        ({"skip_attention": [0, 1, 2], "skip_mlp": [0, 1, 2]}, "skips every sublayer"),
        ({"kinds": [KIND | {"skip_mlp": [3]}]}, "skips layers [3]"),
        ({"kinds": [KIND | {"skip_attention": [0, 1, 2], "skip_mlp": [0, 1, 2]}]}, "skips every sublayer"),
        (
            {"kinds": [KIND, KIND | {"centres": [[0.5] * 15, [0.5] * 16]}]},
            "has centres of 15 and 16 numbers for 'code', the model's hidden states have 16; make one with `jaxspec "
            "search --by-kind`",
        ),
        ({"kinds": [KIND | {"centres": []}]}, "has centres of no numbers for 'code'"),
        (
            {"kinds": [KIND | {"centres": [[None]]}]},
            "has [[None]] in `centres`, expected a list, each entry a list",
        ),
        ({"kinds": [{"kind": "code"}]}, "has no `skip_attention`"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(beside, change, line):
    path = beside.directory / "plan.json"
    method_files.write_plan(path, beside.fingerprint, PLAN, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(re.escape(line)):
        made("draft-verify", beside, plan=str(path))


def test_a_bank_is_read_as_it_was_written(beside):
    """A file without kinds has one mask, and is a bank's file too; `auto` counts the mean of the masks."""
    path, width = beside.directory / method_files.PLAN_NAME, CONFIG.hidden_size
    kinds = (
        method_files.Kind("code", (2,), (), ((0.5,) * width, (1.25,) * width)),
        method_files.Kind("chat", (), (0, 1), ((-2.0,) * width,)),
    )
    method_files.write_plan(path, beside.fingerprint, PLAN, {}, kinds)
    drafter, _ = beside.drafter("draft-verify")
    masks = [LayerPlan.skipping(3, [2]), LayerPlan.skipping(3, [2]), LayerPlan.skipping(3, [], [0, 1])]
    assert drafter.plan.tolist() == [np.array(mask.run).tolist() for mask in masks]
    assert drafter.centres.tolist() == [[0.5] * width, [1.25] * width, [-2.0] * width]
    method = registry.make("draft-verify", {})
    target = LoadedModel(beside.config, beside.params, beside.name)
    costs = [method.cost(target, drafter.replace(plan=mask.traced()), None).layers for mask in masks]
    assert method.cost(target, drafter, None).layers == pytest.approx(np.mean(costs))
    assert method_files.read_plan(path, beside.fingerprint, 3) == PLAN
    content = json.loads(path.read_text())
    del content["kinds"]  # as before
    path.write_text(json.dumps(content))
    drafter, _ = beside.drafter("draft-verify")
    assert (drafter.plan.tolist(), drafter.centres) == (np.array(PLAN.run).tolist(), None)


def vector_of(prompt, begin: int = 0) -> np.ndarray:
    """Returns the sum of the last hidden states of a prompt from a position on."""
    stream: list[np.ndarray] = []
    tiny.reference.forward(tiny.DEEP, tiny.params(tiny.DEEP), prompt, stream=stream)
    sizes = np.sqrt(np.mean(stream[-1] ** 2, axis=1, keepdims=True) + tiny.DEEP.rms_norm_eps)
    found: np.ndarray = (stream[-1] / sizes * np.asarray(tiny.params(tiny.DEEP)["norm"]))[begin:].sum(axis=0)
    return found


def test_each_text_has_the_mask_of_its_prompt():
    """A mask follows from the prompt, also if the prompt is fed in chunks, continues another one, or refills a row."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 13, size).tolist() for size in (1, 3, 8, 9, 21, 17)]
    sums = np.stack([vector_of(prompt) / len(prompt) for prompt in prompts])
    centres = np.float32(sums[:4] + 0.1 * rng.standard_normal(sums[:4].shape))
    masks = [LayerPlan.skipping(3, [layer], [layer]).traced() for layer in range(3)] + [PLAN.traced()]
    loop = tiny.loop(tiny.Combination("draft-verify", "constant", "greedy"))
    drafter = loop.parts.drafter.replace(plan=jnp.stack(masks), centres=jnp.asarray(centres))
    loop = dataclasses.replace(loop, parts=dataclasses.replace(loop.parts, drafter=drafter))

    def check(state, vectors) -> None:
        own = state.drafter_state.own
        np.testing.assert_allclose(own.vectors, vectors, atol=1e-4)
        best = ((vectors[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        assert own.plan.tolist() == np.stack(masks)[best].tolist()
        assert drafter.plans(state.drafter_state, ~state.done).tolist() == own.plan.tolist()

    state, _ = loop.begin(prompts)
    check(state, sums)
    assert len(np.unique(state.drafter_state.own.plan, axis=0)) == 4

    # Row 0 continues nothing. The others continue the longest prompt, or its caches in the target alone.
    longer = [[7, 2], [*prompts[4], 3, 1, 5], [*prompts[5], 5, 5]]
    before, _ = loop.begin([prompts[1], prompts[4], prompts[5]])
    start = np.array([0, 20, 16], np.int32)
    length = np.array([len(prompt) for prompt in longer], np.int32)
    tokens = np.stack([np.pad(prompt, (0, tiny.CAPACITY - len(prompt))) for prompt in longer])
    request = decoding.Request(
        *map(jnp.asarray, (tokens, length, length + 9, np.full((3, 2), -1, np.int32))),
        before.keys,
        jnp.asarray(start),
    )
    vectors, held = drafter.absorbed(before.drafter_state)
    known = held * np.array([0, 1, 0])
    caches = decoding.Caches(before.cache, (vectors, known))
    again, _ = tiny.prefill(tiny.DEEP, loop.weights, loop.parts, request, caches, chunk_size=8)
    expected = [
        vector_of(longer[0]) / 2,
        20 * sums[4] + vector_of(longer[1], 20),
        vector_of(longer[2], 16) / 3,
    ]
    expected[1] /= len(longer[1])
    check(again, np.stack(expected))
    assert again.drafter_state.own.held.tolist() == [2, 24, 3]

    state = decoding.insert(state, jnp.int32(2), before, jnp.int32(1))
    check(state, sums[[0, 1, 4, 3, 4, 5]])


def test_a_fingerprint_names_the_weights_whatever_their_dtype():
    name = method_files.fingerprint(CONFIG, shared.params)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), shared.params)
    assert method_files.fingerprint(CONFIG, half) == name
    assert method_files.fingerprint(dataclasses.replace(CONFIG, eos_token_ids=()), shared.params) == name
    assert method_files.fingerprint(dataclasses.replace(CONFIG, rope_theta=5e5), shared.params) != name
    assert method_files.fingerprint(CONFIG, tiny.params(tiny.DEEP, seed=6)) != name


@pytest.mark.parametrize("host", [True, False])
def test_a_fingerprint_stays_as_it_is(monkeypatch, host):
    """Otherwise files that users made for their models would no longer match."""
    monkeypatch.setattr(method_files, "_on_host", lambda leaf: host)
    normed = dataclasses.replace(tiny.TARGET, qk_norm=True)
    assert method_files.fingerprint(tiny.TARGET, tiny.params()) == "26416c5588157075"
    assert method_files.fingerprint(normed, tiny.params()) != "26416c5588157075"


# Masks


@pytest.mark.full
def test_another_mask_compiles_nothing(beside):
    """A new mask per prompt, other α, m and n, another plan."""
    path = beside.directory / method_files.PLAN_NAME
    method_files.write_plan(path, beside.fingerprint, PLAN, {})
    plain = [generate(beside, prompt).tokens for prompt in PROMPTS]
    for method, others in (
        ("asd", [{"alpha": 0.5}, {"alpha": 0.9, "every": 2, "keep_last": 0}, {"every": 0}]),
        ("draft-verify", [LayerPlan.skipping(3, [0], [2]), LayerPlan.skipping(3, [2], [])]),
    ):
        generate(beside, PROMPTS[0], method=method, num_draft_tokens=4)
        before = beside.executables.num_compilations
        for other in others:
            if isinstance(other, LayerPlan):
                method_files.write_plan(path, beside.fingerprint, other, {})
                other = {}
            for prompt, text in zip(PROMPTS, plain, strict=True):
                found = generate(beside, prompt, method=method, num_draft_tokens=4, **other)
                assert found.tokens == text
        assert beside.executables.num_compilations == before


def looks(lm, count: int, **options: Any):
    """Returns the result of a text with polls of the host between rounds."""
    pieces = list(lm.stream(PROMPTS[0], max_new_tokens=count, ignore_eos=True, **options))
    return pieces[-1].result


@pytest.mark.slow
def test_a_static_program_takes_over_at_a_chunks_end(monkeypatch):
    """The traced program runs first, then the static one once it is compiled, with the same text."""
    monkeypatch.setattr("jaxspec.engine.language_model.STREAM_ROUNDS", 1)
    lm = LanguageModel(CONFIG, shared.params, name="deep")
    options: dict[str, Any] = {"method": "asd", "every": 2, "keep_last": 0, "num_draft_tokens": 2}
    plain = looks(lm, 14).tokens
    assert looks(lm, 14, **options).statistics.static_plans.misses == 0
    first = looks(lm, 14, static=True, **options)
    assert first.statistics.static_plans.misses > 0
    lm.executables.wait()
    second = looks(lm, 14, static=True, **options)
    counts = second.statistics.static_plans
    assert (counts.misses, counts.hits) == (0, second.statistics.num_rounds)
    assert first.tokens == second.tokens == plain
    assert lm.executables.variants.compile_ms > 0
    # Two rows with different masks have no static program.
    before = lm.executables.variants
    both = lm.generate(PROMPTS, max_new_tokens=6, alpha=0.84, static=True, ignore_eos=True, **options)
    assert lm.executables.variants == before
    assert tokens(both) == [lm.generate(p, max_new_tokens=6, ignore_eos=True).tokens for p in PROMPTS]


def test_only_so_many_static_programs_are_kept():
    executables = Executables()
    double = jax.jit(lambda x, *, by: x * by, static_argnames="by")
    for by in range(MAX_VARIANTS + 2):
        assert executables.variant(double, jnp.ones(2), by=by) is None
        executables.wait()
    assert executables.variant(double, jnp.ones(2), by=MAX_VARIANTS + 1)(jnp.ones(2)).tolist() == [17, 17]
    assert executables.variant(double, jnp.ones(2), by=0) is None
    executables.wait()
    assert executables.variants.hits == 1
    assert len(executables._futures) == MAX_VARIANTS


def test_a_static_program_that_fails_to_compile_is_not_tried_again():
    executables, tried = Executables(), []

    @jax.jit
    def broken(x):
        tried.append(x)
        raise ValueError("no such operation")

    for _ in range(3):
        assert executables.variant(broken, jnp.ones(2)) is None
        executables.wait()
    assert len(tried) == 1
    assert executables.variants.misses == 3


# The γ that a text ends with


def ended(gamma: float = 0.0) -> Any:
    """Returns a text whose γ begins at `gamma`."""
    return generate(shared, PROMPTS[2], method="adaspeed", exit_layer=1, gamma=gamma)


def quickly(monkeypatch, **numbers: float) -> None:
    """Gives γ larger steps."""
    monkeypatch.setattr(stopping, "AdaptiveGamma", functools.partial(AdaptiveGamma, beta2=0.0, **numbers))


@pytest.mark.full
def test_a_text_goes_on_from_the_gamma_that_another_ended_with(monkeypatch):
    """The result contains γ, which can be passed to the next call; calls are otherwise independent."""
    quickly(monkeypatch, epsilon=0.4, alpha=1.0)
    first = ended()
    assert first.gamma == 1.0  # clipped: with these numbers γ rises by 0.4 a round
    again = ended(gamma=first.gamma)
    assert again.tokens == first.tokens
    assert again.statistics.num_draft_tokens < first.statistics.num_draft_tokens
    assert ended().statistics.num_draft_tokens == first.statistics.num_draft_tokens


@pytest.mark.full
def test_each_row_has_the_gamma_of_its_own_text(monkeypatch):
    """Also a refilled row, which begins at the given γ."""
    quickly(monkeypatch, epsilon=0.05)
    budgets = [14, 1, 3]
    options: dict[str, Any] = {"method": "adaspeed", "exit_layer": 1}
    alone = [
        shared.generate(prompt, max_new_tokens=budget, ignore_eos=True, **options)
        for prompt, budget in zip(PROMPTS, budgets, strict=True)
    ]
    for max_batch in (1, 2):
        rows = shared.generate(
            PROMPTS, max_new_tokens=budgets, ignore_eos=True, max_batch=max_batch, **options
        )
        assert [row.gamma for row in rows] == [row.gamma for row in alone]
    assert alone[1].gamma == pytest.approx(0.8)  # no round
    assert len({row.gamma for row in alone}) == 3


@pytest.mark.parametrize(("shares", "acceptor"), [(True, None), (True, "coupled"), (False, None)])
def test_rows_of_a_shared_mask_are_drawn_apart(monkeypatch, shares, acceptor):
    """The mask depends on all live rows: equal randomness in another row would reveal the next draws."""
    apart = []
    monkeypatch.setattr(
        "jaxspec.session.session.drawn_apart", lambda rows: apart.append(rows) or drawn_apart(rows)
    )
    shared.stream(
        [PROMPTS[0]] * 2,
        method="asd",
        shared_mask=shares,
        temperature=1.0,
        seed=[5, 5],
        acceptor=acceptor,
    )
    # With the coupled acceptor a text depends only on its seed, not on the drafts.
    assert len(apart) == (shares and acceptor is None)


@pytest.mark.full
def test_the_first_rule_with_a_gamma_counts():
    assert generate(shared, PROMPTS[0], method="layerskip", exit_layer=1, num_draft_tokens=3).gamma is None
    fixed = generate(shared, PROMPTS[0], method="adaspeed", exit_layer=1, adaptive_gamma=False)
    assert fixed.gamma is None
    for first, expected in ((0.25, 0.25), (-0.5, 0.0)):
        moving = ProductBelow(AdaptiveGamma(first, epsilon=0.0)), ConfidenceBelow(AdaptiveGamma(0.75))
        rules = AnyOf((ConfidenceBelow(FixedGamma(0.9)), *moving))
        assert generate(shared, PROMPTS[0], method=LayerSkipDrafter(CONFIG, 1, rules, 4)).gamma == expected


@pytest.mark.full
def test_a_text_that_a_stop_string_ended_has_a_gamma_too(lm):
    options: dict[str, Any] = {
        "method": "adaspeed",
        "exit_layer": 1,
        "max_new_tokens": 20,
        "ignore_eos": True,
    }
    whole = lm.generate("ab", **options)
    assert whole.text
    cut = lm.generate("ab", stop=whole.text[2:4], **options)
    assert cut.finish_reason == "stop"
    assert cut.gamma is not None
    assert 0 <= cut.gamma <= 1
