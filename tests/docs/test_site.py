"""The documentation site builds, needs no network, and fits a desktop's screen and a phone's."""

from __future__ import annotations

import functools
import html.parser
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)
RAW_TEX = re.compile(r"\$\$|\\\(|\\\[|\\(?:frac|text|left|max|cdot)\b")
# Each page in a frame of each width. An element is cut if its content is wider than its box. Tables may scroll in a
# box of their own on a phone.
HARNESS = """<!doctype html><meta charset="utf-8"><pre id="found"></pre><script>
const cut = (frame, width) => [...frame.contentDocument.querySelectorAll("html, .md-content *")].filter(one =>
  one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 1 && getComputedStyle(one).display != "inline" &&
  (one.tagName == "HTML" || getComputedStyle(one).overflowX != "visible") &&
  (width > 600 || !one.matches(".md-typeset__scrollwrap, .md-typeset__table"))
).map(one => `${one.tagName}.${one.className} by ${one.scrollWidth - one.clientWidth} px: ` +
  one.textContent.trim().slice(0, 60));
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of WIDTHS) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    frame.src = page;
    const loaded = new Promise(done => frame.onload = done);
    document.body.append(frame);
    await loaded;
    await new Promise(done => setTimeout(done, 200));
    found.push([page, width, frame.contentDocument.querySelectorAll(".md-content p").length, cut(frame, width)]);
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
  document.title = "done";
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """The text of a page outside code, and what the browser loads for it from elsewhere."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.text, self.loaded = "", []
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
        if tag in ("code", "script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside[-1:] == [tag]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.text += data


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *args):
        pass


def pages(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("index.html"))


@pytest.mark.full
def test_pages_have_no_raw_formulas_and_load_nothing_from_elsewhere(site):
    assert len(pages(site)) > 15
    for path in pages(site):
        page = Page(path)
        assert not RAW_TEX.search(page.text), (path, RAW_TEX.search(page.text))
        assert not page.loaded, path


def test_raw_formulas_are_noticed(tmp_path):
    path = tmp_path / "index.html"
    path.write_text("<p>The speed-up is \\[\\frac{a}{b}\\]</p><script src='https://x.org/a.js'></script>")
    page = Page(path)
    assert RAW_TEX.search(page.text)
    assert page.loaded == ["https://x.org/a.js"]


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


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome in PATH")
def test_no_page_is_cut_on_a_desktop_or_a_phone(site, tmp_path):
    names = [f"/{page.parent.relative_to(site)}/index.html" for page in pages(site)]
    harness = HARNESS.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "harness.html").write_text(harness)
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command += ["--virtual-time-budget=600000", "--window-size=1400,1000", "--dump-dom"]
        address = f"http://127.0.0.1:{server.server_port}/harness.html"
        done = subprocess.run([*command, address], capture_output=True, text=True, timeout=300)
        server.shutdown()
    dumped = re.search(r'<pre id="found">(\[.*?)</pre>', done.stdout, re.DOTALL)
    assert dumped, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(html.unescape(dumped[1]))
    assert len(found) == len(names) * len(WIDTHS)
    assert [(page, width, cut) for page, width, _, cut in found if cut] == []
    assert sum(paragraphs for *_, paragraphs, _ in found) > 500  # the pages were there
