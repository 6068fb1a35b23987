"""The evaluation of a backtest's predictions, against loops over the rows."""

import json
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.estimates import STATISTICS, estimate_model
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.metrics import resample
from evaluation.metrics.oracle import oracle_predictions, read_truth
from foundation.errors import InputError
from tests.models.fleet_predictions import T0, fleet, truth_of


def slow_statistics(frame, k, reach):
    """The documented definitions, one row at a time, of a fleet whose units are nodes."""
    opened = {}
    for row in sorted((row for row in frame.itertuples() if row.alert), key=lambda row: row.decision_time):
        of_unit = opened.setdefault(row.unit, [])
        if not of_unit or not reach or row.decision_time - of_unit[-1].decision_time > reach:
            of_unit.append(row)
    episodes = [row for of_unit in opened.values() for row in of_unit]
    known_rows = [row.drain_label for row in episodes if row.drain_label is not pd.NA]
    known = [row for row in frame.itertuples() if row.label is not pd.NA]
    alerts = [row for row in known if row.alert]
    top = [row for row in known if row.rank <= k]
    positives = [row for row in known if row.label == 1]
    by_incident = {}
    for row in sorted(positives, key=lambda row: row.decision_time):
        by_incident.setdefault(row.incident, []).append(row)
    in_service = frame.groupby("decision_time").size()
    caught = [rows for rows in by_incident.values() if any(row.alert for row in rows)]
    in_top = [
        rows for rows in by_incident.values() if rows[-1].rank <= np.ceil(0.05 * in_service[rows[-1].decision_time])
    ]
    leads = [
        (rows[0].incident_start - min(row.decision_time for row in rows if row.alert)).total_seconds() / 3600
        for rows in caught
    ]
    days = {(row.unit, row.decision_time.date()) for row in known}

    def share(part, total):
        return part / total if total else np.nan

    hits = sum(row.label for row in alerts)
    return {
        "episodes": len(episodes),
        "episodes_known": len(known_rows),
        "episodes_right": sum(known_rows),
        "episode_precision": share(sum(known_rows), len(known_rows)),
        "episode_base_rate": frame["drain_label"].mean(),
        "alerts_of_one_node": max([sum(row.alert for row in rows.itertuples()) for _, rows in frame.groupby("unit")]),
        "precision": share(hits, len(alerts)),
        "precision_at_k": share(sum(row.label for row in top), len(top)),
        "recall": share(len(caught), len(by_incident)),
        "capture": share(len(in_top), len(by_incident)),
        "base_rate": share(len(positives), len(known)),
        "lead_time_median_hours": np.median(leads) if leads else np.nan,
        "false_episodes_per_1000_node_days": 1000 * share(known_rows.count(0), len(days)),
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["xgboost", "parallel"]), st.integers(1, 4), st.integers(0, 80))
def test_statistics_equal_the_definitions_in_a_loop(seed, model, k, reach_hours):
    frame, reach = fleet(seed, [(model, "sliding", 1.0)], k=k), timedelta(hours=reach_hours)
    drawn = np.random.default_rng(seed).choice([0, 1, pd.NA], len(frame), p=[0.6, 0.3, 0.1])
    frame = frame.assign(drain_label=pd.array(drawn, dtype="Int8"))
    row = evaluate(frame, k=k, bootstrap=0, seed=0, drain_reach=reach).row(model, "sliding")
    for name, value in slow_statistics(frame, k, reach).items():
        assert row[name] == pytest.approx(value, nan_ok=True), name


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_order_of_rows_does_not_matter_and_statistics_stay_in_bounds(seed):
    frame = fleet(seed, [("xgboost", "sliding", 1.0), ("parallel", "sliding", 1.0)])
    shuffled = frame.sample(frac=1, random_state=seed)
    one, two = (evaluate(predictions, k=2, bootstrap=25, seed=1) for predictions in (frame, shuffled))
    assert json.dumps(one.to_metrics()) == json.dumps(two.to_metrics())
    for name in STATISTICS:
        values = one.table[[name, f"{name}_low", f"{name}_high"]].to_numpy(dtype=float)
        assert (np.isnan(values) | ((values >= 0) & (values <= 1))).all()
        assert (np.isnan(values[:, 1]) | (values[:, 1] <= values[:, 2])).all()


def test_incidents_report_lead_time_class_and_those_not_caught():
    frame = fleet(5, [("xgboost", "sliding", 1.5)], k=1)
    measured = evaluate(frame, k=1, bootstrap=0, seed=0)
    incidents = measured.lead_times
    missed = incidents[~incidents["caught"]]
    assert len(missed)
    assert missed["lead_time_hours"].isna().all()
    assert missed["first_alert"].isna().all()
    caught = incidents[incidents["caught"]]
    hours = (caught["start"] - caught["first_alert"]).dt.total_seconds() / 3600
    np.testing.assert_allclose(caught["lead_time_hours"], hours)
    assert caught["lead_time_hours"].between(10 / 60, 24 + 10 / 60).all()
    by_class = measured.by_class
    assert by_class["incidents"].sum() == len(incidents)
    assert by_class["caught"].sum() == len(caught)


