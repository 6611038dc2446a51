"""Training of heads: each step compared with the drafter's, the losses by hand, the command, and its output."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import signal
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxspec
from jaxspec.heads import files as heads
from jaxspec.heads.eagle.drafter import EagleDrafter
from jaxspec.heads.eagle.network import EagleConfig
from jaxspec.heads.writer import write_head
from jaxspec.io import embedded
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import vocabulary_file
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL
from jaxspec.protocol import Weights
from tests import ROOT, refused, tiny
from tests.heads import files as head_files
from tests.heads import reference
from tests.training.test_training_run import losses_of
from training import option_files
from training.heads import kinds, losses
from training.heads import measure as drafts
from training.heads import train as command
from training.heads.eagle import EagleNetwork
from training.losses import base
from training.losses.base import Given, head_of
from training.reports import metrics
from training.reports.metrics import Metrics

TARGET = dataclasses.replace(tiny.TARGET, num_layers=4, rope_theta=50.0)
WIDTH, SIZE = TARGET.hidden_size, TARGET.vocab_size
BLOCK = LlamaConfig(SIZE, WIDTH, 20, 1, num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=30.0)
NARROW = dataclasses.replace(BLOCK, hidden_size=12)
FLAGS = {"aux_norm": "each", "residual_is_normed": True, "output_is_normed": True}
PART = np.array([1, 2, 4, 5, 7, 8, 10, 11], np.int32)
NETWORKS = {
    "eagle": EagleConfig(BLOCK, fc_bias=True),
    "eagle3": EagleConfig(BLOCK, (2, 2, 1), "eagle3", WIDTH, SIZE),
    "options": EagleConfig(NARROW, (3, FINAL), "eagle3", WIDTH, SIZE, own_embedding=True, **FLAGS),
}
STEPS = 4


def network_of(name: str):
    head = NETWORKS[name]
    return EagleNetwork(head, TARGET), tiny.head_params(head)


def documents_of(batch):
    """Returns row, first column and tokens of each packed document."""
    for row, segments in enumerate(batch["segments"]):
        for number in range(1, segments.max() + 1):
            (columns,) = np.nonzero(segments == number)
            yield row, int(columns[0]), batch["tokens"][row, columns]


@pytest.mark.representatives("eagle3")
@pytest.mark.parametrize("name", NETWORKS)
def test_each_step_is_what_the_drafter_takes_when_it_is_fed_its_own_outputs(name, batch):
    network, params = network_of(name)
    target = tiny.params(TARGET)
    _, found = run(network, params, batch, STEPS)
    drafter, weights = EagleDrafter(TARGET, network.head, num_draft_tokens=STEPS), Weights(target, params)
    zero, absorb = jnp.zeros(1, jnp.int32), jax.jit(drafter.absorb)
    step = jax.jit(lambda *given: drafter._step(weights, *given, True))
    aux_hidden_states_of = jax.jit(
        lambda hidden, cache: llama.run_with_aux(TARGET, target, hidden, zero, cache, network.aux_layers)[1]
    )
    compared = 0
    for row, first, tokens in documents_of(batch):
        # The decoder's own forward, on this document alone.
        cache = kv.create(TARGET, 1, 16, jnp.float32, merged=True)
        padded = np.pad(tokens, (0, 12 - len(tokens)))
        aux_hidden_states = aux_hidden_states_of(llama.embed(TARGET, target, padded[None]), cache)
        for t in range(len(tokens) - 1):
            own = drafter.begin(weights, jnp.array([t + 2]), 16, merged=True)
            following = np.roll(padded, -1)[None]
            own = absorb(weights, own, aux_hidden_states, following, zero, jnp.array([t + 1]))
            for number in range(min(STEPS, len(tokens) - 1 - t)):
                token = jnp.asarray(tokens[t + 1 + number][None])
                logits, _, own = step(jnp.array([t + 1]), own, token, jnp.int32(number))
                np.testing.assert_allclose(found[number, row, first + t], logits[0], atol=2e-5)
                compared += number == STEPS - 1
    assert compared > 8


def run(network, params, batch, steps: int):
    """Returns the target's outputs and logits for a batch, the head's outputs, and its logits, [steps, B, T, N]."""

    @jax.jit
    def both(batch):
        target = tiny.params(TARGET)
        seen = losses.look(TARGET, target, batch, network.aux_layers)
        outputs = network.outputs(params, target, batch, seen.aux_hidden_states, steps)
        readings = [network.reading(params, step) for step in range(len(outputs))]
        pairs = zip(readings, outputs, strict=True)
        wanted = llama.logits(TARGET, head_of(target), seen.stream)
        return (seen, wanted, outputs), [network.logits(own, head_of(target), one) for own, one in pairs]

    seen, logits = both(batch)
    return jax.tree.map(np.asarray, seen), np.stack(logits)


def distribution_of(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(np.float64(logits) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def by_hand(network, params, batch, part, weights, steps) -> tuple[float, int]:
    """Returns the loss of `losses.head_loss`, computed position by position."""
    (seen, wanted_logits, outputs), logits = run(network, params, batch, steps)
    shares = [weights.decay**step for step in range(steps)]
    chosen = np.arange(SIZE) if part is None else part
    total, count = 0.0, 0
    for row, first, tokens in documents_of(batch):
        for t in range(len(tokens)):
            for step in range(steps):
                told, after = t + 2 + step, first + t + 1 + step
                if told >= len(tokens) or not batch["learn"][row, first + told]:
                    continue
                if int(seen.best[row, after]) not in chosen:
                    continue
                q = distribution_of(logits[step, row, first + t])
                p = distribution_of(wanted_logits[row, after][chosen])
                loss = -weights.distribution * np.sum(p * np.log(q))
                if weights.aux_hidden_state:
                    apart = np.abs(outputs[step][row, first + t] - seen.aux_hidden_states[row, after])
                    loss += weights.aux_hidden_state * np.mean(np.where(apart < 1, apart**2 / 2, apart - 0.5))
                total += shares[step] / sum(shares) * loss
                count += step == 0
    return total, count


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_the_loss_is_the_papers(name, batch):
    network, params = network_of(name)
    target, part = tiny.params(TARGET), None
    weights, steps = losses.Weights(0.1, 1.0, 0.8), 1
    if name == "eagle3":
        part, weights, steps = PART, losses.Weights(decay=0.8), 3
        params = {**params, "head": params["head"][PART]}
    loss = losses.head_loss(network, steps, weights, part)
    given = Given(jnp.int32(0), jax.random.key(0), target)
    (total, weight), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, given)
    wanted, count = by_hand(network, params, batch, part, weights, steps)
    assert 0 < count < batch["learn"].sum()
    assert (float(total), int(weight)) == (pytest.approx(wanted, rel=1e-4), count)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 0, path


def lost(loss: str, p: np.ndarray, q: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Returns the loss of each counted step of a row, from distributions [S, N]; `held` is q without a gradient."""
    crossed, apart = -np.sum(p * np.log(q), axis=1), 1 - np.sum(np.minimum(p, q), axis=1)
    chance = np.sum(np.minimum(p, held), axis=1)
    if loss == "d-pace":
        reached = [np.prod((chance[: step + 1] + 1) / 2) for step in range(len(p))]
        return crossed * [sum(reached[step:]) for step in range(len(p))]
    if loss == "lk":
        far = np.exp(-3 * chance)
        return far * np.sum(p * np.log(p / q), axis=1) + (1 - far) * apart
    return crossed if loss == "ce" else 0.9 * apart + 0.1 * crossed


