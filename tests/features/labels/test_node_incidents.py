"""Node incidents and common causes: which incidents of units are one failure, and of what."""

from datetime import timedelta
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from features.config import LabelSection
from features.labels.incidents import find_incidents
from tests.features import oracle
from tests.features.builders import at, event, events, inventory, stay

LABELS = LabelSection()
FLEET = [stay(f"g{i}", f"n{i // 2}", str(i % 2)) for i in range(6)]
SLOW = settings(deadline=None, max_examples=30)


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


# --- properties -------------------------------------------------------------------------------------------------------

TIMES = st.integers(0, 60).map(lambda step: at(minutes=20 * (step // 3), seconds=20 * (step % 3)))
STORIES = st.lists(st.tuples(st.integers(0, 5), TIMES, st.sampled_from(["xid", "repair"])), max_size=12)


def told(story, *, copies=1):
    """Events of a story in which each GPU stands for so many that fail together, and the fleet of them."""
    units = [(gpu, copy) for gpu in range(6) for copy in range(copies)]
    held = [stay(f"g{gpu}c{copy}", f"n{gpu // 2}", f"{gpu}-{copy}") for gpu, copy in units]
    rows = [
        event(time, kind, "79" if kind == "xid" else "", gpu=f"g{gpu}c{copy}", node=f"n{gpu // 2}")
        for gpu, time, kind in story
        for copy in range(copies)
    ]
    return rows, held


def table(rows, held, **more):
    found = find_incidents(events(*rows), inventory(*held), LABELS, data_end=at(days=90), **more)
    return oracle.records(found)


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
    found = table(*told(story))
    nodes = [row["node_incident"] for row in found]
    near = timedelta(minutes=30)
    assert groups_by(nodes) == plain_groups(
        found, lambda a, b: a["node"] == b["node"] and abs(a["start"] - b["start"]) <= near
    )
    starts = [min(row["start"] for row in found if row["node_incident"] == n) for n in sorted(set(nodes))]
    causes = [next(row["common_cause"] for row in found if row["node_incident"] == n) for n in sorted(set(nodes))]
    assert groups_by(causes) == plain_groups(starts, lambda a, b: abs(a - b) <= timedelta(seconds=30))
    assert starts == sorted(starts)
    assert all(len({row["common_cause"] for row in found if row["node_incident"] == n}) == 1 for n in nodes)


@SLOW
@given(STORIES, st.randoms(use_true_random=False))
def test_four_gpus_that_fail_together_are_counted_as_one_and_the_order_of_events_does_not_matter(story, random):
    one, four = table(*told(story)), table(*told(story, copies=4))
    assert len(four) == 4 * len(one)
    for name in ("node_incident", "common_cause"):
        assert len({row[name] for row in four}) == len({row[name] for row in one})
    rows, held = told(story)
    assert table(random.sample(rows, len(rows)), held) == one


@SLOW
@given(STORIES, TIMES)
def test_what_is_known_to_be_one_node_incident_stays_one(story, r):
    failures = [(gpu, time, kind) for gpu, time, kind in story if kind == "xid"]
    rows, held = told(failures)
    later = {(row["unit"], row["start"]): row["node_incident"] for row in table(rows, held)}
    for number in {row["node_incident"] for row in table(rows, held, as_of=r)}:
        members = [row for row in table(rows, held, as_of=r) if row["node_incident"] == number]
        assert len({later[row["unit"], row["start"]] for row in members}) == 1


def test_units_that_are_acted_on_alone_fail_alone():
    rows = failure(0, at(0)), failure(1, at(minutes=20)), failure(2, at(days=1))
    assert groups(*rows)[1] == [0, 0, 1]
    assert groups(*rows, labels=LabelSection(acts_on="unit"))[1] == [0, 1, 2]
