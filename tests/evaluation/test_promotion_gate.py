"""The gate's verdict on hand-made predictions, against plain counting."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from evaluation.backtest.promotion_gate import evaluate_gate
from evaluation.metrics.aggregation import split_predictions
from models.config import PromotionSection

SECTION = PromotionSection(bootstrap=200, precision_margin=0.2)
T0 = pd.Timestamp("2026-02-01", tz="UTC")


def contenders(*, times=40, units=60, skill=(0.9, 0.9), incidents=24, risk=(1.0, 1.0), seed=0, k=2):
    """Two sides that rank each incident's unit first with given chances, on the same rows."""
    rng = np.random.default_rng(seed)
    time = np.repeat(np.arange(times), units)
    unit = np.tile(np.arange(units), times)
    label = np.zeros((times, units), int)
    incident = np.full((times, units), -1)
    for number in range(incidents):
        label[number % times, number % units] = 1
        incident[number % times, number % units] = number
    frames = []
    seen = rng.random((2, times, units))
    for side, name in enumerate(("version 2", "version 1")):
        score = rng.random((times, units)) + 2.0 * (label * (seen[side] < skill[side]))
        order = (-score).argsort(axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(1, units + 1)[None, :].repeat(times, 0), axis=1)
        rate = label.mean() * risk[side]
        frames.append(
            pd.DataFrame(
                {
                    "decision_time": (T0 + pd.to_timedelta(time * 6, unit="h")).as_unit("ms"),
                    "node": [f"g{number:02d}" for number in unit],
                    "unit": [f"g{number:02d}" for number in unit],
                    "model": name,
                    "variant": "held out",
                    "score": -rank.ravel().astype(float),
                    "risk": np.clip(np.where(rank.ravel() == 1, 8 * rate, rate * (units - 8) / units), 0, 1),
                    "rank": rank.ravel(),
                    "alert": rank.ravel() <= k,
                    "label": pd.array(label.ravel(), dtype="Int8"),
                    "failure_class": np.where(incident.ravel() % 3 == 0, "memory", "bus"),
                    **dict.fromkeys(
                        ("incident", "node_incident", "common_cause"), pd.array(incident.ravel(), dtype="Int64")
                    ),
                    "incident_start": (T0 + pd.to_timedelta(time * 6 + 5, unit="h")).as_unit("ms"),
                    "fold": 0,
                }
            )
        )
    by_name = {contender.model: contender for contender in split_predictions(pd.concat(frames, ignore_index=True), k)}
    return by_name["version 2"], by_name["version 1"]


def verdict_of(pair, section=SECTION, champion=True):
    return evaluate_gate(pair[0], [pair[1]], section, seed=1, champion=champion)


def criterion(verdict, name):
    return next(criterion for criterion in verdict.criteria if criterion.name == name)


def test_an_equal_challenger_passes_and_every_value_is_that_of_plain_counting():
    pair = contenders(skill=(1.0, 1.0))
    verdict = verdict_of(pair)
    assert verdict.passed
    assert verdict.reasons == ()
    scored = pair[0]
    precision = criterion(verdict, "precision at K")
    alerts = scored.rank <= 2
    assert precision.challenger == pytest.approx((alerts & scored.positive).sum() / alerts.sum())
    risk = criterion(verdict, "mean risk over base rate")
    assert risk.challenger == pytest.approx(scored.risk.sum() / scored.positive.sum())
    rate = scored.positive.mean()
    error = ((scored.risk - scored.positive) ** 2).mean()
    assert criterion(verdict, "Brier skill").challenger == pytest.approx(1 - error / (rate * (1 - rate)))
    assert (verdict.rows, verdict.nodes, verdict.times, verdict.incidents, verdict.k) == (2400, 60, 40, 24, 2)
    assert verdict.first_time == T0.to_pydatetime()


