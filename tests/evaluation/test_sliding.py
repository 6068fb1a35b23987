import re
from datetime import UTC, datetime, timedelta

import lightgbm
import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression

from evaluation.backtest.run import run_backtest
from evaluation.backtest.sliding import Backtest, BacktestSetup
from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from foundation.instants import from_ms
from models.config import (
    BacktestSection,
    CalibrationSection,
    CascadeSection,
    ModelsSection,
    ParallelSection,
    TrainingSection,
)
from models.rows.ranking import name_hashes
from models.training.final import fit_final
from models.training.fitted import model_names
from tests.models.fake_matrix import GAP, HORIZON, START, FakeMatrix

QUICK = ModelsSection(
    learners=("lightgbm", "logistic"),
    parallel=ParallelSection(members=("lightgbm", "logistic", "random_forest"), min_votes=2),
    cascade=CascadeSection(stages=("lightgbm", "logistic"), recall_floor=0.9),
    calibration=CalibrationSection(slice=timedelta(days=5), refit=False),
    settings={"lightgbm": {"n_estimators": 20, "learning_rate": 0.2}, "random_forest": {"n_estimators": 12}},
)
REFIT = QUICK.model_copy(update={"calibration": CalibrationSection(slice=timedelta(days=5), refit=True)})
SPAN_15 = TrainingSection(window=timedelta(days=15), negative_ratio=8)
QUICK_SLIDING = SPAN_15.model_copy(update={"refit_every": timedelta(days=14)})
AUTO = BacktestSection()


def backtest(matrix, training=SPAN_15, models=QUICK, section=AUTO, **more):
    return run_backtest(matrix, training=training, models=models, backtest=section, seed=7, **more)


@pytest.fixture(scope="module")
def matrix():
    return FakeMatrix(units=24, days=40, incidents=50, companions=8, seed=3)


@pytest.fixture(scope="module")
def result(matrix):
    return backtest(matrix)


def test_every_grid_row_of_the_test_period_is_scored_once_by_each_model(matrix, result):
    grid = matrix.rows[~matrix.rows["augmented"]]
    times = grid["decision_time"].unique()
    first = times[0] + (times[-1] - times[0]) / 3
    expected = grid[grid["decision_time"] >= result.predictions["decision_time"].min()]
    # A third of 40 days is before the shortest span, 15 days, fits: then it is as soon as that does.
    first = max(first, START + timedelta(days=16, minutes=10))
    assert timedelta(0) <= result.predictions["decision_time"].min() - first <= timedelta(hours=6)
    for _, part in result.predictions.groupby(["model", "variant"], observed=True):
        assert not part.duplicated(["decision_time", "unit"]).any()
        assert list(part["decision_time"]) == list(expected["decision_time"])
        assert list(part["unit"]) == list(expected["unit"])
        assert list(part["gpu"]) == list(expected["gpu"])
    assert result.models == (
        "random", "history_count", "vendor_rules", "lightgbm", "logistic",
        "intersection", "min_votes", "mean_rank", "mean_log_odds", "stacked", "cascade",
    )  # fmt: skip
    static = result.predictions[result.predictions["variant"] == "train_once"]
    assert set(static["model"]) == set(result.models) - {"random", "history_count", "vendor_rules"}


def test_ranks_alerts_and_risks_agree_with_the_scores(result):
    for (model, variant), part in result.predictions.groupby(["model", "variant"], observed=True):
        for _, rows_at in part.groupby("decision_time"):
            assert sorted(rows_at["rank"]) == list(range(1, len(rows_at) + 1))
            tie = name_hashes(rows_at["unit"])
            order = np.lexsort((tie, -rows_at["score"].to_numpy()))
            assert rows_at["rank"].to_numpy()[order].tolist() == list(range(1, len(rows_at) + 1)), (model, variant)
            by_score = rows_at.sort_values("score")["risk"].to_numpy()
            assert (np.diff(by_score) >= -1e-9).all()
            ranked = rows_at.sort_values("rank")
            within = (~ranked["node"].duplicated()).cumsum() <= result.k
            if model in ("intersection", "cascade"):
                assert rows_at.loc[rows_at["alert"], "node"].nunique() <= result.k
            elif model != "min_votes":
                assert (ranked["alert"] == within).all()
    assert result.predictions["risk"].between(0, 1, inclusive="neither").all()


