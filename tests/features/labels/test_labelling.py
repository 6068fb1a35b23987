"""Labels and node incidents: gap and horizon, censoring, and which incidents are one failure."""

from datetime import timedelta
from itertools import combinations

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import LabelSection
from features.labels.incidents import find_incidents
from features.labels.labelling import label_rows
from tests.features import oracle
from tests.features.builders import at, event, events, installation, inventory, rows
from tests.features.worlds import twins, worlds

LABELS = LabelSection()
SLOW = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
MS = timedelta(milliseconds=1)
LATE = at(days=60)


def label(time, *happened, installations=None, labels=LABELS, data_end=LATE, as_of=None, unit="g0"):
    """Label of one row: 0, 1 or None."""
    gpus = inventory(*(installations or [installation()]))
    frame = events(*happened)
    incidents = find_incidents(frame, gpus, labels, as_of=as_of, data_end=data_end)
    out = label_rows(rows((time, unit)), incidents, gpus, labels, data_end=data_end, as_of=as_of, events=frame)
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
    gpus, frame = (
        inventory(installation()),
        events(event(at(5), code="79"), event(at(9), "repair"), event(at(20), code="48")),
    )
    incidents = find_incidents(frame, gpus, LABELS, data_end=LATE)
    decisions = rows((at(0), "g0"), (at(19), "g0"), (at(40), "g0"), (at(19.9), "g0"))
    decisions.index = pd.Index([7, 3, 5, 1])
    out = label_rows(decisions, incidents, gpus, LABELS, data_end=LATE)
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
    gone = [installation(until=at(5))]
    assert label(at(0), installations=gone) is None
    assert label(at(0), installations=gone, labels=LabelSection(censor_leavers=False)) == 0
    assert label(at(0), installations=[installation(until=at(24, minutes=10))]) is None
    assert label(at(0), installations=[installation(until=at(24, minutes=10) + MS)]) == 0


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
    gpus = inventory(installation())
    out = label_rows(rows(), find_incidents(events(), gpus, LABELS), gpus, LABELS, data_end=LATE)
    assert len(out) == 0
    assert out["label"].dtype == "Int8"


def plain_label(row, world, labels, data_end, r):
    gpus, happened = oracle.records(world.inventory), oracle.records(world.events)
    t, unit = row["decision_time"], row["unit"]
    low, high = t + labels.gap, t + labels.gap + labels.horizon
    incidents = oracle.incidents(unit, happened, gpus, labels, r, min(r, data_end))
    if any(start <= t and (end is None or end > t) for start, end in incidents):
        return None
    if high > min(r, data_end) or oracle.in_maintenance(unit, t, happened, gpus, r):
        return None
    planned = {start for start, _ in incidents if oracle.in_maintenance(unit, start, happened, gpus, r)}
    incidents = [incident for incident in incidents if incident[0] not in planned]
    if any(low < start <= high for start, _ in incidents):
        return 1
    for left in oracle.departures(unit, gpus, r):
        if labels.censor_leavers and t < left <= high and not any(t < start <= left for start, _ in incidents):
            return None
    if any(t < start <= high for start in planned):
        return None
    hidden = hidden_by_our_drain(t, high, unit, incidents, [e for e in happened if oracle.known(e) <= r], gpus)
    return None if hidden else 0


def hidden_by_our_drain(t, high, unit, incidents, happened, gpus):
    facts = [row for row in happened if oracle.concerns(row, unit, gpus)]
    failed = [start for start, _ in incidents]
    passed = [row["timestamp"] for row in facts if row["type"] == "diagnostic" and row["code"] == "passed"]
    returned = [
        row["timestamp"] for row in facts if (row["type"] == "drain" and row["code"] == "release") or oracle.is_end(row)
    ]
    for row in facts:
        drained = row["timestamp"]
        if row["type"] != "drain" or row["code"] == "release" or not oracle.is_own(row):
            continue
        if any(drained < time <= high for time in failed + passed):
            continue
        begins = t < drained <= high and not any(t < time <= drained for time in failed)
        ongoing = drained <= t and not any(drained < time <= t for time in failed + passed + returned)
        if begins or ongoing:
            return True
    return False


