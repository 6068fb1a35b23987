"""Tickets that follow a failure: they belong to it, as known at each time, and change nothing else."""

from datetime import timedelta

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import FeatureSection, LabelSection
from features.groups.history import EventHistory
from features.labels.evidence import IncidentEvidence
from features.labels.incidents import find_incidents, known_onsets, out_of_use
from features.labels.labelling import label_rows
from tests.features import oracle
from tests.features.builders import at, event, events, installation, inventory, rows

LABELS = LabelSection()
HELD = [installation("g0"), installation("g1", slot="1"), installation("g2", "n1")]
NODE = {"g0": "n0", "g1": "n0", "g2": "n1"}
DAY, MS = timedelta(days=1), timedelta(milliseconds=1)
SLOW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def ticket(time, gpu=None, code="", node="n0", **more):
    return event(time, "failure", code, gpu=gpu, node=node, **more)


def by_day(day, gpu=None, code="gpu lost", **more):
    """A ticket dated by day, as an import dates it."""
    return ticket(at(days=day + 1) - MS, gpu, code, **more)


def found(*happened, labels=LABELS, as_of=None, installations=HELD):
    frame = find_incidents(events(*happened), inventory(*installations), labels, data_end=at(days=60), as_of=as_of)
    return [(row["unit"], row["start"], row["end"]) for row in oracle.records(frame)]


@pytest.mark.parametrize("hard", [event(at(1), code="79"), event(at(1), "failure", "gpu_lost"),
                                  event(at(1), "failure", "sxid_20034")])  # fmt: skip
@pytest.mark.parametrize("later", [ticket(at(40)), ticket(at(40), "g0"), ticket(at(40), "g1"),
                                   ticket(at(40), "g1", node=None), by_day(1), by_day(1, "g0")])  # fmt: skip
def test_a_ticket_belongs_to_the_failure_of_its_node_before_it(hard, later):
    assert found(hard, later) == [("g0", at(1), later["timestamp"] + DAY)]


def test_a_ticket_of_the_day_on_which_its_gpu_failed_belongs_to_that_failure():
    assert found(event(at(23), code="79"), by_day(0, "g0")) == [("g0", at(23), at(48) - MS)]
    assert found(event(at(25), code="79"), by_day(0, "g0"))[0][:2] == ("g0", at(24) - MS)


@pytest.mark.parametrize(
    "later",
    [
        ticket(at(40), "g0", "gpu_lost"), ticket(at(40), "g2", node="n1"), ticket(at(1, days=7, seconds=0.001), "g0"),
        by_day(8, "g0"), ticket(at(0.5), "g0"),
    ],
)  # fmt: skip
def test_a_coded_a_foreign_a_late_and_an_earlier_failure_stand_alone(later):
    assert (later["gpu"], later["timestamp"]) in [span[:2] for span in found(event(at(1), code="79"), later)]


@pytest.mark.parametrize(
    ("between", "alone"),
    [
        (event(at(30), "repair"), True), (event(at(30), "repair", gpu=None), True),
        (event(at(30), "replacement", gpu=None), True), (event(at(30), "other", "reboot", gpu=None), False),
        (event(at(30), "repair", "reset"), False), (event(at(30), "repair", gpu="g1"), False),
        (event(at(41), "repair"), False),
    ],
)  # fmt: skip
def test_a_repair_between_closes_the_failure_and_a_reset_does_not(between, alone):
    spans = found(event(at(1), code="79"), between, ticket(at(40), "g0"))
    assert [start for _, start, _ in spans] == ([at(1), at(40)] if alone else [at(1)])


def test_a_repair_on_the_day_of_a_ticket_dated_by_day_ends_the_incident_that_the_ticket_belongs_to():
    assert found(event(at(1), code="79"), event(at(30), "repair"), by_day(1, "g0")) == [("g0", at(1), at(30))]


def test_a_ticket_answers_the_newest_failure_of_its_node_but_first_that_of_its_own_gpu():
    failures = event(at(1), code="79"), event(at(30), code="79", gpu="g1")
    of_gpu, of_neighbour = ("g0", at(1)), ("g1", at(30))
    for of, ends in ((None, {of_gpu: at(25), of_neighbour: at(74)}), ("g0", {of_gpu: at(74), of_neighbour: at(54)})):
        assert {span[:2]: span[2] for span in found(*failures, ticket(at(50), of))} == ends


def test_all_units_of_a_node_incident_are_down_until_its_ticket():
    failures = event(at(1), code="79"), event(at(1, minutes=20), code="79", gpu="g1")
    assert found(*failures, ticket(at(50), "g1")) == [("g0", at(1), at(74)), ("g1", at(1, minutes=20), at(74))]


