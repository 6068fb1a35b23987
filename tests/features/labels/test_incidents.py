"""Incidents: coalescing, ends, conditions, and what was known when."""

from datetime import timedelta

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import LabelSection
from features.labels.evidence import IncidentEvidence, is_fatal
from features.labels.facts import diagnostic_outcome
from features.labels.incidents import find_incidents, known_onsets, out_of_use
from foundation.errors import InputError
from tests.features import oracle
from tests.features.builders import at, event, events, installation, inventory
from tests.features.worlds import UNPLANNED, twins, worlds

LABELS = LabelSection()
SLOW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def spans(incidents, unit="g0"):
    return [
        (row["start"], row["end"]) for row in oracle.records(incidents[["unit", "start", "end"]]) if row["unit"] == unit
    ]


def find(*rows, installations=None, labels=LABELS, data_end=None, as_of=None):
    gpus = inventory(*(installations or [installation()]))
    return find_incidents(events(*rows), gpus, labels, data_end=data_end or at(days=60), as_of=as_of)


@pytest.mark.parametrize(
    ("type_", "code"),
    [("repair", ""), ("replacement", ""), ("other", "Reset"), ("other", "reboot"), ("other", "boot")],
)  # fmt: skip
def test_a_repair_or_reset_ends_an_incident(type_, code):
    incidents = find(event(at(0), code="79"), event(at(3), type_, code), event(at(5), code="79"))
    assert spans(incidents) == [(at(0), at(3)), (at(5), at(29))]


def test_each_of_two_failures_ends_with_its_own_repair():
    failures = event(at(0), "failure", "DBE"), event(at(2), "failure", "gone")
    repairs = event(at(3), "repair", "dbe"), event(at(8), "repair", "gone")
    third = event(at(5), "failure", "DBE")  # not a new incident, though the first failure is repaired
    assert spans(find(*failures, *repairs, third)) == [(at(0), at(29))]
    assert spans(find(*failures, *repairs)) == [(at(0), at(8))]
    assert spans(find(*failures, *reversed(repairs))) == [(at(0), at(8))]
    assert spans(find(*failures, {**repairs[0], "code": "board"})) == [(at(0), at(3))]
    assert spans(find(failures[0], {**failures[1], "known_at": at(4)}, repairs[0])) == [(at(0), at(3))]
    assert spans(find(*failures, event(at(3), "replacement", "DBE"))) == [(at(0), at(3))]


def test_a_late_repair_of_the_unit_moves_the_end_but_a_late_reset_or_one_after_another_failure_does_not():
    assert spans(find(event(at(0), code="79"), event(at(days=9), "repair", "board"))) == [(at(0), at(days=9))]
    assert spans(find(event(at(0), code="79"), event(at(days=9), "repair", "reset"))) == [(at(0), at(24))]
    assert spans(find(event(at(0), code="79"), event(at(days=31), "repair", "board"))) == [(at(0), at(24))]
    twice = find(event(at(0), code="79"), event(at(days=4), code="79"), event(at(days=9), "repair", "board"))
    assert spans(twice) == [(at(0), at(24)), (at(days=4), at(days=9))]


def test_a_late_repair_of_the_node_that_names_no_gpu_ends_what_is_open_on_its_gpus():
    assert spans(find(event(at(0), code="79"), event(at(days=9), "repair", gpu=None))) == [(at(0), at(days=9))]
    assert spans(find(event(at(0), code="79"), event(at(days=9), "replacement", gpu=None))) == [(at(0), at(days=9))]
    assert spans(find(event(at(0), code="79"), event(at(days=9), "other", "boot", gpu=None))) == [(at(0), at(24))]


@pytest.mark.parametrize(
    "code", ["13", "31", "43", "45", "63", "92", "94", "156", "46", "109", "110", "136", "99999", "x", "9" * 40]
)
def test_application_errors_precursors_and_unknown_codes_are_no_incidents(code):
    assert find(event(at(0), code=code)).empty


@pytest.mark.parametrize(
    ("code", "expected"),
    [("48", "memory"), ("64", "memory"), ("95", "memory"), ("140", "memory"), ("79", "bus"), ("143", "bus"),
     ("62", "firmware"), ("119", "firmware"), ("120", "firmware"), ("158", "other")],
)  # fmt: skip
def test_each_label_worthy_xid_has_its_class(code, expected):
    assert find(event(at(0), code=code))["failure_class"].tolist() == [expected]


