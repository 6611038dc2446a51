"""What the training commands say while they work, and what they choose where nothing is given."""

from __future__ import annotations

import io
import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from rich.console import Console

from jaxspec.host import progress
from jaxspec.host.progress import duration
from tests import refused
from tests.training.test_training_run import arguments, metrics
from training import layerskip, option_files, sft, soft
from training.data import bpe_tokenizer, conversations, packing, sizing, sources
from training.data.sizing import AUTO
from training.loop import training_loop
from training.loop.progress import FIRST_S, MAX_S, Pace, Progress
from training.reports import curves
from training.start import start_model


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spoken(seconds: float, each: float) -> str:
    """What is shown of work of so many seconds that says how far it is each so many seconds."""
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, width=100, soft_wrap=True)
    total = int(seconds / each)
    with Progress(console, "step", total, clock=clock) as shown:
        shown.doing("compiling")
        for done in range(1, total + 1):
            clock.now += each
            shown.update(done, f"loss {done}")
    return stream.getvalue()


def test_without_a_terminal_a_line_comes_now_and_then():
    lines = spoken(seconds=60, each=1).splitlines()
    assert lines[0] == "step 0/60  compiling"
    assert lines[1:] == [f"step {done}/60  loss {done}" for done in (10, 20, 30, 40, 50, 60)]


def test_the_lines_of_long_work_come_less_often_but_do_come():
    lines = spoken(seconds=36_000, each=5).splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    gaps = [5 * (later - earlier) for earlier, later in itertools.pairwise(steps)]
    assert gaps[0] == FIRST_S
    assert gaps[-1] == MAX_S
    assert gaps == sorted(gaps)
    assert len(lines) < 200


def test_a_terminal_gets_the_line_of_progress_and_no_others(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "is_shown", lambda: True)
    monkeypatch.setattr(progress.Progress, "__call__", lambda self, what: shown.append(what))
    assert spoken(seconds=30, each=1) == ""
    assert shown[0] == "step 0/30  compiling"
    assert shown[-1] == "step 30/30  loss 30"


def test_the_pace_is_of_the_latest_steps_and_unknown_without_any():
    pace = Pace(latest=2)
    assert pace.tokens_per_second is None
    assert pace.seconds_left(10, 1) is None
    for tokens, seconds in ((1, 100), (300, 1), (100, 3)):
        pace.add(tokens, seconds)
    pace.pause(5)
    assert pace.tokens_per_second == 100
    assert pace.seconds_left(10, 3) == 10 * 2 + 3 * 5


def test_compilation_is_in_no_rate_and_a_batch_of_another_vocabulary_ends_the_run(monkeypatch, tmp_path):
    """The program of the measurements is assumed to compile as long as the step."""
    clock, compiles = Clock(), [50, 0]
    monkeypatch.setattr(training_loop.time, "monotonic", clock)

    class Running(float):
        """A metric that is computed when the program has run for a while."""

        def __float__(self) -> float:
            clock.now += 10
            return 2.0

    def step_fn(state, batch):
        clock.now += compiles.pop(0)
        return state, {"loss": Running(), "tokens": 30.0, "gradient_norm": 1.0}

    batches = ({"tokens": np.full((1, 8, 4), token)} for token in (8, 0, 9))
    options, saved = training_loop.LoopOptions(steps=7, every=10), SimpleNamespace(standing=lambda: "intact")
    console = Console(file=io.StringIO())
    loop = training_loop.Loop(options, tmp_path, saved, None, step_fn, batches, 9, None, console)
    with Progress(console, "step", 7, clock=clock) as shown:
        loop._step(None, 0, shown)
        assert loop._pace.tokens_per_second == 3
        # Six steps of 10 s, and 50 s for the program.
        assert loop._ahead(1) == "about 2 min left"
        loop._step(None, 1, shown)
        assert loop._pace.tokens_per_second == 3
        with pytest.raises(
            training_loop.Failed, match="step 3 holds tokens from 9 to 9, the vocabulary has 9"
        ):
            loop._step(None, 2, shown)


def test_times_are_said_as_people_say_them():
    assert [duration(s) for s in (0.1, 40, 59.6, 150, 5000, 7200)] == [
        *("1 s", "40 s", "1 min", "2 min", "83 min", "2.0 h")
    ]


