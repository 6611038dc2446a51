"""The documentation site builds, needs no network, and fits a desktop's screen and a phone's."""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import hooks

ROOT = Path(__file__).parents[2]
RAW_TEX = re.compile(r"\$\$|\\\(|\\\[|\\(?:frac|text|left|max|cdot)\b")
TAG_AS_TEXT = re.compile(
    r"</?(?:a|b|br|code|dd|div|dl|dt|em|h\d|img|li|ol|p|pre|small|span|strong|t[dhr]|table|ul)\b[^<>]*>"
)
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build(directory: Path, folder: Path) -> subprocess.CompletedProcess:
    """Builds the site of a directory as a user does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )


class Page(html.parser.HTMLParser):
    """The content of a page in a browser, and the addresses that it loads from other hosts.

    Attributes:
      text: the text outside code.
      loaded: the addresses of what is loaded from elsewhere.
      headings, places: the texts of the headings, and their places.
      linked: the places in the table of contents.
      blocks: the texts of the blocks of code.
    """

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.text, self.loaded = "", []
        self.headings, self.places, self.linked, self.blocks = [], [], set(), []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        source = values.get("src") or (values.get("href") if tag == "link" else None)
        if re.match("(?:https?:)?//", source or "") and values.get("rel") not in (
            "canonical",
            "prev",
            "next",
        ):
            self.loaded.append(source)
        if tag in ("code", "pre", "script", "style", *HEADINGS):
            self.inside.append(tag)
        if tag in HEADINGS:
            self.headings.append("")
            self.places.append(values.get("id"))
        elif tag == "a" and values.get("class") == "md-nav__link":
            self.linked |= {*re.findall("^#(.+)", values.get("href") or "")}
        elif tag == "pre":
            self.blocks.append("")

    def handle_endtag(self, tag):
        if self.inside[-1:] == [tag]:
            self.inside.pop()

    def handle_data(self, data):
        if not {"code", "pre", "script", "style"} & {*self.inside}:
            self.text += data
        if "pre" in self.inside:
            self.blocks[-1] += data
        if {*HEADINGS} & {*self.inside}:
            self.headings[-1] += data.removesuffix("\N{PILCROW SIGN}")


def pages(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("index.html"))


@pytest.mark.full
def test_pages_show_no_raw_formulas_and_no_tags_and_load_nothing_from_elsewhere(site):
    assert len(pages(site)) > 15
    for path in pages(site):
        page = Page(path)
        assert not RAW_TEX.search(page.text), (path, RAW_TEX.search(page.text))
        assert not TAG_AS_TEXT.search(page.text), (path, TAG_AS_TEXT.search(page.text))
        assert not page.loaded, path


def test_raw_formulas_and_tags_are_noticed(tmp_path):
    path = tmp_path / "index.html"
    path.write_text(
        "<p>The speed-up is \\[\\frac{a}{b}\\]</p><script src='https://x.org/a.js'></script>"
        "<code>&lt;p></code><h2 id='a'>&lt;/span> <code>a</code></h2>"
    )
    page = Page(path)
    assert RAW_TEX.search(page.text)
    assert TAG_AS_TEXT.findall(page.text) == ["</span>"]
    assert page.loaded == ["https://x.org/a.js"]
    assert page.headings == ["</span> a"]


@pytest.mark.full
def test_a_broken_link_ends_the_build(tmp_path):
    """The build of the other tests can fail: with the same options a site with one warning is none."""
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    for link, status in (("index.md", 0), ("missing.md", 1)):
        (tmp_path / "docs" / "index.md").write_text(f"# x\n\n[y]({link})\n")
        assert build(tmp_path, tmp_path / "site").returncode == status


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_shows_its_cells(site, path):
    """Its headings, its table of contents and its blocks of code are those of the cells."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    page = Page(site / "tutorials" / path.stem / "index.html")
    written = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    headings = re.findall(r"^#+ (.+)$", written, re.MULTILINE)
    assert page.headings == [heading.replace("`", "") for heading in headings]
    assert {*page.places[1:]} == page.linked
    blocks = []
    for cell in cells:
        if cell["cell_type"] == "code":
            blocks.append(cell["source"])
            outputs = [output.get("data", {"text/plain": output.get("text")}) for output in cell["outputs"]]
            blocks += [data["text/plain"] for data in outputs if {*data} == {"text/plain"}]
    assert [block.strip() for block in page.blocks] == ["".join(block).strip() for block in blocks]


@pytest.mark.parametrize(
    "text",
    ["```python\na\n```", "a\n\n# no heading\n\n    b", "~~~~\n````\n1. c"],
    ids=["fence", "heading", "mixed"],
)
def test_an_output_is_no_markdown(text):
    """An output as HTML has one line, and a fence is longer than those of its text."""
    made = f"<div style='white-space: pre-wrap'>{text}</div>"
    (line,) = hooks.shown({"data": {"text/html": [made]}}).splitlines()
    assert html.unescape(line) == made
    opening, *lines, closing = hooks.shown({"text": [text]}).splitlines()
    assert "\n".join(lines) == text
    assert opening == f"{closing}text"
    assert closing not in lines


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
