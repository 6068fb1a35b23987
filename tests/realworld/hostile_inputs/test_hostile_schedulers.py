"""Damaged and hostile output of Slurm, Kubernetes and ticket systems: no traceback, and every row is accounted for."""

import copy
import json
import random
import string
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.kubernetes.watching import Resource
from foundation.slurm import SlurmFormatError
from telemetry.accounting import Accounting
from telemetry.collect.kubernetes.collector import NoticeReader, NoticeTracker
from telemetry.collect.kubernetes.jobs import gpus_of, pod_run
from telemetry.collect.kubernetes.nodes import NodeTracker, view_of
from telemetry.collect.kubernetes.rules import default_rules
from telemetry.collect.slurm.jobs import jobs_table, read_sacct, read_squeue
from telemetry.collect.slurm.nodes import read_nodes
from telemetry.collect.tickets import collect_tickets
from telemetry.importing.mapping import TableMapping
from tests.realworld.hostile import JOB, NODE
from tests.telemetry.collect.builders import staging
from tests.telemetry.collect.kubernetes.objects import NOW, event, node, pod

INPUTS = 10_000
RULES = default_rules()
DEEP: Any = json.loads("[" * 200 + "]" * 200)
HOSTILE = [
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, -(10**30), 1e308, float("inf"), float("-inf"), float("nan"), "",
    "\ud800", "n[0-999999999]", "n[1-", "x" * 5000, [], [[]], {}, {"set": True, "infinite": True, "number": 5},
    {"number": 1e400}, {"number": "x"}, [None], ["DRAIN", None, 7], "2026-13-45", "9" * 40, DEEP,
    "gres/gpu=" + "9" * 30,
]  # fmt: skip


def damaged(content: Any, chance: random.Random) -> Any:
    """Return a copy with a few parts replaced, removed or doubled, at any depth."""
    made = copy.deepcopy(content)
    for _ in range(chance.randint(1, 4)):
        parent: Any = made
        while True:
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            if not keys:
                break
            key = chance.choice(keys)
            child = parent[key]
            if isinstance(child, dict | list) and child and chance.random() < 0.7:
                parent = child
                continue
            kind = chance.random()
            if kind < 0.75:
                parent[key] = copy.deepcopy(chance.choice(HOSTILE))
            elif kind < 0.9 or isinstance(parent, list):
                del parent[key]
            else:
                parent["".join(chance.choices(string.ascii_letters, k=3))] = child
            break
    return made


@pytest.mark.parametrize(
    ("key", "row", "read", "table"),
    [("nodes", NODE, read_nodes, "nodes"), ("jobs", JOB, read_squeue, "jobs")],
    ids=["nodes", "jobs"],
)
def test_damaged_json_of_slurm(key: str, row: dict[str, Any], read: Callable[..., Any], table: str) -> None:
    chance = random.Random(7)
    for _ in range(INPUTS // 8):
        rows = [row, damaged({"rows": [row]}, chance), *(damaged(row, chance) for _ in range(7))]
        accounting = Accounting()
        try:
            made = read(json.dumps({key: rows}), accounting)
        except SlurmFormatError:
            continue
        account = accounting.tables[table]
        assert (account.read, account.unaccounted) == (len(rows), 0)
        assert account.used >= 1
        if key == "jobs":
            assert jobs_table(made).num_rows >= 2


@pytest.mark.parametrize("report", ["", "{", "[" * 100_000, '{"nodes": ' + "[" * 100_000, '{"nodes": 1}', "\ud800"])
def test_reports_that_are_none(report: str) -> None:
    for read in (read_nodes, read_squeue):
        with pytest.raises(SlurmFormatError):
            read(report, Accounting())
        assert isinstance(read_sacct(report, Accounting()), list)


def test_damaged_lines_of_sacct() -> None:
    chance = random.Random(11)
    line = "101_7|COMPLETED|1760000000|1760000100|n[1-2]|cpu=8,gres/gpu:h100=4,gres/gpu=4"
    for _ in range(INPUTS // 10):
        lines = [list(line) for _ in range(10)]
        for letters in lines:
            for _ in range(chance.randint(1, 5)):
                letters[chance.randrange(len(letters))] = chance.choice("|[]-,=9x\ud800\u0661 ")
        accounting = Accounting()
        jobs = read_sacct("\n".join([line, *map("".join, lines)]), accounting)
        assert accounting.tables["jobs"].unaccounted == 0
        assert jobs_table(jobs).num_rows >= 2


OBJECTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "node": (
        node(
            conditions=[{"type": "XIDErrors", "status": "True", "reason": '{"79":true}', "message": "XID 79",
                         "lastTransitionTime": "2026-03-01T11:00:00Z"}],
            taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        ),
        lambda item: view_of(item, RULES),
    ),
    "event": (event("NvidiaXID79Error", "NVRM: Xid (PCI:0000:3b:00): 79, x"), NoticeReader(RULES)),
    "pod": (pod(annotations={"gpu-fraction": "0.5"}), lambda item: pod_run(item, RULES)),
    "claim": (
        {"status": {"allocation": {"devices": {"results": [{"driver": "gpu.nvidia.com", "pool": "n", "device": "0"}]}}},
         "metadata": {"name": "c"}},
        lambda item: gpus_of(item, RULES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTS)
def test_damaged_objects_of_kubernetes(kind: str) -> None:
    item, read = OBJECTS[kind]
    chance = random.Random(13)
    trackers: dict[str, Any] = {"node": NodeTracker(), "event": NoticeTracker()}
    resource = Resource(kind, "/", {}, read, trackers.get(kind) or NodeTracker())
    views = 0
    for _ in range(INPUTS):
        view = resource.view(damaged(item, chance))
        views += view is not None
        if kind in trackers and view is not None:
            trackers[kind].update(view, NOW)
    assert views > 100
    assert resource.unreadable.total() + views <= INPUTS


def test_damaged_tickets(tmp_path: Path) -> None:
    chance = random.Random(17)
    head = "timestamp,node,gpu,type,code,detail,resolved_at,slot,known_at"
    row = "2026-03-01T12:00:00Z,n1,GPU-a,RMA,79,GPU 3 replaced,2026-03-02T12:00:00Z,3,2026-03-01T13:00:00Z"
    values = ["", "1e400", "-1", "9" * 40, "GPU 3", "3b:00.0", "1700-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "xid",
              "maintenance", "drain", "x" * 3000, '"', "no RMA needed", "0000-00-00", "N/A"]  # fmt: skip
    lines = [row]
    for _ in range(INPUTS):
        fields = row.split(",")
        for _ in range(chance.randint(1, 3)):
            fields[chance.randrange(len(fields))] = chance.choice(values).replace('"', "'")
        lines.append(",".join(fields))
    path = tmp_path / "tickets.csv"
    path.write_text("\n".join([head, *lines]))
    _, accounting = collect_tickets(path, staging(tmp_path), mapping=TableMapping(), delay=timedelta(minutes=10))
    account = accounting.tables["events"]
    assert account.unaccounted == 0
    assert account.used > 500


@pytest.mark.parametrize("text", ["", "\n\n", "timestamp,node,type\n", "timestamp,node,type\nx,n1,repair\n", "\ud800"])
def test_tickets_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tickets.csv"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        result, _ = collect_tickets(path, staging(tmp_path), mapping=TableMapping(), delay=timedelta())
    except InputError:
        return
    assert result["events_written"] == 0
