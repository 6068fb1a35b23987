"""`thresholds_from: scores`: the controller calls the same nodes high as the scores, the service and its pages do."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from policy.fleet import Level
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.tiers import RAISED, ChosenThresholds, TierThresholds, node_risk, worst_tier
from scheduler.controller.settings import read_settings
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import SourceError
from serving.scores.reading import PastScore, tier_of
from tests.policy.decide_world import HOUR, T0, config, node, once
from tests.scheduler.cluster import Cluster
from tests.scheduler.score_files import reading, record, write

PROMISED = TierThresholds(watch=0.05, elevated=0.2, high=0.5)
NO_PROMISE = "none: a precision of 85% is not promised (4 of 9 earlier drains would have been right)"
RISKS = st.lists(st.floats(0.0, 1.0) | st.none(), min_size=1, max_size=8)


def by_scores(**others):
    made = config("g", free=True, **others)
    return replace(made, thresholds=TierThresholds(), thresholds_from="scores")


def on_scores(tiers, file=None):
    policy = by_scores(cost_benefit=CostBenefitConfig(always=True))
    cluster = Cluster(policy=policy, ledger=SqliteLedger(file))
    cluster.scored(n1=0.4)
    cluster.risks.risks = replace(cluster.risks.risks, tiers=tiers)
    return cluster


@given(RISKS, st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(sorted), st.booleans())
def test_a_node_has_one_tier_its_own_risks_by_given_thresholds_and_its_worst_gpus_by_promised_ones(risks, values, own):
    thresholds = TierThresholds(*values)
    chosen = ChosenThresholds(thresholds, dict.fromkeys(RAISED, "given" if own else "a precision of 50 %"))
    known = once([node("n", *risks)], by_scores().by_scores(chosen)).nodes.get("n")
    expected = thresholds.tier(node_risk(risks)) if own else worst_tier(thresholds.tier(risk) for risk in risks)
    assert (known.tier if known else "clear") == (expected if expected != "unknown" else "clear")
    assert tier_of([PastScore(T0, risk, thresholds.tier(risk)) for risk in risks], chosen) == expected, (
        "for the service and its pages"
    )


def test_eight_gpus_at_a_low_risk_would_make_a_high_node_by_the_risk_that_any_fails_and_do_not():
    eight = [0.1] * 8
    given_for_gpus = replace(by_scores(), thresholds=PROMISED, thresholds_from="settings")
    assert math.isclose(node_risk(eight), 0.57, abs_tol=0.01)
    assert once([node("n", *eight)], given_for_gpus).nodes["n"].tier == "high"
    assert once([node("n", *eight)], by_scores().by_scores(ChosenThresholds(PROMISED))).nodes["n"].tier == "watch"


def test_the_thresholds_that_the_scores_name_hold_and_change_with_them():
    cluster = on_scores(ChosenThresholds(PROMISED))
    assert not cluster.round().failed
    assert cluster.levels() == {"n1": Level.AVOID}
    cluster.risks.risks = replace(cluster.risks.risks, tiers=ChosenThresholds(TierThresholds(0.05, 0.2, 0.3)))
    cluster.clock.move(HOUR)
    cluster.scored()
    cluster.risks.risks = replace(cluster.risks.risks, tiers=ChosenThresholds(TierThresholds(0.05, 0.2, 0.3)))
    cluster.round()
    assert cluster.levels() == {"n1": Level.DRAIN}


def test_a_promise_that_is_not_made_drains_nobody_and_reports_why():
    cluster = on_scores(
        ChosenThresholds(TierThresholds(0.05, None, None), {"high": NO_PROMISE, "elevated": "none: no evidence"})
    )
    report = cluster.round()
    assert cluster.levels() == {"n1": Level.PUBLISH}
    assert f"no node is of tier high ({NO_PROMISE})" in report.notes
    assert "no node is of tier elevated (none: no evidence)" in report.notes


def test_scores_that_name_no_thresholds_give_no_tier_and_reports_it():
    cluster = on_scores(None)
    assert "the scores have no thresholds: only hard rules act" in cluster.round().notes
    assert cluster.levels() == {}


def test_the_ledger_replays_a_decision_with_the_thresholds_that_held_then(tmp_path):
    cluster = on_scores(ChosenThresholds(PROMISED), tmp_path / "ledger.db")
    number = cluster.round().number
    assert LedgerReader(tmp_path / "ledger.db").replay(number).differences == ()
    assert LedgerReader(tmp_path / "ledger.db").replay(number).plan["nodes"]["n1"]["tier"] == "elevated"


def test_scores_that_look_further_ahead_than_the_policy_report_that_alerts_are_judged_too_early():
    cluster = on_scores(ChosenThresholds(PROMISED))
    cluster.risks.risks = replace(cluster.risks.risks, horizon=72 * HOUR)
    message = (
        "the horizon of the scores is 72 h and policy.horizon is 24 h: alerts are evaluated before their horizon ends"
    )
    assert message in cluster.round().notes
    cluster.risks.risks = replace(cluster.risks.risks, horizon=6 * HOUR)
    message = "the horizon of the scores is 6 h and policy.horizon is 24 h: alerts are evaluated over a longer horizon"
    assert message in cluster.round().notes


def test_thresholds_are_read_from_the_summary_with_their_sources(tmp_path):
    thresholds, sources = {"watch": 0.05, "elevated": None, "high": 0.5}, {"elevated": "none: too few"}
    write(tmp_path, record("g0", "n0", 0.2), thresholds=thresholds, threshold_sources=sources)
    read = reading(tmp_path).read()
    assert read.tiers == ChosenThresholds(TierThresholds(0.05, None, 0.5), sources)
    assert read.horizon == 24 * HOUR


@pytest.mark.parametrize(
    "thresholds", [{"high": "0.5"}, {"high": 2}, {"watch": 0.6, "high": 0.5}, [0.5], {"high": True}]
)
def test_damaged_thresholds_are_refused(tmp_path, thresholds):
    write(tmp_path, record("g0", "n0", 0.2), thresholds=thresholds)
    with pytest.raises(SourceError, match="are damaged"):
        reading(tmp_path).read()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("{thresholds_from: scores, thresholds: {high: 0.4}}", "thresholds are given, .*thresholds_from is 'scores'"),
        ("{thresholds_from: costs, thresholds: {high: 0.4}}", "thresholds.high is given, .*thresholds_from is 'costs'"),
        ("{thresholds_from: model}", r"settings\.policy\.thresholds_from: "),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, policy, message):
    (tmp_path / "act.yaml").write_text(f"policy: {policy}")
    with pytest.raises(InputError, match=message):
        read_settings(tmp_path / "act.yaml")
