import json
from datetime import timedelta
from typing import Any

import pytest

from telemetry.accounting import Accounting
from telemetry.collect.slurm.jobs import UNREADABLE, Job, jobs_table, read_sacct, read_squeue
from telemetry.dataset.schema import JOBS
from tests.clock import NOW

AT = int(NOW.timestamp())


def row(job: str = "7", state: str = "COMPLETED", end: object = AT + 60, tres: str = "cpu=8,node=2,gres/gpu=16") -> str:
    return f"{job}|{state}|{AT}|{end}|gpu[01-02]|{tres}"


def accounted(report: str) -> list[Job]:
    accounting = Accounting()
    jobs = read_sacct(report, accounting)
    assert (accounting.tables["jobs"].used, accounting.tables["jobs"].unaccounted) == (len(jobs), 0)
    return jobs


def test_a_job_is_a_row_for_each_node():
    jobs = accounted(row())
    table = jobs_table(jobs)
    assert table.schema == JOBS
    whole = {"job": "7", "gpu": None, "started_at": NOW, "ended_at": NOW + timedelta(minutes=1), "gpus": 8}
    whole |= {"checkpointed_at": None, "outcome": "completed"}
    assert table.to_pylist() == [whole | {"node": "gpu01"}, whole | {"node": "gpu02"}]


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
    (job,) = accounted(row(state=state, end=end))
    assert (job.outcome, job.ended_at is None) == (outcome, outcome is None)


def test_runs_of_a_requeued_job_and_tasks_of_an_array_are_apart():
    later = row("7_3").replace(str(AT), str(AT + 3600), 1).replace(str(AT + 60), str(AT + 7200))
    jobs = accounted("\n".join([row("7_3", "NODE_FAIL"), later, row("7_4")]))
    assert len({job.key for job in jobs}) == 3


@pytest.mark.parametrize(
    ("line", "unreadable"),
    [
        (row("7.batch"), 0),
        ("8|PENDING|Unknown|Unknown|None assigned|", 0),
        ("9_[1-5]|PENDING|Unknown|Unknown||", 0),
        ("10|COMPLETED|x", 1),
        (row("11", end=AT - 5), 1),
        ("12|COMPLETED|2026-13-01|5|n[|", 1),
    ],
)
def test_what_is_left_out_is_counted_where_it_cannot_be_read(line: str, unreadable: int):
    accounting = Accounting()
    assert read_sacct(line, accounting) == []
    assert accounting.tables["jobs"].left_out.total() == 1
    assert accounting.tables["jobs"].left_out[UNREADABLE] == unreadable


def later(number: int, *, given: bool = True) -> dict[str, Any]:
    return {"set": given, "infinite": False, "number": number}


TIMES = {"start_time": later(AT), "end_time": later(AT + 5)}


@pytest.mark.parametrize(
    ("fields", "name", "gpus", "outcome"),
    [
        ({"gres_detail": ["gpu:h100:2(IDX:0-1)", "gpu:h100:1(IDX:7)"]}, "5", (2, 1), None),
        ({"job_state": "FAILED", "tres_per_node": "gres:gpu:2", "gres_detail": []}, "5", (2, 2), "failed"),
        (
            {"job_state": ["COMPLETED"], "array_job_id": later(4), "array_task_id": later(0), **TIMES}
            | {"tres_alloc_str": "cpu=2,gres/gpu=4"},
            "4_0", (2, 2), "completed",
        ),
        (
            {"job_state": ["COMPLETED", "COMPLETING"], "array_job_id": later(0, given=False), **TIMES},
            "5", (0, 0), None,
        ),
        ({"het_job_id": 3, "het_job_offset": 1, "tres_per_job": "gpu:3"}, "3+1", (None, None), None),
    ],
)  # fmt: skip
def test_what_the_controller_remembers(fields: dict[str, Any], name: str, gpus: tuple[int, ...], outcome: str | None):
    (job,) = read_squeue(squeue(**fields), Accounting())
    assert (job.job, job.nodes, job.gpus, job.outcome) == (name, ("n1", "n2"), gpus, outcome)
    assert job.ended_at == (None if outcome is None else NOW + timedelta(seconds=5))


def squeue(**job: Any) -> str:
    base = {"job_id": 5, "job_state": "RUNNING", "start_time": AT, "end_time": AT + 5, "nodes": "n[1-2]"}
    return json.dumps({"errors": [], "jobs": [base | job]})


def test_jobs_that_wait_have_not_started():
    assert read_squeue(squeue(job_state="PENDING"), Accounting()) == []
    accounting = Accounting()
    assert read_squeue(squeue(nodes="n["), accounting) == []
    assert accounting.tables["jobs"].left_out == {UNREADABLE: 1}
