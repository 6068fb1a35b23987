import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from telemetry.collect.slurm.jobs import SACCT_COLUMNS, gpus_of, jobs_table, read_sacct, read_squeue
from telemetry.dataset.schema import JOBS
from tests.telemetry.collect.builders import NOW

AT = int(NOW.timestamp())
SACCT = Path(__file__).parents[5] / "shared" / "data" / "slurm-output" / "sacct.txt"


def row(job: str = "7", state: str = "COMPLETED", end: object = AT + 60, tres: str = "cpu=8,node=2,gres/gpu=16") -> str:
    return f"{job}|{state}|{AT}|{end}|gpu[01-02]|{tres}"


def test_a_job_is_a_row_for_each_node():
    jobs, counts = read_sacct(row())
    table = jobs_table(jobs)
    assert table.schema == JOBS
    assert counts == {"jobs": 1}
    rows = table.to_pylist()
    assert [(each["job"], each["node"], each["gpus"], each["outcome"]) for each in rows] == [
        ("7", "gpu01", 8, "completed"),
        ("7", "gpu02", 8, "completed"),
    ]
    assert {(each["started_at"], each["ended_at"]) for each in rows} == {(NOW, NOW + timedelta(minutes=1))}
    assert {(each["gpu"], each["checkpointed_at"]) for each in rows} == {(None, None)}


@pytest.mark.parametrize(
    ("state", "end", "outcome"),
    [
        ("CANCELLED by 1000", AT + 60, "cancelled"),
        ("NODE_FAIL", AT + 60, "node_fail"),
        ("RUNNING", "Unknown", None),
        ("RUNNING", AT + 60, None),
        ("REQUEUED", AT + 60, "requeued"),
    ],
)
def test_how_jobs_end(state: str, end: object, outcome: str | None):
    ((job,), _) = read_sacct(row(state=state, end=end))
    assert (job.outcome, job.ended_at is None) == (outcome, outcome is None)


def test_runs_of_a_requeued_job_and_tasks_of_an_array_are_apart():
    later = row("7_3").replace(str(AT), str(AT + 3600), 1).replace(str(AT + 60), str(AT + 7200))
    jobs, _ = read_sacct("\n".join([row("7_3", "NODE_FAIL"), later, row("7_4")]))
    assert len({job.key for job in jobs}) == 3


def test_what_is_left_out_is_counted():
    report = "\n".join(
        [
            row("7.batch"),
            row("7.0"),
            "8|PENDING|Unknown|Unknown|None assigned|",
            "9_[1-5]|PENDING|Unknown|Unknown||",
            "10|COMPLETED|x",
            row("11", end=AT - 5),
            "12|COMPLETED|2026-13-01|5|n[|",
        ]
    )
    assert read_sacct(report) == ([], {"steps": 2, "not_started": 2, "unreadable": 3, "jobs": 0})


def test_the_real_sacct_output_holds_steps_only():
    if not SACCT.exists():
        pytest.skip(f"the captured sacct output is not here: {SACCT}")
    header, *lines = SACCT.read_text().splitlines()
    place = [header.split("|").index(name) for name in SACCT_COLUMNS]
    report = "\n".join("|".join(line.split("|")[index] for index in place) for line in lines)
    assert read_sacct(report) == ([], {"steps": 68, "jobs": 0})
    jobs, counts = read_sacct(report.replace("8012944_24093.0", "8012944_24093"))
    assert counts == {"jobs": 68}
    assert {(job.job, job.nodes, job.gpus, job.outcome) for job in jobs} == {
        ("8012944_24093", ("node077",), (0,), "completed")
    }


@pytest.mark.parametrize(
    ("written", "gpus"),
    [
        ("cpu=8,mem=64G,node=1,billing=8,gres/gpu=4,gres/gpu:h100=4", 4),
        ("cpu=8,gres/gpu:a100=2,gres/gpu:h100=4", 6),
        ("cpu=1,node=1", 0),
        ("gpu:h100:2(IDX:0-1)", 2),
        ("gpu:8", 8),
        ("gpu:ampere:0(IDX:N/A)", 0),
        ("gpu:a:2(IDX:0,1),gpu:b:1(IDX:4),shard:8", 3),
        ("gres:gpu:2", 2),
        ("gres:gpu:h100:2", 2),
        ("gres/gpu:2", 2),
        ("gres:gpu", 0),
        ("", 0),
    ],
)
def test_gpus_in_resources(written: str, gpus: int):
    assert gpus_of(written) == gpus


def test_gpus_that_do_not_divide_evenly_are_unknown():
    ((job,), _) = read_sacct(row(tres="gres/gpu=3"))
    assert job.gpus == (None, None)


def squeue(**job: Any) -> str:
    base = {"job_id": 5, "job_state": "RUNNING", "start_time": AT, "end_time": AT + 999999, "nodes": "n[1-2]"}
    return json.dumps({"errors": [], "jobs": [base | job]})


def test_what_the_controller_remembers():
    ((running,), _) = read_squeue(squeue(gres_detail=["gpu:h100:2(IDX:0-1)", "gpu:h100:1(IDX:7)"]))
    assert (running.job, running.nodes, running.gpus, running.ended_at, running.outcome) == (
        "5",
        ("n1", "n2"),
        (2, 1),
        None,
        None,
    )
    ((done,), _) = read_squeue(squeue(job_state="FAILED", end_time=AT + 5, tres_per_node="gres:gpu:2", gres_detail=[]))
    assert (done.gpus, done.ended_at, done.outcome) == ((2, 2), NOW + timedelta(seconds=5), "failed")


def test_what_a_newer_controller_remembers():
    def value(number: int, *, given: bool = True) -> dict[str, Any]:
        return {"set": given, "infinite": False, "number": number}

    times = {"start_time": value(AT), "end_time": value(AT + 5)}
    report = squeue(
        job_state=["COMPLETED"],
        array_job_id=value(4),
        array_task_id=value(0),
        tres_alloc_str="cpu=2,gres/gpu=4",
        **times,
    )
    ((job,), _) = read_squeue(report)
    assert (job.job, job.gpus, job.outcome) == ("4_0", (2, 2), "completed")
    completing = squeue(job_state=["COMPLETED", "COMPLETING"], array_job_id=value(0, given=False), **times)
    ((job,), _) = read_squeue(completing)
    assert (job.job, job.ended_at) == ("5", None)


def test_jobs_that_wait_have_not_started():
    assert read_squeue(squeue(job_state="PENDING"))[1] == {"not_started": 1, "jobs": 0}
    assert read_squeue(squeue(het_job_id=3, het_job_offset=1))[0][0].job == "3+1"
    assert read_squeue(squeue(nodes="n["))[1] == {"unreadable": 1, "jobs": 0}
