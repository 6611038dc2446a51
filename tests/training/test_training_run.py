"""The training commands as real processes: killed, resumed, interrupted, refused, exported."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cli
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import method_files
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests import ROOT, gguf_files, refused, variables
from training import export, job, layerskip, option_files, own_text, plots, probe, sft, soft
from training import run as run_record
from training.data import bpe_tokenizer, conversations, packing, reading, sources
from training.loop import checkpoints, state_sharding, step
from training.losses import base
from training.reports import card, curves, evaluation
from training.reports import metrics as training_metrics
from training.run_options import SCRATCH
from training.start import Objective, Start, chat_of, put_tokenizer, start_model, written_dtype

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
)
STORIES = [
    f"Once upon a time {name} found a {thing}. {name} was happy and gave the {thing} to {friend}."
    for name in ("Tim", "Sam", "Lily", "Anna", "Ben")
    for thing in ("ball", "tree", "red car", "dog", "big book")
    for friend in ("Mom", "Dad", "a bird")
]


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    shape = "--vocab-size 300 --hidden-size 16 --intermediate-size 24 --layers 1 --heads 2 --kv-heads 1"
    further = "--learning-rate 3e-3 --warmup 100 --weight-decay 0.1 --accumulate 1"
    shape = further if "--start" in more else f"{shape} --head-dim 8 --context 64"
    size = "--window 32 --batch 2 --held-out 6 --samples 1 --every 5"
    places = {"--data": "text.txt", "--output": name, "--run": f"run-{name}"}
    named = [word for option, place in places.items() for word in (option, str(folder / place))]
    return [*named, *shape.split(), *size.split(), *more]


def with_programs(folder: Path) -> dict[str, str]:
    """The environment of processes that share compiled programs."""
    shared = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    return variables(**shared, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")


def start(folder: Path, name: str, *more: str) -> subprocess.Popen:
    """The command as a process."""
    # Dropout and turning exits are drawn again at every step.
    recipe = "--layers 2 --exits 1 --rotation 2 --max-dropout 0.3"
    given = arguments(folder, name, *recipe.split(), *more)
    command = [sys.executable, "-m", "training.layerskip", *given]
    return subprocess.Popen(command, env=with_programs(folder), stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, status: int = 0) -> str:
    _, said = process.communicate(timeout=200)
    assert process.returncode == status, said
    return said


def metrics(folder: Path, name: str) -> list[dict]:
    file = folder / f"run-{name}" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def best_of(folder: Path, name: str):
    """The best checkpoint of a run: parameters, step, what was measured; none is damaged."""
    with checkpoints.Checkpoints(folder / f"run-{name}" / "checkpoints", read_only=True) as kept:
        return kept.best(pytest.fail)


def one_error(capsys, module: str = "training.sft") -> str:
    """The one line that a refused command says."""
    said = capsys.readouterr().err
    assert said.startswith(f"{module}: error: ")
    assert said.count("\n") == 1
    return said


def losses_of(records: list[dict]) -> list[tuple]:
    return [(one["step"], one["loss"], one["gradient_norm"], one.get("held_out_loss")) for one in records]


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run of 60 steps."""
    finish(start(folder, "whole", "--steps", "60", "--plot"))
    return losses_of(metrics(folder, "whole"))


def stop_after(folder: Path, name: str, steps: int, number: int) -> subprocess.Popen:
    """Starts the run of `whole` under another name and sends it a signal once it has done `steps` steps."""
    process = start(folder, name, "--steps", "60")
    limit = time.monotonic() + 200
    while len(metrics(folder, name)) < steps and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    process.send_signal(number)
    return process


@pytest.mark.full
def test_a_killed_run_resumes_exactly(folder, whole):
    """Killed twice."""
    for steps in (12, 33):
        process = stop_after(folder, "killed", steps, signal.SIGKILL)
        process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL
        assert steps <= len(metrics(folder, "killed")) < 60
    said = finish(start(folder, "killed", "--steps", "60"))
    assert int(said.split("resumed from step ")[1].split()[0]) > 22
    assert losses_of(metrics(folder, "killed")) == whole


