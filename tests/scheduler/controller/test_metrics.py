"""The controller's numbers and its page, over rounds on a cluster in memory."""

import urllib.error
import urllib.request
from dataclasses import replace
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foundation.errors import InputError
from scheduler.controller.metrics import RoundMetrics, listening
from scheduler.ports.clock import ManualClock
from tests.policy.decide_world import STEP, T0, config
from tests.scheduler.cluster import Cluster, at_risk

MINUTE = timedelta(minutes=1)


def values(page: str) -> dict[str, float]:
    """All samples of a page, read by the field's own parser."""
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for result in text_string_to_metric_families(page)
        for sample in result.samples
    }


def test_a_round_is_reported_by_what_it_did_and_how_the_fleet_stands():
    cluster = Cluster(policy=config("g", free=True))
    cluster.scored(n1=0.15, n2=0.4, n3=0.9)
    metrics = RoundMetrics(ManualClock(T0), STEP, STEP)
    metrics.note(cluster.round(), 0.5)
    result = values(metrics.exposition())
    assert result["predrain_act_rounds_total result=decided"] == 1
    assert result["predrain_act_rounds_total result=failed"] == 0
    assert result["predrain_act_actions_total outcome=done verb=publish"] == 1
    assert result["predrain_act_actions_total outcome=done verb=drain"] == 1
    assert [result[f"predrain_act_nodes tier={tier}"] for tier in ("watch", "elevated", "high")] == [1, 1, 1]
    assert result["predrain_act_target_nodes level=drain"] == 1
    assert result["predrain_act_stage_groups stage=hard"] == 1
    assert result["predrain_act_last_round_timestamp_seconds"] == T0.timestamp()
    assert result["predrain_act_leader"] == 1
    assert result["predrain_act_breaker_open_causes"] == 0
    for _ in range(2):
        cluster.clock.move(STEP)
        cluster.scored(n1=0.01, n2=0.01, n3=0.01)
        report = cluster.round()
    assert {node.tier for node in report.plan.nodes.values()} == {"clear"}
    metrics.note(report, 0.5)
    tiers = [name for name in values(metrics.exposition()) if name.startswith("predrain_act_nodes ")]
    assert sorted(tiers) == [f"predrain_act_nodes tier={tier}" for tier in ("elevated", "high", "unknown", "watch")]


def test_what_is_over_budget_and_what_opened_the_breaker_is_reported_by_kind_and_never_by_name():
    cluster = at_risk(n0=0.9, n1=0.9, n2=0.9, n3=0.9)
    metrics = RoundMetrics(ManualClock(T0), STEP, STEP)
    metrics.note(cluster.round(), 0.1)
    result = values(metrics.exposition())
    assert result["predrain_act_budget_deferred_nodes"] == 2
    assert result["predrain_act_budget_remaining_nodes scope=rack"] == 0
    cluster.clock.move(timedelta(days=30))
    cluster.scored()
    cluster.risks.risks = replace(cluster.risks.risks, model_fitted_at=T0)
    metrics.note(cluster.round(), 0.1)
    page = metrics.exposition()
    assert values(page)["predrain_act_breaker_open cause=model"] == 1
    assert not any(name in page for name in (*cluster.names, "r0"))


def test_a_standby_reports_nothing_of_the_fleet():
    cluster = Cluster()
    metrics = RoundMetrics(ManualClock(T0), STEP, STEP)
    cluster.scored(n1=0.9)
    metrics.note(cluster.round(), 0.1)
    assert "predrain_act_nodes" in metrics.exposition()
    assert cluster.scheduler.hold_lease("another", timedelta(hours=1)) is None
    cluster.clock.move(timedelta(hours=1))
    assert cluster.scheduler.hold_lease("another", timedelta(hours=1)) is not None
    metrics.note(cluster.round(), 0.1)
    result = values(metrics.exposition())
    assert result["predrain_act_leader"] == 0
    assert result["predrain_act_rounds_total result=standby"] == 1
    assert "predrain_act_nodes tier=high" not in result


def test_the_page_is_served_and_reports_when_rounds_have_stopped():
    clock = ManualClock(T0)
    page = RoundMetrics(clock, MINUTE, MINUTE)
    with listening(page, "127.0.0.1:0") as port:

        def get(path: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert get("/healthz") == (200, "ok\n")
        assert "last_round_timestamp_seconds" not in get("/metrics")[1], "a zero would raise the alert on silence"
        page.note(Cluster().round(), 0.25)
        assert values(get("/metrics")[1])["predrain_act_last_round_duration_seconds"] == 0.25
        assert get("/nodes")[0] == 404
        clock.move(7 * MINUTE)
        assert get("/healthz") == (503, "no round has ended for 420 s\n")


def test_a_port_that_is_taken_is_refused():
    page = RoundMetrics(ManualClock(T0), STEP, STEP)
    with (
        listening(page, "127.0.0.1:0") as port,
        pytest.raises(InputError, match="cannot listen on"),
        listening(page, f"127.0.0.1:{port}"),
    ):
        pass


@pytest.mark.parametrize("call", ["hold_lease", "read_fleet"])
def test_a_round_that_fails_is_counted_and_who_cannot_ask_for_the_lease_does_not_hold_it(call):
    cluster, metrics = Cluster(), RoundMetrics(ManualClock(T0), STEP, STEP)
    cluster.scheduler.faults.plan("refused", call)
    metrics.note(cluster.round(), 0.1)
    counts = values(metrics.exposition())
    assert counts["predrain_act_rounds_total result=failed"] == 1
    assert counts["predrain_act_leader"] == (call != "hold_lease")