def test_folds_and_months_add_up_to_the_pool():
    measured = evaluate(fleet(6), k=2, bootstrap=0, seed=0)
    row = measured.row("xgboost", "sliding")
    for frame in (measured.folds, measured.monthly):
        assert frame["hits"].sum() == row["hits"]
        assert frame["alerts_labelled"].sum() == row["alerts_labelled"]
        assert frame["positives"].sum() == row["positives"]
    assert list(measured.monthly["month"]) == ["2026-01", "2026-02"]
    assert list(measured.folds["fold"]) == [0, 1, 2]


@pytest.mark.parametrize("per_node", [1, 3])
def test_a_bootstrap_replicate_counts_each_row_as_often_as_its_cluster_is_drawn(per_node):
    [scored] = split_predictions(fleet(7, [("xgboost", "sliding", 1.0)], per_node=per_node), 2)
    weights = resample(scored.shared.n_clusters, 5, 9)
    measured = estimate_model(scored, weights)
    opened, outcome = scored.episodes()
    for i, weight in enumerate(weights.astype(int)):
        rows = np.repeat(np.arange(len(scored.rank)), weight[scored.rows.cluster])
        known, top, hit = (values[rows] for values in (scored.known, scored.rank <= 2, scored.positive))
        alert, order = scored.alert[rows], -scored.rank[rows]
        drains = np.repeat(outcome, weight[scored.rows.cluster[opened]])
        caught = np.repeat(measured.incidents["caught"], weight[scored.rows.incidents.cluster])
        expected = {
            "precision_at_k": hit[top & known].mean(),
            "precision": hit[alert & known].mean(),
            "episode_precision": (drains == 1).sum() / (drains >= 0).sum(),
            "recall": caught.mean(),
            "average_precision": average_precision_score(hit[known], order[known]),
            "roc_auc": roc_auc_score(hit[known], order[known]),
        }
        for name, value in expected.items():
            assert measured.replicates[name][i] == pytest.approx(value), name


def test_paired_differences_say_which_comparison_and_share_resamples():
    models = [
        ("xgboost", "sliding", 0.3), ("xgboost", "train_once", 3.0), ("lightgbm", "sliding", 2.0),
        ("mean_rank", "sliding", 0.2), ("random", "sliding", 9.0),
    ]  # fmt: skip
    measured = evaluate(fleet(8, models, units=30, incidents=20), k=2, bootstrap=100, seed=0)
    paired = measured.paired
    assert set(paired["comparison"]) == {"sliding", "ensemble", "baseline"}
    row = paired[(paired["comparison"] == "sliding") & (paired["statistic"] == "precision_at_k")].iloc[0]
    assert (row["model"], row["variant"], row["other_model"], row["other_variant"]) == (
        "xgboost", "sliding", "xgboost", "train_once",
    )  # fmt: skip
    assert row["difference"] == row["value"] - row["other_value"] > 0
    assert row["low"] <= row["difference"] <= row["high"]
    assert set(paired.loc[paired["comparison"] == "ensemble", "other_model"]) == {"xgboost"}
    itself = evaluate(
        pd.concat([fleet(8), fleet(8).assign(variant="train_once")]), k=2, bootstrap=50, seed=0
    ).paired  # the same predictions differ by nothing in any resample
    assert (itself[["difference", "low", "high"]].to_numpy() == 0).all()


def test_a_model_that_alerts_less_is_compared_at_equal_numbers_of_alerts():
    frame = fleet(9, [("parallel", "sliding", 1.0), ("xgboost", "sliding", 1.0)], k=3)
    table = evaluate(frame, k=3, bootstrap=0, seed=0).equal_alerts
    assert list(zip(table["model"], table["other_model"], strict=True)) == [("parallel", "xgboost")]
    spare = frame[(frame["model"] == "parallel") & frame["alert"]]
    budget = spare.groupby("decision_time").size()
    alternative = frame[frame["model"] == "xgboost"]
    taken = alternative[alternative["rank"] <= alternative["decision_time"].map(budget).fillna(0)]
    assert table.loc[0, "alerts"] == len(spare) == len(taken)
    assert table.loc[0, "precision"] == pytest.approx(spare["label"].dropna().mean())
    assert table.loc[0, "other_precision"] == pytest.approx(taken["label"].dropna().mean())
    assert evaluate(fleet(9), k=2, bootstrap=0, seed=0).equal_alerts.empty


def test_the_oracle_stands_beside_the_models_with_the_share_that_is_reached():
    frame = fleet(10, [("xgboost", "sliding", 1.0), ("xgboost", "train_once", 4.0)], units=30, incidents=20)
    measured = evaluate(frame, k=2, bootstrap=60, seed=0, oracle=oracle_predictions(frame, truth_of(frame), 2))
    oracle = measured.row("oracle", "oracle")
    sliding = measured.row("xgboost", "sliding")
    assert oracle["kind"] == "oracle"
    assert oracle["oracle_share_precision_at_k"] == 1
    assert sliding["oracle_share_precision_at_k"] == pytest.approx(sliding["precision_at_k"] / oracle["precision_at_k"])
    assert sliding["oracle_share_precision_at_k_low"] <= sliding["oracle_share_precision_at_k"]
    assert measured.oracle_coverage == 1
    assert "oracle_share_capture" not in evaluate(frame, k=2, bootstrap=0, seed=0).table


