from datetime import datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from evaluation.backtest.promises import FOLD_COLUMNS, decisions_frame, walk_promises
from evaluation.metrics.lead_time import unforeseen_incidents
from models.config import PrecisionTargetsSection
from tests.evaluation.fleet_matrix import FOLD, SECTION, UNITS, FleetMatrix, folds, predictions
from tests.models.fake_matrix import GAP, HORIZON, START


@pytest.fixture(scope="module")
def walked():
    matrix = FleetMatrix()
    return matrix, predictions(matrix), walk_promises(predictions(matrix), folds(), matrix, SECTION, k=2)


def test_nothing_is_promised_at_the_first_refit_and_something_later(walked):
    frame = walked[2].folds
    assert list(frame.columns) == list(FOLD_COLUMNS)
    assert len(frame) == 2 * 2 * 4
    good = frame[(frame["model"] == "good") & (frame["target"] == 0.5)].set_index("fold")
    assert not good["promised"][0]
    assert good["why"][0].startswith("no incident among 0 earlier decisions")
    assert good["promised"][3]
    assert good["lower"][3] >= 0.5
    assert good["earlier_drains"][3] > good["earlier_nodes"][3] / 2


def first_alerts(alerts):
    """Those that begin a drain, one after the other."""
    began, first = {}, []
    for alert in alerts.sort_values("decision_time").itertuples():
        if alert.unit not in began or alert.decision_time > began[alert.unit] + GAP + HORIZON:
            began[alert.unit] = alert.decision_time
            first.append(alert.Index)
    return alerts.loc[first]


def alerted_under_promise(frame, promised, target):
    """Rows of the good model at or above the threshold that was promised in their fold."""
    of_target = promised.folds[(promised.folds["model"] == "good") & (promised.folds["target"] == target)].set_index(
        "fold"
    )
    good = frame[frame["model"] == "good"]
    return good[good["risk"] >= good["fold"].map(of_target["threshold"]).fillna(np.inf)]


def test_a_promise_is_judged_on_the_drains_that_begin_in_its_fold(walked):
    _, frame, promised = walked
    row = promised.folds[(promised.folds["model"] == "good") & (promised.folds["target"] == 0.5)].iloc[3]
    drains = first_alerts(alerted_under_promise(frame, promised, 0.5))
    in_fold, test = drains[drains["fold"] == 3], frame[(frame["model"] == "good") & (frame["fold"] == 3)]
    assert row["drains"] == len(in_fold) > 0
    assert row["hits"] == (in_fold["label"] == 1).sum()
    assert row["known_drains"] == in_fold["label"].notna().sum()
    assert row["caught"] == in_fold.loc[in_fold["label"] == 1, "incident"].nunique()
    assert row["incidents"] == test.loc[test["label"] == 1, "incident"].nunique()