def test_rows_between_a_failure_and_its_ticket_have_no_label_and_those_before_are_as_without_it():
    hard, later = event(at(48), code="79"), ticket(at(100), known=at(101))
    gpus = inventory(*HELD)
    decisions = rows(*((at(6 * i), "g0") for i in range(30)))
    labels = []
    for happened in ((hard,), (hard, later)):
        incidents = find_incidents(events(*happened), gpus, LABELS, data_end=at(days=60))
        labels.append(label_rows(decisions, incidents, gpus, LABELS, data_end=at(days=60))["label"])
    without, with_it = labels
    assert with_it[:8].equals(without[:8])
    assert with_it[8:21].isna().all()
    assert (without[13:] == 0).all()
    assert (with_it[21:] == 0).all()


def test_what_a_ticket_belongs_to_is_used_only_from_when_it_is_known():
    hard, later = event(at(1), code="79", known=at(60)), ticket(at(40), "g1", known=at(41))
    assert [span[:2] for span in found(hard, later, as_of=at(59))] == [("g1", at(40))]
    assert [span[:2] for span in found(hard, later, as_of=at(60))] == [("g0", at(1))]
    onsets = oracle.records(known_onsets(IncidentEvidence.of(events(hard, later), inventory(*HELD), LABELS)))
    assert [(row["unit"], row["known_at"], row["until"]) for row in onsets] == [
        ("g1", at(41), at(60)), ("g0", at(60), None)
    ]  # fmt: skip


# --- against a plain reading ------------------------------------------------------------------------------------------

QUARTERS = st.integers(0, 10 * 96).map(lambda quarter: at(minutes=15 * quarter))
DELAYS = st.sampled_from([0, 10, 600, 3000]).map(lambda minutes: timedelta(minutes=minutes))
KINDS = [("xid", "79"), ("xid", "79"), ("failure", "DBE"), ("failure", ""), ("failure", ""), ("failure", "day"),
         ("repair", ""), ("other", "reboot")]  # fmt: skip


@st.composite
def stories(draw, kinds=KINDS, most=9):
    out = []
    for _ in range(draw(st.integers(0, most))):
        kind, code = draw(st.sampled_from(kinds))
        gpu = draw(st.sampled_from(["g0", "g0", "g1", "g2", None]))
        time = draw(QUARTERS)
        if code == "day":
            time = time.replace(hour=23, minute=59, second=59, microsecond=999_000)
        out.append(event(time, kind, code, gpu=gpu, node=NODE.get(gpu, "n0"), known=time + draw(DELAYS)))
    return out


def is_ticket(row):
    return row["type"] == "failure" and row["code"] in ("", "day")


def plain_incidents(happened, labels, r):
    """(unit, start, end) by what is known at r, the slow way; data end: r."""
    facts = [row for row in happened if oracle.known(row) <= r]
    hard = [row for row in facts if row["gpu"] and not is_ticket(row) and row["type"] in ("xid", "failure")]

    def mended(row, first, last):
        return any(
            e["type"] == "repair" and first <= e["timestamp"] < last
            and (e["gpu"] == row["gpu"] or (e["gpu"] is None and e["node"] == row["node"]))
            for e in facts
        )  # fmt: skip

    signs = {gpu: [row["timestamp"] for row in hard if row["gpu"] == gpu] for gpu in NODE}
    follow = {gpu: [] for gpu in NODE}
    for row in facts:
        if not is_ticket(row):
            continue
        time = row["timestamp"]
        day = time - DAY if row["code"] == "day" else time
        open_ones = [
            h for h in hard
            if h["node"] == row["node"] and time - labels.ticket_lag <= h["timestamp"] <= time
            and not mended(h, h["timestamp"], day)
        ]  # fmt: skip
        of_gpu = [h for h in open_ones if h["gpu"] == row["gpu"]]
        if not open_ones:
            if row["gpu"]:
                signs[row["gpu"]].append(time)
            continue
        together = [max(of_gpu or open_ones, key=lambda h: (h["timestamp"], h["gpu"]))]
        while more := [
            h for h in open_ones
            if h not in together and any(abs(h["timestamp"] - t["timestamp"]) <= labels.node_window for t in together)
        ]:  # fmt: skip
            together += more
        for gpu in {h["gpu"] for h in together}:
            newest = max((h for h in open_ones if h["gpu"] == gpu), key=lambda h: h["timestamp"])
            if newest in together and not mended(newest, newest["timestamp"], time + MS):
                follow[gpu].append(time)
    out = []
    for gpu, times in signs.items():
        stops = sorted(
            e["timestamp"] for e in facts
            if e["type"] in ("repair", "other") and (e["gpu"] == gpu or (e["gpu"] is None and e["node"] == NODE[gpu]))
        )  # fmt: skip
        own_repairs = sorted(
            e["timestamp"] for e in facts
            if e["type"] == "repair" and (e["gpu"] == gpu or (e["gpu"] is None and e["node"] == NODE[gpu]))
        )  # fmt: skip
        groups = []
        for time in sorted(times):
            last = groups[-1][-1] if groups else None
            if last is not None and (
                time - last <= labels.merge_window
                or (time - last < labels.cooldown and not any(last <= stop <= time for stop in stops))
            ):
                groups[-1].append(time)
            else:
                groups.append([time])
        for i, group in enumerate(groups):
            next_start = groups[i + 1][0] if i + 1 < len(groups) else oracle.FOR_EVER
            last = max([group[-1], *(t for t in follow[gpu] if group[-1] <= t < next_start)])
            soon = [stop for stop in stops if last <= stop <= last + labels.cooldown]
            late = [stop for stop in own_repairs if last <= stop <= last + timedelta(days=30) and stop < next_start]
            end = min([*(soon[:1] or late[:1] or [last + labels.cooldown]), next_start])
            out.append((gpu, group[0], end if soon or late or end <= r else None))
    return sorted(out, key=lambda span: (span[1], span[0]))


