"""How a prediction frame is split by model, and put together from folds, against loops over the rows."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.backtest.frames import VARIANTS, Fold, cooled_down, predictions_of
from evaluation.metrics.aggregation import split_predictions
from models.training.schedule import Schedule
from tests.models.fake_matrix import FakeMatrix
from tests.models.fleet_predictions import fleet

MODELS = [("xgboost", "sliding", 1.0), ("lightgbm", "sliding", 0.5), ("xgboost", "train_once", 2.0)]


def as_categories(frame):
    """The same rows as a backtest holds them; each column has one category that no row takes."""
    out = frame.copy()
    for name in ("node", "gpu", "unit", "model", "variant", "failure_class"):
        distinct = [*sorted(frame[name].dropna().unique(), reverse=True), "never"]
        out[name] = pd.Categorical(frame[name], categories=distinct)
    return out


def slow_split(frame):
    """The decisions about nodes of each model and variant, in order of time and then node, one at a time."""
    out = {}
    for name, part in frame.groupby(["model", "variant"], observed=True):
        rows = out.setdefault(name, [])
        for (time, node), units in part.groupby(["decision_time", "node"], observed=True):
            spoken = units[units["label"].notna()] if units["label"].notna().any() else units
            hits = spoken[(spoken["label"] == 1).fillna(False)]
            rows.append(
                {
                    "time": time,
                    "node": node,
                    "label": -1 if spoken["label"].isna().all() else int(spoken["label"].max()),
                    "risk": spoken["risk"].max(),
                    "alert": bool(spoken["alert"].any()),
                    "best": spoken["rank"].min(),
                    "covers": set(hits["node_incident"]),
                    "fold": units["fold"].iloc[0],
                }
            )
        for row in rows:
            row["rank"] = 1 + sum(other["time"] == row["time"] and other["best"] < row["best"] for other in rows)
    return out


def some_unknown(frame, seed):
    """Labels of some units taken away, of whole nodes among them; the same for every model."""
    rng = np.random.default_rng(seed)
    lost = {key: rng.random() < 0.2 for key in sorted(set(zip(frame["decision_time"], frame["unit"], strict=True)))}
    mask = [lost[key] for key in zip(frame["decision_time"], frame["unit"], strict=True)]
    return frame.assign(label=frame["label"].mask(pd.Series(mask, index=frame.index)))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.booleans(), st.integers(1, 4))
def test_each_part_holds_its_models_decisions_by_time_and_node(seed, shuffled, categories, per_node):
    frame = some_unknown(fleet(seed, MODELS, times=8, units=6, per_node=per_node), seed)
    given_frame = frame.sample(frac=1, random_state=seed) if shuffled else frame
    parts = split_predictions(as_categories(given_frame) if categories else given_frame, 2)
    expected = slow_split(frame)
    assert [part.name for part in parts] == list(expected)
    for part in parts:
        rows, wanted = part.rows, expected[part.name]
        assert pd.to_datetime(part.shared.times_ms[rows.time], unit="ms", utc=True).tolist() == [
            row["time"] for row in wanted
        ]
        assert part.shared.nodes[rows.node].tolist() == [row["node"] for row in wanted]
        for name, values in (("label", rows.label), ("fold", rows.fold), ("risk", part.risk), ("alert", part.alert),
                             ("rank", part.rank)):  # fmt: skip
            assert values.tolist() == [row[name] for row in wanted], name
        covers = [set() for _ in wanted]
        for row, place in zip(rows.incidents.row, rows.incidents.place, strict=True):
            covers[row].add(int(rows.incidents.number[place]))
        assert covers == [row["covers"] for row in wanted]


def test_models_that_scored_the_same_units_share_their_rows():
    frame = fleet(5, MODELS[:2])
    one, two = split_predictions(frame, 2)
    assert one.rows is two.rows
    changed = frame.copy()
    changed.loc[changed["model"] == "xgboost", "fold"] += 1
    one, two = split_predictions(changed, 2)
    assert (two.rows.fold == one.rows.fold + 1).all()


@pytest.fixture(scope="module")
def folded():
    """Folds that a matrix's grid rows could have given, with models in another order than rows."""
    matrix = FakeMatrix(units=7, days=6, incidents=5, augmentation=2, companions=2)
    rng = np.random.default_rng(0)
    grid = np.flatnonzero(~matrix.rows["augmented"].to_numpy())
    folds = []
    for number, rows in enumerate(grid.reshape(3, -1)):
        row, model = np.tile(rows, 3), np.repeat([1, 0, 1], len(rows))
        variant = np.repeat([0, 0, 1], len(rows))
        n = len(row)
        table = pa.table(
            {
                "row": row,
                "variant": variant.astype(np.int8),
                "model": model.astype(np.int8),
                "score": rng.normal(size=n).astype(np.float32),
                "risk": rng.random(n).astype(np.float32),
                "rank": rng.integers(1, 8, n).astype(np.int32),
                "alert": rng.random(n) < 0.5,
            }
        )
        folds.append(Fold(table, {"fold": number}))
    return matrix, folds


