"""The fault history of a real GPU cluster, against what its README says of it."""

from pathlib import Path

import pandas as pd
import pytest

from tests.telemetry.helpers import run_import

TRACE = Path(__file__).parents[3] / "shared" / "data" / "gpu-cluster-faults" / "fault_trace.json"

RULES = """
events:
  columns:
    node_id: node
    event_time: timestamp
    event_type: type
    fault_type.Desc: code
    fault_type.Class: detail
    fault_type.Level: source
  time: {unit: d, origin: 2024-03-30T00:00:00Z}
  values: {type: {fault_start: failure, fault_end: repair}}
span: [2024-03-30T00:00:00Z, 2025-03-13T00:00:00Z]
"""


def test_faults_of_a_real_cluster(tmp_path: Path):
    if not TRACE.exists():
        pytest.skip(f"the fault trace is not here: {TRACE}")
    named = sorted({event["node_id"] for event in pd.read_json(TRACE).to_dict("records")})
    assert len(named) == 231
    nodes = [*named, *(f"without-fault-{number:03d}" for number in range(400 - len(named)))]
    inventory = pd.DataFrame({"node": nodes, "installed_at": "2024-03-30T00:00:00Z"})
    result = run_import(tmp_path, events=[TRACE], inventory=inventory, mapping=RULES)
    events = result.dataset.events()
    starts = events[events["type"] == "failure"]
    assert (result.dataset.meta.unit, result.dataset.meta.counts["nodes"]) == ("node", 400)
    assert result.quarantined == {}
    assert (len(starts), len(events)) == (584, 2 * 584)
    assert (starts["detail"] == "GPU").sum() == 158
    assert starts["timestamp"].max() <= pd.Timestamp(result.dataset.meta.span[1])