def test_folds_follow_the_refits(result):
    sliding = result.folds[result.folds["variant"] == "sliding"].reset_index(drop=True)
    assert (sliding["refit_at"].diff().dropna() == timedelta(days=7)).all()
    assert (sliding["test_start"] == sliding["refit_at"]).all()
    assert (sliding["train_end"] == sliding["refit_at"] - GAP - HORIZON).all()
    assert (sliding["train_end"] - sliding["train_start"] == sliding["span"]).all()
    static = result.folds[result.folds["variant"] == "train_once"]
    assert static["refit_at"].nunique() == 1
    frame = result.predictions
    frames = [frame[(frame["variant"] == v) & (frame["model"] == "lightgbm")] for v in ("sliding", "train_once")]
    is_equal = frames[0]["score"].to_numpy() == frames[1]["score"].to_numpy()
    assert is_equal[frames[0]["fold"] == 0].all()
    assert not is_equal[frames[0]["fold"] == 1].all()


def test_models_find_the_signal(result):
    frame = result.predictions[result.predictions["label"].notna() & (result.predictions["variant"] == "sliding")]
    precision = frame[frame["rank"] <= result.k].groupby("model", observed=True)["label"].mean()
    assert precision["lightgbm"] > 2 * precision["random"]
    assert precision["mean_rank"] > 2 * precision["random"]


@pytest.mark.parametrize("models", [QUICK, REFIT], ids=["held out", "refitted"])
def test_what_is_unknown_at_a_refit_changes_neither_models_nor_scores(matrix, result, models):
    refit = result.folds["refit_at"].iloc[0]
    end = result.folds["test_end"].iloc[0]
    rng = np.random.default_rng(11)
    poisoned = FakeMatrix(units=24, days=40, incidents=50, companions=8, seed=3)
    late = poisoned.events["known_at"] > refit
    assert late.any()
    poisoned.events.loc[late, "unit"] = rng.choice(poisoned.rows["unit"].unique(), late.sum())
    poisoned.events = poisoned.events[~late | (rng.random(len(late)) < 0.7)]
    unestablished = poisoned.rows["augmented"] & (poisoned.rows["established_at"] > refit)
    future = ((poisoned.rows["decision_time"] > end) | unestablished).to_numpy()
    poisoned.features[future] = rng.normal(size=(future.sum(), 6)) * 100
    honest = poisoned.labels

    def labels(as_of=None, *, horizon=None, rows=None):
        frame = honest(as_of, horizon=horizon)
        if as_of is not None:  # labels that cannot be known yet must not be looked at, whatever they say
            frame.loc[frame["complete_at"] > as_of, "label"] = rng.integers(0, 2)
        return frame if rows is None else frame.iloc[rows]

    poisoned.labels = labels
    section = BacktestSection(first_test=refit.to_pydatetime(), last_test=end.to_pydatetime())
    poisoned_result = backtest(poisoned, models=models, section=section).predictions
    full_result = result if models is QUICK else backtest(matrix, models=models)
    clean = full_result.predictions[full_result.predictions["fold"] == 0]
    for column in ("score", "risk", "rank", "alert"):
        assert np.array_equal(poisoned_result[column].to_numpy(), clean[column].to_numpy()), column