@SLOW
@given(worlds(), st.booleans(), st.sampled_from([6, 24]))
def test_labels_are_as_the_plain_reading_says(world, censor, hours):
    labels = LabelSection(censor_leavers=censor, horizon=timedelta(hours=hours), cooldown=timedelta(hours=5))
    data_end = at(days=6)
    frame = rows(*((at(6 * k), unit) for k in range(24) for unit in ("g0", "g1", "g2", "g3")))
    for as_of in (None, world.r):
        incidents = find_incidents(world.events, world.inventory, labels, as_of=as_of, data_end=data_end)
        out = label_rows(frame, incidents, world.inventory, labels, data_end=data_end, as_of=as_of, events=world.events)
        expected = [
            plain_label(row, world, labels, data_end, as_of or oracle.FOR_EVER) for row in oracle.records(frame)
        ]
        assert [None if pd.isna(value) else int(value) for value in out["label"]] == expected


@SLOW
@given(twins())
def test_labels_as_of_r_depend_only_on_what_was_known_at_r(pair):
    decisions = rows(*((at(3 * k), unit) for k in range(48) for unit in ("g0", "g1", "g2", "g3")))
    out = []
    for world in pair:
        incidents = find_incidents(world.events, world.inventory, LABELS, as_of=world.r, data_end=at(days=9))
        out.append(
            label_rows(
                decisions, incidents, world.inventory, LABELS, data_end=at(days=9), as_of=world.r, events=world.events
            )
        )
    pd.testing.assert_frame_equal(*out)
    is_complete = (out[0]["complete_at"] <= pair[0].r).to_numpy()
    assert not (out[0]["label"][~is_complete] == 0).any()


FLEET = [installation(f"g{i}", f"n{i // 2}", str(i % 2)) for i in range(6)]


def failure(gpu, time, code="79", **more):
    return event(time, code=code, gpu=f"g{gpu}", node=f"n{gpu // 2}", **more)


def groups(*rows, installations=FLEET, labels=LABELS, as_of=None):
    """Node incidents and common causes by (unit, start)."""
    incidents = find_incidents(events(*rows), inventory(*installations), labels, data_end=at(days=90), as_of=as_of)
    keys = [(row["unit"], row["start"]) for row in oracle.records(incidents)]
    return keys, incidents["node_incident"].tolist(), incidents["common_cause"].tolist()


def test_failures_of_a_nodes_gpus_that_each_begin_within_the_window_of_the_one_before_are_one_node_incident():
    rows = failure(0, at(0)), failure(1, at(minutes=30)), failure(2, at(minutes=10)), failure(1, at(days=3))
    _, node_incident, common_cause = groups(*rows)
    assert node_incident == [0, 1, 0, 2]
    assert common_cause == [0, 1, 0, 2]
    later = failure(0, at(0)), failure(1, at(minutes=30, seconds=0.001))
    assert groups(*later)[1] == [0, 1]
    assert groups(*later, labels=LabelSection(node_window=timedelta(minutes=31)))[1] == [0, 0]


def test_units_without_a_node_are_alone():
    gpus = [installation("g0", None), installation("g1", None)]
    rows = [event(at(minutes=5 * i), code="79", gpu=f"g{i}", node=None) for i in range(2)]
    _, node_incident, common_cause = groups(*rows, installations=gpus)
    assert node_incident == [0, 1]
    assert common_cause == [0, 1]


def test_a_gpu_counts_for_the_node_that_it_was_in():
    moved = [installation("g0", "n0", until=at(1)), installation("g0", "n1", since=at(1)), installation("g1", "n1")]
    rows = event(at(2), code="79", gpu="g0", node="n1"), event(at(2.1), code="48", gpu="g1", node="n1")
    assert groups(*rows, installations=moved)[1] == [0, 0]


def test_node_incidents_that_begin_at_one_instant_have_a_common_cause_unless_they_are_dated_by_day():
    rows = failure(0, at(0)), failure(1, at(minutes=2)), failure(2, at(0, seconds=30)), failure(4, at(0, seconds=61))
    assert groups(*rows)[2] == [0, 0, 1, 0]
    day = at(days=1) - timedelta(milliseconds=1)  # of a date, in a zone of whole hours
    tickets = (event(day, "failure", "", gpu=f"g{gpu}", node=f"n{gpu // 2}") for gpu in (0, 2))
    assert groups(*tickets)[2] == [0, 1]


