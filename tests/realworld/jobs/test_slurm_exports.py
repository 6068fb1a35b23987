"""Slurm's own exports as tables of jobs: host lists, resources, states and steps, without a mapping of columns."""

import contextlib
import json
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.importing.jobs import CUT, NO_END
from tests.realworld.hostile import number
from tests.telemetry.helpers import run_import, samples_frame

UTC = "timezone: UTC\n"
SACCT = """\
JobID|User|Partition|JobName|ReqTRES|NNodes|State|Start|End|NodeList|AllocTRES|ExitCode
1001|ann|gpu|train|gres/gpu=4|2|COMPLETED|2026-03-01T00:00:00|2026-03-01T01:00:00|node-[0-1]|cpu=32,gres/gpu=4,node=2|0:0
1001.batch||||||COMPLETED|2026-03-01T00:00:00|2026-03-01T01:00:00|node-0|cpu=16,gres/gpu=2,mem=100G,node=1|0:0
1001.extern||||||COMPLETED|2026-03-01T00:00:00|2026-03-01T01:00:00|node-[0-1]|billing=32,gres/gpu=4,node=2|0:0
1001.0||||||COMPLETED|2026-03-01T00:00:10|2026-03-01T01:00:00|node-[0-1]|cpu=32,gres/gpu=4,mem=200G,node=2|0:0
1002_7|a|gpu|s||1|CANCELLED by 1000 (ann)|2026-03-01T00:10:00|2026-03-01T00:20:00|node-1|gres/gpu:h100=1,gres/gpu=1|0:15
1003|bob|gpu|run|gres/gpu=1|1|RUNNING|2026-03-01T00:30:00|Unknown|node-0|billing=8,cpu=8,gres/gpu=1,mem=50G|0:0
1004|bob|gpu|wait|gres/gpu=1|1|PENDING|Unknown|Unknown|None assigned||0:0
1005|bob|gpu|gone|gres/gpu=1|1|CANCELLED by 0|None|2026-03-01T00:30:00|None assigned||0:0
1006|bob|gpu|shared|gres/shard=2|1|NODE_FAIL|2026-03-01T00:30:00|2026-03-01T00:45:00|node-1|cpu=8,gres/shard=2,node=1|0:0
1007|bob|gpu|cpus|cpu=4|1|OUT_OF_ME+|2026-03-01T00:30:00|2026-03-01T00:45:00|node-1|billing=4,cpu=4,mem=9G,node=1|0:9
1008|bob|gpu|odd|gres/gpu=3|2|TIMEOUT|2026-03-01T00:00:00|2026-03-01T00:45:00|node-[0-1]|gres/gpu=3,node=2|0:0
"""
JOBS = [
    *(("1001", f"node-{number}", "00:00", "01:00", 2, "completed") for number in (0, 1)),
    ("1002_7", "node-1", "00:10", "00:20", 1, "cancelled"),
    ("1003", "node-0", "00:30", None, 1, None),
    ("1006", "node-1", "00:30", "00:45", 1, "node_fail"),
    ("1007", "node-1", "00:30", "00:45", 0, "out_of_me"),
    *(("1008", f"node-{number}", "00:00", "00:45", None, "timeout") for number in (0, 1)),
]


def imported(
    folder: Path, name: str, text: str, mapping: str | None = UTC, **more: object
) -> tuple[list[tuple[object, ...]], object]:
    (folder / name).write_text(text)
    result = run_import(folder, samples=samples_frame(), jobs=folder / name, mapping=mapping, **more)
    jobs = result.dataset.jobs().sort_values(["job", "node"])
    return [
        (
            row.job,
            row.node,
            row.started_at.strftime("%H:%M"),
            None if pd.isna(row.ended_at) else row.ended_at.strftime("%H:%M"),
            None if pd.isna(row.gpus) else row.gpus,
            None if pd.isna(row.outcome) else row.outcome,
        )
        for row in jobs.itertuples()
    ], result


def test_sacct_in_its_parsable_form(tmp_path: Path) -> None:
    jobs, result = imported(tmp_path, "sacct.csv", SACCT)
    assert jobs == JOBS
    account = result.accounting.tables["jobs"]
    assert dict(account.left_out) == {"step of a job": 3, "has not started": 2}
    assert account.read == account.used + account.left_out.total() + account.waiting.total()