def test_a_fit_after_calibration_uses_the_newest_rows_and_keeps_the_calibration(matrix):
    reported = []
    held_out, again = (
        fit_final(
            matrix,
            training=SPAN_15,
            models=models.model_copy(update={"profile": "cascade"}),
            backtest=AUTO,
            seed=7,
            progress=lambda *counts: reported.append(counts),
        )
        for models in (QUICK, REFIT)
    )
    fits = [(name, what) for name, _, what in reported]
    assert fits[0][0] == 1
    assert [what for _, what in fits].count("cascade") == 3  # once, and twice where it is fitted again
    assert reported[-1][0] == reported[-1][1]
    assert held_out.calibrated
    assert again.calibrated
    assert again.n_incidents > held_out.n_incidents
    assert again.n_positive > held_out.n_positive
    assert again.calibrators == held_out.calibrators
    assert again.cascade.thresholds == held_out.cascade.thresholds
    rows = matrix.rows[~matrix.rows["augmented"]].tail(48)
    values = matrix.values(rows.index)
    one, other = (model.score(values, rows["decision_time"], rows["unit"])["score"] for model in (held_out, again))
    assert not np.array_equal(one, other)


def test_k_is_the_mean_number_of_nodes_with_a_positive_before_the_test(matrix, result):
    refit = result.folds["refit_at"].iloc[0]
    labels = matrix.labels(refit)
    known = ~matrix.rows["augmented"] & labels["label"].notna() & (labels["complete_at"] <= refit)
    times = matrix.rows.loc[known, "decision_time"].nunique()
    positive = matrix.rows[known & (labels["label"] == 1).fillna(False)]
    assert result.k == max(1, round(len(positive.drop_duplicates(["decision_time", "node"])) / times))
    assert backtest(matrix, section=BacktestSection(k=3)).k == 3
    for k in (0, 1 + matrix.rows["node"].nunique()):
        with pytest.raises(InputError, match=rf"k is {k} \(parameter backtest\.k\)"):
            backtest(matrix, section=BacktestSection(k=k))


def test_defaults_score_the_last_third_of_45_days():
    matrix = FakeMatrix(units=8, days=45, incidents=20, companions=4)
    result = backtest(matrix, TrainingSection(refit_every="30d"))
    assert result.predictions["decision_time"].min() <= START + timedelta(days=30)
    assert result.predictions["decision_time"].max() == matrix.rows["decision_time"].max()
    assert [line for line in result.skipped if line.startswith("window")] == [
        "window: 14 d is longer than the history at every refit",
        "window: 28 d is longer than the history at every refit",
        "window: 56 d is longer than the history at every refit",
        "window: 90 d is longer than the history at every refit",
    ]


def test_no_span_fits(matrix):
    with pytest.raises(
        InputError, match=r"60 d, 90 d .*needs 61\.01 d, .* span 39\.75 d \(parameter training\.candidate_windows\)"
    ):
        backtest(matrix, TrainingSection(candidate_windows=("60d", "90d")))
    for span, reported in (("60d", "candidates 60 d"), ("expanding", "expanding, at least 60 d")):
        with pytest.raises(InputError, match=rf"fits: the data span 40 d, gap .* take 1\.01 d; {reported} \("):
            fit_final(
                matrix,
                training=TrainingSection(window=span, candidate_windows=("60d",)),
                models=QUICK,
                backtest=AUTO,
                seed=1,
            )
    short, until = TrainingSection(candidate_windows=("8d", "14d")), START + timedelta(days=8)
    message = (
        r"fits: 8 d of the data lie before 2026-01-09 00:00 UTC \(--until\), gap .* 8 d, 14 d .* Give a later time,"
    )
    with pytest.raises(InputError, match=message):
        fit_final(matrix, training=short, models=QUICK, backtest=AUTO, seed=1, until=until)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"first_test": START + timedelta(days=10)}, r"first_test 2026-01-11 .*from 2026-01-17 00:10 UTC on \(param"),
        ({"first_test": datetime(2027, 1, 1, tzinfo=UTC)}, r"no decision time from 2027-01-01 00:00 UTC to 2026-02-09"),
        ({"last_test": START + timedelta(days=16)}, "the test period is empty"),
    ],
)
def test_a_test_period_that_cannot_be_is_refused(matrix, section, message):
    with pytest.raises(InputError, match=message):
        backtest(matrix, section=BacktestSection(**section))