def test_node_incidents_in_one_maintenance_have_a_common_cause_and_none_mixes_with_those_outside():
    ends = at(9).isoformat()
    windows = [event(at(h), "maintenance", ends, gpu=None, node=f"n{i}") for i, h in enumerate((1, 1, 4))]
    rows = failure(0, at(2)), failure(2, at(7)), failure(4, at(8)), failure(1, at(2.2))
    keys, node_incident, common_cause = groups(*rows, *windows)
    assert [unit for unit, _ in keys] == ["g0", "g1", "g2", "g4"]
    assert (node_incident, common_cause) == ([0, 0, 1, 2], [0, 0, 0, 1])
    edge = failure(0, at(8.9)), failure(1, at(9.1))
    assert groups(*edge, windows[0])[1] == [0, 1]


# --- properties -------------------------------------------------------------------------------------------------------

TIMES = st.integers(0, 60).map(lambda step: at(minutes=20 * (step // 3), seconds=20 * (step % 3)))
STORIES = st.lists(st.tuples(st.integers(0, 5), TIMES, st.sampled_from(["xid", "repair"])), max_size=12)


def records_of(story, *, copies=1):
    """Events of a story in which each GPU stands for so many that fail together, and the fleet of them."""
    units = [(gpu, copy) for gpu in range(6) for copy in range(copies)]
    gpus = [installation(f"g{gpu}c{copy}", f"n{gpu // 2}", f"{gpu}-{copy}") for gpu, copy in units]
    rows = [
        event(time, kind, "79" if kind == "xid" else "", gpu=f"g{gpu}c{copy}", node=f"n{gpu // 2}")
        for gpu, time, kind in story
        for copy in range(copies)
    ]
    return rows, gpus


def table(rows, gpus, **more):
    incidents = find_incidents(events(*rows), inventory(*gpus), LABELS, data_end=at(days=90), **more)
    return oracle.records(incidents)


def plain_groups(members, linked):
    """Sets of positions that are linked, directly or through others."""
    groups = [{i} for i in range(len(members))]
    for i, j in combinations(range(len(members)), 2):
        if linked(members[i], members[j]):
            one, two = (next(group for group in groups if k in group) for k in (i, j))
            if one is not two:
                groups.remove(two)
                one |= two
    return {frozenset(group) for group in groups}


def groups_by(numbers):
    return {frozenset(i for i, n in enumerate(numbers) if n == number) for number in numbers}


@SLOW
@given(STORIES)
def test_groups_are_those_of_the_plain_reading(story):
    incidents = table(*records_of(story))
    nodes = [row["node_incident"] for row in incidents]
    near = timedelta(minutes=30)
    assert groups_by(nodes) == plain_groups(
        incidents, lambda a, b: a["node"] == b["node"] and abs(a["start"] - b["start"]) <= near
    )
    starts = [min(row["start"] for row in incidents if row["node_incident"] == n) for n in sorted(set(nodes))]
    causes = [next(row["common_cause"] for row in incidents if row["node_incident"] == n) for n in sorted(set(nodes))]
    assert groups_by(causes) == plain_groups(starts, lambda a, b: abs(a - b) <= timedelta(seconds=30))
    assert starts == sorted(starts)
    assert all(len({row["common_cause"] for row in incidents if row["node_incident"] == n}) == 1 for n in nodes)


@SLOW
@given(STORIES, st.randoms(use_true_random=False))
def test_four_gpus_that_fail_together_are_counted_as_one_and_the_order_of_events_does_not_matter(story, random):
    one, four = table(*records_of(story)), table(*records_of(story, copies=4))
    assert len(four) == 4 * len(one)
    for name in ("node_incident", "common_cause"):
        assert len({row[name] for row in four}) == len({row[name] for row in one})
    rows, gpus = records_of(story)
    assert table(random.sample(rows, len(rows)), gpus) == one


@SLOW
@given(STORIES, TIMES)
def test_what_is_known_to_be_one_node_incident_stays_one(story, r):
    failures = [(gpu, time, kind) for gpu, time, kind in story if kind == "xid"]
    rows, gpus = records_of(failures)
    later = {(row["unit"], row["start"]): row["node_incident"] for row in table(rows, gpus)}
    for number in {row["node_incident"] for row in table(rows, gpus, as_of=r)}:
        members = [row for row in table(rows, gpus, as_of=r) if row["node_incident"] == number]
        assert len({later[row["unit"], row["start"]] for row in members}) == 1


def test_units_that_are_acted_on_alone_fail_alone():
    rows = failure(0, at(0)), failure(1, at(minutes=20)), failure(2, at(days=1))
    assert groups(*rows)[1] == [0, 0, 1]
    assert groups(*rows, labels=LabelSection(acts_on="unit"))[1] == [0, 1, 2]