@pytest.mark.full
def test_an_interrupted_run_leaves_a_checkpoint_and_an_export(folder, whole):
    said = finish(stop_after(folder, "interrupted", 7, signal.SIGINT), status=130)
    last = metrics(folder, "interrupted")[-1]
    assert "finishing step " in said
    assert f"interrupted after step {last['step']}; the same command goes on from there" in said
    assert last["step"] < 60
    assert "held_out_loss" in last
    assert (folder / "run-interrupted" / "checkpoints" / str(last["step"])).is_dir()
    assert (folder / "interrupted" / "model.safetensors").is_file()
    # Its last step was measured out of turn; all others are those of the uninterrupted run.
    assert losses_of(metrics(folder, "interrupted"))[:-1] == whole[: last["step"] - 1]


@pytest.mark.full
def test_the_export_is_the_best_checkpoint(folder, whole):
    directory = folder / "whole"
    config = huggingface.read_config(directory)
    assert (config.bos_token_id, config.eos_token_ids) == (bpe_tokenizer.BOS_ID, (bpe_tokenizer.EOS_ID,))
    params = huggingface.load_params(directory, config, jnp.float32)
    words = bpe_tokenizer.load(directory)
    held_out = packing.split(
        reading.read_source(str(folder / "text.txt"), "text", conversations.Chat(), False), 6
    )[1]
    encoded = bpe_tokenizer.encode_documents(words, held_out, bpe_tokenizer.BOS_ID, [bpe_tokenizer.EOS_ID])
    nothing = base.Given(jnp.int32(0), jax.random.key(0))
    total, weight = base.next_token(config)(params, packing.pack(encoded, 32), nothing)
    best = min(one[3] for one in whole if one[3] is not None)
    # The loss is measured with the weights that are written.
    assert float(total / weight) == pytest.approx(best, abs=1e-5)
    text = (directory / "README.md").read_text()
    for said in (
        "Once upon a time",
        f"{best:.4f}",
        "python -m training.layerskip",
        "| text | ",
        "| exit | tok",
    ):
        assert said in text


@pytest.mark.full
def test_curves_are_drawn_and_events_written(folder, whole, monkeypatch):
    run = folder / "run-whole"
    for name in (curves.LOSS_FILE, curves.ACCEPTANCE_FILE):
        assert (run / name).read_bytes().startswith(b"<svg")
    assert plots.main(["--run", str(run)]) == 0
    assert plots.main(["--run", str(folder)]) == 2
    drawn = []
    monkeypatch.setattr(curves, "Live", lambda: drawn.append)
    monkeypatch.setattr(curves, "_REDRAW_S", 0.01)
    with curves.watched(folder / "nothing yet"):
        time.sleep(0.1)
    assert len(drawn) > 2
    with curves.watched(run):
        pass
    assert "exit 1" in str(drawn[-1])
    assert list((run / "tensorboard").glob("events.*"))
    measured = [record for record in training_metrics.read_metrics(run) if "acceptance/1" in record]
    assert measured
    assert all(0 <= record["acceptance/1"] <= 1 for record in measured)
    longest = 1 + evaluation.NUM_DRAFT_TOKENS
    assert all(1 <= record["mean_acceptance_length/1"] <= longest for record in measured)


@pytest.mark.full
def test_training_goes_on_from_a_directory(folder, whole, capsys):
    """Its dtype and its sampling defaults are those of the trained model."""
    given, further = shutil.copytree(folder / "whole", folder / "given"), folder / "further"
    config, defaults = huggingface.read_config(given), {"do_sample": True, "temperature": 0.7, "top_k": 3}
    params = huggingface.load_params(given, config, jnp.float32)
    huggingface.save(given, config, params, generation=defaults)
    assert sft.main(arguments(folder, "further", "--steps", "5", "--start", str(given))) == 0
    assert losses_of(metrics(folder, "further"))[0][1] < whole[0][1] - 0.5
    assert "wrote step 5 in float32, held-out loss " in capsys.readouterr().err
    assert huggingface.stored_dtype(further) == np.float32
    assert huggingface.generation_defaults(further) == defaults
    words = ["--run", str(folder / "run-further"), "--output", str(further), "--dtype", "bfloat16"]
    assert export.main(words) == 0
    assert re.search(r"in bfloat16, held-out loss [0-9.]+ in float32, to ", capsys.readouterr().err)
    assert huggingface.stored_dtype(further) == jnp.bfloat16
    # A tokenizer that somebody took out of the run directory is put there again.
    (folder / "run-further" / "tokenizer.json").unlink()
    assert sft.main(arguments(folder, "further", "--steps", "6", "--start", str(given))) == 0


