"""Random mixtures of good, unknown and broken rows by each way in: the accounts' sums, and as many rows behind them.

Series have a test of their own (``test_accounts_of_series``), and so have kernel logs (``kernel_log/test_ways_in``).
"""

import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.accounting import Account, Accounting
from telemetry.collect.gpud import read_events
from telemetry.collect.kubernetes.collector import KubernetesCollector
from telemetry.collect.kubernetes.rules import default_rules
from telemetry.collect.slurm.jobs import jobs_table, read_sacct, read_squeue
from telemetry.collect.slurm.nodes import read_nodes
from telemetry.collect.tickets import collect_tickets
from telemetry.dataset.store import Dataset
from telemetry.importing.mapping import TableMapping
from tests.clock import Clock
from tests.realworld.hostile import JOB, NODE
from tests.telemetry.collect.builders import staged, staging
from tests.telemetry.collect.kubernetes.memory_api import EVENTS, NODES, PODS, MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW, event, node, pod
from tests.telemetry.collect.remote_write.encoding import T0, instants, pushed
from tests.telemetry.helpers import DAY, gpu, run_import
from tests.telemetry.staging_world import NOW as COMPACTED
from tests.telemetry.staging_world import compacted, raw, samples_of, stage_events, stage_frame
from tests.telemetry.staging_world import event as staged_event

GOOD, UNKNOWN, BROKEN = "good", "unknown", "broken"
LONG_AGO = pd.Timestamp("1971-01-01", tz="UTC")
SINCE = "2026-01-01T00:00:00Z"
ONE_SAMPLE = pd.DataFrame({"timestamp": [DAY.isoformat()], "node": ["node-0"], "gpu": [gpu(0)], "power_w": [300.5]})
Outcome = tuple[Account, int]
"""The account of the rows, and how many came out behind it."""