def test_a_refit_begins_no_second_drain_of_a_unit_that_stays_alerted():
    matrix = FleetMatrix()
    daily = predictions(matrix).query("model == 'good'")
    daily["fold"] = ((daily["decision_time"] - START) // timedelta(days=1)).astype(np.int32)
    days = pd.DataFrame({"fold": range(28), "variant": "sliding"})
    section = PrecisionTargetsSection(values=(0.5,), horizon=timedelta(hours=72))
    promised = walk_promises(daily, days, matrix, section, k=2)
    alerts = alerted_under_promise(daily, promised, 0.5)
    last: dict[str, datetime] = {}
    starts = []
    for alert in alerts.sort_values("decision_time").itertuples():
        if alert.unit not in last or alert.decision_time > last[alert.unit] + GAP + timedelta(hours=72):
            last[alert.unit] = alert.decision_time
            starts.append(alert.fold)
    by_fold = promised.folds.set_index("fold")["drains"]
    assert by_fold.sum() == len(starts) > 0
    assert by_fold[by_fold > 0].to_dict() == pd.Series(starts).value_counts().to_dict()
    restarted = alerts.groupby(["unit", "fold"]).ngroups
    assert len(starts) < restarted, "no unit stayed alerted over a refit: the test shows nothing"


def test_pooled_recall_counts_each_incident_once(walked):
    _, frame, promised = walked
    row = promised.pooled.set_index(["model", "target"]).loc[("good", 0.5)]
    assert row["incidents"] == frame.loc[frame["label"] == 1, "incident"].nunique()
    assert row["recall"] == pytest.approx(row["caught"] / row["incidents"])
    assert row["recall_promised"] >= row["recall"]
    assert row["kept"]
    assert row["precision"] >= 0.5


@pytest.mark.parametrize("name", ["mean_rank", "intersection"])
def test_a_model_that_only_orders_units_promises_nothing(walked, name):
    matrix, frame, _ = walked
    one = frame[frame["model"] == "good"].assign(model=name)
    promised = walk_promises(one, folds(), matrix, SECTION, k=2)
    assert not promised.folds["promised"].any()
    assert promised.folds["why"].str.startswith(f"{name} only ranks").all()
    assert [promise.kind for promise in promised.current[name] if promise.threshold is not None] == ["budget"]


def test_the_future_moves_no_promise():
    matrix = FleetMatrix()
    frame = predictions(matrix)
    promised = walk_promises(frame, folds(), matrix, SECTION, k=2).folds
    cut = START + 2 * FOLD

    poisoned = FleetMatrix()
    late = poisoned.starts > 2 * 7 * 24
    poisoned.of = np.where(late, (poisoned.of + 17) % UNITS, poisoned.of)
    other = frame.copy()
    after = (other["decision_time"] >= cut).to_numpy()
    other.loc[after, "risk"] = 1 - other.loc[after, "risk"]
    changed = walk_promises(other, folds(), poisoned, SECTION, k=2).folds

    promise = ["model", "target", "fold", "promised", "threshold", "lower", "best", "earlier_drains", "earlier_hits"]
    is_earlier = promised["fold"] <= 2
    pd.testing.assert_frame_equal(promised.loc[is_earlier, promise], changed.loc[is_earlier, promise])
    assert not promised.loc[~is_earlier, promise].equals(changed.loc[~is_earlier, promise])


def test_outcomes_that_were_entered_late_do_not_count_before():
    matrix = FleetMatrix(late=timedelta(days=9))
    promised = walk_promises(predictions(matrix), folds(), matrix, SECTION, k=2).folds
    good = promised[(promised["model"] == "good") & (promised["target"] == 0.5)].set_index("fold")
    assert good["earlier_hits"][1] == 0


def test_the_current_decisions_look_back_on_everything(walked):
    matrix, _, promised = walked
    kinds = [(promise.kind, promise.asked) for promise in promised.current["good"]]
    assert kinds == [("precision", 0.5), ("precision", 0.85), ("budget", 2)]
    assert promised.until == matrix.span[1]
    frame = decisions_frame(promised)
    assert len(frame) == 6
    assert frame["threshold"].dtype == "float64"


def test_a_drain_is_judged_by_the_longer_of_the_two_horizons(walked):
    matrix, frame, promised = walked

    def pooled(horizon):
        return walk_promises(frame, folds(), matrix, SECTION.model_copy(update={"horizon": horizon}), k=2).pooled

    pd.testing.assert_frame_equal(pooled(timedelta(hours=1)), promised.pooled)
    longer = pooled(timedelta(hours=72))
    blind, before = (table[table["model"] == "blind"].iloc[0] for table in (longer, promised.pooled))
    assert blind["best"] > before["best"]


def test_targets_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="give precisions between 0 and 1"):
        PrecisionTargetsSection(values=(0.5, 1.0))


def test_failures_that_stand_out_differ_from_those_that_do_not(walked):
    _, frame, _ = walked
    out = unforeseen_incidents(frame[frame["model"] == "good"])
    shown = out["incident"] % 4 != 0
    assert out.loc[shown, "seen"].mean() > 0.95
    # Random ranks put a unit in the top 5 % of at least one of four times in a fifth of the cases.
    assert out.loc[~shown, "seen"].mean() == pytest.approx(out["chance"].mean(), abs=0.12)
    assert 0.1 < out["chance"].mean() < 0.3
    assert out["announced"].isna().all()


def test_the_truth_says_which_failures_announced_themselves(walked):
    _, frame, _ = walked
    one = frame[frame["model"] == "good"]
    odd = (one["incident"].fillna(1) % 2 == 0).to_numpy(dtype=bool)
    out = unforeseen_incidents(frame, one.assign(model="oracle", variant="oracle", risk=np.where(odd, 0.5, 0.01)))
    assert (out["announced"] == (out["incident"] % 2 == 0)).all()
    assert (out["true_base"] < 0.1).all()