@SLOW
@given(stories(), QUARTERS)
def test_incidents_with_tickets_are_as_the_plain_reading_says(happened, r):
    for moment in (r, at(days=30)):
        frame = find_incidents(events(*happened), inventory(*HELD), LABELS, as_of=moment)
        spans = [(row["unit"], row["start"], row["end"]) for row in oracle.records(frame)]
        assert spans == plain_incidents(oracle.records(events(*happened)), LABELS, moment)


@settings(SLOW, max_examples=15)
@given(stories())
def test_a_unit_is_known_down_when_looking_back_from_then_shows_an_incident_that_lasts(happened):
    down = oracle.records(out_of_use(IncidentEvidence.of(events(*happened), inventory(*HELD), LABELS)))
    facts = oracle.records(events(*happened))
    for quarter in range(3, 1200, 83):
        t = at(minutes=15 * quarter)
        lasting = {gpu for gpu, start, end in plain_incidents(facts, LABELS, t) if end is None or start <= t < end}
        assert {row["unit"] for row in down if row["down_from"] <= t < row["down_until"]} == lasting


@SLOW
@given(stories(), stories(), QUARTERS)
def test_what_is_known_later_changes_no_onset_before(shared, more, r):
    known = [row for row in shared if oracle.known(row) <= r]
    later = [row for row in more if oracle.known(row) > r]
    seen = []
    for part in (known, known + later):
        onsets = known_onsets(IncidentEvidence.of(events(*part), inventory(*HELD), LABELS))
        onsets = onsets[onsets["known_at"] <= r].reset_index(drop=True)
        seen.append(onsets.assign(until=onsets["until"].where(onsets["until"] <= r)))
    pd.testing.assert_frame_equal(*seen)


@SLOW
@given(stories(kinds=[("xid", "79"), ("failure", "DBE"), ("other", "reboot")]), st.data())
def test_a_ticket_a_day_or_two_behind_each_failure_changes_no_incident_and_no_history(happened, data):
    hard = [row for row in happened if row["gpu"] and row["type"] != "other"]
    late = []
    for row in hard:
        later = row["timestamp"] + data.draw(st.sampled_from([DAY, 2 * DAY, timedelta(hours=30)]))
        named = data.draw(st.sampled_from([None, row["gpu"], {"g0": "g1", "g1": "g0"}.get(row["gpu"])]))
        late.append(ticket(later, named, data.draw(st.sampled_from(["", "day"])), row["node"]))
        if late[-1]["code"] == "day":
            late[-1]["timestamp"] = later.replace(hour=23, minute=59, second=59, microsecond=999_000)
        late[-1]["known_at"] = max(late[-1]["timestamp"], row["known_at"]) + timedelta(minutes=10)
    gpus = inventory(*HELD)
    times = rows(*((at(minutes=15 * quarter), gpu) for quarter in range(3, 1400, 67) for gpu in ("g0", "g1")))
    features, starts = [], []
    for frame in (events(*happened), events(*happened, *late)):
        incidents = find_incidents(frame, gpus, LABELS, data_end=at(days=30))
        starts.append(incidents[["unit", "start", "known_at", "node_incident", "common_cause"]])
        features.append(EventHistory.of(IncidentEvidence.of(frame, gpus, LABELS), FeatureSection(), gpus).values(times))
    pd.testing.assert_frame_equal(*starts)
    assert pd.DataFrame(features[0]).equals(pd.DataFrame(features[1]))