@pytest.mark.full
def test_what_a_run_says(folder, capsys):
    assert sft.main(arguments(folder, "says", "--steps", "10")) == 0
    said = capsys.readouterr().err
    assert "held-out tokens of 1 kind, run in" in said
    assert re.search(
        r"step 0/10  compiling the step\nstep 0/10  computing step 1  compiled in \d+ (s|min)\n", said
    )
    assert not re.search(r"\b0 min|\b0 tok|[^,.\d]0 tokens/s|kinds", said)
    middle, last = (line for line in said.splitlines() if "held-out " in line and line.startswith("step "))
    # Five steps of training are worse than equal probabilities of the 300 tokens.
    worse = r"  above 5\.70, that of equal probabilities: take more steps or raise --learning-rate"
    assert re.fullmatch(
        rf"step 5/10  loss \S+  held-out \S+{worse}  [\d,]+ tokens/s  about \d+ (s|min) left", middle
    )
    assert re.fullmatch(
        rf"step 10/10  loss \S+  held-out \S+({worse})?  [\d,]+ tokens/s  \d+ (s|min) in all", last
    )


@pytest.mark.full
def test_out_of_time_is_what_was_asked_for(folder, capsys):
    assert sft.main(arguments(folder, "minutes", "--steps", "9", "--minutes", "0.000001")) == 0
    said = capsys.readouterr().err
    assert "out of the time given by --minutes after step 1; the same command goes on from there" in said


def test_ctrl_c_outside_of_the_steps_is_one_line(folder, monkeypatch, capsys):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "read_kinds", pressed)
    assert sft.main(arguments(folder, "early", "--steps", "9")) == 130
    assert capsys.readouterr().err == "training.sft: interrupted\n"


# Sizes


def test_sizes_grow_with_the_data_and_are_possible():
    before = None
    for characters in (1, 3_000, 300_000, 3_000_000, 40_000_000, 500_000_000):
        sizes = sizing.choose(characters, True, {})
        assert set(sizes) == set(sizing.NAMES)
        assert sizes["heads"] * sizes["head_dim"] == sizes["hidden_size"]
        assert sizes["kv_heads"] == sizes["heads"]
        assert sizes["vocab_size"] >= 258
        assert 1 <= sizes["every"] <= sizes["steps"]
        assert sizes["window"] <= sizes["context"]
        # There are as many windows as a step takes, even if a token were twice as long as thought.
        tokens_of_step = sizes["window"] * sizes["batch"]
        assert sizes["batch"] == 1 or 2 * tokens_of_step <= characters
        if before is not None:
            assert all(
                sizes[name] >= before[name] for name in ("vocab_size", "layers", "hidden_size", "steps")
            )
        before = sizes


def test_what_is_given_stays_and_the_rest_follows_it():
    plain = sizing.choose(300_000, True, {})
    wide = sizing.choose(300_000, True, {"hidden_size": 96, "window": 64, "heads": 4})
    assert (wide["hidden_size"], wide["window"], wide["heads"], wide["head_dim"]) == (96, 64, 4, 24)
    assert wide["intermediate_size"] == 256
    assert wide["steps"] == pytest.approx(4 * plain["steps"], rel=0.01)
    assert sizing.choose(300_000, True, {"accumulate": 2})["steps"] == pytest.approx(
        plain["steps"] / 2, rel=0.02
    )
    assert sizing.choose(300_000, True, {"steps": 30})["every"] == 10
    assert sizing.choose(300_000, True, dict(plain)) == plain
    for kv_heads in (1, 2, 3, 5):
        grouped = sizing.choose(300_000, True, {"kv_heads": kv_heads})
        assert grouped["kv_heads"] == kv_heads
        assert grouped["heads"] % kv_heads == 0


def test_a_given_model_keeps_its_shape_and_sees_the_data_less_often():
    sizes = sizing.choose(300_000, False, {})
    assert set(sizes) == {"window", "batch", "accumulate", "steps", "every"}
    assert sizes["steps"] < sizing.choose(300_000, True, {})["steps"]


def options_of(kind, *given: str):
    return option_files.parse(kind, ["--data", "a", "--run", "r", *given], "x")


