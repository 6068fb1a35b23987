"""The null check at small size: nothing where nothing is, something where something is, and a leak is noticed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.null.altered import ReadsTheFuture, ShuffledOwners, draw_incidents
from benchmarks.null.finding import Finding, Outcome, show
from benchmarks.null.runs import Size, passed, run_checks, small_params
from features.matrix.matrix import FeatureMatrix
from telemetry.dataset.store import Dataset

pytestmark = pytest.mark.system  # half a minute of computing

SIZE = Size(gpus=64, days=40, incidents=150, acceleration=100.0)
NAMES = ("shuffled", "leak shuffled", "independent", "leak", "planted")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("null")


@pytest.fixture(scope="module")
def outcomes(work):
    return run_checks(work, SIZE, small_params(), NAMES)


@pytest.mark.parametrize("name", ["shuffled", "independent"])
def test_nothing_is_found_where_nothing_is(outcomes, name):
    assert outcomes[name].above == ()
    assert outcomes[name].incidents >= 20
    models = {each.model for each in outcomes[name].findings}
    assert {"lightgbm", "mean_rank", "stacked", "intersection", "cascade", "history_count", "random"} <= models


def test_a_planted_signal_is_found_by_every_learner(outcomes):
    for model in ("lightgbm", "xgboost", "logistic", "mean_rank", "stacked", "cascade"):
        assert outcomes["planted"].of(model, "roc_auc").low > 0.7
        assert (
            outcomes["planted"].of(model, "precision_at_k").low > outcomes["planted"].of(model, "precision_at_k").chance
        )


@pytest.mark.parametrize("name", ["leak", "leak shuffled"])
def test_a_feature_that_reads_the_future_fails_the_check(outcomes, name):
    assert len(outcomes[name].above) >= 3
    assert outcomes[name].of("mean_rank", "roc_auc").low > 0.6


def test_the_verdict_follows(outcomes):
    assert all(passed(outcomes).values())
    assert not any(passed({"independent": outcomes["leak"], "planted": outcomes["independent"]}).values())
    assert "mean_rank" not in show(outcomes, "mean_rank").splitlines()[0]
    assert len(show(outcomes, "mean_rank").splitlines()) == 1 + 3 * len(NAMES)


def test_shuffled_owners_keep_times_and_break_the_tie_to_a_gpu(outcomes, work):
    matrix = FeatureMatrix.open(work / "failing-matrix")
    shuffled = ShuffledOwners(matrix, SIZE.seed)
    own, handed = matrix.incidents(), shuffled.incidents()
    assert len(own) * 0.8 < len(handed) <= len(own)
    assert set(handed["start"]) <= set(own["start"])
    joined = handed.merge(own, on="incident", suffixes=("", "_own"))
    assert (joined["start"] == joined["start_own"]).all()
    assert (joined["unit"] == joined["unit_own"]).mean() < 0.1
    as_of = matrix.rows["decision_time"].iloc[len(matrix.rows) // 2].to_pydatetime()
    earlier = shuffled.incidents(as_of)
    kept = earlier.merge(handed, on=["incident", "start"], suffixes=("", "_later"))
    assert (kept["unit"] == kept["unit_later"]).all()  # whoever asks, and whenever
    units = handed.sort_values(["unit", "start"])
    ended = units["end"].groupby(units["unit"]).shift()
    assert not (ended > units["start"]).any()
    assert shuffled.digest != matrix.digest


def test_labels_of_shuffled_owners_follow_the_definition(outcomes, work):
    matrix = FeatureMatrix.open(work / "failing-matrix")
    shuffled = ShuffledOwners(matrix, SIZE.seed)
    labels = shuffled.labels()
    gap, horizon = matrix.config.labels.gap, matrix.config.labels.horizon
    starts = {unit: list(found) for unit, found in shuffled.incidents().groupby("unit")["start"]}
    known = np.flatnonzero(labels["label"].notna())
    chosen = np.random.default_rng(0).choice(known, 400, replace=False)
    for row, label in zip(matrix.rows.iloc[chosen].itertuples(), labels["label"].iloc[chosen], strict=True):
        low, high = row.decision_time + gap, row.decision_time + gap + horizon
        assert label == any(low < start <= high for start in starts.get(row.unit, []))


def test_drawn_incidents_fall_evenly_and_each_is_repaired(outcomes, work):
    dataset = Dataset.open(work / "quiet")
    assert not {"failure", "repair", "replacement"} & set(dataset.events()["type"])  # no failure of its own
    drawn = draw_incidents(dataset, 3000, 1)
    failures = drawn[drawn["type"] == "failure"]
    assert failures["gpu"].nunique() == dataset.inventory()["gpu"].nunique()
    thirds = pd.cut(failures["timestamp"].astype("int64"), 3).value_counts()
    assert thirds.min() > 900
    assert (failures["known_at"] > failures["timestamp"]).all()


def test_the_leak_is_in_the_last_column_only(outcomes, work):
    matrix = FeatureMatrix.open(work / "independent-matrix")
    leaking = ReadsTheFuture(matrix, 1)
    rows = np.arange(0, len(matrix.rows), 97)
    assert np.array_equal(leaking.values(rows)[:, :-1], matrix.values(rows), equal_nan=True)
    assert [column.name for column in leaking.columns[:-1]] == [column.name for column in matrix.columns]
    label = matrix.labels(None)["label"].iloc[rows]
    leak = leaking.values(rows)[:, -1]
    assert leak[(label == 1).fillna(False)].mean() > leak[(label == 0).fillna(False)].mean() + 1


def test_a_finding_is_judged_by_how_many_were_looked_at():
    def finding(z):
        return Finding("m", "sliding", "roc_auc", 0.6, 0.5, 0.7, 0.5, z)

    assert Outcome("one", (finding(2.0),), 9).above
    assert not Outcome("many", (finding(2.0), *[finding(0.0)] * 50), 9).above
