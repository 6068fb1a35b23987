"""Decision rows: who is scored when, and the training rows off the grid."""

from datetime import timedelta

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings

from features.config import DecisionSection, LabelSection
from features.labels.evidence import IncidentEvidence
from features.labels.incidents import known_onsets, out_of_use
from features.matrix.grid import MIN_COMPANIONS, augmented_rows, decision_rows, decision_times
from tests.features import oracle
from tests.features.builders import T0, at, event, events, installation, inventory
from tests.features.small_fleet import config_of
from tests.features.worlds import twins, worlds

DECISION, LABELS = DecisionSection(), LabelSection()
SLOW = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
SPAN = (at(0), at(days=6))


def grid(frame, gpus, span=SPAN):
    return decision_rows(decision_times(DECISION, span), gpus, out_of_use(IncidentEvidence.of(frame, gpus, LABELS)))


def extra(frame, gpus, **changed):
    record = IncidentEvidence.of(frame, gpus, LABELS)
    config = config_of(**{"span": SPAN, **changed})
    return augmented_rows(known_onsets(record), gpus, out_of_use(record), config)


def fleet(size=12):
    return inventory(*(installation(f"g{i}", f"n{i // 4}", str(i % 4)) for i in range(size)))


@pytest.mark.parametrize("shift", [0, 1, 5.99])
def test_decision_times_are_the_multiples_of_the_spacing_from_the_origin(shift):
    times = decision_times(DECISION, (at(shift), at(18)))
    assert times.tolist() == [at(h) for h in (0, 6, 12, 18) if h >= shift]
    every_five_hours = DecisionSection(every=timedelta(hours=5), origin=at(1))
    assert decision_times(every_five_hours, (at(-5), at(7))).tolist() == [at(-4), at(1), at(6)]


@SLOW
@given(worlds())
def test_rows_are_as_the_plain_reading_says(world):
    down = oracle.records(out_of_use(IncidentEvidence.of(world.events, world.inventory, LABELS)))
    gpus = oracle.records(world.inventory)
    rows = grid(world.events, world.inventory)
    expected = []
    for t in decision_times(DECISION, SPAN):
        for unit in ("g0", "g1", "g2", "g3"):
            here = [
                row for row in oracle.stays_of(unit, gpus)
                if row["installed_at"] <= t < (row["removed_at"] or oracle.FOR_EVER)
            ]  # fmt: skip
            if here and not any(row["unit"] == unit and row["down_from"] <= t < row["down_until"] for row in down):
                expected.append((t, unit, here[-1]["node"]))
    assert list(zip(rows["decision_time"], rows["unit"], rows["node"], strict=True)) == expected


@SLOW
@given(twins())
def test_rows_up_to_t_depend_only_on_what_was_known_at_t(pair):
    one, two = (grid(w.events, w.inventory) for w in pair)
    one, two = (f[f["decision_time"] <= pair[0].r].reset_index(drop=True) for f in (one, two))
    pd.testing.assert_frame_equal(one, two)


def test_extra_rows_stand_off_the_grid_inside_the_horizon_and_spread_over_it():
    rows = extra(events(event(at(60), code="79", gpu="g5")), fleet())
    failing = rows[rows["unit"] == "g5"]
    times = failing["decision_time"]
    assert len(times) == 4
    assert ((times + LABELS.gap < at(60)) & (at(60) <= times + LABELS.gap + LABELS.horizon)).all()
    assert all((t - T0) % DECISION.every for t in times)
    assert not any((t - T0) % timedelta(minutes=10) for t in times)
    assert times.diff().dropna().between(timedelta(hours=5), timedelta(hours=7)).all()
    assert (failing["established_at"] == at(60, minutes=10)).all()


@pytest.mark.parametrize(("negative_ratio", "companions"), [(1, MIN_COMPANIONS), (7, 7), (50, 11)])
def test_each_extra_time_has_units_without_the_failure_too(negative_ratio, companions):
    rows = extra(events(event(at(60), code="79", gpu="g5")), fleet(), negative_ratio=negative_ratio)
    counts = rows.groupby("decision_time")["unit"].agg(["size", "nunique", lambda units: "g5" in list(units)])
    assert counts.to_numpy().tolist() == [[companions + 1, companions + 1, True]] * 4
    assert rows["augmented"].all()


def test_companions_vary_with_time_and_seed_and_repeat_for_the_same():
    frame = events(event(at(60), code="79", gpu="g5"))
    one, again, other = extra(frame, fleet()), extra(frame, fleet()), extra(frame, fleet(), seed=4)
    pd.testing.assert_frame_equal(one, again)
    assert one["unit"].tolist() != other["unit"].tolist()
    sets = {tuple(group) for _, group in one.groupby("decision_time")["unit"]}
    assert len(sets) > 1


def test_a_unit_has_no_extra_row_while_it_is_not_there_or_known_to_be_down():
    gpus = pd.concat([fleet(5), inventory(installation("g5", since=at(50)))], ignore_index=True)
    rows = extra(events(event(at(60), code="79", gpu="g5")), gpus)
    assert (rows.loc[rows["unit"] == "g5", "decision_time"] >= at(50)).all()
    down = extra(events(event(at(20), code="79", gpu="g5"), event(at(50), code="79", gpu="g5")), fleet())
    late = down[(down["unit"] == "g5") & (down["decision_time"] > at(20))]["decision_time"]
    assert len(late) > 0
    assert (late >= at(44)).all()


def test_a_row_asked_for_twice_stands_once_from_when_it_was_first_known():
    frame = events(event(at(60), code="79", gpu="g5", known=at(90)), event(at(60), code="79", gpu="g6", known=at(70)))
    rows = extra(frame, fleet(), negative_ratio=50)
    assert not rows.duplicated(["decision_time", "unit"]).any()
    assert len(rows) == 4 * 12
    assert (rows["established_at"] == at(70)).all()


@SLOW
@given(twins(kinds=("xid", "failure", "repair", "replacement", "drain")))
def test_extra_rows_established_at_r_depend_only_on_what_was_known_at_r(pair):
    one, two = (extra(w.events, w.inventory) for w in pair)
    one, two = (f[f["established_at"] <= pair[0].r].reset_index(drop=True) for f in (one, two))
    pd.testing.assert_frame_equal(one, two)
