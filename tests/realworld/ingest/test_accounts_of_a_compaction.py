"""Random mixtures of valid, unknown and broken staged rows: exact sums, and the used rows in the dataset."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from telemetry.accounting import Accounting
from telemetry.dataset.store import Dataset
from tests.telemetry.helpers import DAY, gpu
from tests.telemetry.landing.test_compaction import fold, land, landing, raw, table_of

BAD = 0.3


def balanced(accounting: Accounting, *tables: str) -> None:
    for name in tables:
        account = accounting.tables[name]
        assert account.read == account.used + account.left_out.total() + account.waiting.total(), (name, account)
        assert account.read, name


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