def test_only_what_is_not_given_is_chosen():
    options, chosen = options_of(sft.Options, "--layers", "3", "--steps", "7", "--batch", "auto").settled(
        300_000, {}
    )
    assert (options.model.layers, options.loop.steps, options.data.batch) == (3, 7, 8)
    assert not {"layers", "steps"} & set(chosen)
    assert {"batch", "hidden_size", "vocab_size"} <= set(chosen)
    line = sizing.in_words(300_000, chosen)
    assert line.startswith("chosen for 300,000 characters of training text: ")
    assert "--hidden-size 128" in line
    assert "--steps" not in line
    options, chosen = options_of(sft.Options, "--start", "m").settled(300_000, {})
    assert set(chosen) == {"window", "batch", "accumulate", "steps", "every"}
    assert options.model.layers is AUTO
    _, chosen = options_of(sft.Options, "--tokenizer", "m").settled(300_000, {})
    assert "vocab_size" not in chosen


FURTHER = sizing.Further(context=4096)


def test_a_pretrained_model_is_trained_as_in_the_papers():
    """At ShareGPT's size: 128 rows of 2,048 tokens a step, three passes; a micro-batch has 2,048 tokens a device."""
    options, _ = options_of(sft.Options, "--start", "m").settled(400_000_000, {}, FURTHER)
    recipe = options.optimizer
    assert (recipe.learning_rate, recipe.warmup, recipe.weight_decay) == (2e-5, 0.04, 0.0)
    assert recipe.schedule == "cosine"
    assert (options.data.window, options.data.batch, recipe.accumulate) == (2048, 1, 128)
    assert options.loop.steps == math.ceil(3 * 100_000_000 / (128 * 2048))
    sizes = sizing.choose(400_000_000, False, {}, further=sizing.Further(512, places=16))
    assert (sizes["window"], sizes["batch"], sizes["accumulate"]) == (512, 64, 2)
    assert sizing.choose(400_000_000, False, {"batch": 16}, further=FURTHER)["accumulate"] == 8
    for characters in (1_000, 100_000, 3_000_000):
        sizes = sizing.choose(characters, False, {}, further=FURTHER)
        rows = sizes["batch"] * sizes["accumulate"]
        assert rows == 1 or 2 * rows * sizes["window"] <= characters / 4
        assert sizes["steps"] >= 1


def test_what_is_given_stays_from_a_pretrained_model_too():
    given = ["--start", "m", "--learning-rate", "1e-3", "--warmup", "7", "--accumulate", "1"]
    options, _ = options_of(sft.Options, *given).settled(10**6, {}, FURTHER)
    assert (options.optimizer.learning_rate, options.optimizer.warmup) == (1e-3, 7)
    assert (options.optimizer.accumulate, options.optimizer.weight_decay) == (1, 0)
    # A run that began with other defaults goes on with them.
    earlier = {"learning_rate": 3e-3, "accumulate": 2, "window": 256}
    options, _ = options_of(sft.Options, "--start", "m").settled(10**6, earlier, FURTHER)
    assert (options.optimizer.learning_rate, options.optimizer.accumulate, options.data.window) == (
        3e-3,
        2,
        256,
    )


def test_a_resumed_run_divides_the_same_rows_over_other_devices():
    def of(places: int, earlier: dict[str, int], *more: str) -> tuple[int, int]:
        further = sizing.Further(context=4096, places=places)
        options, _ = options_of(sft.Options, "--start", "m", *more).settled(400_000_000, earlier, further)
        return options.data.batch, options.optimizer.accumulate

    one, eight = of(1, {}), of(8, {})
    earlier = {"window": 2048, "batch": one[0], "accumulate": one[1], "places": 1}
    assert (one, eight) == ((1, 128), (8, 16))
    assert (of(1, earlier), of(8, earlier)) == (one, eight)
    assert of(1, {**earlier, "batch": 8, "accumulate": 16, "places": 8}) == one
    assert of(3, earlier) == one  # is refused later, because three devices do not divide the rows
    assert of(8, earlier, "--batch", "16") == (16, 128)  # what is given stays
    # A run that began with other defaults goes on with them on as many devices.
    other = {**earlier, "batch": 4, "accumulate": 32}
    assert of(1, other) == of(1, {**other, "places": None}) == (4, 32)
    assert of(8, {**other, "places": None}) == eight


