"""Reading a folder of scores, as `predrain score` writes it."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta

import pytest

from policy.risk_record import ModelName, RiskReason, RiskRecord
from scheduler.failures import SourceError
from scheduler.scores_reader import ScoresReader
from serving.writing import ScoresFolder, write_decision
from tests.policy.decide_world import HOUR, STEP, T0


def record(unit, node, risk, at=T0):
    known = risk is not None
    return RiskRecord(
        unit, unit, node, None, "ok" if known else "unknown", None if known else "no sample", risk, {}, risk,
        1 if known else None, False, "clear" if known else "unknown", at, at, at + 2 * STEP, 24 * HOUR,
        ModelName("a" * 64, "stacked", 4), None, 1.0, (RiskReason("errors rise", "history", 1.0),) if known else (),
    )  # fmt: skip


def write(path, *records, at=T0, **summary):
    scores = ScoresFolder(path)
    content = {"format": 1, "units": len(records), "model": {"fitted_at": "2026-02-20T00:00:00Z"}, **summary}
    with scores.building(at) as swap:
        write_decision(swap.path, records, content)
        swap.commit()
    scores.point_to_newest()


def test_the_newest_scores_are_read_by_node_with_model_and_age(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2), record("g1", "n0", None), record("g2", "n1", 0.9))
    risks = ScoresReader(tmp_path).read()
    assert {name: [unit.name for unit in units] for name, units in risks.nodes.items()} == {
        "n0": ["g0", "g1"],
        "n1": ["g2"],
    }
    score = risks.nodes["n1"][0].score
    assert (score.risk, score.decided_at, score.expires_at) == (0.9, T0, T0 + 2 * STEP)
    assert score.reasons == ("errors rise",)
    assert risks.nodes["n0"][1].score.risk is None
    assert (risks.model.version, risks.decided_at, risks.model_fitted_at.day) == (4, T0, 20)


def test_scores_are_read_again_only_when_a_newer_decision_is_there(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2))
    reader = ScoresReader(tmp_path)
    first = reader.read()
    assert reader.read() is first
    later = T0 + STEP
    write(tmp_path, record("g0", "n0", 0.7, later), at=later)
    assert reader.read().nodes["n0"][0].score.risk == 0.7


def test_a_decision_that_vanishes_while_it_is_read_is_an_error_in_words(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2))
    shutil.rmtree(tmp_path / "decisions")
    with pytest.raises(SourceError, match="cannot be read"):
        ScoresReader(tmp_path).read()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("latest.json", lambda t: t.replace('"format": 1', '"format": 2'), "in format 2: expected"),
        ("latest.json", lambda t: "[]", "expected an object"),
        ("latest.json", lambda t: t.replace("20260301T000000Z", "../elsewhere"), "names decision"),
        ("decisions/20260301T000000Z/risks.jsonl", lambda t: t[:-40], "line 2: "),
        ("decisions/20260301T000000Z/risks.jsonl", lambda t: t.splitlines(True)[0], "cut short: 1 of 2 units"),
        ("decisions/20260301T000000Z/risks.jsonl", lambda t: t + t, "two records of unit g0"),
        ("decisions/20260301T000000Z/risks.jsonl", lambda t: t.replace('"format":1', '"format":9'), "format 9"),
        (
            "decisions/20260301T000000Z/risks.jsonl",
            lambda t: t.replace("2026-03-01T00:00:00Z", "2026-03-02T00:00:00Z"),
            "of another decision",
        ),
    ],
)
def test_damaged_scores_are_refused_with_the_place(tmp_path, file, change, words):
    write(tmp_path, record("g0", "n0", 0.2), record("g1", "n1", 0.3))
    target = tmp_path / file
    target.write_text(change(target.read_text()))
    with pytest.raises(SourceError, match=words):
        ScoresReader(tmp_path).read()


def test_without_an_age_the_models_age_is_not_known(tmp_path):
    write(tmp_path, record("g0", "n0", 0.2), model={"fitted_at": "yesterday"})
    assert ScoresReader(tmp_path).read().model_fitted_at is None
    assert json.loads((tmp_path / "latest.json").read_text())["decision"] == "20260301T000000Z"
    assert timedelta(hours=6) == STEP
