"""Planned maintenance and units out of use: what is seen in the first is no incident, the second have no rows."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import DecisionSection, FeatureSection, LabelSection
from features.groups.history import EventHistory, history_columns
from features.labels.evidence import IncidentEvidence
from features.labels.incidents import MAX_DRAIN_LENGTH, counted, find_incidents, known_onsets, out_of_use
from features.labels.labelling import label_rows
from features.labels.maintenance import MAX_LENGTH
from features.matrix.grid import decision_rows, decision_times
from tests.features import oracle
from tests.features.builders import at, event, events, installation, inventory, rows
from tests.features.worlds import instants, twins, worlds

LABELS = LabelSection()
SLOW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
LATE = at(days=60)


def window(start, end, *, gpu=None, node="n0", known=None):
    """A maintenance whose end is planned, known as it begins."""
    return event(start, "maintenance", end.isoformat(), gpu=gpu, node=node, known=start if known is None else known)


def begin(start, **whose):
    return event(start, "maintenance", "begin", known=start, **{"gpu": None, **whose})


def end(time, *, known=None, **whose):
    return event(time, "maintenance", "end", known=known or time, **{"gpu": None, **whose})


def left(*happened, installations=None, as_of=None):
    """(unit, start) of the incidents that count."""
    gpus = inventory(*(installations or [installation(), installation("g1", slot="1"), installation("g2", "n1")]))
    incidents = counted(find_incidents(events(*happened), gpus, LABELS, as_of=as_of, data_end=LATE))
    return [(row["unit"], row["start"]) for row in oracle.records(incidents)]


def test_an_incident_counts_unless_it_begins_in_a_maintenance_of_its_gpu_or_node():
    seen = [event(at(2), code="79"), event(at(2), code="79", gpu="g2", node="n1"), event(at(50), code="79")]
    both = [("g0", at(2)), ("g2", at(2)), ("g0", at(50))]
    assert left(*seen) == both
    assert left(*seen, window(at(1), at(3))) == both[1:]
    assert left(*seen, window(at(1), at(3), gpu="g0")) == both[1:]
    assert left(*seen, window(at(1), at(3), gpu="g1")) == both
    assert left(*seen, window(at(2), at(2, seconds=1))) == both[1:]
    assert left(*seen, window(at(1), at(2))) == both  # the end is no part of it
    assert left(*seen, window(at(1), at(3)), window(at(1), at(4), node="n1")) == both[2:]


def test_a_window_without_a_planned_end_lasts_until_it_is_ended_or_a_month():
    failures = [event(at(2), code="79"), event(at(8), "repair"), event(at(50), code="79")]
    assert left(*failures, begin(at(1)), end(at(9))) == [("g0", at(50))]
    assert left(*failures, begin(at(1)), end(at(9), node="n1")) == []
    assert left(*failures, begin(at(1)), end(at(9), gpu="g0")) == []
    assert left(event(at(1) + MAX_LENGTH, code="79"), begin(at(1))) == [("g0", at(1) + MAX_LENGTH)]
    assert left(*failures, event(at(1), "maintenance", "tomorrow", gpu=None)) == [("g0", at(2)), ("g0", at(50))]


def test_a_gpu_that_was_put_in_during_the_maintenance_is_concerned():
    newcomer = [installation("g1", slot="1"), installation("g3", slot="0", since=at(2))]
    assert left(event(at(3), code="79", gpu="g3"), window(at(1), at(5)), installations=newcomer) == []


def test_labels_use_a_window_from_when_it_was_known():
    late = window(at(1), at(3), known=at(90))
    assert left(event(at(2), code="79"), late, as_of=at(89)) == [("g0", at(2))]
    assert left(event(at(2), code="79"), late, as_of=at(90)) == []


def test_rows_before_in_and_after_a_hidden_incident_have_no_label():
    happened = [event(at(26), code="79"), window(at(25), at(30))]
    gpus, frame = inventory(installation()), events(*happened)
    incidents = find_incidents(frame, gpus, LABELS, data_end=LATE)
    decisions = rows(*((at(hours), "g0") for hours in (1, 2, 24, 25, 29.9, 30, 49.9, 50)))
    out = label_rows(decisions, incidents, gpus, LABELS, data_end=LATE, events=frame)["label"]
    assert out.fillna(-1).tolist() == [0, -1, -1, -1, -1, -1, -1, 0]


def spans(*happened):
    intervals = oracle.records(out_of_use(IncidentEvidence.of(events(*happened), inventory(installation()), LABELS)))
    return [(row["down_from"], row["down_until"]) for row in intervals]


def test_a_unit_in_a_known_maintenance_is_out_of_use():
    assert spans(window(at(1), at(3)), event(at(2), code="79")) == [(at(1), at(3))]
    assert spans(window(at(1), at(3), known=at(2))) == [(at(2), at(3))]
    assert spans(window(at(1), at(3), known=at(4))) == []
    assert spans(begin(at(1)), end(at(3), known=at(4))) == [(at(1), at(4))]


@SLOW
@given(worlds(), instants, st.integers(0, 96), st.sampled_from([("g0", "n0"), (None, "n0"), (None, "n1")]))
def test_one_more_window_takes_away_incidents_in_it_and_labels_and_nothing_else(world, start, quarters, whose):
    gpu, node = whose
    stop = start + quarters * (at(minutes=15) - at(0))
    more = pd.concat([world.events, events(window(start, stop, gpu=gpu, node=node))], ignore_index=True)
    before, after = (find_incidents(e, world.inventory, LABELS, data_end=at(days=9)) for e in (world.events, more))
    names = [name for name in before.columns if name != "in_maintenance"]
    pd.testing.assert_frame_equal(before[names], after[names])
    gone = oracle.records(before[after["in_maintenance"] & ~before["in_maintenance"]])
    assert not (before["in_maintenance"] & ~after["in_maintenance"]).any()
    assert all(start <= row["start"] < stop for row in gone)
    decisions = rows(*((at(6 * k), unit) for k in range(24) for unit in ("g0", "g1", "g2", "g3")))
    labels = [
        label_rows(decisions, found, world.inventory, LABELS, data_end=at(days=9), events=e)["label"]
        for found, e in ((before, world.events), (after, more))
    ]
    is_labelled = labels[1].notna()
    assert labels[0][is_labelled].tolist() == labels[1][is_labelled].tolist()


def test_history_forgets_what_was_seen_in_a_window_that_is_told_of_later():
    gpus, names = inventory(installation()), [column.name for column in history_columns(FeatureSection())]
    happened = events(event(at(1), code="79"), event(at(3), code="48"), window(at(2), at(4), known=at(50)))
    decisions = rows((at(49), "g0"), (at(50), "g0"), (at(60), "g0"))
    values = EventHistory.of(IncidentEvidence.of(happened, gpus, LABELS), FeatureSection(), gpus).values(decisions)
    counts = values[:, names.index("history__gpu_xid_memory__count__7d")]
    ages = values[:, names.index("history__gpu_xid_hardware__since")]
    assert (counts.tolist(), ages.tolist()) == ([1, 0, 0], [46, 49, 59])


NODES, RACK = 288, 214


def test_a_rack_that_reboots_in_its_maintenance_is_nothing_to_learn_from():
    gpus = inventory(*(installation(f"g{n:03d}", f"n{n:03d}", rack="r7" if n < RACK else "r8") for n in range(NODES)))
    real = [
        event(at(30), code="79", gpu="g100", node="n100"), event(at(32), "repair", gpu="g100", node="n100"),
        event(at(30), code="79", gpu="g250", node="n250"),
    ]  # fmt: skip
    reboot = [
        values
        for n in range(RACK)
        for values in (
            event(at(48, seconds=n), code="79", gpu=f"g{n:03d}", node=f"n{n:03d}"),
            event(at(48.1), "failure", "gone", gpu=f"g{n:03d}", node=f"n{n:03d}"),
            event(at(48.5), "other", "boot", gpu=None, node=f"n{n:03d}"),
        )
    ]
    plan = [window(at(47), at(50), node=f"n{n:03d}") for n in range(RACK)]
    noisy, quiet = events(*real, *reboot, *plan), events(*real)
    incidents = find_incidents(noisy, gpus, LABELS, data_end=LATE)
    assert (len(incidents), int(incidents["in_maintenance"].sum())) == (2 + RACK, RACK)
    assert sorted(counted(incidents)["unit"]) == ["g100", "g250"]
    records = [IncidentEvidence.of(happened, gpus, LABELS) for happened in (noisy, quiet)]
    assert len(known_onsets(records[0])) == 2
    grid = decision_times(DecisionSection(), (at(0), at(days=9)))
    listed = [decision_rows(grid, gpus, out_of_use(record)) for record in records]
    in_rack = listed[1]["unit"] < f"g{RACK:03d}"
    planned = in_rack & (listed[1]["decision_time"] == at(48))
    pd.testing.assert_frame_equal(listed[0], listed[1][~planned].reset_index(drop=True))
    histories = [EventHistory.of(record, FeatureSection(), gpus).values(listed[0]) for record in records]
    np.testing.assert_array_equal(*histories)


@pytest.mark.parametrize("code", ["begin", "end", at(1).isoformat()])
def test_a_window_alone_changes_no_history(code):
    gpus, late = inventory(installation()), event(at(0), "maintenance", code, gpu=None, known=at(0))
    records = [IncidentEvidence.of(events(*happened), gpus, LABELS) for happened in ([late], [])]
    values = [EventHistory.of(r, FeatureSection(), gpus).values(rows((at(days=40), "g0"))) for r in records]
    np.testing.assert_array_equal(*values)


def drain(time, code, gpu="g0", source="scheduler"):
    return event(time, "drain", code, gpu=gpu, source=source, known=time)


@pytest.mark.parametrize(
    ("happened", "down"),
    [
        ([drain(at(1), "unhealthy"), drain(at(9), "released")], [(at(1), at(9))]),
        ([drain(at(1), "unhealthy"), event(at(9), "repair", known=at(10))], [(at(1), at(10))]),
        ([drain(at(1), "planned", None), drain(at(5), "released", None)], [(at(1), at(5))]),
        ([drain(at(1), "unhealthy")], [(at(1), at(1) + MAX_DRAIN_LENGTH)]),
        ([drain(at(1), "at-risk", source="predrain")], []),
        (
            [event(at(0), code="79", known=at(0)), drain(at(1), "unhealthy"), event(at(100), "repair", known=at(100))],
            [(at(0), at(100))],
        ),
    ],
    ids=["taken back", "repaired", "of the node", "never taken back", "our own", "after a failure"],
)
def test_a_drain_holds_until_it_is_taken_back(happened, down):
    assert spans(*happened) == down


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_intervals_are_disjoint(world):
    intervals = oracle.records(out_of_use(IncidentEvidence.of(world.events, world.inventory, LABELS)))
    for one, two in pairwise(intervals):
        assert one["unit"] != two["unit"] or one["down_until"] < two["down_from"]


@settings(max_examples=40, deadline=None)
@given(twins())
def test_what_is_not_known_at_r_changes_nothing_at_or_before_r(pair):
    views = [out_of_use(IncidentEvidence.of(world.events, world.inventory, LABELS)) for world in pair]
    r = pair[0].r
    cut = [
        view[view["down_from"] <= r].assign(
            down_until=lambda v: v["down_until"].where(v["down_until"] <= r, pd.Timestamp(r))
        )
        for view in views
    ]
    pd.testing.assert_frame_equal(cut[0].reset_index(drop=True), cut[1].reset_index(drop=True))
