"""Commands overwrite only their own files, lock their output, and remove the temporary files of killed writers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import main as papers
from jaxspec.host import files, lock
from jaxspec.io import model_files
from tests import python
from tests.commands import called, write_model, write_tokenizer
from training import export, layerskip, outputs, own_text, probe, sft, soft
from training.data import reading
from training.heads import train as heads

TEXT = f"\n{reading.SEPARATOR}\n".join(f"Once {number} upon a time." for number in range(40))
SIZES = "--window 16 --batch 2 --steps 2 --every 1 --held-out-rows 2 --held-out 4"
LENGTHS = SIZES.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "text.txt").write_text(TEXT)
    write_tokenizer(write_model(folder / "m"))
    write_tokenizer(write_model(folder / "other", seed=2))
    (folder / "link").symlink_to("m")
    (folder / "linked").mkdir()
    (folder / "linked" / "model.safetensors").symlink_to("../m/model.safetensors")
    (folder / "gone").mkdir()
    (folder / "gone" / "model.safetensors").symlink_to("../nowhere")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "quantised").mkdir()
    (folder / "quantised" / "Model.GGUF").write_bytes(b"GGUF")
    (folder / "words").mkdir()
    (folder / "words" / "tokenizer.json").write_text("{}")
    (folder / "orbax" / "params").mkdir(parents=True)
    (folder / "orbax" / "params" / "manifest.ocdbt").write_bytes(b"")
    return folder


def seen(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


JOBS = {
    "sft": (sft.main, "--start m --start-layers 1"),
    "soft": (soft.main, "--start m --exits 1"),
    "layerskip": (layerskip.main, "--start m"),
    "heads": (heads.main, "--target m --kind medusa"),
}


def refused(folder, capsys, monkeypatch, job, *more) -> str:
    monkeypatch.chdir(folder)
    before = seen(folder)
    main, given = JOBS[job]
    assert main(["--data", "text.txt", *given.split(), *LENGTHS, *more]) == 2
    assert seen(folder) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert len(said) <= 300 + len(str(folder))
    return said


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("place", ["m", "other"])
def test_every_job_refuses_an_output_that_holds_a_model(folder, capsys, monkeypatch, job, place):
    said = refused(folder, capsys, monkeypatch, job, "--run", "run", "--output", place)
    assert f"--output {place} " in said


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("./m", "is the directory of --start"),
        ("m/../m/", "is the directory of --start"),
        ("link", "is the directory of --start"),
        (".", "contains the directory of --start"),
        ("linked", r"holds a model \(model.safetensors\)"),
        ("gone", r"holds a model \(model.safetensors\)"),
        ("quantised", r"holds a model \(Model.GGUF\)"),
        ("words", r"holds a model \(tokenizer.json\)"),
        ("orbax/params", r"holds a model \(manifest.ocdbt\)"),
        ("nothing", "is a broken link"),
        ("text.txt", "is a file"),
        ("text.txt/model", "is a file"),
        ("m/model.safetensors", "is a file"),
    ],
)
def test_an_output_is_refused_by_whatever_name_it_has(folder, capsys, monkeypatch, output, why):
    said = refused(folder, capsys, monkeypatch, "sft", "--run", "run", "--output", output)
    assert re.search(why, said), said


@pytest.mark.parametrize("place", ["m", "link", "other", "linked"])
def test_a_run_directory_with_a_model_is_refused(folder, capsys, monkeypatch, place):
    assert "--run " in refused(folder, capsys, monkeypatch, "sft", "--run", place)


def test_the_target_of_a_draft_is_no_output(folder, capsys, monkeypatch):
    said = refused(
        folder, capsys, monkeypatch, "soft", "--target", "other", "--run", "run", "--output", "other"
    )
    assert "--output other is the directory of --target" in said


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize("option", ["--run", "--output"])
def test_an_empty_path_is_refused(folder, capsys, monkeypatch, option, empty):
    monkeypatch.chdir(folder)
    before = seen(folder)
    assert sft.main(["--data", "text.txt", *LENGTHS, "--output", "new", option, empty]) == 2
    said = capsys.readouterr().err
    assert f"{option} is empty" in said
    assert said.count("\n") == 1
    assert seen(folder) == before


def train(folder, *more: str) -> int:
    given = ["--data", f"{folder}/text.txt", "--start", f"{folder}/m", "--start-layers", "1"]
    return sft.main([*given, *LENGTHS, "--samples", "0", "--output", str(folder / "made"), *more])


@pytest.mark.full
def test_a_run_writes_over_its_own_model_and_no_other_run_does(folder, capsys, monkeypatch):
    run = ("--run", str(folder / "first"))
    assert train(folder, *run) == 0
    weights = (folder / "made" / "model.safetensors").read_bytes()
    (folder / "made" / ".model.safetensors.1234.tmp").write_bytes(b"half")
    (folder / "first" / ".run.json.1234.tmp").write_bytes(b"half")
    assert train(folder, *run, "--steps", "3", "--learning-rate", "0.1") == 0
    assert (folder / "made" / "model.safetensors").read_bytes() != weights
    assert not list(folder.glob("*/.*.tmp"))
    before = seen(folder / "made")
    capsys.readouterr()
    assert train(folder, "--run", str(folder / "second"), "--seed", "1") == 2
    said = capsys.readouterr().err
    assert "holds a model (config.json), which another run wrote" in said
    assert seen(folder / "made") == before
    assert not (folder / "second" / "checkpoints").exists()
    # The run's own directory cannot be another run's output either, and an export makes the same check.
    assert export.main(["--run", str(folder / "first"), "--output", str(folder / "other")]) == 2
    assert "--output" in capsys.readouterr().err
    (folder / "made" / outputs.MARK).write_text("{")
    assert export.main(["--run", str(folder / "first"), "--output", str(folder / "made")]) == 2


@pytest.mark.full
def test_an_export_that_was_killed_goes_on(folder, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    run = ("--run", str(folder / "killed"), "--output", str(folder / "half"))
    with monkeypatch.context() as patched:
        patched.setattr(export.huggingface, "read_trained_for", killed)
        assert train(folder, *run) == 130
    with monkeypatch.context() as patched:
        patched.setattr(export, "copy_files", killed)
        assert train(folder, *run) == 130
    assert (folder / "half" / "model.safetensors").exists()
    assert train(folder, *run) == 0


def test_a_run_is_not_its_own_output(folder, capsys):
    both = ("--run", str(folder / "both"), "--output", str(folder / "both"))
    assert train(folder, *both) == 2
    assert "is the run directory" in capsys.readouterr().err
    assert not (folder / "both").exists()


def test_numbers_are_not_put_beside_another_model(folder, capsys):
    given = ["--model", str(folder / "m"), "--exit-layers", "1", "--data", str(folder / "text.txt")]
    assert probe.main([*given, "--output", str(folder / "other")]) == 2
    assert "holds a model (config.json), which is not the one" in capsys.readouterr().err


def test_a_models_own_texts_are_not_written_over_what_others_wrote(folder, tmp_path, capsys):
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text('{"text": "mine"}\n')
    given = ["--model", str(folder / "m"), "--data", str(folder / "text.txt"), "--output"]
    before = seen(tmp_path)
    for name, found in (("a.jsonl", "a.jsonl"), ("b.jsonl", "b.txt")):
        assert own_text.main([*given, str(tmp_path / name)]) == 2
        assert f"{tmp_path / found} exists, and was not written by this command" in capsys.readouterr().err
    (tmp_path / "a.log").write_text("{}\n")
    own = ["--model", str(folder / "m"), "--data", str(tmp_path / "a.jsonl"), "--no-resume"]
    assert own_text.main([*own, "--output", str(tmp_path / "a.jsonl")]) == 2
    assert "is among the data" in capsys.readouterr().err
    assert (tmp_path / "a.jsonl").read_text() == before[str(tmp_path / "a.jsonl")].decode()


# Locks and temporary files


def held(directory: Path, name: str = lock.FILE):
    """Holds a lock as another process would: flock distinguishes open files, not processes."""
    file = (directory / name).open("a+")
    file.write("process 7 on elsewhere\n")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.mark.parametrize("command", ["bench", "papers", "search", "own_text"])
def test_a_measurement_beside_another_in_its_output_is_refused(folder, tmp_path, capsys, command):
    model = ("--model", folder / "m")
    short = ("--max-new-tokens", 2, "--repeats", 1, "--limit", 1)
    file = {"search": "plan.json", "own_text": "a.jsonl"}.get(command)
    with held(tmp_path, f"{file}.lock" if file else lock.FILE):
        if command == "own_text":
            given = ["--model", str(folder / "m"), "--data", str(folder / "text.txt")]
            assert own_text.main([*given, "--output", str(tmp_path / file)]) == 2
            said = capsys.readouterr().err
        else:
            words = {
                "bench": ("bench", *model, *short, "--methods", "autoregressive", "--output", tmp_path),
                "papers": ("asd", *model, "--max-new-tokens", 2, "--limit", 1, "--output", tmp_path),
                "search": ("search", *model, "--random", "--output", tmp_path / "plan.json"),
            }[command]
            run = {"main": papers} if command == "papers" else {}
            status, _, said = called(capsys, *words, **run)
            assert status == 2
    assert f"{tmp_path} is in use by process 7 on elsewhere; wait until" in said
    assert "give another --output" in said
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_writer_left_goes_with_the_next_write_and_what_is_written_stays(tmp_path):
    script = (
        "import os, sys; from jaxspec.host import files\n"
        "with files.atomic(sys.argv[1]) as file: file.write(b'half'); file.flush(); os._exit(9)"
    )
    python("-c", script, tmp_path / "a")
    assert [path.name[:3] for path in tmp_path.iterdir()] == [".a."]
    with files.atomic(tmp_path / "b") as file:
        file.write(b"1")
        files.write_atomic(tmp_path / "a", "2")
        assert len(list(tmp_path.iterdir())) == 2  # the complete `a`, and the unfinished `b`
        files.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    others = (".a.tmp", ".env", "a.12.tmp", ".a.x.tmp")
    for name in others:
        (tmp_path / name).write_text("")
    (tmp_path / ".c.99.tmp").write_text("")
    with lock.exclusive(tmp_path, pytest.fail):
        assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "lock", *others}
    files.remove_abandoned(tmp_path / "nowhere")


def test_an_error_of_writing_names_the_file(tmp_path):
    with pytest.raises(OSError, match="a") as refused, files.atomic(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert refused.value.filename == str(tmp_path / "a")
    assert files.is_full(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_model_holds_none(tmp_path):
    assert model_files.held(tmp_path / "nowhere") is None
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "heads").mkdir()
    assert model_files.held(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert model_files.held(tmp_path) == "config.json"
    assert model_files.held(tmp_path, weights_only=True) is None
