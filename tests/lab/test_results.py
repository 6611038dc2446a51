"""The tables that are made from figures, and the commands that pages print."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import results, speeds
from benchmarks.papers import __main__ as papers
from jaxspec.cli import main
from jaxspec.cli.methods import parse_run
from jaxspec.measuring.commands import bench, compare, profile

TABLES = tuple(f"results/{paper}.md" for paper in ("adaspeed", "asd", "s2d"))
MEASUREMENTS = results.DOCS / "measurements"
MEASURED = {
    f"measurements/{path.name}": path.read_text(encoding="utf-8")
    for path in sorted(MEASUREMENTS.glob("*.md"))
}
MEASURING = tuple(page for page, text in MEASURED.items() if "```bash\n" in text)
PAGES = (*TABLES, *MEASURING, "laboratory.md")
# In bash, a printed command prints its words; loops and variables of the page are expanded.
STUBS = """
say() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >&3; }
for name in jaxspec python pytest pip; do eval "$name() { say $name \\"\\$@\\"; }"; done
exec 3>&1 >/dev/null
cd "$1"
"""


def printed(page: str, folder: Path) -> list[list[str]]:
    """The commands that a page prints, as words; a block with a title is of another commit."""
    text = (results.DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    script = STUBS + "\n".join(blocks) + "true\n"
    ran = subprocess.run(["bash", "-c", script, "page", folder], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_tables_within_pages_are_made():
    """A measured cell of the table of speeds is a figure of its page."""
    made = {}
    for page, mark, made[mark] in results.tables():
        text = page.read_text("utf-8")
        assert text == speeds.replaced(text, mark, made[mark])
        assert text != speeds.replaced(text, mark, "| another |")
    printed = made[speeds.MADE]
    assert printed.index("| 1.2b |") < printed.index("| 70b | T4 | no: `--mesh model=16` or `--weights int8")
    for one in json.loads((MEASUREMENTS / "speeds.json").read_text("utf-8"))["measured"]:
        assert re.search(rf"\b{re.escape(one['value'])}\b", MEASURED[f"measurements/{one['page']}"]), one
    assert printed.count("**") == 2 * 4


@pytest.mark.parametrize("page", PAGES)
def test_printed_commands_can_be_read(page, tmp_path, monkeypatch):
    commands = {"bench": bench.Bench, "compare": compare.Compare, "profile": profile.Profile}

    def run(self):
        for words in getattr(self, "runs", ()):
            assert parse_run(words)
        return 0

    for one in commands.values():
        monkeypatch.setattr(one, "run", run)
    monkeypatch.setattr(papers.Papers, "run", lambda self: 0)
    found = printed(page, tmp_path)
    assert found
    for name, *words in found:
        if name == "jaxspec" and words[0] in commands:
            assert main(words) == 0, words
        elif name == "python":
            assert words[0] == "-m"
            assert importlib.util.find_spec(words[1]), words
            if words[1] == "benchmarks.papers":
                assert papers.main(words[2:]) == 0, words
