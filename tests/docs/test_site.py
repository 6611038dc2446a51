"""The documentation site builds and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RAW_TEX = re.compile(r"\$\$|\\\(|\\\[|\\(?:frac|text|left|max|cdot)\b")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site; a broken link ends the build."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.full
def test_pages_show_no_raw_formulas_and_load_nothing_from_elsewhere(site):
    found = sorted(site.rglob("index.html"))
    assert len(found) > 15
    for path in found:
        page = path.read_text("utf-8")
        shown = re.sub(r"<(code|pre|script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert not RAW_TEX.search(shown), (path, RAW_TEX.search(shown))
        assert not re.search(r"<(?:script|img)\b[^>]*\bsrc=[\"']?(?:https?:)?//", page), path
        assert not re.search(r"<link\b[^>]*rel=[\"']?stylesheet[^>]*href=[\"']?(?:https?:)?//", page), path


@pytest.mark.full
def test_each_option_of_a_command_has_its_description(site):
    text = (site / "command_line.md").read_text("utf-8")
    assert "<dt><code>--repeats N</code></dt><dd>how often each method runs, timed. (default: 3)</dd>" in text
    assert "</dt><dd></dd>" not in text


@pytest.mark.full
def test_the_list_of_pages_for_programs_is_complete(site):
    listed = re.findall(r"^- \[.+\]\((\S+\.md)\)$", (site / "llms.txt").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    )
    for page in listed:
        assert "{{" not in (site / page).read_text("utf-8"), page
