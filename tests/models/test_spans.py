from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from features.errors import InputError
from features.times import instant_ms
from models import learners, spans
from models.config import JudgeSection, TrainingSection
from models.spans import candidates, choose_span, fitting, usable_spans
from models.training_set import Labels, Rows
from tests.models.fake_matrix import GAP, HORIZON, START, FakeMatrix

REACH_MS = int((GAP + HORIZON).total_seconds() * 1000)
SPANS = tuple(timedelta(days=d) for d in (7, 14, 28))


def days(*numbers):
    return tuple(timedelta(days=n) for n in numbers)


def test_candidates_are_the_fixed_span_or_the_list():
    assert candidates(TrainingSection(span="10d")) == days(10)
    assert candidates(TrainingSection(spans=("28d", "14d", "28d"))) == days(14, 28)


def test_spans_longer_than_the_history_do_not_fit():
    first = instant_ms(START)
    refit = first + REACH_MS + 14 * 86_400_000
    assert fitting(SPANS, refit_ms=refit, first_ms=first, reach_ms=REACH_MS) == days(7, 14)
    assert fitting(SPANS, refit_ms=refit - 1, first_ms=first, reach_ms=REACH_MS) == days(7)


def choose(matrix, *, day=40, spans=SPANS, hysteresis=0.02, current=None, judge=None, seen=None, least=0, **others):
    refit = START + timedelta(days=day)

    def read(rows):
        if seen is not None:
            seen.append(rows)
        return matrix.values(rows)

    return choose_span(
        read,
        Rows.of(matrix.rows),
        Labels.of(matrix.labels(refit)),
        spans,
        refit_ms=instant_ms(refit),
        first_ms=instant_ms(START),
        reach_ms=REACH_MS,
        hysteresis=hysteresis,
        current=current,
        negative_ratio=10,
        seed=3,
        judge=(judge or JudgeSection()).model_copy(update={"least_incidents": least}),
        **others,
    )


@pytest.fixture(scope="module")
def drifting():
    """Until day 22 what announces a failure later is common among healthy units: only recent rows teach what holds."""
    matrix = FakeMatrix(units=40, days=45, incidents=110, strength=4.0, seed=5)
    rng = np.random.default_rng(0)
    old = (matrix.rows["decision_time"] < START + timedelta(days=22)).to_numpy()
    matrix.features[old] = rng.normal(size=(old.sum(), 6))
    healthy = old & (matrix.labels()["label"] == 0).fillna(False).to_numpy(dtype=bool)
    matrix.features[np.ix_(healthy & (rng.random(len(old)) < 0.3), [0, 1])] += 4
    return matrix


def test_a_long_choice_says_how_far_it_is(drifting):
    told = []
    choose(drifting, spans=days(7, 28), progress=lambda done, total, what: told.append((done, total, what)))
    gone, totals, words = zip(*told, strict=True)
    assert gone[0] == 0
    assert list(gone) == sorted(set(gone))
    assert gone[-1] == totals[0] > 0
    assert (set(totals), set(words)) == ({totals[0]}, {"judging spans"})


def test_the_span_that_holds_the_present_only_wins_under_drift(drifting):
    choice = choose(drifting, spans=days(7, 28))
    assert choice.span == timedelta(days=7)
    assert choice.scores[timedelta(days=7)] > choice.scores[timedelta(days=28)]


def test_hysteresis_keeps_the_span_in_use(drifting):
    assert choose(drifting, spans=days(7, 28), current=timedelta(days=28), hysteresis=1000.0).span == timedelta(days=28)
    assert choose(drifting, spans=days(7, 28), current=timedelta(days=28), hysteresis=0.0).span == timedelta(days=7)


def test_a_span_that_no_longer_fits_is_not_kept(drifting):
    assert choose(drifting, spans=days(7, 28), current=timedelta(days=90)).span == timedelta(days=7)


def test_too_few_incidents_take_the_longest():
    matrix = FakeMatrix(units=10, days=45, incidents=6)
    choice = choose(matrix, current=timedelta(days=7))
    assert choice.span == timedelta(days=28)
    assert "too few to compare" in choice.why
    assert choice.scores == {}


def test_the_tail_is_never_fitted_on(drifting):
    """Rows from one reach before the tail on may change at will, but for the tail's own features."""
    seen = []

    def read(rows):
        seen.append(rows)
        return drifting.values(rows)

    refit = START + timedelta(days=40)
    rows = Rows.of(drifting.rows)
    labels = Labels.of(drifting.labels(refit))
    choose_span(
        read, rows, labels, days(7, 28), refit_ms=instant_ms(refit), first_ms=instant_ms(START), reach_ms=REACH_MS,
        hysteresis=0.0, current=None, negative_ratio=10, seed=3, judge=JudgeSection(least_incidents=0),
    )  # fmt: skip
    *fitted, tail = seen
    assert len(fitted) == 2
    for each in fitted:
        assert labels.complete[each].max() <= rows.time[tail].min()
        assert not set(each.tolist()) & set(tail.tolist())


