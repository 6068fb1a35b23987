"""Numbers of GPUs of jobs: shares, Slurm's resources, what cannot be."""

from pathlib import Path

import pandas as pd
import pytest

from telemetry.importing.importer import ImportResult
from tests.telemetry.helpers import run_import, samples_frame


def imported(folder: Path, *gpus: object, **more: object) -> ImportResult:
    frame = pd.DataFrame(
        {
            "job": [f"j{number}" for number in range(len(gpus))],
            "node": "node-0",
            "started_at": "2026-03-01T00:00:00Z",
            "ended_at": "2026-03-01T01:00:00Z",
            "gpus": pd.Series(gpus, dtype=object),
        }
    )
    frame.to_csv(folder / "jobs.csv", index=False)
    return run_import(folder, samples=samples_frame(), jobs=folder / "jobs.csv", **more)


def numbers(result: ImportResult) -> dict[str, float]:
    jobs = result.dataset.jobs()
    return dict(zip(jobs["job"], jobs["gpus"].astype(float).fillna(-1), strict=True))


SHARES = [
    *((0.5, 1), (0.25, 1), (1.5, 2), (2.5, 3), (1, 1), (0, 0), ("4.0", 4), ("0.001", 1), ("2 ", 2)),
    *(("gpu:2", 2), ("gpu:a100:4", 4), ("billing=8,cpu=16,gres/gpu=4,mem=1T", 4), ("gres/gpu:h100=8", 8)),
    *(("50%", 1), ("150 %", 2), ("gres/shard=4", 1), ("gres/mps=50", 1), ("gpu:nvidia_a100_3g.20gb:2", 1)),
    *(("8 GPUs", 8), ("1 gpu", 1), ("2x A100", 2), ("4xH100-SXM", 4), ("gpu=2(IDX:0-1)", 2), ("gpu:0", 0)),
    *(("A100 x 2", 2), ("2x A100 80GB, 2x H100", 4), ("gpus=8", 8), ("8 x MI300X", 8), ("0.5 GPU", 1), ("0 GPUs", 0)),
    *(("gpu:h100", 1), ("gpu:h100,gpu:a100:2", 3), ("gpu:a100:2(IDX:0,2)", 2), ("GPUs: 8 (H100)", 8)),
    *(("gres/gpu=6,gres/gpu:h100=4,gres/gpu:a100=2", 6), ("gpu:h100:2(S:0-1)", 2), ("cpu=4,mem=8G", 0)),
    *(("gpu:ampere:0(IDX:N/A)", 0), ("gpu:a:2(IDX:0,1),gpu:b:1(IDX:4),shard:8", 3), ("gres:gpu:h100:2", 2)),
    ("gres:gpu", 1),
    *(("[0,1,2,3]", 4), ('["GPU-a", "GPU-b"]', 2)),
]
WORDS = ["many", "gpu", "gpu=a100=2", "gpu:a100:many", "all GPUs", "8 GPU hours", "2 nodes x 8 GPUs", "8G", "8,8"]


def test_a_share_of_a_gpu_is_a_gpu(tmp_path: Path) -> None:
    result = imported(tmp_path, *(given for given, _ in SHARES))
    assert numbers(result) == {f"j{number}": count for number, (_, count) in enumerate(SHARES)}
    assert result.quarantined == {}


@pytest.mark.parametrize("given", [-1, -0.5, 1e9, "inf", "1e400", 2**40])
def test_an_impossible_number_is_set_aside_with_its_job(tmp_path: Path, given: object) -> None:
    result = imported(tmp_path, given, 1)
    assert result.dataset.jobs()["job"].tolist() == ["j1"]
    assert result.quarantined == {"impossible number in gpus": 1}


def test_no_number_is_unknown_and_a_word_is_reported(tmp_path: Path) -> None:
    result = imported(tmp_path, "", "N/A", "[N/A]", "-", *WORDS, "2x A100 or so", 2, max_loss=1.0)
    assert list(numbers(result).values()).count(-1) == 4 + len(WORDS) + 1
    assert result.quarantined == {"not a number in gpus": len(WORDS) + 1}
