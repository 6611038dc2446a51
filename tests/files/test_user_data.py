"""Files found out about a model go where they can be written and never into the installation, and are found again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import platformdirs
import pytest

from jaxspec.console.output import output_file
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host import files
from jaxspec.io import embedded
from jaxspec.io.methods import method_files
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.methods.method_files import ProbeFile
from jaxspec.io.user_data import home, model_data, user_data
from jaxspec.model.plan import LayerPlan
from tests import refused, tiny

DEEP = tiny.DEEP


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXSPEC_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def lm(tmp_path) -> LanguageModel:
    """A model in a directory of its own."""
    (tmp_path / "model").mkdir()
    return LanguageModel(DEEP, tiny.params(DEEP), tiny.tokenizer(), directory=tmp_path / "model")


def test_where_files_go(data, tmp_path, monkeypatch):
    own, shipped = tmp_path / "model", tmp_path / "checkpoints"
    own.mkdir()
    (shipped / "large").mkdir(parents=True)
    monkeypatch.setattr(embedded, "_ROOTS", (shipped,))
    theirs = data / "models" / "print"
    assert home(own, str(own), "print") == own
    assert home(None, "model", "print") == theirs
    assert home(shipped / "large", "large", "print") == theirs
    # Who names the directory means it.
    assert home(shipped / "large", str(shipped / "large"), "print") == shipped / "large"
    monkeypatch.setattr(embedded, "_PACKAGE", tmp_path)
    assert home(own, str(own), "print") == theirs
    monkeypatch.undo()
    monkeypatch.setenv("JAXSPEC_DATA", str(data))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # read-only, to whomever this runs as
    assert home(own, str(own), "print") == theirs
    monkeypatch.delenv("JAXSPEC_DATA")
    assert user_data() == Path(platformdirs.user_data_dir("jaxspec"))


def test_the_embedded_models_are_never_written_to(data):
    for name in embedded.embedded_names():
        assert home(embedded.embedded_model(name), name, "print") == data / "models" / "print"


def test_output_files(data, lm, tmp_path, monkeypatch, capsys):
    assert output_file(None, lm, "probes/x") == tmp_path / "model" / "probes" / "x"
    assert capsys.readouterr().err == ""
    (tmp_path / "model" / "probes" / "x").write_text("of another precision")
    known = output_file(None, lm, "probes/x")
    assert capsys.readouterr().err == f"jaxspec: will replace {known}; give --output FILE to keep it\n"
    with monkeypatch.context() as another:  # another process of the command writes the file
        another.setattr(files, "_written_by_another", True)
        assert output_file(None, lm, "probes/x") == known
    assert capsys.readouterr().err == ""
    assert output_file(str(tmp_path / "x"), lm, "plan") == tmp_path / "x"
    with refused("is a directory; give output=FILE"):
        output_file(str(tmp_path), lm, "plan")
    with refused(r"cannot write .*; give another output=FILE"):
        output_file(str(tmp_path / "no" / "x"), lm, "plan")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    path = output_file(None, lm, "thresholds/x.json")
    assert path == data / "models" / lm.fingerprint / "thresholds" / "x.json"
    assert path.parent.is_dir()


@pytest.mark.parametrize("writable", [True, False])
def test_files_are_found_first_where_they_are_written_now(data, lm, writable, monkeypatch):
    """In the model's directory, or in the user's data if that is read-only: what was found last counts."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: writable and access(path, mode))
    beside, own = lm.directory, model_data(lm.fingerprint)
    with refused(re.escape(f"there is no {beside / 'jaxspec.plan.json'}"), FileNotFoundError):
        lm.drafter("draft-verify")
    earlier, later = (own, beside) if writable else (beside, own)
    for directory, skipped in ((earlier, 1), (later, 2)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "probes").mkdir()
        plan = LayerPlan.skipping(DEEP.num_layers, [skipped], [])
        method_files.write_plan(directory / method_files.PLAN_NAME, lm.fingerprint, plan, {})
        ASDNumbers(0.5, skipped, 1).write(directory / method_files.ASD_NAME, lm.fingerprint, {})
        probe = ProbeFile(np.ones(DEEP.hidden_size, np.float32), skipped, 1, "greedy")
        method_files.write_probe(method_files.probe_path(directory, 1, "greedy"), lm.fingerprint, probe)
        assert np.asarray(lm.drafter("draft-verify")[0].plan).tolist() == [list(pair) for pair in plan.run]
        assert int(lm.drafter("asd")[0].every) == skipped
        assert float(lm.drafter("adaspeed-probe", exit_layer=1)[0].rule.estimate.bias) == skipped
    # They belong to this model alone.
    other = LanguageModel(DEEP, tiny.params(DEEP, seed=8), tiny.tokenizer(), directory=beside)
    (beside / method_files.ASD_NAME).unlink()
    assert int(other.drafter("asd")[0].every) == 3


def test_who_has_no_home_directory_needs_none(lm, monkeypatch):
    """As in a container with a user id of nobody's: nothing is looked for there, and only writing needs a place."""
    monkeypatch.setenv("JAXSPEC_DATA", "~nobody-of-this-name/data")
    assert int(lm.drafter("asd")[0].every) == 3
    assert output_file(None, lm, "plan").parent == lm.directory
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refused(r"there is no home directory.*JAXSPEC_DATA"):
        output_file(None, lm, "plan")


def test_a_home_that_cannot_be_read_holds_nothing(data, lm, monkeypatch):
    """As under `sudo -u`, which keeps the HOME of root."""
    is_dir = Path.is_dir

    def refused(path):
        if path.is_relative_to(data):
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    assert int(lm.drafter("asd")[0].every) == 3


@pytest.mark.full
def test_probes_that_exist_are_named(data, lm):
    with refused(r"no probe .*exit-1-greedy\.safetensors; train one", FileNotFoundError):
        lm.drafter("adaspeed-probe", exit_layer=1)
    (lm.directory / "probes").mkdir()
    for distribution, exit_layer in (("greedy", 2), ("temperature-0.6-top_p-0.9", 1)):
        (lm.directory / "probes" / f"exit-{exit_layer}-{distribution}.safetensors").touch()
    message = r"there is no probe for exit_layer=1 \(greedy\), only for 2; give one of these, or train one"
    with refused(message, FileNotFoundError):
        lm.drafter("adaspeed-probe", exit_layer=1)
    (lm.directory / "probes" / "exit-2-greedy.safetensors").unlink()
    with refused(r"the model's probes are for temperature-0\.6-top_p-0\.9; train", FileNotFoundError):
        lm.drafter("adaspeed-probe", exit_layer=1)