def test_an_empty_matrix():
    matrix = FakeMatrix(units=4, days=10, incidents=2)
    matrix.rows, matrix.features = matrix.rows.iloc[:0], matrix.features[:0]
    with pytest.raises(InputError, match="the feature matrix has no decision rows"):
        backtest(matrix)


def test_one_class_in_every_span_is_an_error_that_says_where(matrix):
    quiet = FakeMatrix(units=6, days=30, incidents=0)
    with pytest.raises(InputError, match=r"lacks failures.* \(3 refits from .*, window 10 d: .*Give a longer window"):
        backtest(quiet, TrainingSection(window="10d"))
    only = r"lacks failures.*: refit at 2026-01-31 .*no positive rows"
    with pytest.raises(InputError, match=only):
        fit_final(quiet, training=TrainingSection(window="10d"), models=QUICK, backtest=AUTO, seed=1)


def test_a_refit_without_telemetry_or_incident_since_the_last_is_not_fitted_again():
    begin, end = START + timedelta(days=45), START + timedelta(days=80)

    def plan(empty, quiet):
        matrix = FakeMatrix(units=8, days=100, incidents=60, augmentation=1, companions=2, seed=1)
        time, start = matrix.rows["decision_time"], matrix.events["start"]
        matrix.events = matrix.events[(start < begin) | (start > end) | (not quiet)].reset_index(drop=True)
        matrix.features[((time > begin) & (time < end)).to_numpy() & empty] = np.nan
        replay = Backtest(matrix, BacktestSetup(SPAN_15, QUICK, AUTO, 7))
        return list(replay.plan()), [from_ms(at) for at in replay.schedule.refits_ms]

    refits, at = plan(empty=True, quiet=True)
    again = [refit for refit in refits if refit.source != refit.fold]
    assert len(again) == 4
    assert {refit.source for refit in again} == {again[0].fold - 1}
    for refit in refits:
        inside = begin + GAP + HORIZON < at[max(refit.fold - 1, 0)] and at[refit.fold] < end + GAP + HORIZON
        assert (refit in again) == inside
    assert "no telemetry and no incident since" in str(again[0].unfit)
    for empty, quiet in ((True, False), (False, True)):
        assert not [refit for refit in plan(empty, quiet)[0] if "no telemetry" in str(refit.unfit)]