def printed(table: str, widths: dict[str, int]) -> str:
    """Print a parsable table as sacct does without ``-P``."""
    head, *rows = (line.split("|") for line in table.splitlines())
    lines = []
    for row in [head, *rows]:
        cells = [(row[head.index(name)], width) for name, width in widths.items()]
        lines.append(" ".join(f"{c[: w - 1] + '+' if len(c) > w else c:>{w}}" for c, w in cells) + " \n")
    return lines[0] + " ".join("-" * width for width in widths.values()) + " \n" + "".join(lines[1:])


WIDTHS = {"JobID": 12, "Partition": 4, "State": 10, "Start": 19, "End": 19, "NodeList": 15, "AllocTRES": 60}


@pytest.mark.parametrize("name", ["sacct.txt", "sacct.csv", "sacct"])
def test_sacct_in_columns_of_fixed_width(tmp_path: Path, name: str) -> None:
    table = printed(SACCT, WIDTHS)
    first, second = table.splitlines(keepends=True)[:2]
    jobs, result = imported(tmp_path, name, "\n" + table + first + second)
    assert [job[:5] for job in jobs] == [job[:5] for job in JOBS]
    account = result.accounting.tables["jobs"]
    assert dict(account.left_out) == {"step of a job": 3, "has not started": 2, "the header again": 1}
    assert account.unaccounted == 0


def test_what_the_width_of_a_column_cuts_off_is_not_guessed(tmp_path: Path) -> None:
    table = printed(SACCT, WIDTHS | {"JobID": 6, "NodeList": 8, "AllocTRES": 12}) + "text between columns\n"
    jobs, result = imported(tmp_path, "sacct.txt", table, max_loss=1.0)
    assert [(job[0], job[4]) for job in jobs] == [("1002_7", None), ("1003", None), ("1006", None), ("1007", None)]
    reasons = {CUT: 2, "malformed row": 1, "not a number in gpus": 6}
    assert result.quarantined == reasons


def test_a_mapping_of_the_columns_gives_the_same(tmp_path: Path) -> None:
    columns = "JobID: job, State: outcome, Start: started_at, End: ended_at, NodeList: node, AllocTRES: gpus"
    jobs, _ = imported(tmp_path, "sacct.csv", SACCT, f"{UTC}jobs: {{columns: {{{columns}}}, ignore_others: true}}\n")
    assert jobs == JOBS


def sacct_json(**more: object) -> dict[str, object]:
    return {
        "job_id": 7,
        "name": "train",
        "nodes": "node-[0-1]",
        "state": {"current": ["COMPLETED"], "reason": "None"},
        "time": {"start": 1772323200, "end": 1772326800, "elapsed": 3600, "submission": 1772320000},
        "tres": {"allocated": [{"type": "cpu", "count": 32}, {"type": "gres", "name": "gpu", "count": 4}]},
        "steps": [{"step": {"id": "7.batch"}}],
        **more,
    }


def squeue_json() -> dict[str, object]:
    return {
        "job_id": 7,
        "nodes": "node-[0-1]",
        "job_state": ["RUNNING"],
        "start_time": number(1772323200),
        "end_time": number(1772326800),
        "tres_alloc_str": "cpu=32,gres/gpu=4",
    }


# https://slurm.schedmd.com/squeue.html: END_TIME of a running job is that of its time limit
SQUEUE = """\
JOBID|USER|ST|START_TIME|END_TIME|NODELIST(REASON)|TRES_ALLOC
7|ann|R|2026-03-01T00:00:00|2026-03-02T00:00:00|node-[0-1]|cpu=1,gres/gpu:a100_3g.20gb=2,gres/gpu=2
8|ann|CG|2026-03-01T00:10:00|2026-03-01T00:20:00|node-1|cpu=1,gres/gpu=1
11|ann|CF|2026-03-01T00:15:00|2026-03-02T00:00:00|node-1|cpu=1,gres/gpu=1
9|ann|PD|2026-03-05T00:00:00|N/A||cpu=1,gres/gpu=1
10|ann|PENDING|N/A|N/A|(Priority)|cpu=1,gres/gpu=1
"""