@pytest.mark.parametrize(
    ("stored", "given", "written"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("float32", "bfloat16", "bfloat16"),
        (None, "auto", "bfloat16"),
        (None, "float32", "float32"),
    ],
)
def test_a_model_is_written_in_the_dtype_of_its_start(tmp_path, params, stored, given, written):
    start = SCRATCH
    if stored is not None:
        huggingface.save(tmp_path, CONFIG, params, dtype=stored)
        start = str(tmp_path)
    words = ["--data", "a", "--run", "r", "--start", start, "--dtype", given]
    assert written_dtype(option_files.parse(sft.Options, words, "sft")) == written


@pytest.mark.full
def test_another_run_in_the_same_run_directory_is_refused(folder, tmp_path, capsys):
    """What the shape does not tell: nothing is written before the refusal, and a record of before is no other."""
    assert sft.main(arguments(folder, "own", "--steps", "5")) == 0
    run = folder / "run-own"
    given = shutil.copytree(folder / "own", tmp_path / "given")
    (tmp_path / "other.txt").write_text((folder / "text.txt").read_text().replace("Mom", "Pop"))
    files = [path for path in run.iterdir() if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    capsys.readouterr()
    for command, more, said in (
        (
            soft,
            "--exits 1",
            "`job` training.sft, --exits []; this command has `job` training.soft, --exits [1]",
        ),
        (sft, f"--start {given}", "--start scratch, --vocab-size 300; this command has --start "),
        (sft, "--held-out 7", "--held-out 6, --data "),
        (sft, "--seed 1", "--seed 0; this command has --seed 1: give "),
        (sft, "--vocab-size 290", "--vocab-size 300; this"),
        (sft, f"--data {tmp_path}/other.txt", "--data "),
    ):
        assert command.main(arguments(folder, "own", *more.split(), "--steps", "9")) == 2
        assert f"{run} holds a run with {said}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    record = json.loads((run / "run.json").read_text())
    del record["identity"]
    (run / "run.json").write_text(json.dumps(record))
    assert sft.main(arguments(folder, "own", "--steps", "6")) == 0
    assert "resumed from step 5" in capsys.readouterr().err


def test_models_of_one_shape_are_told_apart(params, words):
    options = option_files.parse(sft.Options, ["--data", "a", "--run", "r", "--start", "s"], "sft")
    aim = Objective(base.next_token(CONFIG))
    other = llama.init_params(CONFIG, jax.random.key(1))
    starts = [
        Start(CONFIG, weights, words, state_sharding.make_mesh()) for weights in (params, params, other)
    ]
    first, again, another = (job.identity(options, start, aim) for start in starts)
    assert first == again != another


def test_runs_with_other_teachers_are_told_apart(params, words):
    given = ["--data", "a", "--run", "r", "--start", "s", "--exits", "1", "--target", "t"]
    options = option_files.parse(soft.Options, given, "soft")
    start, loss = Start(CONFIG, params, words, state_sharding.make_mesh()), base.next_token(CONFIG)
    others = [(CONFIG, params), (CONFIG, llama.init_params(CONFIG, jax.random.key(1)))]

    def identity(target, weight):
        known = None if target is None else method_files.fingerprint(*target)
        aim = Objective(loss, target=target, target_fingerprint=known, distil_weight=weight)
        return job.identity(options, start, aim)

    # A target that only measures may change.
    assert identity(others[0], 0.0) == identity(others[1], 0.0) == identity(None, 0.0)
    assert identity(others[0], 0.5) != identity(others[1], 0.5)
    assert identity(others[0], 0.5) != identity(others[0], 1.0) != identity(others[0], 0.0)


@pytest.mark.full
def test_a_first_command_that_failed_can_be_corrected(folder, capsys):
    """It had learned and kept a tokenizer already."""
    assert sft.main(arguments(folder, "corrected", "--batch", "5000")) == 2
    assert sft.main(arguments(folder, "corrected", "--vocab-size", "280", "--steps", "1", "--seed", "1")) == 0
    assert json.loads((folder / "corrected" / "config.json").read_text())["vocab_size"] == 280
    assert len(run_record.read_run(folder / "run-corrected")["commands"]) == 1


@pytest.mark.parametrize(
    ("output", "run"), [("exp1/model", "exp1-model"), ("./a/../b", "b"), ("/x/y", "x-y"), ("{}/c/d", "c-d")]
)
def test_a_run_is_named_after_the_whole_path_of_its_output(output, run):
    given = ["--data", "a", "--output", output.format(Path.cwd())]
    assert option_files.parse(sft.Options, given, "sft").run_directory == Path("runs") / run


@pytest.mark.full
def test_a_held_out_loss_that_is_not_finite_ends_the_run(folder, monkeypatch, capsys):
    found = iter([3.0, float("nan")])
    monkeypatch.setattr(evaluation, "make_measure", lambda *_: lambda *_: {"held_out_loss": next(found)})
    assert sft.main(arguments(folder, "unmeasured", "--steps", "30")) == 1
    message = capsys.readouterr().err
    assert "held-out loss nan at step 10; training stops, the checkpoint of step 5 is intact" in message


def test_a_checkpoint_without_a_finite_loss_is_never_the_best():
    measured = {5: {"held_out_loss": float("nan")}, 10: {"held_out_loss": 2.0}, 15: {"held_out_loss": 3.0}}
    assert checkpoints.best_step(measured) == 10
    assert checkpoints.best_step({5: measured[5]}) is None


def test_a_draft_needs_only_its_start_and_its_data(tmp_path, monkeypatch, params):
    """Its exits and its output have defaults; lists of numbers take blanks and commas."""
    config = dataclasses.replace(CONFIG, num_layers=8)
    huggingface.save(tmp_path / "base", config, {**params, "layers": 8 * params["layers"]})
    monkeypatch.chdir(tmp_path)

    def read(*given: str) -> soft.Options:
        return option_files.parse(soft.Options, ["--data", "a", *given], "soft")

    found = read("--start", "base", "--target", "base")
    assert (found.exits, found.start_layers, found.output) == ((1, 2, 3), 3, Path("base-soft"))
    assert read("--start", "base", "--target", "large").exits == (4, 6, 8)
    assert read("--start", "base", "--start-layers", "4").exits == (2, 3, 4)
    assert read("--layers", "2").exits == (1, 2)
    assert read("--exits", "1,2,6").exits == read("--exits", "1", "2", "6").exits == (1, 2, 6)
    assert read("--exits", "4", "--run", "r").output is None
    with refused("exits must be given for a draft from scratch of unknown depth"):
        read()
    with refused("--exits is 'x'; give a whole number"):
        read("--exits", "1,x")


def test_a_card_has_the_command_that_uses_its_model():
    def line(job, start, **options):
        record = {"options": options, "identity": {"job": f"training.{job}"}, "exits": [2, 3]}
        return card.use_of_job(record, start, Path("d")).removeprefix(
            "jaxspec generate 'Once upon a time' --model "
        )

    assert line("layerskip", "x") == "d --method layerskip --exit-layer 2"
    assert line("soft", "x") == "x --method s2d --draft d"
    assert line("soft", "x", target="t") == "t --method s2d --draft d"
    assert line("soft", None) == line("sft", "x") == "d"
    assert line("sft", "x", start_layers=2) == "x --method draft-model --draft d"


def test_a_card_asks_a_held_out_question():
    """The tokens before the answer of the first text that has both; a piece that begins within an answer has none."""
    windows = {
        "tokens": np.array([[5, 6, 7, 1, 8, 9, 4, 0]]),
        "segments": np.array([[1, 1, 1, 2, 2, 2, 2, 0]]),
        "learn": np.array([[True, True, True, False, False, False, True, False]]),
    }
    assert card._question(windows) == [1, 8, 9]
    windows["learn"] = np.array([[False, True, True, False, True, True, True, False]])  # all but the BOS
    assert card._question(windows) is None


def test_a_card_counts_the_parameters_that_are_written():
    record = {
        "parameters": 10**9,
        "options": {"start": "scratch", "weights": "bfloat16"},
        "commands": ["c"],
        "exits": [1],
        "documents": {"a": 1, "b": 1},
        "tokens": {"training": {"a": 1, "b": 1}, "held_out": {"a": 1, "b": 1}},
    }
    measured = {"held_out_loss": 1.0, "held_out_loss/a": 1.0, "held_out_loss/b": 2.0, "acceptance/1/a": 0.5}
    used = "float16, trained in bfloat16", "jaxspec generate x --model m"
    text = card.write("m", CONFIG, record, [], 0, measured, {}, *used)
    assert text.endswith("## Use it\n\n```bash\njaxspec generate x --model m\n```\n")
    assert f"A Llama of {llama.num_params(CONFIG) / 1e6:.1f} million parameters" in text
    assert "| b | 1 | 1 | 1 | 2.000 | - |" in text
    assert "| weights | float16, trained in bfloat16 |" in text


@pytest.mark.full
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(folder, monkeypatch, capsys):
    """A step that turns to NaN after the first checkpoint."""
    make_step = step.make_step

    def broken(*arguments):
        step_fn = make_step(*arguments)

        def then_nan(state, *rest):
            state, measured = step_fn(state, *rest)
            bad = state.step > 6
            return state, {**measured, "loss": jnp.where(bad, jnp.nan, measured["loss"])}

        return then_nan

    monkeypatch.setattr(step, "make_step", broken)
    assert sft.main(arguments(folder, "diverging", "--steps", "30")) == 1
    message = capsys.readouterr().err
    assert "at step 7; training stops, the checkpoint of step 5 is intact" in message
    found, best, measured = best_of(folder, "diverging")
    assert best == 5
    assert np.isfinite(measured["held_out_loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.full
def test_the_best_and_the_latest_checkpoints_are_kept(folder, monkeypatch):
    """Held-out losses that fall, then rise: the best is not among the latest two."""
    falling_then_rising = iter([3.0, 1.0, 2.0, 2.5, 2.7, 2.9])
    monkeypatch.setattr(
        evaluation, "make_measure", lambda *_: lambda *_: {"held_out_loss": next(falling_then_rising)}
    )
    assert sft.main(arguments(folder, "kept", "--steps", "30")) == 0
    with checkpoints.Checkpoints(folder / "run-kept" / "checkpoints", read_only=True) as kept:
        assert kept.steps() == [10, 25, 30]
    assert best_of(folder, "kept")[1:] == (10, {"held_out_loss": 1.0})


def test_metrics_say_that_the_disk_is_full_and_end(tmp_path):
    """The events outgrow the limit first, each being longer than its line; neither waits nor hides the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = training_metrics.Metrics(tmp_path, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            any(written.write(number, {"held_out_loss": 1.0}) for number in range(1, 100))
        written.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / training_metrics.METRICS_FILE).stat().st_size < 2000


@pytest.mark.full
@pytest.mark.representatives("100")
@pytest.mark.parametrize("limit", [20_000, 100])
def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint(folder, monkeypatch, capsys, limit):
    """From the third checkpoint on no file may grow beyond a limit, as if nothing more fitted."""
    name = f"full-{limit}"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    make_measure = evaluation.make_measure
    calls = []

    def filling(*arguments):
        measure = make_measure(*arguments)

        def then_full(*rest):
            calls.append(1)
            if len(calls) == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            return measure(*rest)

        return then_full

    monkeypatch.setattr(evaluation, "make_measure", filling)
    try:
        status = sft.main(arguments(folder, name, "--steps", "30"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 1
    message = capsys.readouterr().err
    assert " could not be written: " in message
    assert "File too large" in message
    found, best, _ = best_of(folder, name)
    # The second may have been on its way when the disk filled up.
    assert best in (5, 10)
    assert f"the checkpoint of step {best} is intact" in message
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    monkeypatch.undo()
    assert sft.main(arguments(folder, name, "--steps", "12")) == 0
    assert f"resumed from step {best}" in capsys.readouterr().err


# Sorted drafts


@pytest.mark.full
def test_a_sorted_draft_names_its_exits_and_is_cut_from_a_model(folder, whole):
    target = str(folder / "whole")
    cut = f"--start {target} --exits 1 2 --target {target} --distil-weight 0.5 --steps 5"
    assert soft.main(arguments(folder, "sorted", *cut.split())) == 0
    content = json.loads((folder / "sorted" / "config.json").read_text())
    config = huggingface.read_config(folder / "whole")
    params = huggingface.load_params(folder / "whole", config, np.float32)
    assert content["jaxspec"] == {"exits": [1, 2], "target": method_files.fingerprint(config, params)}
    assert content["num_hidden_layers"] == 2
    record = metrics(folder, "sorted")[-1]
    assert 0 < record["acceptance/1"] < record["acceptance/2"] <= 1
    kept = arguments(folder, "baseline", "--start", target, "--start-layers", "1", "--steps", "5")
    assert sft.main(kept) == 0
    assert json.loads((folder / "baseline" / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.full
def test_a_model_that_learns_conversations_can_be_talked_to(folder, tmp_path):
    talk = {"conversations": [{"from": "human", "value": "Who is Tim?"}, {"from": "gpt", "value": "A boy."}]}
    others = [
        {"conversations": [{**turn, "value": f"{turn['value']} {n}"} for turn in talk["conversations"]]}
        for n in range(40)
    ]
    (tmp_path / "talk.json").write_text(json.dumps([talk, *others]))
    given = arguments(folder, "talk", "--steps", "5")
    given[given.index("--data") + 1] = str(tmp_path / "talk.json")
    assert sft.main(given) == 0
    from jaxspec.io.tokenizers.tokenizer import load_tokenizer

    loaded = load_tokenizer(folder / "talk")
    asked = loaded.encode_chat("Who is Tim?")
    assert loaded.decode(asked).endswith("USER: Who is Tim? ASSISTANT:")
    # A given model without a template gets the form of its training.
    form = ["--start", str(folder / "whole"), "--chat-template", "vicuna", "--run", str(tmp_path / "run")]
    options = option_files.parse(sft.Options, ["--data", str(tmp_path / "talk.json"), *form], "sft")
    (tmp_path / "run").mkdir()
    documents = reading.read_source(str(tmp_path / "talk.json"), "auto", chat_of(options), False)
    put_tokenizer(options, {"talk": documents}, bpe_tokenizer.load(folder / "whole"))
    loaded = load_tokenizer(tmp_path / "run")
    assert "helpful, detailed, and polite answers" in loaded.decode(loaded.encode_chat("Who is Tim?"))
    # Only the answer and its end are predicted.
    assert metrics(folder, "talk")[0]["tokens"] < 2 * 30


@pytest.mark.full
def test_a_target_of_another_vocabulary_is_refused(folder, whole, capsys):
    given = arguments(folder, "foreign", "--exits", "1", "--layers", "1", "--target", str(folder / "whole"))
    assert soft.main([*given, "--vocab-size", "280"]) == 2
    assert "another vocabulary" in capsys.readouterr().err


# Options


def test_options_come_from_a_yaml_file_and_the_command_line_wins(folder, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(
        f"""
        data: [{{path: {folder / "text.txt"}, kind: stories, weight: 2}}]
        run: {tmp_path / "run"}
        model: {{layers: 2, vocab_size: 300}}
        optimizer:
          learning_rate: 0.25
        remat: true
        """
    )
    options = option_files.parse(sft.Options, ["--config", str(file), "--layers", "3"], "sft")
    assert options.data.data == (sources.Source(str(folder / "text.txt"), "stories", "auto", 2.0),)
    assert (options.model.layers, options.model.vocab_size) == (3, 300)
    assert (options.optimizer.learning_rate, options.remat, options.run) == (0.25, True, tmp_path / "run")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(option_files.to_yaml(options))
    assert option_files.parse(sft.Options, [f"--config={resolved}"], "sft") == options


def test_the_recipes_of_the_real_model_fit_their_commands():
    draft = "--output d --exits 2 4 6"
    jobs = (("draft", soft, draft), ("draft", sft, "--output d --start-layers 6"))
    for name, kind, more in (
        *jobs,
        ("layerskip", layerskip, ""),
        ("probe", probe, ""),
        ("text", own_text, ""),
    ):
        recipe = ROOT / "training" / "recipes" / f"smollm2-{name}.yaml"
        options = option_files.parse(kind.Options, ["--config", str(recipe), *more.split()], name)
        given = options.data if isinstance(options.data, tuple) else options.data.data
        # The problems that accuracy is reported on are in another file.
        assert "runs/data/gsm8k_learn.jsonl" in [source.path for source in given]
        assert "gsm8k_train" not in str(given)


def test_layer_dropout_grows_from_scratch_and_is_constant_where_a_model_goes_on(folder):
    places = ["--data", str(folder / "text.txt"), "--run", str(folder / "none")]
    for more, expected in (
        ([], "exponential"),
        (["--start", "somewhere"], "constant"),
        (["--start", "somewhere", "--dropout-over-time", "exponential"], "exponential"),
    ):
        options = option_files.parse(layerskip.Options, [*places, *more], "layerskip")
        assert layerskip.recipe(options).dropout_over_time == expected


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        *((sft, f"--{name}", f"--{name.replace(' ', ' is ')}") for name in (
            "steps 0", "steps -1", "window 1", "accumulate 0", "minutes -1", "clip -1", "warmup -1",
            "weight-decay -0.1", "final-fraction 2", "b1 1", "vocab-size 200",
        )),
        *((sft, f"--{name}", f"--{name.replace(' ', ' is ')}; give a whole number of at least") for name in (
            "heads 0", "hidden-size -1", "vocab-size 0", "head-dim 1", "context 0",
        )),
        (sft, "--steps few", "is 'few'; give a whole number or auto"),
        (sft, "--stepz 3", "unknown option --stepz; perhaps you meant --steps; see"),
        (sft, "--data nowhere.txt", "cannot read nowhere.txt"),
        (sft, "--data nowhere.txt,format=poem", "no data format 'poem'"),
        (sft, "--kv-heads 3", "not a multiple"),
        (sft, "--start nowhere", "no directory 'nowhere'"),
        (sft, "--start small --layers 3 --heads 2", "layers, heads: the shape is chosen for a model from scratch"),
        (sft, "--batch 5000", "give more data or a smaller batch"),
        (sft, "--config nowhere.yaml", "cannot read"),
        (sft, "--config LIST", "expected options by name"),
        (sft, "--config OPEN", "not YAML"),
        (soft, "--exits 2 1", "exits is (2, 1)"),
        (soft, "--exits 1 3", "--layers 3"),
        (soft, "--exits 1 2 --distil-weight 0.5", "--target"),
        (soft, "--exits 1 2 --distil-weight 2", "--distil-weight is 2"),
        (soft, "--exits 1 2 --target-weights int8", "--target-weights is int8, and no target is given"),
        (soft, "--exits 1 2 --algorithm adafactor --moments bfloat16", "--moments is bfloat16; adafactor keeps no"),
        (export, "--nonsense", "see python -m training.export --help"),
        (plots, "--nonsense", "see python -m training.plots --help"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_wrong_use_is_one_line(folder, tmp_path, command, words, said, capsys):
    """Without boxes and without the names of the program's own classes; what was said before may stand above it."""
    for name, content in {"LIST": "- a", "OPEN": "a: ["}.items():
        (tmp_path / name).write_text(content)
    given = [str(tmp_path / word) if word.isupper() else word for word in words.split()]
    if command in (sft, soft):
        layers = ["--layers", "2"] if command is soft else []
        given = arguments(folder, "wrong", "--run", str(tmp_path / "run"), *layers, *given)
    assert command.main(given) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith(f"{command.__name__}: error: ")] == lines[-1:]
    assert not any("Traceback" in line for line in lines)
    assert lines[-1].count(said) == 1


def test_the_word_none_resets_an_option():
    read = functools.partial(option_files.parse, sft.Options, prog="x")
    given = ["--data", "a", "--run", "r", "--start", "m"]
    some = ["--minutes", "3", "--start-layers", "2", "--remat-policy", "dots_saveable", "--output", "b"]
    none = ["--minutes", "None", "--start-layers", "None", "--remat-policy", "None", "--output", "None"]
    assert read([*given, *some]).remat_policy == "dots_saveable"
    assert read([*given, *some, *none]) == read(given)


def test_a_gguf_file_is_a_start_as_its_conversion_is(tmp_path):
    config = dataclasses.replace(
        CONFIG, vocab_size=700, num_layers=2, bos_token_id=1, eos_token_ids=(2,), max_position_embeddings=64
    )
    params = llama.init_params(config, jax.random.key(0))
    source = gguf_files.write(tmp_path / "m.gguf", config, params, changes=gguf_files.byte_level("smollm"))
    assert cli.main(["convert", str(source), str(tmp_path / "converted")]) == 0
    places = ["--data", "a", "--run", str(tmp_path / "run"), "--start-layers", "1"]
    starts = []
    (tmp_path / "as-hub").mkdir()
    (tmp_path / "as-hub" / "m.gguf").hardlink_to(source)
    for given in (source, tmp_path / "as-hub", tmp_path / "converted"):
        options = option_files.parse(sft.Options, [*places, "--start", str(given)], "sft")
        starts.append((start_model(options, {}, resumed=False), chat_of(options)))
    *ours_of_each, (theirs, their_chat) = starts
    for ours, our_chat in ours_of_each:
        assert ours.config == theirs.config
        assert ours.config.num_layers == 1
        assert jax.tree.all(jax.tree.map(np.array_equal, ours.params, theirs.params))
        assert ours.words.to_str() == theirs.words.to_str()
        assert our_chat == their_chat != conversations.Chat()
