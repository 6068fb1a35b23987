"""Reasons of alerts and shares of features: contributions against slow oracles, and the text about them."""

import itertools
import math
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import RandomForestClassifier

from features.vocabulary import FeatureColumn, describe, describe_percentile
from models.explanation import alert_reasons
from models.explanation.alert_reasons import SAMPLED_ROWS, attribute, attribution_frame, by_group
from models.explanation.contributions import (
    LINEAR,
    OCCLUSION,
    TREES,
    UNKNOWN,
    ReasonPlan,
    contributions,
    explained_by,
    largest_reasons,
    members_of,
    reason_group,
    weights_in,
)
from models.learners.prepared import ColumnSubset
from models.rows.row_reader import log_odds, logit
from tests.models.small_models import COLUMNS, fitted_models, rows


@pytest.fixture(scope="module")
def X():
    return rows(25, seed=8)[0]


def reasons_of(values, X, columns=COLUMNS, **more):
    return [
        largest_reasons(added, row, ReasonPlan.of(columns), **more)[0] for added, row in zip(values, X, strict=True)
    ]


def margin(learner, X):
    return logit(learner.predict_proba(X)[:, 1])


def shapley(value, features):
    """Shapley values by the definition: the mean over all orders of what each feature adds."""
    out = np.zeros(features)
    for subset_size in range(features):
        share = math.factorial(subset_size) * math.factorial(features - subset_size - 1) / math.factorial(features)
        for feature in range(features):
            other_features = [i for i in range(features) if i != feature]
            for subset in itertools.combinations(other_features, subset_size):
                out[feature] += share * (value({*subset, feature}) - value(set(subset)))
    return out


def expected_leaf(tree, row, known, node=0):
    """What a tree of scikit-learn expects when only some features are known: by cover where a feature is not."""
    left, right = tree.children_left[node], tree.children_right[node]
    if left < 0:
        return tree.value[node, 0, 1] / tree.value[node, 0].sum()
    feature = tree.feature[node]
    if feature in known:
        goes = tree.missing_go_to_left[node] if math.isnan(row[feature]) else row[feature] <= tree.threshold[node]
        return expected_leaf(tree, row, known, left if goes else right)
    cover = tree.weighted_n_node_samples
    one, two = (expected_leaf(tree, row, known, child) for child in (left, right))
    return (cover[left] * one + cover[right] * two) / cover[node]


def small_problem(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(240, 4)).astype(np.float32)
    X[rng.random(X.shape) < 0.1] = np.nan
    y = (np.nan_to_num(X[:, 0]) * np.nan_to_num(X[:, 1]) + 0.5 * np.nan_to_num(X[:, 2]) > 0.4).astype(int)
    return X, y, rng.random(240) + 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_a_forest_is_taken_apart_as_the_definition_of_shapley_values_says(seed):
    X, y, weight = small_problem(seed)
    forest = RandomForestClassifier(3, max_depth=3, random_state=seed).fit(X, y, sample_weight=weight)
    values, method = contributions(forest, X[:6])
    assert method == TREES
    for row in range(6):

        def value(known, row=row):
            return np.mean([expected_leaf(tree.tree_, X[row], known) for tree in forest.estimators_])

        parts, base = shapley(value, 4), value(set())
        factor = (logit(base + parts.sum()) - logit(base)) / parts.sum()  # from the probability to its log-odds
        np.testing.assert_allclose(values[row], parts * factor, atol=1e-5)


def test_a_forest_that_learned_nothing_has_no_contributions():
    stump = RandomForestClassifier(2, max_depth=1, random_state=0).fit(np.zeros((20, 2)), np.arange(20) % 2)
    assert not contributions(stump, np.zeros((1, 2), np.float32))[0].any()


@pytest.mark.parametrize("name", ["lightgbm", "xgboost", "random_forest"])
def test_contributions_of_trees_add_up_to_the_log_odds(X, name):
    learner = fitted_models().learners[name]
    values, method = contributions(learner, X)
    assert method == TREES
    assert values.shape == X.shape
    residual = margin(learner, X) - values.sum(axis=1)
    np.testing.assert_allclose(residual, residual[0], atol=1e-5)  # what is left is the same for every row: the average


def test_contributions_of_a_linear_model_add_up_to_its_decision(X):
    learner = fitted_models().learners["logistic"]
    values, method = contributions(learner, X)
    assert method == LINEAR
    np.testing.assert_allclose(values.sum(axis=1) + learner.classifier_.intercept_[0], margin(learner, X), atol=1e-4)
    assert (values[np.isnan(X)] == 0).all()