def test_params_decide_what_is_label_worthy():
    labels = LabelSection(xids={"firmware": (46,)}, classes={"DBE": "memory"})
    incidents = find(event(at(0), code="79"), event(at(5), code="46"), labels=labels)
    assert spans(incidents) == [(at(5), at(29))]
    incidents = find(event(at(0), "failure", " dbe "), event(at(48), "failure", "gone"), labels=labels)
    assert incidents["failure_class"].tolist() == ["memory", "other"]


def test_classes_may_be_the_operators_own_and_incidents_be_made_of_some_only():
    classes = {"DBE": "memory", "fan": "cooling_loop"}
    failures = event(at(0), "failure", "DBE"), event(at(48), "failure", "FAN"), event(at(96), code="79")
    for only, expected in (((), ["memory", "cooling_loop", "bus"]), (("bus", "cooling_loop"), ["cooling_loop", "bus"])):
        assert find(*failures, labels=LabelSection(classes=classes, only=only))["failure_class"].tolist() == expected
    with pytest.raises(ValueError, match=r"only: .*'fans': use memory, .*, cooling_loop"):
        LabelSection(classes=classes, only=("fans",))
    for name in ("all", "Fan", "two words"):
        with pytest.raises(ValueError, match="write snake_case"):
            LabelSection(classes={"fan": name})


def test_failures_of_classes_left_out_keep_their_repairs():
    failures = event(at(0), "failure", "DBE"), event(at(2), "failure", "fan")
    repairs = event(at(3), "repair", "fan"), event(at(8), "repair", "DBE")
    labels = {
        only: LabelSection(classes={"DBE": "memory"}, only=(only,)) for only in ("memory", "other", "interconnect")
    }
    assert spans(find(*failures, *repairs, labels=labels["memory"])) == [(at(0), at(8))]
    assert spans(find(*failures, *repairs, labels=labels["other"])) == [(at(2), at(3))]
    repaired = event(at(30), "failure", "DBE"), event(at(40), "repair", "DBE")
    assert find(event(at(0), code="74"), *repaired, labels=labels["interconnect"]).empty


@pytest.mark.parametrize(
    "after",
    [
        event(at(1), "repair"), event(at(1), "drain", "drain"), event(at(1), "other", "reset"),
        event(at(1), "failure", "gone", gpu=None), event(at(0), "repair", gpu=None),
        event(at(1), "diagnostic", "failed"), event(at(1), "drain", "planned"),
    ],
)  # fmt: skip
def test_an_interconnect_error_counts_when_something_drastic_follows_within_an_hour(after):
    hour = LabelSection(confirm_within=timedelta(hours=1))
    assert spans(find(event(at(0), code="74"), after, labels=hour))[0][0] == at(0)
    earlier = find(event(at(0), code="74"), {**after, "timestamp": at(1, seconds=0.001)}, labels=hour)
    assert at(0) not in [start for start, _ in spans(earlier)]


@pytest.mark.parametrize(
    "after",
    [
        event(at(days=7), "repair", "nvlink bridge"), event(at(days=7), "replacement", gpu=None),
        event(at(days=7), "drain", "drain", detail="unplanned"), event(at(days=7), "diagnostic", "failed"),
        event(at(days=7), "repair", "board", detail="Unscheduled maintenance"),
    ],
)  # fmt: skip
def test_an_interconnect_error_is_an_incident_when_an_answer_follows_within_days_and_known_with_the_answer(after):
    incidents = find(event(at(0), code="74"), after)
    known = at(days=8 if after["type"] == "drain" else 7, minutes=10)  # of a drain when its ticket would be known
    assert incidents[["start", "known_at"]].to_numpy().tolist() == [[at(0), known]]
    assert find(event(at(0), code="74"), after, as_of=at(days=7)).empty
    assert find(event(at(0), code="74"), {**after, "timestamp": at(days=7, seconds=0.001)}).empty


@pytest.mark.parametrize("newer", [event(at(30), code="79"), event(at(30), "failure", "x"), event(at(30), code="74")])
def test_a_repair_answers_the_newest_failure_that_was_known_with_it(newer):
    repair = event(at(40), "repair", "board")
    assert spans(find(event(at(0), code="74"), newer, repair)) == [(at(30), at(40))]
    later = find(event(at(0), code="74"), {**newer, "known_at": at(50)}, repair)
    assert at(0) in [start for start, _ in spans(later)]


