"""Reading a folder of scores, as `predrain score` writes it."""

import json
import shutil
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.controller.scores_reader import ScoresReader
from scheduler.ports.clock import ManualClock
from scheduler.ports.errors import SourceError
from tests.policy.decide_world import STEP, T0
from tests.scheduler.score_files import reading, record, write


def test_the_newest_scores_are_read_by_node_with_model_and_age(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2), record("g1", "n0", None), record("g2", "n1", 0.9))
    risks = reading(tmp_path).read()
    assert {name: [unit.name for unit in units] for name, units in risks.nodes.items()} == {
        "n0": ["g0", "g1"],
        "n1": ["g2"],
    }
    score = risks.nodes["n1"][0].score
    assert (score.risk, score.decided_at, score.expires_at) == (0.9, T0, T0 + 2 * STEP)
    assert score.reasons == ("errors rise",)
    assert risks.nodes["n0"][1].score.risk is None
    assert (risks.model.version, risks.decided_at, risks.model_fitted_at.day) == (4, T0, 20)
    write(tmp_path, record("g0", "n0", 0.2), model={"fitted_at": "yesterday"})
    assert reading(tmp_path).read().model_fitted_at is None


@pytest.mark.parametrize("inner", [".", "latest.json", "decisions", "decisions/20260301T000000Z"])
def test_scores_that_anyone_may_write_drain_nobody(tmp_path, inner):
    write(tmp_path, record("g0", "n0", 0.9))
    (tmp_path / inner).chmod((tmp_path / inner).stat().st_mode | 0o002)
    with pytest.raises(SourceError, match="other users can write to this path"):
        reading(tmp_path).read()


def test_scores_are_read_again_only_when_a_newer_decision_is_there(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2))
    reader = reading(tmp_path)
    first = reader.read()
    assert reader.read() is first
    later = T0 + STEP
    write(tmp_path, record("g0", "n0", 0.7, later), at=later)
    assert reader.read().nodes["n0"][0].score.risk == 0.7


def test_a_decision_that_vanishes_while_it_is_read_is_an_error_with_a_message(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2))
    shutil.rmtree(tmp_path / "decisions")
    with pytest.raises(SourceError, match="cannot be read"):
        reading(tmp_path).read()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("latest.json", lambda t: t.replace('"format": 2', '"format": 1'), "in format 1: expected"),
        ("latest.json", lambda t: "[]", "expected an object"),
        ("latest.json", lambda t: "[" * 60_000, "is not JSON"),
        ("latest.json", lambda t: t.replace("20260301T000000Z", "../elsewhere"), "names decision"),
        ("decisions/20260301T000000Z/risks.jsonl", lambda t: t.splitlines(True)[0], "incomplete: 1 of 2 units"),
        ("decisions/20260301T000000Z/risks.jsonl", lambda t: t.replace('"format":2', '"format":9'), "format 9"),
        (
            "decisions/20260301T000000Z/risks.jsonl",
            lambda t: t.replace("2026-03-01T00:00:00Z", "2026-03-02T00:00:00Z"),
            "none of the scores",
        ),
    ],
)
def test_damaged_scores_are_refused_with_the_place(tmp_path, file, change, message):
    write(tmp_path, record("g0", "n0", 0.2), record("g1", "n1", 0.3))
    target = tmp_path / file
    target.write_text(change(target.read_text()))
    with pytest.raises(SourceError, match=message):
        reading(tmp_path).read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expires_at": "2099-01-01T00:00:00Z"}, "g0 is valid until 2099-01-01 00:00 UTC, longer than"),
        ({"issued_at": "2036-01-01T00:00:00Z"}, "g0 is issued in the future, at 2036-01-01 00:00 UTC"),
        ({"issued_at": "2026-02-28T00:00:00Z"}, "g0 was issued before its decision time"),
        ({"horizon_seconds": -3600}, "g0 is damaged: g0 has a horizon of -1 day, 23:00:00: expected up to 366 days"),
        ({"horizon_seconds": 1e99}, "g0 is damaged: the risk record is damaged"),
        ({"risk": 1.5}, "g0 is damaged: g0 has a risk of 1.5"),
        ({"risks": []}, "g0 is damaged"),
        ({"decision_time": "2026-02-01T00:00:00Z"}, "g0 belongs to another decision"),
        ({"unit": "g1"}, "g1 has more than one record of its unit"),
        ({"unit": 3}, "line 1 is damaged: the risk record is damaged: unit: "),
        (
            {"model": {"digest": "x", "profile": "y", "version": None}},
            "g0 has a different model than the other records",
        ),
    ],
)
def test_a_record_that_cannot_be_believed_is_refused_by_itself(tmp_path, change, message):
    write(tmp_path, record("g0", "n0", 0.9), record("g1", "n0", 0.3), record("g2", "n1", 0.4))
    file = tmp_path / "decisions/20260301T000000Z/risks.jsonl"
    first, *others = file.read_text().splitlines(True)
    file.write_text(json.dumps({**json.loads(first), **change}) + "\n" + "".join(others))
    risks = reading(tmp_path).read()
    assert len(risks.refused) == 1
    assert risks.refused[0].startswith(message)
    scores = {unit.name: unit.score for units in risks.nodes.values() for unit in units}
    assert scores["g2"].risk == 0.4
    assert scores.get("g0") is None