def test_a_network_is_explained_by_what_each_known_feature_adds(X):
    learner = fitted_models().learners["mlp"]
    values, method = contributions(learner, X)
    assert method == UNKNOWN
    assert (values[np.isnan(X)] == 0).all()
    for feature in range(X.shape[1]):
        without = X.copy()
        without[:, feature] = np.nan
        np.testing.assert_allclose(values[:, feature], margin(learner, X) - margin(learner, without), atol=1e-5)


def test_baselines_are_explained_by_what_they_count():
    X = np.array([[60, 400, 0, 2, 5, 0]], dtype=np.float32)
    values, method = explained_by(fitted_models(), "history_count", X)
    [counted] = reasons_of(values, X)
    assert [reason.column for reason in counted] == [COLUMNS[3].name, COLUMNS[4].name]
    assert counted[0].contribution == pytest.approx(2)
    assert method == f"{UNKNOWN} of history_count"
    assert reasons_of(explained_by(fitted_models(), "random", X)[0], X) == [()]


def test_an_ensemble_is_explained_by_the_mean_of_its_members(X):
    fitted = fitted_models()
    values, method = explained_by(fitted, "mean_rank", X)
    mean = np.mean([contributions(fitted.learners[name], X)[0] for name in fitted.members], axis=0)
    np.testing.assert_allclose(values, mean, atol=1e-12)
    for row, reasons in enumerate(reasons_of(values, X, top=2)):
        best = [column for column in np.argsort(-mean[row], kind="stable")[:2] if mean[row, column] > 0]
        assert [reason.column for reason in reasons] == [COLUMNS[column].name for column in best]
        for column, reason in zip(best, reasons, strict=True):
            assert reason.contribution == pytest.approx(mean[row, column])
            assert reason.text == describe(COLUMNS[column], float(X[row, column]))
    assert method == "exact tree contributions of lightgbm, xgboost, random_forest"


def test_a_stacked_score_is_taken_apart_exactly_by_its_weights(X):
    fitted = fitted_models()
    assert weights_in(fitted, "stacked") == fitted.stacker.weights
    members = np.column_stack([log_odds(fitted.learners[name], X) for name in fitted.members])
    score = fitted.stacker.log_odds(members)
    residual = score - explained_by(fitted, "stacked", X)[0].sum(axis=1)
    np.testing.assert_allclose(residual, residual[0], atol=1e-5)


def test_members_that_do_not_add_up_are_left_out_and_named(X):
    fitted = fitted_models()
    values, method = explained_by(replace(fitted, members=("xgboost", "mlp")), "mean_rank", X)
    np.testing.assert_allclose(values, contributions(fitted.learners["xgboost"], X)[0])
    assert method == "exact tree contributions of xgboost (without mlp)"


def test_learners_that_explain_themselves_are_asked():
    class Sequence:
        def occluded(self, X):
            return np.ones(X.shape)

    values, method = contributions(ColumnSubset.around(Sequence(), (0, 2)), np.zeros((1, 3), np.float32))
    assert values.tolist() == [[1, 0, 1]]  # what it does not read adds nothing
    assert method == OCCLUSION


def test_windows_of_one_thing_are_one_reason_and_added_up():
    hours = [1, 6, 24]
    columns = [
        FeatureColumn.of("telemetry", "ecc_sbe_volatile_total", "rise", window=timedelta(hours=hour), unit="errors")
        for hour in hours
    ]
    columns.append(FeatureColumn.of("telemetry", "gpu_temp_c", "max", window=timedelta(hours=1), unit="C"))
    columns.append(FeatureColumn.of("history", "xid_memory", "count", window=timedelta(days=30), scope="gpu"))
    columns.append(FeatureColumn.of("history", "xid_memory", "since", scope="gpu", unit="h"))
    assert len({reason_group(column) for column in columns}) == 3
    values = np.array([[0.5, 0.2, 1.0, 1.5, 0.4, -0.6]])
    X = np.array([[100, 900, 17_700, 80, 1, 5]], np.float32)
    [reasons] = reasons_of(values, X, columns, top=5)
    assert [reason.contribution for reason in reasons] == pytest.approx([1.7, 1.5])  # the history took off 0.2
    assert reasons[0].column == columns[2].name
    assert reasons[0].text == "correctable ECC errors (volatile) rose by 17,700 in the last 24 h"


