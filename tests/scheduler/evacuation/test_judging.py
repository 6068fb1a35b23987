"""What became of alerts, from events, diagnostics of our own, and our own marks; and stages that move by it."""

import json
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from policy.episodes import Alert, OutcomeEvent
from policy.fleet import Fact
from policy.stages import Bar, StagesConfig
from predrain.act.assembly import DatasetHistory
from scheduler.controller.facts import NodeHistories, VerifiedFacts
from scheduler.evacuation.progress import Result
from scheduler.ports.errors import LedgerError, SourceError
from scheduler.ports.risks import MemoryFacts, ReportedFacts
from telemetry.dataset.schema import EVENTS, INVENTORY
from tests.policy.decide_world import HOUR, T0, config
from tests.scheduler.cluster import Cluster

DAY = timedelta(days=1)


def alert(unit="g0", at=T0, node="n0"):
    return Alert(unit, "c/g", "high", at, DAY, node)


def verdicts(history, now, *alerts, results=(), service=()):
    source = VerifiedFacts(MemoryFacts(), lambda: tuple(results), lambda _: history, lambda since: tuple(service))
    return [outcome.verdict for outcome in source.outcomes(alerts or (alert(),), now)]


def result(kind, at, *failed):
    return Result("n0", f"{kind}{at}", ("g0", "g1"), kind, at, failed)


def test_an_incident_within_the_horizon_makes_it_right_and_serving_on_makes_it_wrong():
    history = NodeHistories({"g0": [OutcomeEvent("incident", T0 + HOUR)]})
    alerts = alert("g0"), alert("g1", node="n1")
    assert verdicts(history, T0 + 2 * DAY, *alerts) == ["right", "wrong"]
    assert verdicts(history, T0 + HOUR / 2, *alerts) == ["open", "open"]


def test_an_alert_on_a_node_is_right_whichever_of_its_gpus_fails():
    history = NodeHistories({"g1": [OutcomeEvent("incident", T0 + HOUR)]}, homes={"g0": "n0", "g1": "n0", "g2": "n1"})
    assert verdicts(history, T0 + 2 * DAY, alert("g0"), alert("g2", node="n1")) == ["right", "wrong"]


def test_nothing_is_judged_by_the_silence_of_a_source_that_ends_before():
    history = NodeHistories({}, until=T0 + HOUR)
    assert verdicts(history, T0 + 9 * DAY, alert("g0"), alert("g0", T0 + 2 * HOUR)) == ["open"]


def test_a_drained_unit_is_judged_by_its_diagnostic():
    out = [(T0 + HOUR, "n0", True), (T0 + 4 * HOUR, "n0", False)]
    silent = NodeHistories({}, homes={"g0": "n0"})
    late = T0 + 3 * DAY
    ask = {"service": out}
    assert verdicts(silent, late, **ask) == ["open"]
    assert verdicts(silent, T0 + 30 * DAY, **ask) == ["inconclusive"]
    assert verdicts(silent, late, results=[result("passed", T0 + 3 * HOUR)], **ask) == ["wrong"]
    assert verdicts(silent, T0 + DAY, results=[result("passed", T0 + 3 * HOUR)], **ask) == ["open"]
    assert verdicts(silent, late, results=[result("failed", T0 + 3 * HOUR, "g0")], **ask) == ["right"]
    assert verdicts(silent, late, results=[result("failed", T0 + 3 * HOUR)], **ask) == ["right"]
    assert verdicts(silent, late, results=[result("failed", T0 + 3 * HOUR, "g1")], **ask) == ["right"], (
        "a drain empties the node"
    )
    assert verdicts(silent, late, results=[result("inconclusive", T0 + 3 * HOUR)], **ask) == ["open"]


def test_what_cannot_be_read_judges_nothing():
    def broken(since):
        raise LedgerError("the ledger cannot be read")

    source = VerifiedFacts(MemoryFacts(), tuple, lambda _: NodeHistories({}), broken)
    with pytest.raises(SourceError, match="the ledger cannot be read"):
        source.outcomes((alert(),), T0)
    source = VerifiedFacts(MemoryFacts(), lambda: None, lambda _: NodeHistories({}))
    with pytest.raises(SourceError, match="not available yet"):
        source.outcomes((alert(),), T0)