@pytest.mark.parametrize("is_printed", [False, True])
def test_squeue_in_columns_of_its_own_names(tmp_path: Path, is_printed: bool) -> None:
    widths = {
        "JOBID": 18,
        "USER": 8,
        "ST": 2,
        "START_TIME": 19,
        "END_TIME": 19,
        "NODELIST(REASON)": 20,
        "TRES_ALLOC": 40,
    }
    header, _, *rows = printed(SQUEUE, widths).splitlines(keepends=True)
    jobs, result = imported(tmp_path, "squeue.txt", "".join([header, *rows]) if is_printed else SQUEUE)
    assert jobs == [
        ("11", "node-1", "00:15", None, 1, None),
        ("7", "node-0", "00:00", None, 1, None),
        ("7", "node-1", "00:00", None, 1, None),
        ("8", "node-1", "00:10", None, 1, None),
    ]
    assert dict(result.accounting.tables["jobs"].left_out) == {"has not started": 2}


def test_a_finished_job_without_an_end_does_not_run_on(tmp_path: Path) -> None:
    rows = "".join(f"{job},{state},2026-03-01T00:00:00,node-0\n" for job, state in enumerate(UNENDED))
    jobs, result = imported(tmp_path, "sacct.csv", f"JobID,State,Start,NodeList\n{rows}", max_loss=1.0)
    assert [job[0] for job in jobs] == [str(job) for job, is_over in enumerate(UNENDED.values()) if not is_over]
    assert result.quarantined == {NO_END: sum(UNENDED.values())}


UNENDED = {"COMPLETED": 1, "RUNNING": 0, "F": 1, "R": 0, "Terminated": 1, "Running": 0, "Error": 1, "Succeeded": 1}


@pytest.mark.parametrize(
    ("columns", "state", "first", "second", "expected"),
    [
        ("Start|Elapsed", "COMPLETED", "2026-03-01T00:10:00", "00:40:00", ("00:10", "00:50")),
        ("Start|duration_min", "COMPLETED", "2026-03-01T00:10:00", "40", ("00:10", "00:50")),
        ("Start|Duration (ms)", "COMPLETED", "2026-03-01T00:10:00", "2400000", ("00:10", "00:50")),
        ("Start|Elapsed", "COMPLETED", "2026-03-01T00:10:00", "99999999999", None),
        ("Start|duration", "COMPLETED", "2026-03-01T00:10:00", "00:40:00", ("00:10", "00:50")),
        ("Start|ElapsedRaw", "FAILED", "2026-03-01T00:10:00", "2400", ("00:10", "00:50")),
        ("Start|Elapsed", "RUNNING", "2026-03-01T00:10:00", "00:40:00", ("00:10", None)),
        ("Elapsed|End", "TIMEOUT", "40:00", "2026-03-01T00:50:00", ("00:10", "00:50")),
        ("Elapsed|End", "NODE_FAIL", "1-00:00:00", "2026-03-02T00:50:00", ("00:50", "00:50")),
        ("Elapsed|End", "RUNNING", "00:40:00", "Unknown", None),
        ("Start|Elapsed", "COMPLETED", "2026-03-01T00:10:00", "INVALID", None),
    ],
)
def test_the_time_that_a_job_ran_stands_for_its_start_or_its_end(tmp_path, columns, state, first, second, expected):
    table = f"JobID|State|NodeList|AllocTRES|{columns}|CPUTime\n1|{state}|node-0|gres/gpu=1|{first}|{second}|9\n"
    name = next(name for name in columns.split("|") if name not in ("Start", "End"))
    mapping = f"timezone: UTC\njobs: {{columns: {{{name}: elapsed}}}}"
    jobs, result = imported(tmp_path, "sacct.csv", table, mapping, max_loss=1.0)
    assert [job[2:4] for job in jobs] == ([] if expected is None else [expected])
    assert sum(result.quarantined.values()) == (expected is None)


DURATIONS = "JobID|State|NodeList|AllocTRES|Start|End|duration\n"


@pytest.mark.parametrize(
    ("known", "missing"), [("1800", "2400"), ("30", "40"), ("0.5", "0.66667"), ("1800000", "2400000")]
)
def test_jobs_with_both_times_show_the_unit_of_durations(tmp_path: Path, known: str, missing: str) -> None:
    start = "2026-03-01T00:10:00"
    rows = f"1|COMPLETED|node-0|gres/gpu=1|{start}|2026-03-01T00:40:00|{known}\n2|COMPLETED|node-0|gres/gpu=1|{start}||"
    jobs, _ = imported(tmp_path, "sacct.csv", f"{DURATIONS}{rows}{missing}\n", "timezone: UTC")
    assert [job[3] for job in jobs] == ["00:40", "00:50"]


