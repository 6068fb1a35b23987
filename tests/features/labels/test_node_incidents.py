"""Node incidents and common causes: which incidents of units are one failure, and of what."""

from datetime import timedelta

from hypothesis import settings

from features.config import LabelSection
from features.labels.incidents import find_incidents
from tests.features import oracle
from tests.features.builders import at, event, events, inventory, stay

LABELS = LabelSection()
FLEET = [stay(f"g{i}", f"n{i // 2}", str(i % 2)) for i in range(6)]
SLOW = settings(deadline=None, max_examples=60)


def failure(gpu, time, code="79", **more):
    return event(time, code=code, gpu=f"g{gpu}", node=f"n{gpu // 2}", **more)


def groups(*rows, stays=FLEET, labels=LABELS, as_of=None):
    """Node incidents and common causes by (unit, start)."""
    found = find_incidents(events(*rows), inventory(*stays), labels, data_end=at(days=90), as_of=as_of)
    keys = [(row["unit"], row["start"]) for row in oracle.records(found)]
    return keys, found["node_incident"].tolist(), found["common_cause"].tolist()


def test_failures_of_a_nodes_gpus_that_each_begin_within_the_window_of_the_one_before_are_one_node_incident():
    rows = failure(0, at(0)), failure(1, at(minutes=30)), failure(2, at(minutes=10)), failure(1, at(days=3))
    _, node_incident, common_cause = groups(*rows)
    assert node_incident == [0, 1, 0, 2]
    assert common_cause == [0, 1, 0, 2]
    later = failure(0, at(0)), failure(1, at(minutes=30, seconds=0.001))
    assert groups(*later)[1] == [0, 1]
    assert groups(*later, labels=LabelSection(node_window=timedelta(minutes=31)))[1] == [0, 0]


def test_units_without_a_node_are_alone():
    held = [stay("g0", None), stay("g1", None)]
    rows = [event(at(minutes=5 * i), code="79", gpu=f"g{i}", node=None) for i in range(2)]
    _, node_incident, common_cause = groups(*rows, stays=held)
    assert node_incident == [0, 1]
    assert common_cause == [0, 1]


def test_a_gpu_counts_for_the_node_that_it_was_in():
    moved = [stay("g0", "n0", until=at(1)), stay("g0", "n1", since=at(1)), stay("g1", "n1")]
    rows = event(at(2), code="79", gpu="g0", node="n1"), event(at(2.1), code="48", gpu="g1", node="n1")
    assert groups(*rows, stays=moved)[1] == [0, 0]


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