def test_a_line_that_is_no_json_costs_itself_alone(tmp_path):
    write(tmp_path, record("g0", "n0", 0.9), record("g1", "n0", 0.3))
    file = tmp_path / "decisions/20260301T000000Z/risks.jsonl"
    file.write_text(file.read_text().replace("errors rise", r"errors \ud83d", 1)[:-40])
    risks = reading(tmp_path).read()
    (unit,) = risks.nodes["n0"]
    assert (unit.name, unit.score.reasons) == ("g0", ("errors ?",)), "the ledger takes no half of a surrogate pair"
    assert risks.refused[0].startswith("line 2 is damaged")


def test_a_record_from_the_future_is_believed_when_its_time_has_come(tmp_path):
    write(tmp_path, record("g0", "n0", 0.9), record("g1", "n0", 0.3))
    file = tmp_path / "decisions/20260301T000000Z/risks.jsonl"
    first, second = file.read_text().splitlines(True)
    later = json.dumps({**json.loads(first), "issued_at": "2026-03-01T12:30:00Z"}) + "\n"
    file.write_text(later + second)
    clock = ManualClock(T0 + 2 * STEP)
    reader = ScoresReader(tmp_path, clock, timedelta(days=7))
    assert len(reader.read().refused) == 1
    clock.move(timedelta(minutes=30))
    assert reader.read().refused == ()


TIMES = st.one_of(
    st.datetimes().map(lambda when: when.isoformat() + "Z"), st.sampled_from(["", "2026-03-01T00:00:00", 7, None])
)
ANY = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5), st.just([]), st.just({}))
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "issued_at": TIMES, "expires_at": TIMES, "decision_time": TIMES, "horizon_seconds": ANY, "risk": ANY,
        "risks": ANY, "unit": ANY, "node": ANY, "model": ANY, "reasons": ANY, "tier": ANY, "completeness": ANY,
        "format": ANY,
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=CHANGES)
def test_whatever_a_record_reports_what_is_used_is_within_bounds_and_the_others_stay(tmp_path, change):
    write(tmp_path, record("g0", "n0", 0.9), record("g1", "n0", 0.3), record("g2", "n1", 0.4))
    file = tmp_path / "decisions/20260301T000000Z/risks.jsonl"
    lines = file.read_text().splitlines()
    changed = json.dumps({**json.loads(lines[0]), **change})
    file.write_text("\n".join([changed, *lines[1:]]) + "\n")
    risks = reading(tmp_path).read()
    assert risks.nodes["n1"][0].score.risk == 0.4
    assert timedelta(0) < risks.horizon <= timedelta(days=366)
    for unit in (unit for units in risks.nodes.values() for unit in units):
        if unit.score is not None:
            assert unit.score.risk is None or 0 <= unit.score.risk <= 1
            assert unit.score.expires_at <= T0 + timedelta(days=7)
            assert unit.score.decided_at <= T0 + 2 * STEP
