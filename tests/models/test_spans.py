from datetime import timedelta

import numpy as np
import pytest

from foundation.times import instant_ms
from models.config import TrainingSection
from models.rows.training_set import Labels, TrainingRows
from models.training.spans import candidates, choose_span, usable_spans
from tests.models.fake_matrix import GAP, HORIZON, START, FakeMatrix

REACH_MS = int((GAP + HORIZON).total_seconds() * 1000)
SPANS = tuple(timedelta(days=d) for d in (7, 14, 28))


def days(*numbers):
    return tuple(timedelta(days=n) for n in numbers)


def test_candidates_are_the_fixed_span_or_the_list():
    assert candidates(TrainingSection(window="10d")) == days(10)
    assert candidates(TrainingSection(candidate_windows=("28d", "14d", "28d"))) == days(14, 28)


def choose(matrix, *, day=40, spans=SPANS, hysteresis=0.02, current=None, least=0, **others):
    refit = START + timedelta(days=day)
    return choose_span(
        matrix.values,
        TrainingRows.of(matrix.rows),
        Labels.of(matrix.labels(refit)),
        spans,
        refit_ms=instant_ms(refit),
        first_ms=instant_ms(START),
        reach_ms=REACH_MS,
        training=TrainingSection(hysteresis=hysteresis, negative_ratio=10),
        current=current,
        seed=3,
        min_incidents=least,
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


def test_the_span_that_holds_the_present_only_wins_under_drift(drifting):
    assert choose(drifting, spans=days(7, 28)) == timedelta(days=7)


def test_hysteresis_keeps_the_span_in_use(drifting):
    assert choose(drifting, spans=days(7, 28), current=timedelta(days=28), hysteresis=1000.0) == timedelta(days=28)
    assert choose(drifting, spans=days(7, 28), current=timedelta(days=28), hysteresis=0.0) == timedelta(days=7)


def test_a_span_that_no_longer_fits_is_not_kept(drifting):
    assert choose(drifting, spans=days(7, 28), current=timedelta(days=56), hysteresis=1000.0) == timedelta(days=7)


def test_too_few_incidents_take_the_longest():
    matrix = FakeMatrix(units=10, days=45, incidents=6)
    assert choose(matrix, current=timedelta(days=7)) == timedelta(days=28)


def reads_of_a_choice(matrix, **training):
    """Choose among two spans at day 40; give the rows that were read in turn, all rows, and their labels."""
    reads = []

    def read(rows):
        reads.append(rows)
        return matrix.values(rows)

    refit = START + timedelta(days=40)
    rows, labels = TrainingRows.of(matrix.rows), Labels.of(matrix.labels(refit))
    choose_span(
        read, rows, labels, days(7, 28), refit_ms=instant_ms(refit), first_ms=instant_ms(START), reach_ms=REACH_MS,
        training=TrainingSection(**training), current=None, seed=3, min_incidents=0,
    )  # fmt: skip
    return reads, rows, labels


def test_the_tail_is_never_fitted_on(drifting):
    """Rows from one reach before the tail on may change at will, but for the tail's own features."""
    (*fitted, tail), rows, labels = reads_of_a_choice(drifting, hysteresis=0.0, negative_ratio=10)
    assert len(fitted) == 2
    for block in fitted:
        assert labels.complete[block].max() <= rows.time[tail].min()
        assert not set(block.tolist()) & set(tail.tolist())


def test_the_tail_is_scored_once_in_a_horizon(drifting):
    """Rows in between ask the same again; decision times are scored a horizon apart, to within a step."""
    (*_, tail), rows, _ = reads_of_a_choice(drifting)
    times = np.unique(rows.time[tail])
    step = np.diff(np.unique(rows.time[~rows.augmented])).min()
    assert len(times) >= 3
    assert np.diff(times).min() > REACH_MS - step


def test_the_whole_history_in_whole_days_is_a_candidate_too_and_the_only_one_that_expands():
    first = instant_ms(START)
    limits = {"first_ms": first, "reach_ms": REACH_MS}
    listed = {"candidate_windows": ("14d", "28d")}
    chosen, expanding = TrainingSection(**listed), TrainingSection(window="expanding", **listed)
    assert candidates(expanding) == days(14)
    for after_ms, all_of_them, spans in (
        (14 * 86_400_000 - 1, (), ()),
        (14 * 86_400_000, days(14), days(14)),
        (27 * 86_400_000, days(14, 27), days(27)),
        (28 * 86_400_000 + 5_000, days(14, 28), days(28)),
        (400 * 86_400_000 + 5_000, days(14, 28, 400), days(400)),
    ):
        assert usable_spans(chosen, refit_ms=first + REACH_MS + after_ms, **limits) == all_of_them
        assert usable_spans(expanding, refit_ms=first + REACH_MS + after_ms, **limits) == spans
        fixed = days(14) if after_ms >= 14 * 86_400_000 else ()
        assert usable_spans(TrainingSection(window="14d"), refit_ms=first + REACH_MS + after_ms, **limits) == fixed


def test_the_whole_history_stays_in_use_as_it_grows(drifting):
    assert choose(drifting, spans=days(7, 33), current=timedelta(days=26), hysteresis=1000.0) == timedelta(days=33)


def test_candidates_with_a_handful_of_incidents_are_left_out_but_for_the_longest(drifting):
    assert choose(drifting, spans=days(7, 28), hysteresis=0.0) == timedelta(days=7)
    assert choose(drifting, spans=days(7, 28), hysteresis=0.0, least=10_000) == timedelta(days=28)