@pytest.mark.parametrize(
    "after",
    [
        event(at(0.5), "drain", "drain", source="predrain-controller"), event(at(0.5), "drain", "release"),
        event(at(0.5), "repair", gpu="g1"), event(at(0.5), "diagnostic", "passed"), event(at(0.5), code="31"),
        event(at(30), "drain", "drain", source="predrain-controller"), event(at(30), "drain", "maintenance"),
        event(at(30), "drain", "drain", detail="Scheduled upgrade"), event(at(30), "repair", "reset"),
        event(at(30), "other", "reboot"),
    ],
)  # fmt: skip
def test_our_own_drain_planned_work_late_resets_and_what_happens_elsewhere_prove_no_interconnect_failure(after):
    assert (
        spans(find(event(at(0), code="74"), after, installations=[installation(), installation("g1", slot="1")])) == []
    )


@pytest.mark.parametrize("kind", ["repair", "replacement"])
@pytest.mark.parametrize(
    ("other", "both"),
    [
        ([], [True, False]), ([event(at(0.4), code="74", gpu="g1")], [True, True]),
        ([event(at(3), code="74", gpu="g1")], [False, False]), ([event(at(3), code="79", gpu="g1")], [False, True]),
        ([event(at(3), code="31", gpu="g1")], [True, False]), ([event(at(3), code="74", gpu="g2")], [True, False]),
        ([event(at(3), code="74", gpu="g1", known=at(60))], [True, False]),
        ([event(at(3), code="74", gpu=gpu) for gpu in ("g0", "g1")], [True, True]),
    ],
)  # fmt: skip
def test_a_repair_of_a_node_confirms_errors_of_one_gpu_or_of_those_that_erred_together(kind, other, both):
    installations = [installation(), installation("g1", slot="1"), installation("g2", "n1")]
    incidents = find(event(at(0), code="74"), *other, event(at(40), kind, gpu=None), installations=installations)
    assert [bool(spans(incidents, unit)) for unit in ("g0", "g1")] == both


def test_three_interconnect_errors_in_a_day_are_an_incident_from_the_first_and_known_with_the_third():
    incidents = find(event(at(0), code="74"), event(at(12), code="157"), event(at(24), code="74"))
    assert spans(incidents) == [(at(0), at(48))]
    assert incidents.loc[0, "known_at"] == at(24, minutes=10)
    assert find(event(at(0), code="74"), event(at(12), code="74"), event(at(24.01), code="74")).empty


def test_only_fatal_sub_codes_of_nvlink_5_errors_can_count():
    fatal, mild = "149, NETIR_LINK_EVT Fatal XC0 i0", "149, NETIR_BER_EVENT Nonfatal XC0 i0"
    assert spans(find(event(at(0), code="149", detail=fatal), event(at(1), "repair"))) == [(at(0), at(1))]
    assert find(event(at(0), code="149", detail=mild), event(at(1), "repair")).empty
    assert [is_fatal(text) for text in ("FATAL", "non-fatal", "non fatal", "Nonfatal", "fatality", "")] == [
        True, False, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "detail", "passed"),
    [
        ("pass", "", True),
        ("PASSED", "", True),
        ("fail", "", False),
        ("dcgm-r3", "result: failed", False),
        ("r3", "", None),
        ("inconclusive", "aborted with an error before it failed", None),
    ],
)
def test_the_outcome_of_a_diagnostic(code, detail, passed):
    assert diagnostic_outcome(code, detail) is passed


def test_a_failure_of_a_whole_node_of_gpus_is_no_incident_of_its_gpus():
    assert find(event(at(0), "failure", "gone", gpu=None)).empty


def test_where_nodes_are_the_units_their_failures_are_incidents():
    gpus = inventory(installation(None, "n0", None), installation(None, "n1", None))
    incidents = find_incidents(events(event(at(0), "failure", "fan", gpu=None)), gpus, LABELS, data_end=at(30))
    assert incidents[["unit", "node", "failure_class"]].to_numpy().tolist() == [["n0", "n0", "other"]]
    assert incidents["gpu"].isna().all()


def test_an_event_without_known_at_or_time_zone_is_refused():
    broken = events(event(at(0), code="79"))
    broken["known_at"] = pd.DatetimeIndex([pd.NaT], tz="UTC").as_unit("ms")
    with pytest.raises(InputError, match=r"^an event without known_at \(events row 0\)\. Fill known_at"):
        find_incidents(broken, inventory(installation()), LABELS)
    naive = events(event(at(0), code="79"))
    naive["timestamp"] = naive["timestamp"].dt.tz_localize(None)
    with pytest.raises(InputError, match=r"datetime64\[ms\] instead of times with a time zone \(column timestamp\)"):
        find_incidents(naive, inventory(installation()), LABELS)