def test_predictions_of_folds_stand_by_variant_model_and_row(folded):
    matrix, folds = folded
    begins = [int(matrix.rows["decision_time"].iloc[fold.table["row"][0].as_py()].timestamp() * 1000) for fold in folds]
    schedule = Schedule(tuple(begins), 0, ())
    labels = matrix.labels(None)
    frame = predictions_of(matrix, folds, ("random", "lightgbm"), schedule, labels["label"])
    expected = []
    for fold in folds:
        expected += [(at["variant"], at["model"], at["row"], fold.facts["fold"], at) for at in fold.table.to_pylist()]
    expected.sort(key=lambda row: row[:3])
    assert len(frame) == len(expected)
    for (variant, model, row, fold, at), got in zip(expected, frame.itertuples(), strict=True):
        assert (got.variant, got.model, got.fold) == (VARIANTS[variant], ("random", "lightgbm")[model], fold)
        rows = matrix.rows.iloc[row]
        assert (got.decision_time, got.unit, got.node) == (rows["decision_time"], rows["unit"], rows["node"])
        assert (got.rank, got.alert) == (at["rank"], at["alert"])
        assert (got.score, got.risk) == (np.float32(at["score"]), np.float32(at["risk"]))
        label = labels["label"].iloc[row]
        assert got.label is pd.NA if label is pd.NA else got.label == label
    assert str(frame["label"].dtype) == "Int8"
    assert str(frame["fold"].dtype) == "int32"


def test_a_cool_down_passes_the_budget_on_and_keeps_a_vote_to_what_it_gave():
    few = [("intersection", "sliding", 2.0)]
    frame = as_categories(pd.concat([fleet(3, MODELS, k=2), fleet(3, few, k=2)], ignore_index=True))
    voted = (frame["model"] == "intersection").to_numpy()
    frame.loc[voted & (frame["rank"] == 2), "alert"] = False
    reach, cooldown = timedelta(hours=30), timedelta(days=4)
    chosen = cooled_down(frame, 2, reach, cooldown)
    assert not (chosen & ~frame["alert"].to_numpy() & voted).any()
    assert (chosen & ~frame["alert"].to_numpy() & ~voted).any()
    alerts = frame[chosen].sort_values("decision_time")
    key = ["model", "variant", "unit"]
    since = alerts.groupby(key, observed=True)["decision_time"].diff()
    risen = alerts["risk"] >= 2 * alerts.groupby(key, observed=True)["risk"].shift()
    assert (since.isna() | (since > cooldown) | (risen & (since > reach))).all()
    ordered = frame[frame["alert"]].sort_values("decision_time").groupby(key, observed=True)["decision_time"].diff()
    assert (ordered <= reach).any()
    days = alerts.groupby(["model", "variant", alerts["decision_time"].dt.floor("D")], observed=True).size()
    assert days.max() == 2
    shuffled = frame.sample(frac=1, random_state=0)
    assert (cooled_down(shuffled, 2, reach, cooldown) == chosen[shuffled.index]).all()