@pytest.mark.parametrize(("scale", "end"), [("", None), ("scale: {elapsed: 60}", "00:50")])
def test_durations_without_a_unit_are_asked_for(tmp_path: Path, scale: str, end: str | None) -> None:
    row = "1|COMPLETED|node-0|gres/gpu=1|2026-03-01T00:10:00||40\n"
    with pytest.raises(InputError, match="scale") if end is None else contextlib.nullcontext():
        jobs, _ = imported(tmp_path, "sacct.csv", f"{DURATIONS}{row}", f"timezone: UTC\njobs: {{{scale}}}")
        assert [job[3] for job in jobs] == [end]


@pytest.mark.parametrize(
    ("job", "end", "outcome"),
    [
        (sacct_json(), "01:00", "completed"),
        (sacct_json(state="FAILED"), "01:00", "failed"),
        (sacct_json(state={"current": ["RUNNING"]}, time={"start": 1772323200, "end": 0}), None, None),
        (squeue_json(), None, None),
    ],
)
def test_json_of_sacct_and_squeue(tmp_path: Path, job: dict[str, object], end: str | None, outcome: str | None) -> None:
    pending = sacct_json() | {"job_id": 8, "nodes": "None assigned"} if "time" in job else None
    rows = [job, *([pending] if pending else [])]
    text = json.dumps({"meta": {"plugin": {"type": ""}}, "errors": [], "jobs": rows, "warnings": []}, indent=1)
    jobs, _ = imported(tmp_path, "jobs.json", text, None)
    assert jobs == [("7", f"node-{number}", "00:00", end, 2, outcome) for number in (0, 1)]


def test_a_job_that_lists_its_gpus_as_objects_is_one_job(tmp_path: Path) -> None:
    row = {"job": "7", "node": "node-0", "started_at": "2026-03-01T00:00:00", "ended_at": "2026-03-01T01:00:00"}
    text = json.dumps([row | {"gpus": [{"index": 0, "node": "host"}, {"index": 1}]}])
    jobs, _ = imported(tmp_path, "jobs.json", text)
    assert [job[:4] for job in jobs] == [("7", "node-0", "00:00", "01:00")]


def test_a_number_that_looks_like_a_step_is_a_job_where_there_is_no_such_job(tmp_path: Path) -> None:
    table = "job,node,started_at,ended_at,gpus,outcome\n" + "".join(
        f"{name},node-0,2026-03-01T00:00:00,2026-03-01T01:00:00,1,done\n" for name in ("12.0", "13", "13.0", "train.4")
    )
    jobs, _ = imported(tmp_path, "jobs.csv", table)
    assert [job[0] for job in jobs] == ["12.0", "13", "train.4"]


HOSTS = [
    *(("node-0/0*8+node-1/0*8", [0, 1]), ("node-1/0+node-1/1+node-0/0", [0, 1]), ("node-0/0-7,9", [0])),
    *(("8*node-0:8*node-1", [0, 1]), ("node-1:node-1:node-0", [0, 1]), ("4*node-1", [1]), ("NODE-1.cluster", [1])),
    *(("node-0:9400", [0]), ("node-0/0*8+", []), ("8*node-0:*node-1", [])),
    *(("node-0 node-1", [0, 1]), ("node-0|NODE-1", [0, 1]), ("['node-0', 'node-1']", [0, 1])),
]


