"""What the scores are made of: shares that add up, of every feature, with the ones that matter in front."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from models.explanation import alert_reasons
from models.explanation.alert_reasons import SAMPLED_ROWS, attribute, attribution_frame, by_group
from tests.models.small_models import COLUMNS, fitted_models, rows


class Held:
    """The rows that the models were fitted on, as a matrix."""

    def __init__(self) -> None:
        self.X, _ = rows()
        self.columns = COLUMNS
        self.asked = np.empty(0, np.int64)

    def values(self, indices: np.ndarray) -> np.ndarray:
        self.asked = indices
        return self.X[indices]


@pytest.mark.parametrize("model", ["lightgbm", "logistic", "mlp", "history_count"])
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
    assert "What the scores are made of" in (small_backtest / "report" / "index.html").read_text()


@pytest.mark.parametrize("model", ["mean_rank", "stacked", "intersection", "cascade"])
def test_ensembles_have_shares_too(model: str):
    attribution = attribute(fitted_models(), Held(), model, np.array([3, 5]), np.arange(300))
    assert sum(attribution["shares"]) == pytest.approx(1)


def test_alerts_are_placed_among_the_units_of_their_own_time():
    matrix = Held()
    times = pd.date_range("2026-02-01", periods=3, freq="6h", tz="UTC").repeat(100).as_unit("ms")
    units = [f"g{i % 100}" for i in range(300)]
    matrix.rows = pd.DataFrame({"decision_time": times, "unit": units, "gpu": units})
    asked = np.array([5, 120, 7])
    fleets, sampled = alert_reasons._fleets(matrix, matrix.values, asked, np.arange(300))
    assert not sampled
    for row, fleet in zip(asked, fleets, strict=True):
        same = np.flatnonzero(times == times[row])
        assert np.array_equal(fleet, matrix.X[same], equal_nan=True)
    reported = alert_reasons.explain_rows(fitted_models(), matrix, "mean_rank", asked, among=np.arange(300))
    assert [row["row"] for row in reported] == asked.tolist()
    assert all("fleet at that time" in reason for row in reported for reason in row["reasons"])


def test_a_large_fleet_is_sampled_and_the_alerts_stay_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alert_reasons, "_FLEET_UNITS", 20)
    matrix = Held()
    matrix.rows = pd.DataFrame({"decision_time": pd.to_datetime(["2026-02-01"] * 300, utc=True).as_unit("ms")})
    fleets, sampled = alert_reasons._fleets(matrix, matrix.values, np.array([7]), np.arange(300))
    assert sampled
    assert len(fleets[0]) == 21  # every fifteenth, and the alert itself
    assert any(np.array_equal(row, matrix.X[7], equal_nan=True) for row in fleets[0])