def test_the_oracle_takes_the_latest_true_risk_until_the_next_is_due():
    frame = fleet(11, units=3, times=6)
    truth = pd.DataFrame(
        {
            "timestamp": pd.to_datetime([T0, T0 + timedelta(hours=12), T0 + timedelta(hours=24)]),
            "gpu": ["g00", "g00", "g01"],
            "risk": [0.1, 0.9, 0.5],
        }
    )
    scored = oracle_predictions(frame, truth, 1)
    risk = scored.pivot(index="decision_time", columns="gpu", values="risk")
    assert list(risk["g00"]) == pytest.approx([0.1, 0.1, 0.9, 0.9, np.nan, np.nan], nan_ok=True)
    assert list(risk["g01"]) == pytest.approx([np.nan] * 4 + [0.5] * 2, nan_ok=True)
    assert risk["g02"].isna().all()
    assert (
        scored.groupby("decision_time")["rank"].apply(sorted).map(list) == pd.Series([[1, 2, 3]] * 6, risk.index)
    ).all()
    assert not scored.loc[scored["risk"].isna(), "alert"].any()


def test_metrics_are_json_with_null_for_what_is_undefined():
    frame = fleet(12)
    frame.loc[:, "label"] = frame["label"].where(frame["label"] != 1, 0)
    metrics = evaluate(frame, k=2, bootstrap=30, seed=0).to_metrics()
    entry = json.loads(json.dumps(metrics, allow_nan=False))["models"]["xgboost"]["sliding"]
    assert entry["recall"] is None
    assert entry["average_precision"] is None
    assert entry["precision"] == 0
    assert entry["monthly"]["2026-01"]["labelled"] > 0
    assert metrics["oracle_coverage"] is None
    assert metrics["first_time"] == "2026-01-30T00:00:00+00:00"


def test_no_predictions_are_refused():
    with pytest.raises(InputError, match=r"no predictions .*backtest.first_test and backtest.last_test"):
        evaluate(fleet(13).iloc[:0], k=2, bootstrap=0, seed=0)


def test_truth_of_another_dataset_is_refused(tmp_path):
    frame = fleet(14)
    with pytest.raises(InputError, match="the truth has no risk for any decision"):
        oracle_predictions(frame, truth_of(frame).assign(gpu="elsewhere"), 2)
    with pytest.raises(InputError, match=r"no risk\.parquet in"):
        read_truth(tmp_path / "nowhere")
    truth_of(frame).to_parquet(tmp_path / "risk.parquet")
    assert list(read_truth(tmp_path).columns) == ["timestamp", "gpu", "risk"]


def test_every_ensemble_stands_beside_every_learner_at_as_many_alerts():
    models = [("mean_rank", "sliding", 0.3), ("xgboost", "sliding", 0.5), ("mlp", "sliding", 3.0),
              ("random", "sliding", 9.0)]  # fmt: skip
    table = evaluate(fleet(15, models, units=30, incidents=20), k=2, bootstrap=40, seed=0).equal_alerts
    assert list(zip(table["model"], table["other_model"], strict=True)) == [
        ("mean_rank", "mlp"),
        ("mean_rank", "xgboost"),
    ]
    assert list(table["best"]) == [False, True]
    row = table[table["best"]].iloc[0]
    measured = evaluate(fleet(15, models, units=30, incidents=20), k=2, bootstrap=0, seed=0)
    assert row["precision"] == measured.row("mean_rank", "sliding")["precision_at_k"]
    assert row["other_precision"] == measured.row("xgboost", "sliding")["precision_at_k"]


def test_no_hit_is_not_reported_as_certainty():
    frame = fleet(17, [("xgboost", "sliding", 1.0), ("mean_rank", "sliding", 1.0)], units=30, incidents=8)
    last = frame["rank"].max()
    frame["rank"] = np.where(frame["label"].fillna(0) == 1, last, frame["rank"])
    frame["alert"] = frame["rank"] <= 2
    measured = evaluate(frame, k=2, bootstrap=50, seed=0, oracle=oracle_predictions(frame, truth_of(frame), 2))
    row = measured.row("xgboost", "sliding")
    assert row["precision_at_k"] == row["precision_at_k_low"] == row["oracle_share_precision_at_k"] == 0
    assert row["precision_at_k_high"] > 3 / 30
    assert row["oracle_share_precision_at_k_high"] > row["precision_at_k_high"]
    pairs = measured.paired[measured.paired["statistic"] == "precision_at_k"]
    assert pairs[["low", "high"]].isna().all(axis=None)
    assert measured.equal_alerts[["low", "high"]].isna().all(axis=None)
