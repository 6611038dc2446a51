"""No device, and not the host, holds more than its share while the trainer loads, begins, resumes and exports."""

from __future__ import annotations

import json

import pytest

from tests.core.test_mesh import on_eight_devices

PHASES = {
    "load": {"model", "model.gguf"},
    "soft": {"parameters", "target", "first state", "export"},
    "soft, resumed": {"parameters", "target", "resume", "export"},
    "soft, from scratch": {"parameters", "first state"},
    "heads": {"target", "first state", "export", "load"},
    "own_text": {"load"},
    "probe": {"load"},
}


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shares_of_memory(whole):
    """A sorted draft is loaded, begun, resumed and exported; the slow row has the other jobs too."""
    lines = on_eight_devices(f"from tests.training import memory; memory.main({whole})")
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    expected = PHASES if whole else {job: PHASES[job] for job in ("load", "soft", "soft, resumed")}
    found = {job: {row["phase"] for row in rows if row["job"] == job} for job in expected}
    assert {job: phases & found[job] for job, phases in expected.items()} == expected
    # The decoder holds a head whole on each device.
    assert [row for row in rows if row["device"] > 1.15 and row["phase"] != "decoding"] == []
    assert [row for row in rows if row.get("host", 0) > 1.2] == []
    # Something was counted.
    assert all(row["device"] > 0.05 for row in rows if row["phase"] in PHASES[row["job"]])
