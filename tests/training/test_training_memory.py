"""No device, and not the host, holds more than its share while the trainer loads, begins, resumes and exports."""

from __future__ import annotations

import json

import pytest

from tests.core.test_mesh import on_eight_devices

PHASES = {
    "load": {"model", "model.gguf"},
    "soft": {"parameters", "target", "first state", "export"},
    "soft, resumed": {"parameters", "target", "resume", "export"},
}


@pytest.mark.full
def test_shares_of_memory():
    """A sorted draft is loaded, begun, resumed and exported."""
    lines = on_eight_devices("from tests.training import memory; memory.main()")
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    found = {job: {row["phase"] for row in rows if row["job"] == job} for job in PHASES}
    assert {job: phases & found[job] for job, phases in PHASES.items()} == PHASES
    assert [row for row in rows if row["device"] > 1.15] == []
    assert [row for row in rows if row.get("host", 0) > 1.2] == []
    # Something was counted.
    assert all(row["device"] > 0.05 for row in rows if row["phase"] in PHASES[row["job"]])
