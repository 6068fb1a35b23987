from dataclasses import replace
from datetime import timedelta

import pytest

from policy.fleet import Fact
from policy.node_assessment import RULES, HardRulesConfig, rule_hits
from tests.policy.decide_world import HOUR, T0, carry_out, config, healthy, node, once, verbs, why

RULED = HardRulesConfig()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.fact)
def test_each_rule_reaches_its_action_whatever_the_model_says_and_ends_with_its_reason(rule):
    fleet = [node("sick", 0.001, facts=[rule.fact]), *healthy(12)]
    plan = once(fleet, config())
    last = "drain" if rule.tier == "high" else "avoid"
    assert verbs(plan, "sick")[-2:] == [last, "publish"]
    assert rule.description in why(plan, "sick")
    assert plan.nodes["sick"].expires_at == T0 + rule.holds

    fleet = carry_out(fleet, plan.actions, T0)
    end = T0 + rule.holds
    still = once(fleet, config(), end - timedelta(seconds=1), plan.state)
    assert "release" not in verbs(still, "sick")
    over = once(fleet, config(), end, plan.state)
    assert verbs(over, "sick") == ["release"]


def test_the_rules_named_by_the_vendor_are_there():
    high = {rule.fact for rule in RULES if rule.tier == "high"}
    assert {"row_remap_failure", "xid 64", "xid 79", "xid 95"} <= high
    assert {"recovery_action reset", "recovery_action reboot", "recovery_action drain_and_reset"} <= high
    assert {rule.fact for rule in RULES if rule.tier == "elevated"} == {"row_remap_pending"}


def test_a_gauge_that_keeps_its_last_xid_would_hold_a_node_for_ever_and_the_time_of_the_event_does_not():
    # The exporter shows XID 79 at every scrape until it restarts: a rule on the scrape's time never ends.
    later = T0 + timedelta(days=30)
    scraped = replace(node("n"), units=(replace(node("n").units[0], facts=(Fact("xid 79", later),)),))
    assert rule_hits(scraped, RULED, later)
    happened = node("n", facts=["xid 79"])
    assert not rule_hits(happened, RULED, later)


def test_what_a_repair_or_a_wrong_clock_made_void_does_not_count():
    sick = node("n", facts=["xid 79"])
    fixed = replace(sick, units=(replace(sick.units[0], valid_from=T0 + HOUR),))
    assert not rule_hits(fixed, RULED, T0 + 2 * HOUR)
    assert not rule_hits(sick, RULED, T0 - HOUR)
    assert not rule_hits(node("n", facts=["xid 45", "xid 31"]), RULED, T0)


def test_the_worst_rule_comes_first_and_each_fact_once_with_its_newest_time():
    unit = node("n").units[0]
    facts = (Fact("row_remap_pending", T0), Fact("xid 79", T0 - HOUR), Fact("xid 79", T0))
    hits = rule_hits(replace(node("n"), units=(replace(unit, facts=facts),)), RULED, T0)
    assert [hit.rule.fact for hit in hits] == ["xid 79", "row_remap_pending"]
    assert hits[0].seen_at == T0
    assert hits[0].reason == (
        "n-0: XID 79: the GPU has fallen off the bus (seen 2026-03-01 00:00 UTC, valid until 2026-03-03 00:00 UTC;"
        " remedy: reboot the node)"
    )