@pytest.mark.representatives("lk", "d-pace")
@pytest.mark.parametrize("loss", typing.get_args(losses.LossName))
def test_a_loss_and_its_gradient_are_those_of_differences(batch, loss, monkeypatch):
    network, steps, target = network_of("eagle3")[0], 3, tiny.params(TARGET)

    @dataclasses.dataclass(frozen=True)
    class Sham(EagleNetwork):
        """Its parameters are the logits of each step."""

        def outputs(self, params, embedding, batch, aux_hidden_states, steps):
            return params["logits"]

        def logits(self, own, target, output):
            return output

    logits = np.random.default_rng(0).standard_normal((steps, *batch["tokens"].shape, SIZE))
    head = losses.head_loss(Sham(network.head, TARGET), steps, losses.Weights(decay=0.8, loss=loss))
    seen = losses.look(TARGET, target, batch, (TARGET.num_layers,))
    wanted = distribution_of(np.asarray(llama.logits(TARGET, head_of(target), seen.stream)))
    shares = np.ones(steps) if loss == "d-pace" else 0.8 ** np.arange(steps)

    def slow(logits: np.ndarray, row: int, at: int, ends: int) -> float:
        """Returns the loss of the row that predicts from token `at` on, in a document up to `ends`."""
        told = at + 2 + np.arange(steps)
        counted = [step for step in range(steps) if told[step] < ends and batch["learn"][row, told[step]]]
        if not counted:
            return 0.0
        p = wanted[row, [told[step] - 1 for step in counted]]
        found = lost(loss, p, *(distribution_of(one[counted, row, at]) for one in (logits, held)))
        return float(np.sum(found * shares[counted]) / shares.sum())

    held, total, expected = logits, 0.0, np.zeros_like(logits)
    for row, first, tokens in documents_of(batch):
        for at in range(first, first + len(tokens)):
            total += slow(logits, row, at, first + len(tokens))
            for step, token in itertools.product(range(steps), range(SIZE)):
                sides = []
                for way in (1e-5, -1e-5):
                    moved = logits.copy()
                    moved[step, row, at, token] += way
                    sides.append(slow(moved, row, at, first + len(tokens)))
                expected[step, row, at, token] = (sides[0] - sides[1]) / 2e-5
    for whole in (True, False):  # in one piece, and in several
        if not whole:
            monkeypatch.setattr(base, "_MAX_LOGITS", batch["tokens"].shape[1] * SIZE // 2)
        given = Given(jnp.int32(0), jax.random.key(0), target)
        params = {"logits": list(jnp.float32(logits))}
        (value, _), gradient = jax.value_and_grad(head, has_aux=True)(params, batch, given)
        assert float(value) == pytest.approx(total, rel=1e-5)
        np.testing.assert_allclose(np.stack(gradient["logits"]), expected, atol=1e-5)
    assert np.abs(expected).max() > 0.01


@pytest.mark.full
def test_held_out_acceptance_is_that_of_rounds_from_every_position(batch):
    network, params = network_of("eagle3")
    target = tiny.params(TARGET)
    whole = {**batch, "learn": batch["segments"] > 0}
    loss = losses.head_loss(network, 1, losses.Weights())
    # A head with the target's predictions, except one token that it never predicts.
    best = int(losses.look(TARGET, target, whole, (0,)).best[0, 4])

    @dataclasses.dataclass(frozen=True)
    class Sham(EagleNetwork):
        def outputs(self, params, embedding, batch, aux_hidden_states, steps):
            seen = losses.look(TARGET, embedding, batch, (0,))
            told = jax.nn.one_hot(seen.best, SIZE) * (seen.best != best)[..., None]
            return [losses.ahead(told, 1 + step) for step in range(steps)]

        def logits(self, own, target, output):
            return output + 0.5 * jax.nn.one_hot((best + 1) % SIZE, SIZE)

    sham = Sham(network.head, TARGET)
    loss = losses.head_loss(sham, 1, losses.Weights())
    found = drafts.make_measure(sham, loss, target, "float32")(params, {"x": [whole]}, {"x": 1.0})
    seen = np.asarray(losses.look(TARGET, target, whole, (0,)).best)
    lengths = []
    for row, first, tokens in documents_of(whole):
        for t in range(len(tokens) - 1 - drafts.NUM_DRAFT_TOKENS):
            right = seen[row, first + t + 1 : first + t + 1 + drafts.NUM_DRAFT_TOKENS] != best
            lengths.append(int(np.cumprod(right).sum()))
    assert 0 < np.mean(lengths) < drafts.NUM_DRAFT_TOKENS
    assert found["mean_acceptance_length"] == pytest.approx(1 + np.mean(lengths))
    for position in range(1, drafts.NUM_DRAFT_TOKENS + 1):
        share = np.mean([length >= position for length in lengths])
        assert found[f"acceptance/{position}"] == pytest.approx(share)


def layer_names(prefix: str, *more: str) -> set[str]:
    """Returns the names of the tensors of a Llama layer, and of more of its modules."""
    modules = [f"self_attn.{one}_proj" for one in "qkvo"] + [
        f"mlp.{one}_proj" for one in ("gate", "up", "down")
    ]
    return {f"{prefix}.{one}.weight" for one in (*modules, "post_attention_layernorm", *more)}


NAMES = {
    "eagle": {"fc.weight", "fc.bias"} | layer_names("layers.0"),
    "eagle3": {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    | layer_names("midlayer", "hidden_norm", "input_layernorm"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_written_as_it_is_published_and_read_back_as_it_was(name, tmp_path):
    head = NETWORKS[name]
    ids = PART if name == "eagle3" else None
    if ids is not None:
        head = dataclasses.replace(head, head_size=len(ids))
    params = tiny.head_params(head)
    write_head(tmp_path, head, params, "abc", ids, jnp.dtype("bfloat16"))
    found = heads.read_head(tmp_path, TARGET)
    assert set(huggingface.open_tensors(tmp_path, integers=True)) | {"t2d"} == NAMES[name] | {"t2d"}
    assert found.target == "abc"
    assert dataclasses.replace(found.config, target_width=head.target_width, block=head.block) == head
    assert (found.config.block.rope_theta, found.config.block.head_dim) == (30.0, 4)
    loaded = found.load(np.float32)
    if ids is not None:
        few = loaded.pop("vocabulary")
        np.testing.assert_array_equal(few.ids, PART)
        loaded["head"] = few.head
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, rounded))


@pytest.mark.parametrize(
    "flags", [{}, {"aux_norm": "each", "output_is_normed": True}], ids=["eagle3", "eagle3.1"]
)
@pytest.mark.parametrize("layout", [None, "specforge", "speculators"])
def test_a_head_in_another_layout_drafts_as_the_slow_reference(layout, flags, tmp_path):
    """The reference reads the files as the layout's own trainer does; both without what only jaxspec writes."""
    head = dataclasses.replace(NETWORKS["eagle3"], head_size=len(PART), **flags)
    params = tiny.head_params(head)
    write_head(tmp_path, head, params, "abc", PART, layout=layout, name="org/target")
    content = json.loads((tmp_path / "config.json").read_text())
    assert content.pop("jaxspec")["kind"] == "eagle3"
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    expected = {name.replace("midlayer.", prefix) for name in NAMES["eagle3"]}
    assert set(tensors) == expected | ({f"fc_norm.{i}.weight" for i in range(3)} if flags else set())
    aux_layers = content.get("eagle_aux_hidden_state_layer_ids")
    if layout == "specforge":
        assert aux_layers is None
        aux_layers = [layer + 1 for layer in content["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    if layout == "speculators":
        assert content["speculators_config"]["verifier"]["name_or_path"] == "org/target"
        content |= content["transformer_layer_config"]
    read = heads.read_head(tmp_path, TARGET).config
    assert tuple(aux_layers) == head.aux_layers == read.aux_layers
    assert (read.aux_norm, read.output_is_normed) == (head.aux_norm, head.output_is_normed)
    target = tiny.params(TARGET)

    def logits_of(one):
        true = reference.aux_hidden_states(TARGET, target, one.tokens[:-1], aux_layers)
        return reference.draft_logits(content, tensors, TARGET, target, one.tokens, one.drafts[:-1], true)

    found = head_files.rounds_of(
        tmp_path, lambda config: EagleDrafter(TARGET, config, num_draft_tokens=tiny.K)
    )
    assert head_files.furthest(found, logits_of) < 2e-5


def test_what_does_not_fit_is_not_written(tmp_path):
    head = dataclasses.replace(NETWORKS["eagle3"], head_size=len(PART))
    params = tiny.head_params(head)
    with refused("ids are 3 tokens, the head has 8 rows"):
        write_head(tmp_path / "x", head, params, "abc", PART[:3])
    with refused("the parameters have other leaves than the head"):
        write_head(tmp_path / "x", head, {"fc": params["fc"]}, "abc", PART)
    embedding = dataclasses.replace(head, aux_layers=(0, 2, 1))
    with refused("SpecForge's layout has no head that reads the embedding"):
        write_head(tmp_path / "x", embedding, params, "abc", PART, layout="specforge")
    assert not (tmp_path / "x").exists()


# The command


def arguments(folder, name: str, *more: str, kind: str = "eagle3", output: bool = True) -> list[str]:
    sizes = "--window 48 --batch 2 --held-out 6 --held-out-rows 4 --every 5 --card-prompts 1 --card-tokens 8"
    places = ["--output", str(folder / name)] if output else []
    return [
        *("--kind", kind, "--target", str(folder), "--data", str(folder / "text.txt")),
        *("--run", str(folder / f"run-{name}"), *places, *sizes.split(), "--test-steps", "2"),
        *("--learning-rate", "1e-2", "--warmup", "2", *more),
    ]


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run, and its head over half of the tokens."""
    assert (
        command.main(arguments(folder, "whole", "--steps", "12", "--draft-vocab-size", "120", "--plot")) == 0
    )
    return metrics.read_metrics(folder / "run-whole")


@pytest.mark.full
def test_a_loss_falls_and_the_head_drafts(folder, whole):
    assert whole[-1]["held_out_loss"] < whole[4]["held_out_loss"] < whole[0]["loss"]
    assert {f"acceptance/{position}" for position in range(1, 6)} < set(whole[-1])
    lm = jaxspec.load(folder)
    head = heads.read_head(folder / "whole", lm.config)
    assert head.target == lm.fingerprint
    assert head.config.head_size == len(head.ids) == 120
    assert set(lm.config.eos_token_ids) < set(head.ids.tolist())
    plain = lm.generate("Once upon", max_new_tokens=12)
    drafted = lm.generate("Once upon", max_new_tokens=12, method="eagle3", draft=folder / "whole")
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.num_draft_tokens
    card = (folder / "whole" / "README.md").read_text()
    assert "--method eagle3" in card
    assert "python -m training.heads --kind eagle3" in card
    assert "| text | 1 | " in card
    used, said = card[card.index("## Use it") :].split("```bash\n")[1].split("\n```\n")
    model, output = f"--model {folder}", f"--draft {folder / 'whole'}"
    assert used == f"jaxspec generate 'Once upon a time' {model} --method eagle3 {output}"
    assert said.strip().startswith("Expected: ")
    assert ">token 5" in (folder / "run-whole" / "acceptance.svg").read_text()


@pytest.mark.full
def test_a_stopped_run_resumes_exactly(folder, whole):
    given = arguments(folder, "stopped", "--steps", "12", "--draft-vocab-size", "120", "--card-prompts", "0")
    assert command.main([*given, "--minutes", "1e-9"]) == 0
    assert len(metrics.read_metrics(folder / "run-stopped")) == 1
    assert command.main(given) == 0

    def losses(records):  # the first step has a separate checkpoint here
        return [(step, loss, norm) for step, loss, norm, _ in losses_of(records)]

    stopped = metrics.read_metrics(folder / "run-stopped")
    assert losses(stopped) == losses(whole)
    assert stopped[-1]["held_out_loss"] == whole[-1]["held_out_loss"]
    files = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]


@pytest.mark.full
def test_an_interrupted_run_leaves_a_head(folder, monkeypatch, capsys):
    write = Metrics.write

    def interrupting(log, step, record):
        write(log, step, record)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Metrics, "write", interrupting)
    given = arguments(folder, "interrupted", "--steps", "12", "--card-prompts", "0", kind="eagle")
    assert command.main(given) == 130
    said = capsys.readouterr().err
    assert "interrupted after step 3; the same command goes on from there" in said
    assert re.search(r"step 3/12  loss \S+  held-out \S+  mean acceptance length \d\.\d\d  ", said)
    lm = jaxspec.load(folder)
    assert heads.read_head(folder / "interrupted", lm.config).config.kind == "eagle"
    # The run of a directory has one head type, target, shape and text.
    another = arguments(folder, "interrupted", "--steps", "12", kind="eagle3")
    assert command.main(another) == 2
    assert "holds a run with --kind eagle" in capsys.readouterr().err


@pytest.mark.full
def test_a_head_is_found_beside_its_target_and_where_it_comes_along(folder, tmp_path, monkeypatch):
    given = arguments(folder, "beside", "--steps", "1", "--card-prompts", "0", output=False)
    assert command.main(given) == 0
    written = folder / "heads" / "eagle3"
    lm = jaxspec.load(folder)
    wanted = lm.generate("Once", max_new_tokens=6, method="eagle3").tokens
    shipped = tmp_path / "heads" / "any-name"
    shipped.parent.mkdir()
    written.rename(shipped)
    with refused(r"; give draft=DIR, or train one with .*--kind dflash`$"):
        lm.drafter("dflash")
    with refused(r"or train one with `python -m training\.heads --kind eagle3`"):
        jaxspec.load(folder).generate("Once", method="eagle3")
    monkeypatch.setattr(embedded, "_ROOTS", (tmp_path,))
    assert jaxspec.load(folder).generate("Once", max_new_tokens=6, method="eagle3").tokens == wanted
    content = json.loads((shipped / "config.json").read_text())
    content["jaxspec"]["target"] = "another"
    (shipped / "config.json").write_text(json.dumps(content))
    with refused("method eagle3 needs a head"):
        jaxspec.load(folder).generate("Once", method="eagle3")


def test_a_run_of_another_head_is_another_run():
    """An entry less would resume a run with the checkpoint of another head or loss."""

    def of(words):
        given = ["--target", "t", "--data", "d", "--kind", *words.split()]
        options = option_files.parse(command.Options, given, "heads")
        return command.identity(options, types.SimpleNamespace(aux_layers=(1,)), "f", None)

    for one, more in (
        ("eagle3", ("--fc-norm", "--loss lk", "--test-steps 3", "--step-decay 0.5", "--intermediate-size 8")),
        ("medusa", ("--shared-head", "--num-heads 2")),
        ("dspark", ("--num-layers 3", "--markov-rank 8")),
    ):
        assert len({str(of(f"{one} {words}")) for words in ("", *more)}) == 1 + len(more)


def test_a_vocabulary_is_ranked_or_counted(folder):
    lm = jaxspec.load(folder)
    path = folder / "vocab.json"
    ranking = vocabulary_file.Ranking((0, 1), (9, 5, 7), 10, lm.config.vocab_size)
    ranking.write(path, lm.fingerprint, {})
    counts = np.zeros(lm.config.vocab_size)
    counts[[40, 30, 20]] = 3, 5, 3

    def chosen(**options):
        found = command.draft_tokens(command.HeadOptions(**options), lm, counts)
        return None if found is None else found.tolist()

    assert chosen() is chosen(draft_vocab_size=lm.config.vocab_size) is None
    assert chosen(draft_vocab=path) == [0, 1, 5, 7, 9]
    assert chosen(draft_vocab=path, draft_vocab_size=4) == [0, 1, 5, 9]
    assert chosen(draft_vocab_size=3) == [1, 20, 30]
    with refused(r"^draft_vocab_size is 6; .*vocab\.json ranks 5 tokens"):
        chosen(draft_vocab=path, draft_vocab_size=6)
    ranking.write(path, "another", {})
    with refused("belongs to another model"):
        chosen(draft_vocab=path)
    windows = {"x": {"tokens": np.array([[3, 3, 4, 0]]), "learn": np.array([[True, False, True, True]])}}
    windows["x"]["segments"] = np.array([[1, 1, 1, 0]])
    assert command.learned_counts(windows, {"x": 2.0}, 5).tolist() == [0, 0, 0, 2, 2]


@pytest.mark.full
def test_the_options_of_a_run_start_it_again_and_every_kind_can_be_chosen(folder, whole):
    again = option_files.parse(
        command.Options, ["--config", str(folder / "run-whole" / "options.yaml")], "heads"
    )
    # The record has the defaults of the start.
    more = "--steps 12 --draft-vocab-size 120 --plot --weight-decay 0.1 --accumulate 1"
    assert again == option_files.parse(command.Options, arguments(folder, "whole", *more.split()), "heads")
    assert list(kinds.KINDS) == list(typing.get_args(typing.get_type_hints(command.Options)["kind"]))


def real_recipe(kind):
    """Returns the command's options from the real model's recipe for `kind`."""
    recipe = ROOT / "training/recipes/heads-smollm2.yaml"
    (line,) = [line for line in recipe.read_text().splitlines() if f"$HEADS --kind {kind} " in line]
    return option_files.parse(
        command.Options, [f"--config={recipe}", *shlex.split(line.split("$HEADS")[1])], "heads"
    )


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa", "kangaroo", "dflash", "dspark"])
def test_the_commands_of_the_real_models_recipe_leave_nothing_to_choose(kind):
    options = real_recipe(kind)
    assert options.made == kinds.KINDS[kind]
    assert options.settled(10**6, {})[1] == {}