def test_a_stage_moves_by_what_became_of_the_alerts_that_the_ledger_holds():
    stages = StagesConfig(
        soft=Bar(0.3), min_outcomes=3, min_time=timedelta(0), window=60 * DAY, confidence=0.6, ceiling="soft"
    )
    cluster = Cluster(policy=config("g", free=True, stages=stages))
    units: dict[str, list[OutcomeEvent]] = {}
    history = NodeHistories(units)
    cluster.facts = VerifiedFacts(cluster.facts, tuple, lambda _: history, cluster.ledger.service)
    cluster.restart()
    for i, name in enumerate(("n1", "n2", "n3", "n4", "n5")):
        cluster.clock.move(HOUR)
        cluster.scored(**{name: 0.9})
        cluster.round()
        if i:
            units[f"{name}-0"] = [OutcomeEvent("incident", cluster.clock.now() + 3 * HOUR)]
    assert cluster.levels() == {}, "shadow: recorded only"
    cluster.clock.move(3 * DAY)
    cluster.scored(**dict.fromkeys(cluster.names, 0.01))
    report = cluster.round()
    assert report.plan.stages["c/g"].stage == "soft", report.errors
    assert any("4 of 5 alerts right" in reason for reason in report.plan.reasons)


def test_results_are_facts_of_the_gpus_that_were_in_the_node():
    inner = MemoryFacts()
    inner.facts["g1"] = ReportedFacts((Fact("xid 79", T0),), T0 - DAY)
    results = [
        result("passed", T0 + HOUR), result("failed", T0 + 2 * HOUR, "g1"), result("inconclusive", T0 + 3 * HOUR),
        result("passed", T0 + 9 * HOUR),
    ]  # fmt: skip
    source = VerifiedFacts(inner, lambda: tuple(results))
    assert source.read(T0 + 4 * HOUR) == {
        "g0": ReportedFacts((), T0 + HOUR),
        "g1": ReportedFacts((Fact("xid 79", T0), Fact("diagnostic_failed", T0 + 2 * HOUR)), T0 + HOUR),
    }
    with pytest.raises(SourceError, match="not available yet"):
        VerifiedFacts(inner, lambda: None).read(T0)


def dataset(folder, *events, removed=None):
    rows = [
        {
            "timestamp": at, "node": "n0", "gpu": gpu, "type": kind, "code": code, "detail": None, "source": "s",
            "known_at": at + HOUR / 6,
        }
        for at, gpu, kind, code in events
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=EVENTS), folder / "events.parquet")
    stays = [
        {**dict.fromkeys(INVENTORY.names), "gpu": gpu, "node": "n0", "installed_at": T0 - 90 * DAY, "removed_at": out}
        for gpu, out in (("g0", removed), ("g1", None))
    ]
    pq.write_table(pa.Table.from_pylist(stays, schema=INVENTORY), folder / "inventory.parquet")


def test_a_dataset_reports_incidents_by_the_rules_of_labels_and_all_else_by_its_events(tmp_path):
    dataset(
        tmp_path,
        (T0, "g0", "xid", "79"), (T0, "g1", "xid", "31"), (T0 + HOUR, "g0", "repair", "swap"),
        (T0 + 2 * HOUR, "g1", "diagnostic", "pass"), (T0 + 2 * HOUR, "g1", "diagnostic", "inconclusive"),
        (T0 + 3 * HOUR, None, "drain", "high"), (T0 + 4 * HOUR, None, "drain", "release"),
        removed=T0 + 5 * HOUR,
    )  # fmt: skip
    source = DatasetHistory(tmp_path)
    history = source.read(T0 + 9 * HOUR)
    assert {unit: sorted(event.kind for event in events) for unit, events in history.units.items()} == {
        "g0": ["drained", "incident", "left", "returned", "returned"],
        "g1": ["diagnostic_passed", "drained", "returned"],
    }
    assert history.homes == {"g0": "n0", "g1": "n0"}
    assert history.until == T0 + 4 * HOUR + HOUR / 6
    assert source.read(T0).units == {}, "nothing is known before it was"
    dataset(tmp_path, (T0 + DAY, "g1", "failure", "DBE"))
    assert [event.kind for event in source.read(T0 + 9 * DAY).units["g1"]] == ["incident"]


def test_incidents_are_those_that_the_model_of_the_scores_was_trained_on(tmp_path):
    data, summary = tmp_path / "data", tmp_path / "scores" / "decisions" / "20260101T000000Z" / "summary.json"
    data.mkdir()
    summary.parent.mkdir(parents=True)
    dataset(data, (T0, "g0", "xid", "79"), (T0, "g1", "xid", "31"))

    def incident_units(**labels):
        summary.write_text(json.dumps({"labels": labels, "drain_horizon_seconds": 0}))
        units = source.read(T0 + DAY).units
        return {unit for unit, all_of in units.items() if any(event.kind == "incident" for event in all_of)}

    source = DatasetHistory(data, scores=tmp_path / "scores")
    assert incident_units() == {"g0"}
    assert incident_units(xids=[31]) == {"g1"}, "another model, with the dataset as it was"


def test_a_dataset_that_cannot_be_read_reports_where(tmp_path):
    with pytest.raises(SourceError, match="cannot read events and inventory from"):
        DatasetHistory(tmp_path).read(T0)