def test_epochs_are_passes_over_the_text():
    for kind, more in ((sft.Options, []), (sft.Options, ["--start", "m"])):
        further = FURTHER if more else None
        one, six = (
            options_of(kind, *more, "--epochs", epochs)
            .settled(40_000_000, {"steps": 5}, further)[0]
            .loop.steps
            for epochs in ("1", "6")
        )
        assert six == pytest.approx(6 * one, abs=6)
        assert one > 5
    # A given tokenizer tells the number of tokens better than the characters.
    options, _ = options_of(sft.Options, "--start", "m", "--epochs", "6").settled(
        40_000_000, {}, FURTHER, 20_000_000
    )
    assert options.loop.steps == pytest.approx(2 * six, abs=2)
    options, _ = options_of(sft.Options, "--epochs", "2").settled(3_000_000, {})
    # The options that a run records start it again.
    assert options.loop.epochs is None
    with refused("steps is 5 and epochs 2"):
        options_of(sft.Options, "--epochs", "2", "--steps", "5")
    with refused("epochs is 0"):
        options_of(sft.Options, "--epochs", "0")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--learning-rate 3e-3", "learning_rate is 0.003 (usual: 1e-05 to 0.0001)"),
        ("--learning-rate 1e-7 --window 8", "learning_rate is 1e-07 (usual: 1e-05 to 0.0001), window is 8 ("),
        ("--epochs 50", "epochs is 50 (usual: 1 to 4)"),
        ("--weight-decay 2", "weight_decay is 2 (usual: 0 to 0.1)"),
        ("--window 3000", "window is 3000 (the model's context: 2048)"),
        ("--learning-rate 1e-3 --batch 1 --epochs 3 --warmup 0", "None"),
        ("", "None"),
    ],
)
def test_a_setting_far_outside_the_usual_range_is_described(given, said):
    assert said in str(options_of(sft.Options, "--start", "m", *given.split()).unusual(2048))


def test_a_sorted_draft_is_as_deep_as_its_last_exit():
    options, chosen = options_of(soft.Options, "--exits", "1", "3").settled(300_000, {})
    assert options.model.layers == 3
    assert "layers" not in chosen


@pytest.mark.full
def test_a_resumed_run_keeps_what_was_chosen_for_it(folder, monkeypatch, capsys):
    """Whatever is chosen for new runs by then; and what is given still wins."""
    given = arguments(folder, "chosen", "--steps", "5")
    for option in ("--window", "--batch", "--layers", "--hidden-size", "--heads", "--kv-heads", "--head-dim"):
        del given[given.index(option) : given.index(option) + 2]
    assert sft.main(given) == 0
    assert "chosen for " in capsys.readouterr().err
    file = folder / "run-chosen" / "options.yaml"
    before = yaml.safe_load(file.read_text())
    assert before["data"]["window"] == 64  # the context
    monkeypatch.setattr(sizing, "_SIZES", ((0, 512, 7, 640, 3),))
    assert sft.main([*given, "--steps", "6", "--every", "3"]) == 0
    said = capsys.readouterr().err
    assert "resumed from step 5" in said
    assert "chosen for " not in said
    after = yaml.safe_load(file.read_text())
    assert after["loop"] == {**before["loop"], "steps": 6, "every": 3}
    assert {**after, "loop": None} == {**before, "loop": None}
    assert sft.main(["--config", str(file), "--steps", "7"]) == 0


@pytest.mark.full
def test_layer_skip_measures_a_quarter_and_a_half_of_the_depth(folder, capsys):
    assert [layerskip.usual_exits(n) for n in (1, 2, 3, 4, 8, 12)] == [(), (1,), (1,), (1, 2), (2, 4), (3, 6)]
    given = arguments(folder, "exits", "--layers", "4", "--rotation", "2", "--steps", "5", "--plot")
    assert layerskip.main(given) == 0
    record = metrics(folder, "exits")[-1]
    assert {"acceptance/1", "acceptance/2"} <= record.keys()
    assert (folder / "run-exits" / curves.ACCEPTANCE_FILE).is_file()


@pytest.mark.full
def test_the_data_of_a_small_file_suffice_for_what_is_chosen(folder):
    """The smallest rung, on a text of a few kilobytes: no step asks for more windows than there are."""
    options = option_files.parse(
        sft.Options, ["--data", str(folder / "text.txt"), "--output", "o", "--held-out", "6"], "x"
    )
    documents = sources.read_kinds(options.data, conversations.Chat(), print)
    characters = sum(len(one.text) for one in documents[0]["text"])
    options, _ = options.settled(characters, {})
    start = start_model(options, documents[0], resumed=False)
    encoded = bpe_tokenizer.encode_documents(start.words, documents[0]["text"], 0, [1])
    windows = packing.pack(encoded, options.data.window)
    assert len(windows["tokens"]) >= options.data.batch
