"""The whole main job against a poisoned future: nothing after a decision may change its features, models or scores."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from evaluation.backtest.run import run_backtest
from features.matrix.matrix import FeatureMatrix
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter


def poisoned(source: Path, out: Path, known_at: datetime, delay: timedelta, seed: int) -> Path:
    """Copy a dataset; whatever could not be known at ``known_at`` is replaced by nonsense."""
    original = Dataset.open(source)
    rng = np.random.default_rng(seed)
    known_until = pd.Timestamp(known_at)
    events = original.events()
    known = events[events["known_at"] <= known_until]
    installations = original.inventory()
    units = installations["gpu"].dropna().unique()
    invented = pd.DataFrame(
        {
            "timestamp": known_until + pd.to_timedelta(rng.uniform(-48, 240, 300), unit="h"),
            "gpu": rng.choice(units, 300),
            "type": rng.choice(["xid", "failure", "repair", "drain", "driver"], 300),
            "code": rng.choice(["79", "48", "gpu_lost", "x"], 300),
            "detail": "",
            "source": "poison",
        }
    )
    invented["node"] = invented["gpu"].map(installations.drop_duplicates("gpu").set_index("gpu")["node"])
    invented["known_at"] = known_until + pd.to_timedelta(rng.uniform(0.01, 200, 300), unit="h")
    for column in ("timestamp", "known_at"):
        invented[column] = invented[column].astype(known[column].dtype)
    events = pd.concat([known, invented[known.columns]], ignore_index=True)
    installations["removed_at"] = installations["removed_at"].where(installations["removed_at"] <= known_until)
    later = rng.random(len(installations)) < 0.3
    installations.loc[later & installations["removed_at"].isna(), "removed_at"] = known_until + timedelta(hours=3)
    with DatasetWriter(
        out,
        step=original.meta.step,
        channels=original.meta.channels,
        unit=original.meta.unit,
        buckets=original.meta.buckets,
        sample_count=original.meta.sample_count,
    ) as writer:
        for bucket in original.buckets():
            writer.write_samples(bucket, spoil(original.read_bucket(bucket), known_until - delay, rng))
        writer.finish(events=events, inventory=installations, span=original.meta.span, sources=original.meta.sources)
    return out


def spoil(table: pa.Table, after: pd.Timestamp, rng: np.random.Generator) -> pa.Table:
    """Spoil the samples later than ``after``: a third is dropped, the rest gets other values."""
    unknown = pc.greater(table["timestamp"], pa.scalar(after.to_pydatetime(), table["timestamp"].type))
    keep = pc.or_(pc.invert(unknown), pa.array(rng.random(table.num_rows) > 0.33))
    table = table.filter(keep)
    unknown = unknown.filter(keep)
    for i, field in enumerate(table.schema):
        if field.name in ("timestamp", "node", "gpu"):
            continue
        noise = pa.array(rng.integers(0, 100, table.num_rows)).cast(field.type)
        table = table.set_column(i, field, pc.if_else(unknown, noise, table[field.name]))
    return table


Played = tuple[FeatureMatrix, pd.DataFrame]


def played(dataset: Path, params: Params, out: Path) -> Played:
    """The matrix of a dataset, and the predictions of its backtest."""
    matrix = make_matrix(dataset, params, out)
    backtest = params.backtest.model_copy(update={"k": 2})
    result = run_backtest(matrix, training=params.training, models=params.models, backtest=backtest, seed=params.seed)
    return matrix, result.predictions


@pytest.fixture(scope="module")
def clean(small_fleet: Path, small_params: Params, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return played(small_fleet, small_params, tmp_path_factory.mktemp("clean") / "matrix")


@pytest.fixture(scope="module", params=[timedelta(0), timedelta(hours=31)], ids=str)
def spoiled(request, small_fleet, small_params, tmp_path_factory):
    time, folder = datetime(2026, 2, 9, tzinfo=UTC) + request.param, tmp_path_factory.mktemp("spoiled")
    twin = poisoned(small_fleet, folder / "twin", time, small_params.features.delay, seed=3)
    return time, played(twin, small_params, folder / "matrix")


def test_a_poisoned_future_changes_no_score_before_it(clean: Played, spoiled: tuple[datetime, Played]) -> None:
    border = pd.Timestamp(spoiled[0])

    def known(matrix: FeatureMatrix, predictions: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
        scores = predictions[predictions["decision_time"] <= border].reset_index(drop=True)
        named = ["node", "gpu", "unit", "model", "variant"]  # as text: categories also list units of later days
        grid = matrix.rows[(matrix.rows["decision_time"] <= border) & ~matrix.rows["augmented"]]
        return scores.astype(dict.fromkeys(named, "str")), matrix.values(grid.index.to_numpy())

    (scores, values), (spoiled_scores, spoiled_values) = known(*clean), known(*spoiled[1])
    assert len(scores) > 1000
    assert scores["fold"].nunique() >= 2
    compared = ["decision_time", "node", "gpu", "unit", "model", "variant", "score", "risk", "rank", "alert", "fold"]
    pd.testing.assert_frame_equal(scores[compared], spoiled_scores[compared], check_exact=True)
    assert np.array_equal(values, spoiled_values, equal_nan=True)


def test_the_poison_is_strong_enough_to_show(clean: Played, spoiled: tuple[datetime, Played]) -> None:
    positives = [int((matrix.labels()["label"] == 1).sum()) for matrix, _ in (clean, spoiled[1])]
    assert positives[1] > positives[0]