def chosen(kinds: list[str], **values: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
    """Return a row for each kind: the value of each column for a good, an unknown and a broken row."""
    place = {GOOD: 0, UNKNOWN: 1, BROKEN: 2}
    return [{name: of_kind[place[kind]] for name, of_kind in values.items()} for kind in kinds]


def samples(write: Callable[[pd.DataFrame, Path], None], name: str) -> Callable[[list[str], Path], Outcome]:
    def run(kinds: list[str], folder: Path) -> Outcome:
        rows = chosen(kinds, gpu=(gpu(0), "GPU-elsewhere", gpu(0)), power_w=("300.5", "300.5", "300.5"))
        stamps = [
            "yesterday" if kind == BROKEN else (DAY + pd.Timedelta(minutes=10 * number)).isoformat()
            for number, kind in enumerate(kinds)
        ]
        write(pd.DataFrame(rows).assign(timestamp=stamps), folder / name)
        result = run_import(folder, samples=[folder / name], max_loss=1.0)
        stored = sum(result.dataset.read_bucket(bucket).num_rows for bucket in result.dataset.buckets())
        return result.accounting.tables["samples"], stored

    return run


def events(kinds: list[str], folder: Path) -> Outcome:
    rows = chosen(kinds, gpu=(gpu(0), "GPU-elsewhere", gpu(0)), type=("xid", "xid", "xid"), code=("79", "79", None))
    stamps = [(DAY + pd.Timedelta(minutes=10 * number)).isoformat() for number in range(len(kinds))]
    pd.DataFrame(rows).assign(timestamp=stamps).to_csv(folder / "e.csv", index=False)
    result = run_import(folder, samples=ONE_SAMPLE, events=[folder / "e.csv"], max_loss=1.0)
    return result.accounting.tables["events"], len(result.dataset.events())


def jobs(kinds: list[str], folder: Path) -> Outcome:
    rows = chosen(kinds, node=("node-0", "node-77", "node-0"), started_at=(DAY.isoformat(), DAY.isoformat(), "now"))
    pd.DataFrame(rows).assign(job=range(len(kinds))).to_csv(folder / "j.csv", index=False)
    result = run_import(folder, samples=ONE_SAMPLE, jobs=folder / "j.csv", max_loss=1.0)
    return result.accounting.tables["jobs"], len(result.dataset.jobs())


def inventory(kinds: list[str], folder: Path) -> Outcome:
    rows = chosen(kinds, node=("node-0", None, "node-0"), installed_at=(SINCE, SINCE, "then"))
    frame = pd.DataFrame(rows).assign(gpu=[gpu(number) for number in range(len(kinds))])
    result = run_import(folder, samples=ONE_SAMPLE, inventory=frame, max_loss=1.0)
    return result.accounting.tables["inventory"], len(result.dataset.inventory())


def tickets(kinds: list[str], folder: Path) -> Outcome:
    rows = chosen(kinds, timestamp=(DAY.isoformat(), DAY.isoformat(), "then"), node=("n1", None, "n1"))
    pd.DataFrame(rows).assign(type="RMA", code=range(len(kinds))).to_csv(folder / "t.csv", index=False)
    _, accounting = collect_tickets(folder / "t.csv", staging(folder), mapping=TableMapping(), delay=timedelta())
    return accounting.tables["events"], len(staged(staging(folder)))


def push(kinds: list[str], folder: Path) -> Outcome:
    table = pa.table(
        {
            "timestamp": instants(*({GOOD: T0, UNKNOWN: 2**53, BROKEN: -(2**62)}[kind] for kind in kinds)),
            "node": ["n1"] * len(kinds),
            "gpu_temp_c": [40.0] * len(kinds),
        }
    )
    receiver, _, _ = pushed(staging(folder).root, table, "samples")
    return receiver.accounting.tables["samples"], len(staged(staging(folder), "samples"))


def gpud(kinds: list[str], _folder: Path) -> Outcome:
    message = "XID 79 PCI:0000:01:00"
    entries = chosen(kinds, name=("error_xid", "something", "error_xid"), type=("Fatal", "Info", "Fatal"))
    for number, (entry, kind) in enumerate(zip(entries, kinds, strict=True)):
        stamp = "then" if kind == BROKEN else (NOW - timedelta(minutes=number)).isoformat()
        entry |= {"time": stamp, "message": f"{message} {number}"}
    page = json.dumps([{"component": "accelerator-nvidia-error-xid", "events": entries}]).encode()
    read = list(read_events(page, "n1", lambda _: NOW).values())
    accounting = Accounting()
    for entry in read:  # as the collector counts them
        accounting.take("entries", 1, {entry: 1} if isinstance(entry, str) else {})
    return accounting.tables["entries"], sum(isinstance(entry, list) for entry in read)


def slurm_nodes(kinds: list[str], _folder: Path) -> Outcome:
    rows = chosen(kinds, state=(["IDLE"], ["UNKNOWN"], ["IDLE"]), state_flags=([], [], []), boot_time=(1, 1, -1e400))
    accounting = Accounting()
    report = json.dumps({"nodes": [NODE | row | {"name": f"n{number}"} for number, row in enumerate(rows)]})
    rows_read = len(read_nodes(report, accounting))
    return accounting.tables["nodes"], rows_read


def squeue(kinds: list[str], _folder: Path) -> Outcome:
    rows = chosen(kinds, start_time=(1_760_000_000, 0, {"number": 10**400}), nodes=("n1", "", "n1"), end_time=(0, 0, 0))
    alone = {"array_job_id": 0, "array_task_id": None, "het_job_id": 0}
    report = json.dumps({"jobs": [JOB | alone | row | {"job_id": number} for number, row in enumerate(rows, 1)]})
    accounting = Accounting()
    jobs = jobs_table(read_squeue(report, accounting))
    return accounting.tables["jobs"], jobs.num_rows


def sacct(kinds: list[str], _folder: Path) -> Outcome:
    forms = {
        GOOD: "{}|COMPLETED|1760000000|1760000100|n1|gres/gpu=1",
        UNKNOWN: "{}|PENDING|Unknown|Unknown|None assigned|",
        BROKEN: "{}|COMPLETED|1760000000",
    }
    accounting = Accounting()
    report = "\n".join(forms[kind].format(number) for number, kind in enumerate(kinds, 1))
    jobs = jobs_table(read_sacct(report, accounting))
    return accounting.tables["jobs"], jobs.num_rows


def pods(kinds: list[str], folder: Path) -> Outcome:
    items = [pod(f"p{number}", gpus=int(kind != UNKNOWN)) for number, kind in enumerate(kinds)]
    broken = [item | {"spec": 5} if kind == BROKEN else item for item, kind in zip(items, kinds, strict=True)]
    return kubernetes(folder, PODS, broken).tables["pods"], len(staged(staging(folder), "jobs"))


def kubernetes_events(kinds: list[str], folder: Path) -> Outcome:
    items = []
    for number, kind in enumerate(kinds):
        item = event("Pulled" if kind == UNKNOWN else "GpuLost", uid=f"e{number}")
        items.append(item | {"involvedObject": 5} if kind == BROKEN else item)
    accounting = kubernetes(folder, EVENTS, items)
    whole = Account()
    for name, account in accounting.tables.items():
        if "events of" in name or name == "Kubernetes events":
            whole.read, whole.used = whole.read + account.read, whole.used + account.used
            whole.left_out += account.left_out
    return whole, len(staged(staging(folder)))


def kubernetes(folder: Path, path: str, items: list[dict[str, Any]]) -> Accounting:
    api, rules = MemoryApi(), default_rules()
    api.put(NODES, node("n1"))
    for item in items:
        api.put(path, item)
    kinds = rules.model_copy(update={"rules": tuple(rule for rule in rules.rules if rule.kind == "Node")})
    collector = KubernetesCollector(api, staging(folder), kinds, clock=Clock(NOW))
    collector.once()
    collector.close()
    return collector.accounting()


def staged_samples(kinds: list[str], folder: Path) -> Outcome:
    begins = {GOOD: DAY, UNKNOWN: pd.Timestamp(COMPACTED) - pd.Timedelta(minutes=9), BROKEN: LONG_AGO}
    stamps = [begins[kind] + pd.Timedelta(seconds=30 * number) for number, kind in enumerate(kinds)]
    frame = raw(gpus=1, times=len(kinds))
    stage_frame(folder, frame.assign(timestamp=pd.Series(stamps).astype("datetime64[ms, UTC]")))
    accounting, stored = compacted(folder).accounting, samples_of(folder)
    counted = stored["sample_count"].sum() if "sample_count" in stored else len(stored)
    return accounting.tables["samples"], int(counted)


def staged_events(kinds: list[str], folder: Path) -> Outcome:
    stage_frame(folder, raw(gpus=1))
    rows = chosen(kinds, gpu=(gpu(0), "GPU-never", gpu(0)), when=(DAY, DAY, LONG_AGO))
    stage_events(folder, [staged_event(code=str(2000 + number), **row) for number, row in enumerate(rows)])
    accounting = compacted(folder).accounting
    return accounting.tables["events"], len(Dataset.open(folder / "dataset").events())


WAYS: dict[str, Callable[[list[str], Path], Outcome]] = {
    "csv": samples(lambda frame, path: frame.to_csv(path, index=False), "s.csv"),
    "jsonl": samples(lambda frame, path: frame.to_json(path, orient="records", lines=True), "s.jsonl"),
    "parquet": samples(lambda frame, path: pq.write_table(pa.Table.from_pandas(frame), path), "s.parquet"),
    "events": events,
    "jobs": jobs,
    "inventory": inventory,
    "staged samples": staged_samples,
    "staged events": staged_events,
    "tickets": tickets,
    "push": push,
    "gpud": gpud,
    "slurm nodes": slurm_nodes,
    "squeue": squeue,
    "sacct": sacct,
    "pods": pods,
    "kubernetes events": kubernetes_events,
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=6, deadline=None)
@given(kinds=st.lists(st.sampled_from([GOOD, UNKNOWN, BROKEN]), max_size=6).map(lambda kinds: [GOOD, *kinds]))
def test_what_was_read_is_used_or_left_out_and_what_is_used_comes_out(way: str, kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        account, rows = WAYS[way](kinds, Path(folder))
    good = kinds.count(GOOD)
    others = account.left_out.total() + account.waiting.total()
    assert (account.read, account.used, others, rows) == (len(kinds), good, len(kinds) - good, good)
