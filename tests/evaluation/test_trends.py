"""How the gain of sliding training grows with time, against loops and planted lines."""

import numpy as np
import pandas as pd
import pytest

from evaluation.metrics.bootstrap import resample_fleets, resample_units
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.scored import split_predictions
from evaluation.metrics.trends import MONTH_DAYS, PERIOD_DAYS, days_since, paired_trend
from tests.models.fleet_predictions import fleet


def pair(seed, times=80, gain=None, **settings):
    """Sliding and train-once predictions; ``gain(share of the time)`` is how often the sliding one is right more."""
    models = [("xgboost", "sliding", 0.6), ("xgboost", "train_once", 0.6)]
    frame = fleet(seed, models, units=40, times=times, incidents=120, k=3, **settings)
    if gain is not None:
        frame = _worsen(frame, gain, np.random.default_rng(seed))
    return split_predictions(frame, 3)


def _worsen(frame, gain, rng):
    """Reverse the ranks of the train-once variant at decision times drawn by the gain."""
    times = np.sort(frame["decision_time"].unique())
    share = {time: gain(at / (len(times) - 1)) for at, time in enumerate(times)}
    bad = {time for time in times if rng.random() < share[time]}
    hit = frame["decision_time"].isin(bad) & (frame["variant"] == "train_once")
    units = frame["unit"].nunique()
    return frame.assign(
        rank=np.where(hit, units + 1 - frame["rank"], frame["rank"]),
        alert=np.where(hit, units + 1 - frame["rank"] <= 3, frame["alert"]),
    )


def slow_slope(sliding, once, days, k):
    """The documented line, one row at a time."""
    points = []
    for period in sorted({int(day // PERIOD_DAYS) for day in days}):
        differences, base, ages = [], 0, [day for day in days if int(day // PERIOD_DAYS) == period]
        for scored in (sliding, once):
            rows = [
                at
                for at in range(len(scored.rank))
                if int(days[scored.time[at]] // PERIOD_DAYS) == period and scored.rank[at] <= k and scored.known[at]
            ]
            if rows:
                differences.append(sum(scored.positive[at] for at in rows) / len(rows))
                base = base or len(rows)
        if len(differences) == 2:
            points.append((np.mean(ages) / MONTH_DAYS, differences[0] - differences[1], base))
    x, y, weight = map(np.array, zip(*points, strict=True))
    return np.polyfit(x, y, 1, w=np.sqrt(weight))[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_slope_is_that_of_weighted_least_squares_over_the_weeks(seed):
    sliding, once = pair(seed, gain=lambda share: share)
    days = days_since(sliding.shared.times_ms, int(sliding.shared.times_ms[0]))
    found = paired_trend(sliding, once, np.empty((0, 40)), days)[0]
    assert found["slope"] == pytest.approx(slow_slope(sliding, once, days, 3))
    assert np.isnan(found["low"])
    assert found["periods"] == 3


def test_a_gain_that_grows_is_shown_to_grow_and_one_that_stays_is_not():
    weights = resample_units(40, 200, 7)
    grows = pair(4, times=200, gain=lambda share: share)
    stays = pair(4, times=200, gain=lambda _: 0.5)
    days = days_since(grows[0].shared.times_ms, int(grows[0].shared.times_ms[0]))
    for growing, constant in zip(paired_trend(*grows, weights, days), paired_trend(*stays, weights, days), strict=True):
        assert 0 < growing["low"] < growing["slope"] < growing["high"]
        assert growing["share_growing"] > 0.97
        assert growing["last"] > growing["first"]
        assert constant["low"] < 0 < constant["high"]


def test_two_variants_that_are_the_same_have_no_slope():
    sliding, _ = pair(5)
    days = days_since(sliding.shared.times_ms, int(sliding.shared.times_ms[0]))
    for found in paired_trend(sliding, sliding, resample_units(40, 30, 1), days):
        assert (found["slope"], found["low"], found["high"]) == (0.0, 0.0, 0.0)


def test_one_week_makes_no_line():
    sliding, once = pair(6, times=20)
    days = days_since(sliding.shared.times_ms, int(sliding.shared.times_ms[0]))
    for found in paired_trend(sliding, once, resample_units(40, 30, 1), days):
        assert np.isnan([found["slope"], found["low"], found["high"]]).all()


def test_the_evaluation_holds_a_trend_for_each_model_with_both_variants():
    frame = fleet(7, [("xgboost", "sliding", 0.4), ("xgboost", "train_once", 2.0), ("mlp", "sliding", 1.0)], times=60)
    measured = evaluate(frame, k=2, bootstrap=30, seed=0).trends
    assert list(measured["model"]) == ["xgboost", "xgboost"]
    assert list(measured["statistic"]) == ["precision_at_k", "average_precision"]
    assert evaluate(fleet(8), k=2, bootstrap=0, seed=0).trends.empty


def test_fleets_are_resampled_each_within_itself():
    weights = resample_fleets([5, 9], 40, 3)
    assert weights.shape == (40, 14)
    assert (weights[:, :5].sum(axis=1) == 5).all()
    assert (weights[:, 5:].sum(axis=1) == 9).all()
    pd.testing.assert_frame_equal(pd.DataFrame(weights[:, :5]), pd.DataFrame(resample_units(5, 40, 3)))
