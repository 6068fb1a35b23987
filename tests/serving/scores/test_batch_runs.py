"""Scoring from the newest runs, from raw windows, and without a channel that the model was trained on."""

from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from features.config import SequenceSection
from foundation.errors import InputError
from foundation.times import instant_ms
from models.bundle.store import Bundle
from models.config import ServingSection
from models.sequence.layout import WindowedMatrix
from models.training.reference import Outcomes, Reference, summarise
from policy.breaker import BreakerConfig, BreakerState, watch
from policy.fleet import Signals
from scheduler.controller.scores_reader import ScoresReader
from scheduler.ports.clock import ManualClock
from serving.scores.batch import ServedModel, score_decision
from serving.scores.feature_settings import live_config, window_plan
from serving.scores.fleet_rows import fleet_rows
from serving.scores.writing import ScoresFolder
from telemetry.dataset.files import FolderFiles
from telemetry.dataset.layout import Runs
from telemetry.dataset.schema import INSTANT
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from tests.features.small_fleet import HOUR, SMALL, T0, events_of, gpus, inventory_of, make_matrix, write_dataset
from tests.serving.batch_world import DECISION, HOURS, LABELS, SILENT, World, make_world, manifest, telemetry

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
            past = table.set_column(0, "timestamp", earlier.cast(INSTANT))
            writer.write_samples(bucket, pa.concat_tables([past, table]))
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
    all_rows = fleet_rows(one, live_config(world.bundle, one.meta), ServingSection(), t)
    monkeypatch.setattr(FolderFiles, "opened", noted)
    newest = fleet_rows(cut, live_config(world.bundle, cut.meta), ServingSection(), t)
    assert len(cut.meta.files) > len(one.meta.files)
    parts = {name for name in opened if name.startswith("part-")}
    assert parts
    assert parts <= {"part-20251231.parquet", "part-20260101.parquet", "part-20260102.parquet"}
    for rows in (all_rows, newest):
        np.testing.assert_array_equal(rows.values, all_rows.values)
        pd.testing.assert_frame_equal(rows.keys, everything.keys)
        np.testing.assert_array_equal(rows.completeness, everything.completeness)
    why = dict(zip(everything.keys["unit"], everything.why, strict=True))
    reasons = dict(zip(newest.keys["unit"], newest.why, strict=True))
    assert why.pop(SILENT) == "no sample yet"
    assert reasons.pop(SILENT).startswith("no sample in the last ")
    assert reasons == why


SECTION = SequenceSection(
    channels=("gpu_temp_c", "power_w", "ecc_sbe_volatile_total"), window=6 * HOUR, step=timedelta(minutes=30)
)


@pytest.mark.parametrize("hour", [3, 12, 24])
def test_a_row_holds_the_window_of_the_matrix(tmp_path: Path, hour: int) -> None:
    features = SMALL.model_copy(update={"sequence": SECTION})
    inventory = inventory_of(gpus(12))
    dataset = write_dataset(
        tmp_path / "data", inventory, samples=telemetry(inventory), events=events_of([]), hours=HOURS
    )
    matrix = make_matrix(dataset, tmp_path / "matrix", features=features, decision=DECISION, labels=LABELS)
    windowed = WindowedMatrix(matrix)
    fitted = type("Fitted", (), {"columns": tuple(windowed.columns)})()
    bundle = Bundle(tmp_path, fitted, manifest(matrix, features=features), "d")
    config = live_config(bundle, dataset.meta)
    assert config.columns == matrix.config.columns
    t = T0 + hour * HOUR
    served = fleet_rows(dataset, config, ServingSection(), t, window_plan(bundle, config))
    rows = matrix.rows
    row = np.flatnonzero((rows["decision_time"] == t).to_numpy() & ~rows["augmented"].to_numpy())
    assert served.keys["unit"].tolist() == rows["unit"].iloc[row].tolist()
    np.testing.assert_array_equal(served.values, windowed.values(row))
    assert np.isfinite(served.values[:, len(config.columns) :]).any()
    changed = config.features.model_copy(update={"sequence": SECTION.model_copy(update={"window": 3 * HOUR})})
    with pytest.raises(InputError, match="computes raw windows differently"):
        window_plan(bundle, replace(config, features=changed))


END = T0 + HOURS * HOUR


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def with_reference(world: World) -> ServedModel:
    values, columns = world.matrix.values(), tuple(world.matrix.columns)
    features = tuple(summarise(values[:, index]) for index in range(len(columns)))
    reference = Reference(instant_ms(T0), instant_ms(END), columns, features, 12.0, 8.0, Outcomes(len(values), {}))
    return ServedModel(replace(world.bundle, fitted=replace(world.bundle.fitted, reference=reference)))


def without(channel: str, share: float, folder: Path) -> Dataset:
    """The fleet's telemetry, in which a share of the GPUs send no value of the channel in the last twelve hours."""
    inventory = inventory_of(gpus(12))
    samples = telemetry(inventory)
    names = sorted(samples["gpu"].unique())
    silent = names[: round(share * len(names))]
    lost = (samples["timestamp"] > T0 + (HOURS - 12) * HOUR) & samples["gpu"].isin(silent)
    samples[channel] = samples[channel].mask(lost)
    return write_dataset(folder, inventory, samples=samples, events=events_of([]), hours=HOURS)


@pytest.mark.parametrize(("share", "missing"), [(0.0, ()), (0.3, ()), (1.0, ("power_w",))])
def test_a_channel_that_most_of_the_fleet_stops_sending_opens_the_breaker(world, share, missing, tmp_path):
    dataset, scores = without("power_w", share, tmp_path / "data"), ScoresFolder(tmp_path / "scores")
    score_decision(dataset, with_reference(world), scores, ServingSection(), clock=lambda: END)
    risks = ScoresReader(tmp_path / "scores", ManualClock(END), timedelta(days=2)).read()
    assert risks.missing_channels == missing
    signals = Signals(read_at=END, model_fitted_at=END, missing_channels=risks.missing_channels)
    state, _ = watch(BreakerState(), [], signals, None, BreakerConfig(), END)
    assert set(state.causes) == {f"channel {name}" for name in missing}