SIX = timedelta(hours=6)
ONSET = [
    *(FeatureColumn.of("onset", name, "surge", window=SIX) for name in ("pcie_replay_total", "ecc_sbe_volatile_total")),
    *(FeatureColumn.of("onset", "errors", name, window=SIX) for name in ("surge_max", "surge_sum", "excess_max")),
    FeatureColumn.of("telemetry", "gpu_temp_c", "max", window=SIX, unit="C"),
]
PCIE = (
    "PCIe replays in the last 6 h: at least 12.0 times its own baseline, "
    "above the 95th percentile of units of this model"
)


@pytest.mark.parametrize(
    ("row", "contributions", "expected"),
    [
        # the leading counter, and all that joins it
        ([12, 2, 12, 24, 12], [0.1, 0.2, 1.0, 0.5, 0.3], [(PCIE, 1.9), ("correctable ECC errors", 0.2)]),
        # further above the fleet is another one, whose own past tells less: which one is not known
        ([12, 2, 12, 24, 30], [0.1, 0.0, 0.2, 0.0, 0.7], [("the error counter furthest above", 0.7), (PCIE, 0.3)]),
        # nothing surges
        ([0.5, 0.2, 0.5, 1, 9], [0.0, 0.0, 0.2, 0.0, 0.7], [("the error counter furthest above the fleet", 0.9)]),
        ([math.nan, math.nan, math.nan, math.nan, 9], [0, 0, 0, 0, 1], [("the error counter furthest", 1.0)]),
        (
            [math.nan, 3, 3, 3, 3],
            [0, 0, 1, 0, 0],
            [("correctable ECC errors (volatile) in the last 6 h: at least 3.0", 1.0)],
        ),
    ],
)
def test_an_onset_names_the_counter_that_leads(row, contributions, expected):
    X = np.log(np.array([[*row, 80]], np.float32))
    values = np.array([[*contributions, 0.05]])
    [[*reasons, heat]] = reasons_of(values, X, ONSET, top=5)
    assert heat.contribution == 0.05
    assert [reason.contribution for reason in reasons] == pytest.approx([size for _, size in expected])
    for reason, (text, _) in zip(reasons, expected, strict=True):
        assert reason.text.startswith(text)


def test_a_reason_says_where_the_value_stands_in_the_fleet():
    X = np.array([[80, 400, 0, 0, 0, 0]], dtype=np.float32)
    fleet = np.repeat(np.array([[60, 400, 0, 0, 0, 0]], np.float32), 500, axis=0)
    fleet[0] = X[0]
    [hot] = reasons_of(explained_by(fitted_models(), "xgboost", X)[0], X, fleet=fleet, noun="GPUs")
    assert "80.0 °C over the last 6 h" in hot[0].text
    assert "median 60.0 °C, 99th percentile 60.0 °C; the highest of 500 GPUs" in hot[0].text


RISE = FeatureColumn.of("telemetry", "ecc_sbe_volatile_total", "rise", unit="errors")
CODE = FeatureColumn.of("static", "model", "code", categories=("A", "B"))


@pytest.mark.parametrize(
    ("column", "value", "fleet", "text"),
    [
        (RISE, 5.0, [*range(200)], "median 100, 1st percentile 2; lower than 97% of 200 GPUs"),
        (RISE, 198.0, [*range(200)], "median 100, 99th percentile 197; among the 2 highest of 200 GPUs"),
        (RISE, 0.0, [0, 0, 0, 9], "equal to the median of the fleet at that time, 0"),
        (RISE, math.nan, [0, math.nan, 1, math.nan], "the same on 50% of the fleet at that time"),
        (CODE, 1.0, [0, 0, 0, 1], "the same on 25% of the fleet at that time"),
    ],
)
def test_percentiles_in_text(column, value, fleet, text):
    assert describe_percentile(column, value, np.array(fleet, np.float32)).endswith(text)


def test_members_are_those_that_make_the_alerts():
    fitted = fitted_models()
    names = {model: [name for name, _ in members_of(fitted, model)] for model in fitted.models}
    assert names["lightgbm"] == ["lightgbm"]
    assert names["intersection"] == names["stacked"] == ["lightgbm", "xgboost", "random_forest"]
    assert names["cascade"] == ["mlp"]
    assert names["vendor_rules"] == ["vendor_rules"]
    assert weights_in(fitted, "mean_rank") == pytest.approx((1 / 3,) * 3)
    with pytest.raises(ValueError, match="svm is not among random"):
        members_of(fitted, "svm")