def test_from_events_alone_refits_take_the_whole_history_and_wait_for_new_incidents():
    matrix = FakeMatrix(units=8, days=120, incidents=150, augmentation=0, seed=1)
    quiet = matrix.events["start"] > START + timedelta(days=80)
    matrix.events = matrix.events[~quiet].reset_index(drop=True)
    matrix.columns = [FeatureColumn.of("history", f"f{i}", "recency", scope="node") for i in range(6)]
    replay = Backtest(matrix, BacktestSetup(TrainingSection(refit_every="5d"), QUICK, AUTO, 7))
    times, refits = [from_ms(refit_ms) for refit_ms in replay.schedule.refits_ms], list(replay.plan())
    known = matrix.events["known_at"]
    for refit in refits:
        assert refit.span == timedelta(days=(times[refit.source] - GAP - HORIZON - START) // timedelta(days=1))
        new = int(((known > times[refit.source]) & (known <= times[refit.fold])).sum())
        assert refit.fold == refit.source or new < 10
    skipped = [refit.fold - refit.source for refit in refits]
    assert max(skipped) == 3  # the quiet end is fitted again now and then: the level of risks falls
    assert "new incidents since" in str(refits[skipped.index(3)].unfit)


def test_a_fold_without_positives_falls_back_and_is_listed():
    matrix = FakeMatrix(units=20, days=60, incidents=60, seed=1)
    start = matrix.events["start"]
    first, gap_start = START + timedelta(days=22), START + timedelta(days=36)
    keep = ((start > first) & (start < gap_start)) | (start > START + timedelta(days=50))
    matrix.events = matrix.events[keep]
    training = TrainingSection(window="7d", negative_ratio=5)
    section = BacktestSection(first_test=START + timedelta(days=15))
    result = backtest(matrix, training, section=section, explain=2)
    folds = [re.fullmatch(r"fold \(fold (\d+)\): (.*)", line) for line in result.skipped if line.startswith("fold")]
    why = {int(fold[1]): fold[2] for fold in folds}
    assert "0 positives" in why[0]
    assert why[0].endswith("scored by history_count only")
    assert "scored by the models of 2026-02-" in why[4]
    sliding = result.folds[result.folds["variant"] == "sliding"].set_index("fold")
    assert not sliding.loc[0, "fitted"]
    assert sliding.loc[4, "refit_at"] == sliding.loc[3, "refit_at"]
    static = result.folds[result.folds["variant"] == "train_once"].set_index("fold")
    first_fitted = sliding.index[sliding["fitted"]][0]
    assert (static.loc[first_fitted:, "refit_at"] == sliding.loc[first_fitted, "refit_at"]).all()
    frame = result.predictions
    assert frame[(frame["fold"] == 0) & (frame["model"] == "lightgbm")]["score"].nunique() == 1


def test_a_killed_run_reuses_its_learners(matrix, result, tmp_path, monkeypatch):
    def kill(n_done, total, stage):
        if n_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backtest(matrix, cache=tmp_path, progress=kill)
    cached = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert cached
    broken = next(path for path in tmp_path.rglob("*") if path.is_file())
    broken.write_bytes(broken.read_bytes()[:100])
    (tmp_path / "older-code").mkdir()
    resumed = backtest(matrix, cache=tmp_path)
    pd.testing.assert_frame_equal(resumed.predictions, result.predictions, check_exact=True)
    pd.testing.assert_frame_equal(resumed.folds, result.folds, check_exact=True)
    assert resumed.drift == result.drift
    assert len(list(tmp_path.iterdir())) == 1
    assert cached <= {path.name for path in tmp_path.rglob("*") if path.is_file()}


def test_another_profile_fits_nothing_that_was_fitted_before(matrix, tmp_path, monkeypatch):
    cascade = QUICK.model_copy(update={"profile": "cascade"})
    fresh = backtest(matrix, models=cascade, explain=2)
    backtest(matrix, cache=tmp_path, explain=2)

    def refuse(*_args, **_more):
        raise AssertionError("fitted again")

    for learner in (lightgbm.LGBMClassifier, LogisticRegression, RandomForestClassifier):
        monkeypatch.setattr(learner, "fit", refuse)
    changed = backtest(matrix, models=cascade, cache=tmp_path, explain=2)
    pd.testing.assert_frame_equal(changed.predictions, fresh.predictions, check_exact=True)
    pd.testing.assert_frame_equal(changed.attributions, fresh.attributions, check_exact=True)
    assert changed.reasons == fresh.reasons


def test_memory_leaves_negatives_out_and_says_so(matrix, result, monkeypatch):
    """Half of the rows of the largest fit have room."""
    columns = len(matrix.columns)
    most = int((result.folds["n_positive"] + result.folds["n_negative"]).max()) // 2
    monkeypatch.setattr(TrainingSection, "bytes_of_a_fit", property(lambda _: 4 * columns * most))
    limited = backtest(matrix, QUICK_SLIDING)
    assert ((limited.folds["n_positive"] + limited.folds["n_negative"]) <= most).all()
    unlimited = result.folds[result.folds["refit_at"].isin(limited.folds["refit_at"])]
    assert set(limited.folds["n_positive"]) <= set(unlimited["n_positive"])
    assert any(re.match(r"negatives .* training.memory limited them to", line) for line in limited.skipped)


def test_the_final_models_score_as_the_backtest_would(matrix):
    fitted = fit_final(matrix, training=SPAN_15, models=QUICK, backtest=AUTO, seed=7)
    assert fitted.refit_at == matrix.span[1]
    rows = matrix.rows[~matrix.rows["augmented"]].tail(48)
    values = matrix.values(rows.index)
    frame = fitted.score(values, rows["decision_time"], rows["unit"])
    assert list(frame) == ["decision_time", "unit", "model", "score", "risk", "rank", "alert"]
    assert len(frame) == len(fitted.models) * 48
    # The same rows in another order get the same answers.
    order = np.random.default_rng(0).permutation(48)
    reordered = fitted.score(values[order], rows["decision_time"].iloc[order], rows["unit"].iloc[order])
    keys = ["model", "decision_time", "unit"]
    pd.testing.assert_frame_equal(
        frame.sort_values(keys, ignore_index=True), reordered.sort_values(keys, ignore_index=True), check_exact=True
    )
    with pytest.raises(InputError, match="the rows have 5 features, but the models were fitted on 6"):
        fitted.score(values[:, :5], rows["decision_time"], rows["unit"])


def test_profile_and_member_names_are_checked():
    with pytest.raises(InputError, match=r"'xgboost' is not a model of this run .*Add xgboost to models\.learners"):
        model_names(ModelsSection(learners=("lightgbm",), profile="xgboost"))
    with pytest.raises(InputError, match=r"min_votes is 9 with 3 members"):
        model_names(ModelsSection(parallel=ParallelSection(min_votes=9)))
    with pytest.raises(InputError, match=r"an empty list \(parameter models\.cascade\.stages\)"):
        model_names(ModelsSection(cascade=CascadeSection(stages=())))
    assert "min_votes" not in model_names(ModelsSection())
    single = model_names(
        ModelsSection(
            learners=("lightgbm",),
            profile="lightgbm",
            parallel=ParallelSection(members=("lightgbm",)),
            cascade=CascadeSection(stages=("lightgbm",)),
        )
    )
    assert single == ("random", "history_count", "vendor_rules", "lightgbm")  # an ensemble of one is its member
    assert "min_votes" in model_names(ModelsSection(profile="min_votes"))


DRIFT = SPAN_15.model_copy(update={"refit_every": timedelta(days=4)})


def stepped(days=44, step_day=30, size=3.0):
    """A matrix of which the first two features jump on one day."""
    matrix = FakeMatrix(units=24, days=days, incidents=50, companions=8, seed=3)
    late = (matrix.rows["decision_time"] >= START + timedelta(days=step_day)).to_numpy()
    matrix.features[late, :2] += size
    return matrix


@pytest.fixture(scope="module")
def on_drift():
    return backtest(stepped(), DRIFT)


def test_a_check_for_drift_never_depends_on_what_comes_later(on_drift):
    assert any(check is not None and check.drift for check in on_drift.drift)
    cut = on_drift.folds["refit_at"].iloc[0] + timedelta(days=12)
    poisoned = stepped()
    late = (poisoned.rows["decision_time"] >= cut).to_numpy()
    poisoned.features[late] = np.random.default_rng(5).normal(size=(int(late.sum()), 6)) * 50
    again = backtest(poisoned, DRIFT)
    early = on_drift.folds[on_drift.folds["test_start"] < cut]
    pd.testing.assert_frame_equal(again.folds.loc[early.index], early, check_exact=True)
    checked = [check for check in on_drift.drift if check is not None and check.end_ms <= cut.value // 10**6]
    assert checked == list(again.drift[1 : 1 + len(checked)])