def test_the_choice_is_the_same_every_time(drifting):
    first, second = choose(drifting), choose(drifting)
    assert first == second
    assert np.isfinite(list(first.scores.values())).all()


def test_an_expanding_span_is_the_whole_history_in_whole_days():
    training = TrainingSection(span="expanding", spans=("14d", "28d"))
    first = instant_ms(START)
    assert candidates(training) == days(14)
    at = {"first_ms": first, "reach_ms": REACH_MS}
    assert usable_spans(training, refit_ms=first + REACH_MS + 14 * 86_400_000 - 1, **at) == ()
    assert usable_spans(training, refit_ms=first + REACH_MS + 14 * 86_400_000, **at) == days(14)
    assert usable_spans(training, refit_ms=first + REACH_MS + 40 * 86_400_000 + 5_000, **at) == days(40)
    assert usable_spans(TrainingSection(spans=("14d", "28d")), refit_ms=first + 40 * 86_400_000, **at) == days(14, 28)


def test_spans_that_the_data_cut_may_be_left_out_until_they_fit(drifting):
    """On day 40 the tail begins on day 31.6: 28 days before it are whole, 38 are not."""
    every, whole = (
        choose(drifting, spans=days(7, 28, 38), hysteresis=0.0, judge=JudgeSection(cut_spans=cut))
        for cut in (True, False)
    )
    assert set(every.scores) == set(days(7, 28, 38))
    assert set(whole.scores) == set(days(7, 28))
    early = choose(drifting, day=20, spans=days(14, 18), judge=JudgeSection(cut_spans=False))
    assert early.span == timedelta(days=18)
    assert "too little history to try two whole spans" in early.why


def test_candidates_with_a_handful_of_incidents_are_left_out_but_for_the_longest(drifting):
    fair = choose(drifting, spans=days(7, 28), hysteresis=0.0)
    assert fair.span == timedelta(days=7)
    careful = choose(drifting, spans=days(7, 28), hysteresis=0.0, least=10_000)
    assert careful.span == timedelta(days=28)
    assert careful.why == "the longest that fits: the others hold fewer than 10000 incidents"


def test_several_tails_and_judges_are_averaged_as_shares_of_the_best(drifting):
    choice = choose(drifting, spans=days(7, 14), judge=JudgeSection(learners=("logistic", "lightgbm"), tails=2))
    assert set(choice.scores) == set(days(7, 14))
    assert all(0 < score <= 1 for score in choice.scores.values())
    assert max(choice.scores.values()) > 0.5
    one = choose(drifting, spans=days(7, 14), judge=JudgeSection(learners=("logistic",)))
    assert one != choice


def test_learners_that_judge_have_their_settings_and_what_they_ask_for_of_the_rows(drifting, monkeypatch):
    asked = []

    def fit_learners(unfitted, values, label, weight, facts):
        asked.append((unfitted, facts))
        return learners.fit_learners(unfitted, values, label, weight, facts)

    monkeypatch.setattr(spans, "fit_learners", fit_learners)
    judge = JudgeSection(learners=("lightgbm", "xgboost"))
    choose(drifting, spans=days(7, 14), judge=judge, settings={"lightgbm": {"n_estimators": 7}})
    assert {name for unfitted, _ in asked for name in unfitted} == {"lightgbm", "xgboost"}
    trees = {each["lightgbm"].get_params()["n_estimators"] for each, _ in asked if "lightgbm" in each}
    assert trees == {7}
    assert all(len(np.unique(facts.times)) > 1 for _, facts in asked), "a ranking is one of units at a time"
    with pytest.raises(InputError, match="lightgbm"):
        choose(drifting, spans=days(7, 14), judge=judge, settings={"lightgbm": {"num_leaves": -3}})


def test_no_tail_is_ever_fitted_on_by_its_own_judge(drifting):
    """Candidates' rows are read first, then the tail behind them."""
    seen = []
    choose(drifting, spans=days(7, 14), judge=JudgeSection(tails=3), seen=seen)
    labels = Labels.of(drifting.labels(START + timedelta(days=40)))
    rows = Rows.of(drifting.rows)
    assert len(seen) == 9
    for at in (0, 3, 6):
        fitted, tail = seen[at : at + 2], seen[at + 2]
        for each in fitted:
            assert labels.complete[each].max() <= rows.time[tail].min()
    assert rows.time[seen[5]].max() < rows.time[seen[2]].min()
    assert rows.time[seen[8]].max() < rows.time[seen[5]].min()