def test_a_worse_challenger_fails_on_precision_and_recall():
    verdict = verdict_of(contenders(skill=(0.1, 1.0)))
    assert not verdict.passed
    assert criterion(verdict, "precision at K").why.startswith("worse: ")
    recall = criterion(verdict, "recall of incidents")
    assert recall.outcome == "failed"
    assert "0 gained (exact p 0.000)" in recall.why
    assert any(reason.startswith("precision at K: worse") for reason in verdict.reasons)


RARE = {"times": 400, "incidents": 24}
"""A champion whose alerts are right 3 times in 100, as on real fleets."""


def test_at_a_precision_of_some_percent_a_worse_challenger_fails_by_the_limits_as_shipped():
    shipped = PromotionSection()
    verdict = verdict_of(contenders(skill=(0.2, 1.0), **RARE), shipped)
    precision = criterion(verdict, "precision at K")
    assert precision.champion == pytest.approx(0.03, abs=0.005)
    assert precision.outcome == "failed"
    assert precision.why.startswith("worse: ")
    assert precision.champion - precision.challenger < shipped.precision_margin  # which alone would let it pass
    unsure = criterion(
        verdict_of(contenders(skill=(0.5, 0.5), incidents=12, times=400, seed=1), shipped), "precision at K"
    )
    assert unsure.outcome == "failed"
    assert unsure.why.startswith("non-inferiority not significant")
    assert verdict_of(contenders(skill=(1.0, 1.0), **RARE), shipped).passed


def test_a_recall_that_was_low_may_not_be_lost():
    verdict = verdict_of(contenders(skill=(0.0, 0.08), incidents=120, times=240), PromotionSection())
    recall = criterion(verdict, "recall of incidents")
    assert recall.champion < 0.15
    assert recall.champion - recall.challenger < PromotionSection().recall_margin + 0.05
    assert recall.outcome == "failed"


def test_too_few_incidents_decide_nothing_and_do_not_promote():
    verdict = verdict_of(contenders(incidents=4))
    precision = criterion(verdict, "precision at K")
    assert precision.outcome == "undecided"
    assert precision.why.startswith("4 incidents, at least 10 are needed")
    assert not verdict.passed
    assert criterion(verdict, "recall of incidents").outcome == "undecided"


def test_a_class_with_few_incidents_is_undecided_and_does_not_refuse():
    verdict = verdict_of(contenders(skill=(1.0, 1.0)))
    assert criterion(verdict, "recall of memory").outcome == "undecided"
    assert "fewer than 10 incidents" in criterion(verdict, "recall of memory").why
    assert criterion(verdict, "recall of bus").outcome == "passed"
    assert verdict.passed


def test_risks_far_off_the_base_rate_fail_and_those_that_chance_explains_are_undecided():
    far = criterion(verdict_of(contenders(risk=(8.0, 1.0))), "mean risk over base rate")
    assert far.outcome == "failed"
    assert far.why.startswith("risks are too high: ")
    near = criterion(verdict_of(contenders(risk=(2.3, 1.0))), "mean risk over base rate")
    assert near.outcome == "undecided"


def test_no_hit_at_all_is_never_no_worse():
    verdict = verdict_of(contenders(skill=(0.0, 0.0), units=400))
    precision = criterion(verdict, "precision at K")
    assert precision.outcome == "failed"
    assert precision.why.startswith("no alert of the challenger preceded any of 24 incidents")


def test_the_first_champion_is_compared_with_every_baseline():
    challenger, other = contenders(skill=(1.0, 0.2))
    baselines = [replace(other, model=name) for name in ("history_count", "vendor_rules")]
    verdict = evaluate_gate(challenger, baselines, SECTION, seed=1, champion=False)
    assert [criterion.against for criterion in verdict.criteria if criterion.name == "precision at K"] == [
        "history_count", "vendor_rules",
    ]  # fmt: skip
    assert verdict.champion == "history_count, vendor_rules"
    assert criterion(verdict, "Brier skill").against == "constant base rate"


def test_sides_of_different_rows_are_refused():
    challenger, _ = contenders()
    _, other = contenders(units=50)
    with pytest.raises(ValueError, match="were not scored on the same rows"):
        verdict_of((challenger, other))
