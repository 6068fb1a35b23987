"""Tiers: what a risk is called, thresholds that ascend, and the risk of a node."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.tiers import RAISED, UNKNOWN, TierThresholds, choose_thresholds, node_risk, worst_tier

RISKS = st.floats(0, 1)
THRESHOLD = st.none() | st.floats(1e-6, 1)


@st.composite
def thresholds(draw: st.DrawFn) -> TierThresholds:
    values = [draw(THRESHOLD) for _ in range(3)]
    known = sorted(value for value in values if value is not None)
    return TierThresholds(*[None if value is None else known.pop(0) for value in values])


def promise(asked: float, threshold: float | None, *, promised: bool = True) -> dict[str, Any]:
    return {"kind": "precision", "asked": asked, "threshold": threshold, "promised": promised, "why": "too few drains"}


def budget(threshold: float | None) -> dict[str, Any]:
    return {"kind": "budget", "asked": 3.0, "threshold": threshold, "promised": threshold is not None, "why": ""}


@given(thresholds(), RISKS)
def test_the_tier_is_the_highest_whose_threshold_is_reached(limits: TierThresholds, risk: float) -> None:
    reached = [name for name, value in limits.items() if value is not None and risk >= value]
    assert limits.tier(risk) == (reached[-1] if reached else "clear")


@pytest.mark.parametrize("risk", [None, math.nan])
def test_no_risk_is_unknown_whatever_the_thresholds(risk: float | None) -> None:
    assert TierThresholds(0.1, 0.2, 0.3).tier(risk) == UNKNOWN


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.3, 0.2, None), r"elevated is 0\.2, below watch \(0\.3\): a higher tier needs a higher risk"),
        ((0.3, None, 0.2), r"high is 0\.2, below watch \(0\.3\)"),
        ((0.0, None, None), r"watch is 0\.0: give a risk above 0 and at most 1"),
        ((None, None, 1.5), r"high is 1\.5: give a risk above 0"),
        ((math.nan, None, None), "watch is nan"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TierThresholds(*values)


def test_thresholds_are_derived_from_the_budget_and_the_promises() -> None:
    chosen = choose_thresholds(
        TierThresholds(), [promise(0.3, 0.2), promise(0.5, 0.4), promise(0.85, 0.9), budget(0.1)]
    )
    assert chosen.thresholds == TierThresholds(0.1, 0.4, 0.9)
    assert chosen.sources == {
        "watch": "the budget of 3 alerts per decision time",
        "elevated": "a promised precision of 50%",
        "high": "a promised precision of 85%",
    }


def test_a_promise_that_is_not_made_gives_no_threshold_and_says_why() -> None:
    chosen = choose_thresholds(TierThresholds(), [promise(0.5, None, promised=False), budget(0.1)])
    assert chosen.thresholds == TierThresholds(0.1, None, None)
    assert chosen.sources["elevated"] == ("none: a precision of 50% is not promised (too few drains)")
    assert chosen.sources["high"] == "none: the backtest did not evaluate a precision of 85%"


def test_a_bundle_without_decisions_gives_none() -> None:
    chosen = choose_thresholds(TierThresholds(high=0.7), None, why_none="no backtest was given")
    assert chosen.thresholds == TierThresholds(None, None, 0.7)
    assert chosen.sources == {"watch": "none: no backtest was given", "elevated": "none: no backtest was given",
                              "high": "given"}  # fmt: skip


def test_what_is_promised_is_watched_although_the_budget_is_narrower() -> None:
    chosen = choose_thresholds(TierThresholds(), [budget(0.6), promise(0.5, 0.4), promise(0.85, 0.5)])
    assert chosen.thresholds == TierThresholds(0.4, 0.4, 0.5)
    assert chosen.sources["watch"].endswith("; moved from 0.6 to the threshold of a higher tier")


@given(thresholds(), THRESHOLD, THRESHOLD, THRESHOLD)
def test_given_thresholds_stand_and_derived_ones_fit_between_them(own, watch, elevated, high):
    decisions = [budget(watch), promise(0.5, elevated), promise(0.85, high)]
    chosen = choose_thresholds(own, decisions).thresholds  # raises unless they ascend
    derived = dict(zip(RAISED, (watch, elevated, high), strict=True))
    for name, value in chosen.items():
        mine = dict(own.items())[name]
        assert value == mine if mine is not None else (value is None) == (derived[name] is None)


@given(st.lists(st.floats(0, 0.999)))
def test_the_risk_of_a_node_is_that_any_of_its_gpus_fails(risks: list[float]) -> None:
    combined = node_risk(risks)
    if not risks:
        assert combined is None
    else:
        assert combined == pytest.approx(1 - math.prod(1 - risk for risk in risks), abs=1e-12)
        assert max(risks) - 1e-12 <= combined <= 1


@given(st.lists(st.none() | RISKS))
def test_unknown_gpus_neither_raise_nor_remove_the_risk_of_a_node(risks: list[float | None]) -> None:
    assert node_risk(risks) == node_risk([risk for risk in risks if risk is not None])
    assert node_risk([*risks, math.nan]) == node_risk(risks)


def test_many_tiny_risks_are_not_lost_to_rounding() -> None:
    assert node_risk([1e-18] * 8) == pytest.approx(8e-18, rel=1e-12)
    assert node_risk([0.2, 1.0]) == 1.0


def test_a_risk_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a risk of 1\.5: give one between 0 and 1"):
        node_risk([1.5])


def test_the_worst_tier_is_unknown_only_where_nothing_is_known() -> None:
    assert worst_tier(["clear", "unknown", "elevated"]) == "elevated"
    assert worst_tier(["unknown", "clear"]) == "clear"
    assert worst_tier(["unknown"]) == worst_tier([]) == UNKNOWN
