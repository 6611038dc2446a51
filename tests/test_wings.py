"""Every test file is in a folder that the table in tests/README.md describes."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_file_is_in_a_described_folder():
    described = set(re.findall(r"^\| `(\w+)` \|", (HERE / "README.md").read_text("utf-8"), re.MULTILINE))
    folders = {path.parent.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py")} - {"."}
    assert folders == described
    assert [path.name for path in HERE.glob("test_*.py")] == [Path(__file__).name]
