"""Jobs with a share of a GPU, in Slurm's and Kubernetes' forms: they count as jobs on one GPU."""

import json
from typing import Any

import pytest

from telemetry.accounting import Accounting
from telemetry.collect.kubernetes.jobs import pod_run
from telemetry.collect.kubernetes.rules import default_rules
from telemetry.collect.slurm.jobs import read_sacct, read_squeue
from tests.telemetry.collect.kubernetes.objects import pod

BASE = "billing=8,cpu=8,mem=64G,node=1"


@pytest.mark.parametrize(
    ("tres", "nodes", "gpus"),
    [
        (f"{BASE},gres/shard=4", "n1", (1,)),
        (f"{BASE},gres/mps=50", "n1", (1,)),
        (f"{BASE},gres/shard:h100=4", "n[1-2]", (1, 1)),
        (f"{BASE},gres/gpu:1g.10gb=2,gres/gpu=2", "n1", (1,)),
        (f"{BASE},gres/gpu:h100=4,gres/gpu=4", "n[1-2]", (2, 2)),
        (f"{BASE},gres/gpu:a100=4", "n1", (4,)),
        (f"{BASE},gres/gpu=3", "n[1-2]", (None, None)),
        (f"{BASE},gres/shard=0", "n1", (0,)),
        (BASE, "n1", (0,)),
    ],
)
def test_gpus_of_an_accounted_job(tres: str, nodes: str, gpus: tuple[int | None, ...]) -> None:
    (job,) = read_sacct(f"101|COMPLETED|1760000000|1760003600|{nodes}|{tres}", Accounting())
    assert job.gpus == gpus


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"tres_per_node": "gres:shard:2"}, (1,)),
        ({"gres_detail": ["shard:h100:2(IDX:0)"]}, (1,)),
        ({"gres_detail": ["gpu:1g.10gb:1(IDX:0)"]}, (1,)),
        ({"gres_detail": ["gpu:h100:2(IDX:0-1)"]}, (2,)),
        ({"tres_alloc_str": "cpu=1,gres/mps=25"}, (1,)),
    ],
)
def test_gpus_of_a_remembered_job(fields: dict[str, Any], gpus: tuple[int, ...]) -> None:
    row = {"job_id": 5, "job_state": "RUNNING", "start_time": 1760000000, "nodes": "n1", **fields}
    (job,) = read_squeue(json.dumps({"jobs": [row]}), Accounting())
    assert job.gpus == gpus


@pytest.mark.parametrize(
    ("limits", "annotations", "gpus"),
    [
        ({"nvidia.com/gpu.shared": "1"}, {}, 1),
        ({"nvidia.com/mig-1g.5gb": "2"}, {}, 1),
        ({"nvidia.com/gpumem": "4000", "nvidia.com/gpucores": "30"}, {}, 1),
        ({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "4000"}, {}, 2),
        ({"nvidia.com/gpu": "0.5"}, {}, 1),
        ({"nvidia.com/gpu": "1500m"}, {}, 2),
        ({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1k"}, {}, 1),
        ({"aliyun.com/gpu-mem": "3"}, {}, 1),
        ({}, {"gpu-fraction": "0.25"}, 1),
        ({"nvidia.com/gpu": "8"}, {"gpu-fraction": ""}, 8),
    ],
)
def test_gpus_of_a_pod(limits: dict[str, str], annotations: dict[str, str], gpus: int) -> None:
    item = pod("p", gpus=0, annotations=annotations)
    item["spec"]["containers"][0]["resources"]["limits"] = limits
    assert pod_run(item, default_rules()).gpus == gpus


@pytest.mark.parametrize("limits", [{"cpu": "4"}, {"nvidia.com/gpu": "0"}, {"nvidia.com/gpu": "many"}])
def test_a_pod_without_gpus_is_no_job(limits: dict[str, str]) -> None:
    item = pod("p", gpus=0)
    item["spec"]["containers"][0]["resources"]["limits"] = limits
    assert pod_run(item, default_rules()) is None
