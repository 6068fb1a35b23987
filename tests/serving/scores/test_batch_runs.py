"""Scoring reads the newest runs of a dataset, and scores as if it had read them all."""

from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from models.config import ServingSection
from serving.scores.feature_settings import live_config
from serving.scores.fleet_rows import fleet_rows
from telemetry.dataset.files import FolderFiles
from telemetry.dataset.runs import Runs
from telemetry.dataset.schema import INSTANT
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from tests.features.small_fleet import HOUR, T0
from tests.serving.batch_world import HOURS, SILENT, make_world

PAST = timedelta(days=10)


def with_a_past(world: Dataset, path: Path, days: int | None) -> Dataset:
    """Write a dataset once more with the same samples ten days before as well."""
    meta = world.meta
    options = {"step": meta.step, "channels": meta.channels, "buckets": meta.buckets, "runs": Runs(days)}
    inventory = world.inventory()
    inventory["installed_at"] = inventory["installed_at"] - PAST
    with DatasetWriter(path, **options) as writer:
        for bucket in world.buckets():
            table = world.read_bucket(bucket)
            earlier = pa.array(
                table.column("timestamp").cast(pa.int64()).to_numpy() - PAST // timedelta(milliseconds=1)
            )
            before = table.set_column(0, "timestamp", earlier.cast(INSTANT))
            writer.write_samples(bucket, pa.concat_tables([before, table]))
        return writer.finish(events=world.events(), inventory=inventory, span=(meta.span[0] - PAST, meta.span[1]))


def test_rows_of_the_newest_runs_are_those_of_all_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path / "world")
    one, cut = (with_a_past(world.dataset, tmp_path / str(days), days) for days in (None, 1))
    t = T0 + HOURS * HOUR - 3 * HOUR
    opened: list[str] = []
    opens = FolderFiles.opened

    def noted(files: FolderFiles, name: str) -> AbstractContextManager[pa.NativeFile]:
        opened.append(name.rpartition("/")[2])
        return opens(files, name)

    everything = fleet_rows(world.dataset, live_config(world.bundle, world.dataset.meta), ServingSection(), t)
    whole = fleet_rows(one, live_config(world.bundle, one.meta), ServingSection(), t)
    monkeypatch.setattr(FolderFiles, "opened", noted)
    newest = fleet_rows(cut, live_config(world.bundle, cut.meta), ServingSection(), t)
    assert len(cut.meta.files) > len(one.meta.files)
    parts = {name for name in opened if name.startswith("part-")}
    assert parts
    assert parts <= {"part-20251231.parquet", "part-20260101.parquet", "part-20260102.parquet"}
    for rows in (whole, newest):
        np.testing.assert_array_equal(rows.values, whole.values)
        pd.testing.assert_frame_equal(rows.keys, everything.keys)
        np.testing.assert_array_equal(rows.completeness, everything.completeness)
    why = dict(zip(everything.keys["unit"], everything.why, strict=True))
    reasons = dict(zip(newest.keys["unit"], newest.why, strict=True))
    assert why.pop(SILENT) == "no sample yet"
    assert reasons.pop(SILENT).startswith("no sample in the last ")
    assert reasons == why