@SLOW
@given(worlds(), st.sampled_from([1, 3, 30]), st.sampled_from([1, 30, 168]))
def test_incidents_are_as_the_plain_reading_says(world, quiet_hours, confirm_hours):
    labels = LabelSection(cooldown=timedelta(hours=quiet_hours), confirm_within=timedelta(hours=confirm_hours))
    gpus, happened = oracle.records(world.inventory), oracle.records(world.events)
    for as_of, data_end in ((None, at(days=7)), (world.r, at(days=7))):
        r = as_of or oracle.FOR_EVER
        incidents = find_incidents(world.events, world.inventory, labels, as_of=as_of, data_end=data_end)
        for unit in ("g0", "g1", "g2", "g3"):
            assert spans(incidents, unit) == oracle.incidents(unit, happened, gpus, labels, r, min(r, data_end))
        for row in oracle.records(incidents):
            planned = oracle.in_maintenance(row["unit"], row["start"], happened, gpus, r)
            assert row["in_maintenance"] is planned
        assert incidents["start"].is_monotonic_increasing


@SLOW
@given(worlds())
def test_an_incident_is_known_from_the_first_time_at_which_looking_back_shows_part_of_it(world):
    incidents = find_incidents(world.events, world.inventory, LABELS, data_end=at(days=9))
    happened, gpus = oracle.records(world.events), oracle.records(world.inventory)
    moments = sorted(
        {oracle.known(row) + wait for row in happened for wait in (timedelta(0), oracle.DAY)}
        | {row["removed_at"] for row in gpus if row["removed_at"]}
    )
    onsets = oracle.records(incidents)
    for row in onsets:
        later = {other["start"] for other in onsets if other["unit"] == row["unit"] and other["start"] > row["start"]}
        last = max(  # a sign at its very end is part of it, unless the next incident begins with that
            sign["timestamp"] for sign in oracle.signs(row["unit"], happened, gpus, oracle.FOR_EVER)
            if row["start"] <= sign["timestamp"] <= (row["end"] or oracle.FOR_EVER) and sign["timestamp"] not in later
        )  # fmt: skip
        visible = [
            r for r in moments
            if any(row["start"] <= s["timestamp"] <= last for s in oracle.signs(row["unit"], happened, gpus, r))
        ]  # fmt: skip
        assert row["known_at"] == min(visible)


@SLOW
@given(twins())
def test_incidents_as_of_r_depend_only_on_what_was_known_at_r(pair):
    one, two = (find_incidents(w.events, w.inventory, LABELS, as_of=w.r, data_end=at(days=9)) for w in pair)
    pd.testing.assert_frame_equal(one, two)


@SLOW
@given(twins())
def test_known_onsets_up_to_t_depend_only_on_what_was_known_at_t(pair):
    one, two = (known_onsets(IncidentEvidence.of(w.events, w.inventory, LABELS)) for w in pair)
    one, two = (f[f["known_at"] <= pair[0].r].reset_index(drop=True) for f in (one, two))
    pd.testing.assert_frame_equal(one, two)


@settings(SLOW, max_examples=12)
@given(worlds(kinds=UNPLANNED), st.sampled_from([2, 24]))
def test_a_unit_is_known_down_when_looking_back_from_then_shows_an_incident_that_lasts(world, quiet_hours):
    """Without maintenance, only incidents and drains put a unit out of use."""
    labels = LabelSection(cooldown=timedelta(hours=quiet_hours))
    down = oracle.records(out_of_use(IncidentEvidence.of(world.events, world.inventory, labels)))
    happened, gpus = oracle.records(world.events), oracle.records(world.inventory)
    drains = [row for row in happened if row["type"] == "drain" and not oracle.is_own(row)]
    for quarter in (0, 1, 97, 130, 200, 201, 303, 391, 460, 577, 640):
        t = at(minutes=15 * quarter)
        incidents = oracle.records(find_incidents(world.events, world.inventory, labels, as_of=t))
        for unit in ("g0", "g1", "g2", "g3"):
            is_down = any(r["unit"] == unit and r["down_from"] <= t < r["down_until"] for r in down)
            lasts = any(
                row["unit"] == unit and row["start"] <= t and (row["end"] is None or row["end"] > t)
                for row in incidents
            )
            drained = any(oracle.known(row) <= t and oracle.concerns(row, unit, gpus) for row in drains)
            assert lasts <= is_down <= (lasts or drained), (unit, t)
