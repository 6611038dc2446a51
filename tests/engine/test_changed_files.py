"""Files that change while a model is loaded: the next text drafts by the new ones, however the model is used."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from jaxspec.engine import prepare
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.host.files import identity
from jaxspec.io.hf import huggingface
from jaxspec.io.methods.method_files import write_plan
from jaxspec.methods import Auto, DraftModel, DraftVerify, Medusa
from jaxspec.model.plan import LayerPlan
from jaxspec.programs.executables import Executables
from tests import tiny
from tests.engine.test_conversation import TEMPLATE
from tests.heads import files
from tests.heads.test_medusa import medusa

OPTIONS = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def write_draft(path, good: bool) -> None:
    """Writes the target itself, or a model of the same shapes that drafts other tokens."""
    params = tiny.params() if good else tiny.params(seed=3)
    huggingface.save(path, tiny.engine_config(tiny.TARGET), params, np.float32)


def write_mask(path, good: bool) -> None:
    skipped = ([], [1]) if good else ([0, 1], [0])
    write_plan(path, model().fingerprint, LayerPlan.skipping(2, *skipped), {})


def write_head(path, good: bool) -> None:
    content, tensors = medusa()
    files.write(path, (content, {name: one * (1 if good else -1) for name, one in tensors.items()}))


EXECUTABLES = Executables()


def model(config=tiny.TARGET) -> LanguageModel:
    lm = LanguageModel(tiny.engine_config(config), tiny.params(config), tiny.tokenizer(TEMPLATE))
    lm.executables = EXECUTABLES
    return lm


def generate(lm):
    return lambda method: lm.generate("dabd", method=method, **OPTIONS)


def schedule(lm):
    scheduler = Scheduler(lm)

    def use(method):
        scheduler.add("dabd", method=method, **OPTIONS)
        pieces = []
        while not scheduler.idle:
            pieces += scheduler.step()
        return pieces[-1][1].result

    return use


def converse(lm):
    conversations = []

    def use(method):
        conversations[:] = conversations or [lm.chat(method=method, **OPTIONS)]
        return conversations[0].send("ab")

    return use


KINDS = {
    "draft": (tiny.TARGET, write_draft, lambda path: DraftModel(draft=str(path))),
    "head": (files.TARGET, write_head, lambda path: Medusa(draft=str(path))),
    "mask": (tiny.TARGET, write_mask, lambda path: DraftVerify(plan=str(path))),
}


@pytest.mark.parametrize(
    ("use", "kind"),
    [(generate, "draft"), (generate, "head"), (schedule, "mask"), (converse, "draft")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_the_next_text_drafts_by_the_new_files(tmp_path, use, kind):
    """The model accepts as many draft tokens as in a new process."""
    config, write, method = KINDS[kind]
    path, found = tmp_path / "file", []
    used, fresh = use(model(config)), use(model(config))
    for good in (False, True):
        write(path, good)
        statistics = used(method(path)).statistics
        found.append(statistics.num_accepted_tokens / statistics.num_draft_tokens)
    expected = fresh(method(path)).statistics
    assert found[1] != found[0]
    # The second turn of a conversation is another text than the first.
    assert use is converse or found[1] == expected.num_accepted_tokens / expected.num_draft_tokens


def test_auto_has_the_new_files(tmp_path):
    lm, made = model(), []
    method = Auto(among=(DraftModel(draft=str(tmp_path / "draft")),))
    for good in (False, True, True):
        if len(made) < 2:
            write_draft(tmp_path / "draft", good)
        made.append(prepare.auto_drafter(lm, method, ("greedy",), lm.loaded))
    assert made[0] is not made[1] is made[2]
    embedded = [np.asarray(one.params[0]["embed"]) for one in made]
    np.testing.assert_array_equal(embedded[1], lm.params["embed"])
    assert (embedded[0] != embedded[1]).any()


def test_what_did_not_change_is_read_once(tmp_path):
    write_draft(tmp_path / "draft", True)
    write_head(tmp_path / "head", True)
    lm, other = model(), model(files.TARGET)
    drafts = [lm.drafts.load(tmp_path / "draft") for _ in range(2)]
    heads = [other.drafts.load_head(tmp_path / "head", other.loaded) for _ in range(2)]
    assert drafts[0] is drafts[1]
    assert heads[0] is heads[1]


def test_a_group_of_requests_with_old_files_is_not_kept(tmp_path):
    lm = model()
    scheduler = Scheduler(lm)
    for good in (False, True):
        write_draft(tmp_path / "draft", good)
        scheduler.add("dabd", method=DraftModel(draft=str(tmp_path / "draft")), **OPTIONS)
        while not scheduler.idle:
            scheduler.step()
    assert len(scheduler._groups) == 1


def test_the_identity_of_files(tmp_path):
    """It changes with the content, also under the old time, within subdirectories, and where files come and go."""
    root, file = tmp_path / "head", tmp_path / "head" / "adapter" / "model.safetensors"
    seen = [identity(root), identity(file)]
    assert seen == [(), ()]

    def changed() -> bool:
        seen.append(identity(root))
        return seen[-1] not in seen[:-1]

    file.parent.mkdir(parents=True)
    file.write_bytes(b"abc")
    assert changed()
    assert not changed()
    times = os.stat(file)
    time.sleep(0.05)  # longer than a tick of the file system's clock
    file.write_bytes(b"abd")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed()
    file.rename(file.with_name("other"))
    assert changed()
    assert identity(file) == ()
