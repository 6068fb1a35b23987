"""Random mixtures of valid, unknown and broken rows by each way in: exact sums, and the used rows in the dataset."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from telemetry.accounting import Accounting
from telemetry.dataset.store import Dataset
from tests.telemetry.helpers import DAY, gpu, inventory_frame, run_import, samples_frame, write_csv
from tests.telemetry.landing.test_compaction import fold, land, landing, raw, table_of

BAD = 0.3


def balanced(accounting: Accounting, *tables: str) -> None:
    for name in tables:
        account = accounting.tables[name]
        assert account.read == account.used + account.left_out.total() + account.waiting.total(), (name, account)
        assert account.read, name


def some(turn: Random, frame: pd.DataFrame, column: str, values: list[object]) -> pd.Series:
    """Return a column in which a part of the rows has one of other values."""
    return pd.Series([turn.choice(values) if turn.random() < BAD else old for old in frame[column]], dtype=object)


@pytest.mark.parametrize("seed", range(3))
def test_files(seed: int) -> None:
    turn = Random(seed)
    samples = samples_frame(gpus=4, times=20).astype(object)
    samples["timestamp"] = some(
        turn, samples, "timestamp", [None, "yesterday", "1970-01-01T00:00:00Z", "2099-01-01T00:00:00Z"]
    )
    samples["gpu"] = some(turn, samples, "gpu", [None, "N/A", gpu(2)])
    samples["power_w"] = some(turn, samples, "power_w", ["much", 1e9, None])
    numbers = range(60)
    events = pd.DataFrame(
        {
            "timestamp": [(DAY + pd.Timedelta(minutes=number)).isoformat() for number in numbers],
            "node": None,
            "gpu": [gpu(number % 4) for number in numbers],
            "type": "xid",
            "code": [str(1000 + number) for number in numbers],
        }
    ).astype(object)
    events["timestamp"] = some(
        turn, events, "timestamp", [None, "then", "2020-01-01T00:00:00Z", "2090-01-01T00:00:00Z"]
    )
    events["gpu"] = some(turn, events, "gpu", ["GPU-elsewhere", None])
    jobs = pd.DataFrame({"job": [str(number) for number in range(30)], "node": "node-0", "started_at": DAY.isoformat()})
    jobs["node"] = some(turn, jobs, "node", [None, "node-77", "NODE-1"])
    jobs["started_at"] = some(turn, jobs, "started_at", [None, "now", "2090-01-01T00:00:00Z"])
    inventory = pd.concat([inventory_frame(), inventory_frame(2).assign(node=None), inventory_frame(1)])
    log = ["NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off the bus.", "usb 1-1: new device", "NVRM: Xid: what"]
    lines = [f"2026-03-01T0{turn.randint(1, 9)}:00:00+00:00 node-0 kernel: {turn.choice(log)}" for _ in range(20)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dmesg.log").write_text(
            "\n".join(["2026-03-01T00:30:00+00:00 node-0 kernel: " + log[0], *lines]) + "\n"
        )
        result = run_import(
            folder,
            samples=samples,
            events=[write_csv(folder / "events.csv", events), folder / "dmesg.log"],
            jobs=write_csv(folder / "jobs.csv", jobs),
            inventory=inventory,
            max_loss=1.0,
        )
        accounting, dataset = result.accounting, result.dataset
        balanced(accounting, "samples", "sample values", "events", "inventory", "jobs")
        assert accounting.tables["samples"].read == len(samples)
        assert accounting.tables["jobs"].read == len(jobs)
        held = dataset.jobs()
        assert held is not None
        assert len(held) == accounting.tables["jobs"].used
        repeats = result.counts.get("samples_repeated", 0)
        kept_samples = sum(dataset.read_bucket(bucket).num_rows for bucket in dataset.buckets())
        assert kept_samples <= accounting.tables["samples"].used
        assert accounting.tables["samples"].used - kept_samples >= repeats >= 0
        good = events["timestamp"].str.startswith("2026-03-01", na=False) & events["gpu"].str.endswith(
            "0000000000", na=False
        )
        good &= events["gpu"] != gpu(2)  # samples show it on two nodes at one time, so it is no identity
        tickets = dataset.events()["code"].str.len() == 4
        assert set(dataset.events()["code"][tickets]) == set(events["code"][good])
        for table in ("samples", "events", "jobs"):
            assert set(accounting.tables[table].left_out) <= set(accounting.tables[table].examples)
        json.dumps(accounting.as_dict())


@pytest.mark.parametrize("seed", range(3))
def test_staged_files_and_a_compaction(seed: int) -> None:
    turn = Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        frame = raw(gpus=2, times=40)
        wrong = [pd.Timestamp("2041-01-01", tz="UTC"), pd.Timestamp("1971-01-01", tz="UTC")]
        stamps = [turn.choice(wrong) if turn.random() < BAD else old for old in frame["timestamp"]]
        frame["timestamp"] = pd.Series(stamps).astype("datetime64[ms, UTC]")
        land(folder, frame)
        land(folder, raw(gpus=2, times=10, start=pd.Timestamp("2026-04-30T23:58:00Z")))  # not settled as a whole
        rows = []
        for number in range(40):
            when = turn.choice([*wrong, *[DAY] * 6]) + pd.Timedelta(minutes=number)
            unit = turn.choice([gpu(0), gpu(1), "GPU-never"])
            rows.append(
                {
                    "timestamp": when,
                    "known_at": when,
                    "node": "node-0",
                    "gpu": unit,
                    "type": "xid",
                    "code": str(2000 + number),
                }
            )
        events = pd.DataFrame(rows)
        for column in ("timestamp", "known_at"):
            events[column] = events[column].astype("datetime64[ms, UTC]")
        landing(folder).stage("events", table_of(events))
        jobs = pd.DataFrame({"job": ["a", "b", "c"], "node": ["node-0", "node-9", "node-0"], "started_at": [DAY] * 3})
        jobs["started_at"] = jobs["started_at"].astype("datetime64[ms, UTC]")
        landing(folder).stage("jobs", table_of(jobs))
        result = fold(folder)
        accounting, dataset = result.accounting, Dataset.open(folder / "dataset")
        balanced(accounting, "samples", "events", "jobs", "staged files")
        plausible = (events["timestamp"] > wrong[1] + pd.Timedelta(days=1)) & (events["timestamp"] < wrong[0])
        usable = set(events["code"][plausible & (events["gpu"] != "GPU-never")])
        assert set(dataset.events()["code"]) == usable
        assert accounting.tables["events"].used == len(usable)
        assert (
            accounting.tables["events"].waiting
            == {"unknown gpu": int((plausible & (events["gpu"] == "GPU-never")).sum())}
            or not (plausible & (events["gpu"] == "GPU-never")).any()
        )
        assert accounting.tables["jobs"].used == 2
        sample_rows = sum(
            dataset.read_bucket(bucket).column("sample_count").to_pandas().sum() for bucket in dataset.buckets()
        )
        assert sample_rows == accounting.tables["samples"].used
