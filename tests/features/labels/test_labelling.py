"""Labels: borders of gap and horizon, censoring, and what was known when."""

from datetime import timedelta

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import LabelSection
from features.labels.incidents import find_incidents
from features.labels.labelling import label_rows
from tests.features import oracle
from tests.features.builders import at, event, events, inventory, rows, stay
from tests.features.worlds import twins, worlds

LABELS = LabelSection()
SLOW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
MS = timedelta(milliseconds=1)
LATE = at(days=60)


def label(time, *happened, stays=None, labels=LABELS, data_end=LATE, as_of=None, unit="g0"):
    """Label of one row: 0, 1 or None."""
    held = inventory(*(stays or [stay()]))
    frame = events(*happened)
    incidents = find_incidents(frame, held, labels, as_of=as_of, data_end=data_end)
    out = label_rows(rows((time, unit)), incidents, held, labels, data_end=data_end, as_of=as_of, events=frame)
    value = out["label"].iloc[0]
    return None if pd.isna(value) else int(value)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (at(minutes=10), 0), (at(minutes=10) + MS, 1), (at(24, minutes=10), 1), (at(24, minutes=10) + MS, 0),
    ],
)  # fmt: skip
def test_the_horizon_is_open_at_the_gap_and_closed_at_its_end(start, expected):
    assert label(at(0), event(start, code="79")) == expected


def test_a_positive_row_names_its_incident():
    held, frame = inventory(stay()), events(event(at(5), code="79"), event(at(9), "repair"), event(at(20), code="48"))
    incidents = find_incidents(frame, held, LABELS, data_end=LATE)
    asked = rows((at(0), "g0"), (at(19), "g0"), (at(40), "g0"), (at(19.9), "g0"))
    asked.index = pd.Index([7, 3, 5, 1])
    out = label_rows(asked, incidents, held, LABELS, data_end=LATE)
    assert out.index.tolist() == [7, 3, 5, 1]
    assert out["label"].tolist() == [1, 1, pd.NA, 0]
    assert out["incident"].tolist() == [0, 1, pd.NA, pd.NA]
    assert out["incident_start"].tolist() == [at(5), at(20), pd.NaT, pd.NaT]
    assert out["failure_class"].fillna("-").tolist() == ["bus", "memory", "-", "-"]
    assert out["complete_at"].iloc[0] == at(24, minutes=10)
    assert out["node_incident"].tolist() == out["common_cause"].tolist() == [0, 1, pd.NA, pd.NA]
    assert out.dtypes.astype(str).tolist()[:5] == ["Int8", "Int64", "Int64", "Int64", "datetime64[ms, UTC]"]


def test_a_row_inside_an_incident_has_no_label_even_if_that_was_not_known_then():
    ticket = event(at(0), "failure", "DBE", known=at(50))
    assert label(at(-1 / 60), ticket) == 0
    assert label(at(0), ticket) is None
    assert label(at(23.9), ticket) is None
    assert label(at(24), ticket) == 0
    assert label(at(2), ticket, event(at(3), "repair"), event(at(9), code="79")) is None


def test_a_leaver_is_censored_unless_params_say_otherwise():
    gone = [stay(until=at(5))]
    assert label(at(0), stays=gone) is None
    assert label(at(0), stays=gone, labels=LabelSection(censor_leavers=False)) == 0
    assert label(at(0), stays=[stay(until=at(24, minutes=10))]) is None
    assert label(at(0), stays=[stay(until=at(24, minutes=10) + MS)]) == 0


def own_drain(time, code="drain", gpu=None):
    return event(time, "drain", code, gpu=gpu, source="predrain-controller")


def test_a_drain_on_our_own_alert_hides_the_outcome():
    assert label(at(0), own_drain(at(3))) is None
    assert label(at(0), own_drain(at(3), gpu="g0")) is None
    assert label(at(0), own_drain(at(3)), event(at(9), "diagnostic", "passed")) == 0
    assert label(at(0), own_drain(at(3)), event(at(9), "diagnostic", "failed")) is None
    assert label(at(0), own_drain(at(3)), event(at(30), "diagnostic", "passed")) is None
    assert label(at(0), own_drain(at(3)), event(at(9), code="79")) == 1
    assert label(at(0), event(at(minutes=5), code="79"), own_drain(at(3))) == 0
    assert label(at(0), own_drain(at(25))) == 0
    assert label(at(0), event(at(3), "drain", "drain", source="slurm", gpu=None)) == 0