class Held:
    """The rows that the models were fitted on, as a matrix."""

    def __init__(self) -> None:
        self.X, _ = rows()
        self.columns = COLUMNS
        self.asked = np.empty(0, np.int64)

    def values(self, indices: np.ndarray) -> np.ndarray:
        self.asked = indices
        return self.X[indices]


@pytest.mark.parametrize("model", ["lightgbm", "logistic", "mlp", "history_count", "stacked", "cascade"])
def test_shares_add_up_and_favour_what_tells_positives_apart(model: str):
    matrix = Held()
    attribution = attribute(fitted_models(), matrix, model, np.array([3, 5]), np.arange(300))
    assert sum(attribution["shares"]) == pytest.approx(1)
    assert {3, 5} <= set(matrix.asked.tolist())
    assert attribution["rows"] == len(matrix.asked) <= SAMPLED_ROWS
    frame = attribution_frame(matrix, model, [attribution])
    assert frame["feature"].tolist() == [column.name for column in COLUMNS]
    telling = frame.set_index("feature")["share"]
    if model in ("lightgbm", "logistic"):
        assert telling["telemetry__gpu_temp_c__mean__6h"] > telling["telemetry__power_w__mean__6h"]


def test_no_rows_and_no_effect_give_no_shares():
    matrix = Held()
    assert attribute(fitted_models(), matrix, "lightgbm", np.empty(0, np.int64), np.empty(0, np.int64))["rows"] == 0
    assert attribute(fitted_models(), matrix, "random", np.array([1]), np.arange(20))["shares"] == []
    assert attribution_frame(matrix, "random", [{"shares": [], "rows": 20}]).empty


def test_groups_are_averaged_over_the_folds_and_name_their_channels():
    columns = COLUMNS[:4]
    folds = [{"shares": [0.4, 0.2, 0.2, 0.2], "rows": 10}, {"shares": [0.0, 0.2, 0.2, 0.6], "rows": 10}]
    groups = by_group(attribution_frame(SimpleNamespace(columns=columns), "lightgbm", folds))
    assert groups["group"].tolist() == ["telemetry", "history"]
    assert groups["share"].tolist() == pytest.approx([0.6, 0.4])
    assert list(groups["channels"][1]) == ["xid_memory"]
    assert groups["channels"][0]["gpu_temp_c"] == pytest.approx(0.2)


def test_a_backtest_writes_them(small_backtest):
    frame = pd.read_parquet(small_backtest / "evaluation" / "attributions.parquet")
    assert (frame["model"] == "mean_log_odds").all()
    sums = frame.groupby("fold")["share"].sum()
    assert sums.tolist() == pytest.approx([1.0] * len(sums))
    assert "Feature attributions" in (small_backtest / "report" / "index.html").read_text()


def test_alerts_are_placed_among_the_units_of_their_own_time():
    matrix = Held()
    times = pd.date_range("2026-02-01", periods=3, freq="6h", tz="UTC").repeat(100).as_unit("ms")
    units = [f"g{i % 100}" for i in range(300)]
    matrix.rows = pd.DataFrame({"decision_time": times, "unit": units, "gpu": units})
    alerted = np.array([5, 120, 7])
    fleets, sampled = alert_reasons._fleets(matrix, matrix.values, alerted, np.arange(300))
    assert not sampled
    for row, fleet in zip(alerted, fleets, strict=True):
        of_time = np.flatnonzero(times == times[row])
        assert np.array_equal(fleet, matrix.X[of_time], equal_nan=True)
    reported = alert_reasons.explain_rows(fitted_models(), matrix, "mean_rank", alerted, candidates=np.arange(300))
    assert [(alert.decision_time, alert.unit) for alert in reported] == [(times[row], units[row]) for row in alerted]
    assert all("fleet at that time" in reason for alert in reported for reason in alert.reasons)


def test_a_large_fleet_is_sampled_and_the_alerts_stay_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alert_reasons, "_FLEET_UNITS", 20)
    matrix = Held()
    matrix.rows = pd.DataFrame({"decision_time": pd.to_datetime(["2026-02-01"] * 300, utc=True).as_unit("ms")})
    fleets, sampled = alert_reasons._fleets(matrix, matrix.values, np.array([7]), np.arange(300))
    assert sampled
    assert len(fleets[0]) == 21  # every fifteenth, and the alert itself
    assert any(np.array_equal(row, matrix.X[7], equal_nan=True) for row in fleets[0])