def test_hosts_of_pbs_and_lsf(tmp_path: Path) -> None:
    rows = [
        f"{job};DONE;{hosts};Sun Mar  1 00:00:00 2026;Sun Mar  1 01:00:00 2026;4\n"
        for job, (hosts, _) in enumerate(HOSTS, 10)
    ]
    text = "JOBID;STAT;EXEC_HOST;START_TIME;FINISH_TIME;GPU_NUM\n" + "".join(rows)
    text += "8;RUN;node-1;Sun Mar  1 00:30:00 2026;Sun Mar  1 02:00:00 2026;1\n9;PEND;-;-;-;-\n"
    text += "7;SSUSP;node-1;Sun Mar  1 00:40:00 2026;-;1\n"
    jobs, result = imported(tmp_path, "bjobs.csv", text, UTC, max_loss=1.0)
    expected = [
        (str(job), f"node-{number}", "00:00", "01:00", 4 // len(nodes), "done")
        for job, (_, nodes) in enumerate(HOSTS, 10)
        for number in nodes
    ]
    running = [("7", "node-1", "00:40", None, 1, None), ("8", "node-1", "00:30", None, 1, None)]
    assert jobs == [*expected, *running]
    assert dict(result.accounting.tables["jobs"].left_out)["has not started"] == 1


@pytest.mark.parametrize("has_hosts", [True, False])
def test_a_table_of_qstat(tmp_path: Path, has_hosts: bool) -> None:
    row = {"Job_Id": "7.pbs", "job_state": "F", "exec_host": "node-0/0*8+node-1/0*8", "Resource_List": {"ngpus": 8}}
    row |= {"stime": "Sun Mar  1 00:00:00 2026", "end": "Sun Mar  1 01:00:00 2026"}
    row |= {"exec_vnode": "(node-0[0]:ncpus=4:ngpus=2+node-0[1]:ncpus=4:ngpus=2)+(node-1:ncpus=8:mem=9kb:ngpus=4)"}
    if not has_hosts:
        del row["exec_host"]
    jobs, _ = imported(tmp_path, "qstat.jsonl", json.dumps(row) + "\n", UTC)
    assert jobs == [("7.pbs", f"node-{number}", "00:00", "01:00", 4, "F") for number in (0, 1)]


START, END = 1772323200, 1772326800
OAR = {
    "41": {"assigned_network_address": ["node-0", "node-1"], "state": "Error", "startTime": START, "stopTime": END},
    "42": {"assigned_network_address": ["node-1"], "state": "Running", "startTime": START, "stopTime": 0},
    "43": {"assigned_network_address": [], "state": "Waiting", "startTime": 0, "stopTime": 0},
}
PBS = {
    "41.pbs": {
        "job_state": "F",
        "exec_host": "node-0/0*8",
        "stime": "Sun Mar  1 00:00:00 2026",
        "resources_used": {"walltime": "01:00:00"},
        "Resource_List": {"ngpus": 2},
    },
    "42[].pbs": {"job_state": "Q", "Resource_List": {"ngpus": 1}},
}
CONDOR = {"GlobalJobId": "s#7.0#1", "JobStatus": 4, "JobCurrentStartDate": START, "RequestGPUs": 1}
NUMBERED = {
    "oarstat": (OAR, [("41", "node-0", "01:00"), ("41", "node-1", "01:00"), ("42", "node-1", None)]),
    "oar, one job": ({"42": OAR["42"]}, [("42", "node-1", None)]),
    "qstat": ({"timestamp": 1, "pbs_version": "22.05", "Jobs": PBS}, [("41.pbs", "node-0", "01:00")]),
    "condor_history": (
        [CONDOR | {"LastRemoteHost": "slot1_1@node-0.cluster", "CompletionDate": END}],
        [("s#7.0#1", "node-0", "01:00")],
    ),
    "condor_q": (
        [CONDOR | {"RemoteHost": "slot1_2@node-1", "CompletionDate": 0, "JobStatus": 2}],
        [("s#7.0#1", "node-1", None)],
    ),
}


@pytest.mark.parametrize(("content", "expected"), NUMBERED.values(), ids=NUMBERED)
def test_json_of_oar_pbs_and_htcondor(tmp_path: Path, content: object, expected: list[tuple[str, ...]]) -> None:
    jobs, _ = imported(tmp_path, "jobs.json", json.dumps(content), f"{UTC}jobs: {{ignore_others: true}}\n")
    assert [(job, node, end) for job, node, _, end, *_ in jobs] == expected


def test_nodes_without_telemetry_are_left_out_of_a_job_and_reported(tmp_path: Path) -> None:
    table = "JobID|State|Start|End|NodeList|AllocTRES\n" + "".join(
        f"{name}|COMPLETED|2026-03-01T00:00:00|2026-03-01T01:00:00|{nodes}|gres/gpu=4\n"
        for name, nodes in (("1", "node-0,other-1"), ("2", "other-[1-2]"), ("3", "node-["))
    )
    (tmp_path / "sacct.csv").write_text(table)
    result = run_import(tmp_path, samples=samples_frame(), jobs=tmp_path / "sacct.csv", mapping=UTC, max_loss=1.0)
    assert result.dataset.jobs()[["job", "node", "gpus"]].to_numpy().tolist() == [["1", "node-0", 2]]
    assert result.quarantined == {"unknown node": 3}