def test_unknown_units_and_no_rows():
    assert label(at(0), unit="gX") == 0
    held = inventory(stay())
    out = label_rows(rows(), find_incidents(events(), held, LABELS), held, LABELS, data_end=LATE)
    assert len(out) == 0
    assert out["label"].dtype == "Int8"


def plain_label(row, world, labels, data_end, r):
    held, happened = oracle.records(world.inventory), oracle.records(world.events)
    t, unit = row["decision_time"], row["unit"]
    low, high = t + labels.gap, t + labels.gap + labels.horizon
    incidents = oracle.incidents(unit, happened, held, labels, r, min(r, data_end))
    if any(start <= t and (end is None or end > t) for start, end in incidents):
        return None
    if high > min(r, data_end) or oracle.in_maintenance(unit, t, happened, held, r):
        return None
    planned = {start for start, _ in incidents if oracle.in_maintenance(unit, start, happened, held, r)}
    incidents = [incident for incident in incidents if incident[0] not in planned]
    if any(low < start <= high for start, _ in incidents):
        return 1
    for left in oracle.departures(unit, held, r):
        if labels.censor_leavers and t < left <= high and not any(t < start <= left for start, _ in incidents):
            return None
    if any(t < start <= high for start in planned):
        return None
    hidden = hidden_by_our_drain(t, high, unit, incidents, [e for e in happened if oracle.known(e) <= r], held)
    return None if hidden else 0


def hidden_by_our_drain(t, high, unit, incidents, happened, held):
    mine = [row for row in happened if oracle.concerns(row, unit, held)]
    failed = [start for start, _ in incidents]
    passed = [row["timestamp"] for row in mine if row["type"] == "diagnostic" and row["code"] == "passed"]
    returned = [
        row["timestamp"] for row in mine if (row["type"] == "drain" and row["code"] == "release") or oracle.is_end(row)
    ]
    for row in mine:
        drained = row["timestamp"]
        if row["type"] != "drain" or row["code"] == "release" or not oracle.is_own(row):
            continue
        if any(drained < time <= high for time in failed + passed):
            continue
        begins = t < drained <= high and not any(t < time <= drained for time in failed)
        lasts = drained <= t and not any(drained < time <= t for time in failed + passed + returned)
        if begins or lasts:
            return True
    return False


@SLOW
@given(worlds(), st.booleans(), st.sampled_from([6, 24]))
def test_labels_are_as_the_plain_reading_says(world, censor, hours):
    labels = LabelSection(censor_leavers=censor, horizon=timedelta(hours=hours), cooldown=timedelta(hours=5))
    data_end = at(days=6)
    asked = rows(*((at(6 * k), unit) for k in range(24) for unit in ("g0", "g1", "g2", "g3")))
    for as_of in (None, world.r):
        incidents = find_incidents(world.events, world.inventory, labels, as_of=as_of, data_end=data_end)
        out = label_rows(asked, incidents, world.inventory, labels, data_end=data_end, as_of=as_of, events=world.events)
        expected = [
            plain_label(row, world, labels, data_end, as_of or oracle.FOR_EVER) for row in oracle.records(asked)
        ]
        assert [None if pd.isna(value) else int(value) for value in out["label"]] == expected


@SLOW
@given(twins())
def test_labels_as_of_r_depend_only_on_what_was_known_at_r(pair):
    asked = rows(*((at(3 * k), unit) for k in range(48) for unit in ("g0", "g1", "g2", "g3")))
    out = []
    for world in pair:
        incidents = find_incidents(world.events, world.inventory, LABELS, as_of=world.r, data_end=at(days=9))
        out.append(
            label_rows(
                asked, incidents, world.inventory, LABELS, data_end=at(days=9), as_of=world.r, events=world.events
            )
        )
    pd.testing.assert_frame_equal(*out)
    done = (out[0]["complete_at"] <= pair[0].r).to_numpy()
    assert not (out[0]["label"][~done] == 0).any()
