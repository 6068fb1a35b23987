"""Google's prediction in a real Prometheus, through the shipped rules and parameters: a channel of each GPU."""

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from telemetry.dataset.store import Dataset
from tests.processes import predrain
from tests.system.prometheus_server import load_blocks, need_prometheus, prometheus
from tests.system.simulated_exposition import samples_of

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "kubernetes" / "gke-health-prediction-rules.yaml"
PARAMS = ("--params", ROOT / "params.yaml", "--params", ROOT / "params" / "gke-health-prediction.yaml")
STATUS = "compute_googleapis_com:instance_gpu_failure_prediction_status"
START = datetime(2026, 1, 1, tzinfo=UTC)
HOURS = 3
NO, POSSIBLE, DEGRADED = "NO_DEGRADATION_PREDICTED", "POSSIBLE_DEGRADATION_PREDICTED", "DEGRADATION_PREDICTED"
STATES = {"111": [NO, POSSIBLE, DEGRADED], "222": [NO, NO, NO]}  # by instance, hour by hour
NODES = {"111": "gke-a", "222": "gke-b"}


def history() -> str:
    """Return three hours of two nodes with two GPUs each; a third, without a prediction, has one."""
    gauges: dict[str, list[str]] = {"DCGM_FI_DEV_GPU_TEMP": [], "kube_node_annotations": [], STATUS: []}
    for minute in range(HOURS * 60):
        s = (START + timedelta(minutes=minute)).timestamp()
        for node, gpus in {"gke-a": 2, "gke-b": 2, "gke-c": 1}.items():
            for gpu in range(gpus):
                labels = f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",Hostname="{node}",pod="p{minute // 60}"'
                gauges["DCGM_FI_DEV_GPU_TEMP"].append(f"{{{labels}}} {40 + gpu} {s}")
        for instance, node in NODES.items():
            labels = f'node="{node}",annotation_container_googleapis_com_instance_id="{instance}"'
            gauges["kube_node_annotations"].append(f"{{{labels}}} 1 {s}")
            if minute % 10 == 0:
                state = STATES[instance][minute // 60]
                labels = f'instance_id="{instance}",zone="z",monitored_resource="gce_instance",Value="{state}"'
                gauges[STATUS].append(f"{{{labels}}} 1 {s}")
    lines = [line for name, rows in gauges.items() for line in (f"# TYPE {name} gauge", *(name + row for row in rows))]
    return "\n".join((*lines, "# EOF\n"))


def test_each_gpu_has_its_nodes_prediction_as_a_channel(tmp_path: Path) -> None:
    need_prometheus()
    (tmp_path / "history.om").write_text(history())
    load_blocks(tmp_path / "history.om", tmp_path / "data")
    span = [START.isoformat().replace("+00:00", "Z"), f"2026-01-01T0{HOURS}:00:00Z"]
    # As the server would have evaluated them at the time: the second rule reads what the first has made.
    times = ("--start", span[0], "--end", span[1], "--eval-interval", "5m", "--output-dir", tmp_path / "data")
    for _ in range(2):
        with prometheus(tmp_path / "data") as url:
            command = ("promtool", "tsdb", "create-blocks-from", "rules", "--url", url, *times, RULES)
            subprocess.run(command, check=True, capture_output=True, timeout=300)
    with prometheus(tmp_path / "data") as url:
        collect = ("collect", "prometheus", "--prometheus", url, "--since", span[0], "--until", span[1], "--json")
        report = json.loads(predrain(*collect, "--dataset", tmp_path / "fleet", *PARAMS).stdout)
    assert report["quarantined"] == {}
    samples = samples_of(Dataset.open(tmp_path / "fleet"))
    samples["hour"] = samples["timestamp"].dt.hour
    steady = samples[samples["timestamp"].dt.minute >= 20]  # a state is kept for a quarter of an hour
    found = steady.groupby(["gpu", "hour"], observed=True)["gke_health_prediction"].agg(["min", "max"])
    assert {gpu: found.loc[gpu].to_numpy().tolist() for gpu in ("GPU-gke-a-0", "GPU-gke-a-1", "GPU-gke-b-0")} == {
        **{gpu: [[0, 0], [1, 1], [2, 2]] for gpu in ("GPU-gke-a-0", "GPU-gke-a-1")},
        "GPU-gke-b-0": [[0, 0], [0, 0], [0, 0]],
    }
    assert samples.loc[samples["gpu"] == "GPU-gke-c-0", "gke_health_prediction"].isna().all()
