"""The report says which combination to use when, from the measured rows and nothing else."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from evaluation.metrics.evaluation import evaluate
from pipeline.report import comparisons, plots, summary
from pipeline.report.comparisons import combiner_advice, combining, trend_sentence
from tests.models.fleet_predictions import fleet

MODELS = (
    ("mean_rank", "sliding", 0.4), ("mean_rank", "train_once", 2.0), ("parallel", "sliding", 0.8),
    ("xgboost", "sliding", 0.7), ("xgboost", "train_once", 2.5), ("logistic", "sliding", 1.5),
)  # fmt: skip


@pytest.fixture(scope="module")
def evaluation():
    return evaluate(fleet(21, MODELS, units=40, times=60, incidents=40, k=4), k=4, bootstrap=60, seed=1)


def rows(model, precision, low, high, kind="ensemble", alerts=100):
    return {"model": model, "variant": "sliding", "kind": kind, "alerts": alerts, "precision_at_k": precision,
            "precision_at_k_low": low, "precision_at_k_high": high}  # fmt: skip


def beside(model, low, high, alerts=100):
    return {"model": model, "other_model": "xgboost", "alerts": alerts, "precision": 0.3, "other_precision": 0.2,
            "difference": (low + high) / 2, "low": low, "high": high, "best": True}  # fmt: skip


TABLE = pd.DataFrame(
    [rows("mean_rank", 0.30, 0.25, 0.35), rows("intersection", 0.10, 0.05, 0.15, alerts=40),
     rows("xgboost", 0.26, 0.2, 0.3, "learner"), rows("mlp", 0.05, 0.0, 0.1, "learner")]
)  # fmt: skip
BUDGETS = pd.DataFrame(
    [{"model": model, "variant": "sliding", "k": k, "precision": precision}
     for model, at in {"mean_rank": (0.4, 0.2), "xgboost": (0.3, 0.25), "oracle": (0.9, 0.8)}.items()
     for k, precision in zip((2, 20), at, strict=True)]
)  # fmt: skip


def test_what_the_intervals_show_is_what_is_said():
    for low, high, word in (
        (0.01, 0.2, "more precise than it is shown for mean_rank"),
        (-0.2, -0.01, "less precise for mean_rank"),
        (-0.1, 0.1, "no difference is shown for mean_rank"),
    ):
        said = combiner_advice(TABLE, pd.DataFrame([beside("mean_rank", low, high)]), BUDGETS, "mean_rank")
        assert word in said[0]
        assert ("no combination here earns its place" in said[0]) == (low <= 0)


def test_the_most_precise_and_its_ties_are_named_and_a_profile_below_them_too():
    said = " ".join(combiner_advice(TABLE, pd.DataFrame([beside("mean_rank", -0.1, 0.1)]), BUDGETS, "mlp"))
    assert "mean_rank was the most precise (30.0 % [25.0, 35.0 %]); xgboost lies within its interval." in said
    assert "The profile, mlp, reaches 5.0 % and lies below it." in said
    assert "mean_rank at 2 (40.0 %) and xgboost at 20 (25.0 %)" in said


def test_the_simple_mean_that_is_advised_is_the_one_that_may_promise_unless_it_is_shown_to_be_worse():
    table = pd.concat([TABLE, pd.DataFrame([rows("mean_log_odds", 0.29, 0.24, 0.34)])], ignore_index=True)

    def advice(table, **bounds):
        equal = pd.DataFrame([beside(name, *each) for name, each in bounds.items()])
        said = combiner_advice(table, equal, BUDGETS, "mean_log_odds")[1]
        return said.partition(" Among these, ")[2]

    open_, worse, nothing = (-0.1, 0.1), (-0.2, -0.01), (float("nan"), float("nan"))
    for mine in (open_, (0.01, 0.2), nothing):
        for other in (open_, worse):
            said = advice(table, mean_log_odds=mine, mean_rank=other)
            assert said == (
                "mean_log_odds needs neither fitted weights nor a best member known before, and gives a risk that "
                "compares from day to day, so it can carry promises."
            )
    for said in (advice(table, mean_log_odds=worse, mean_rank=open_), advice(TABLE, mean_rank=open_)):
        assert said.startswith("mean_rank needs neither fitted weights nor a best member known before; it only orders")
    said = advice(table, mean_log_odds=worse, mean_rank=worse)
    assert said.startswith("mean_log_odds ")
    assert said.endswith("; its best single learner is shown to be more precise, but is known only afterwards.")
    # far below the most precise one, it is not among those that the choice is free of
    below = pd.concat([TABLE, pd.DataFrame([rows("mean_log_odds", 0.2, 0.15, 0.3)])], ignore_index=True)
    assert advice(below, mean_log_odds=open_, mean_rank=open_).startswith("mean_rank ")
    assert advice(TABLE.iloc[1:], intersection=open_) == ""


def test_agreement_is_judged_at_as_many_alerts():
    for low, high, word in (
        (0.01, 0.2, "the agreement itself adds precision"),
        (-0.2, -0.01, "asking for agreement costs precision"),
        (-0.1, 0.1, "agreement is not shown to add anything"),
    ):
        equal = pd.DataFrame([beside("intersection", low, high, alerts=40)])
        said = combiner_advice(TABLE, equal, BUDGETS, "mean_rank")[-1]
        assert (
            "40 alerts, 40.0 % of the budget, at a precision of 30.0 %. xgboost cut to as many reaches 20.0 %" in said
        )
        assert word in said


def test_of_a_cascade_no_agreement_is_told():
    for low, high, word in (
        (0.01, 0.2, "the stages themselves add precision"),
        (-0.2, -0.01, "the stages cost precision"),
        (-0.1, 0.1, "the stages are not shown to add anything"),
    ):
        equal = pd.DataFrame([beside("cascade", low, high, alerts=40)])
        table = pd.concat([TABLE, pd.DataFrame([rows("cascade", 0.1, 0.05, 0.15, alerts=40)])], ignore_index=True)
        said = combiner_advice(table, equal, BUDGETS, "mean_rank")[-1]
        assert said.startswith("cascade alerts only what survives its first stages: 40 alerts, 40.0 % of the budget")
        assert word in said
        assert "agree" not in said


def test_nothing_measured_is_nothing_said(evaluation):
    assert combiner_advice(TABLE.iloc[:0], pd.DataFrame([beside("x", 0, 1)]), BUDGETS, "x") == []
    alone = evaluate(fleet(22), k=2, bootstrap=0, seed=0)
    assert combining(alone, None) is None
    assert trend_sentence(alone, "xgboost") == ""


def test_the_section_compares_ensembles_budgets_and_trends(evaluation):
    context = type("Context", (), {"profile": "mean_rank"})()
    section = combining(evaluation, context)
    ensembles, budgets, trends = section.tables
    assert {row[0].text for row in ensembles.rows} == {"mean_rank", "parallel"}
    assert budgets.header == ("model", "K = 2", "K = 4", "K = 8", "K = 20")
    assert [row[0].text for at, row in enumerate(budgets.rows) if at in budgets.strong] == ["mean_rank"]
    assert {row[0].text for row in trends.rows} == {"mean_rank", "xgboost"}
    assert all(len(row) == len(table.header) for table in section.tables for row in table.rows)
    assert any("Beside its best single learner" in sentence for sentence in section.before)


def test_a_trend_is_told_as_it_was_found(evaluation):
    for low, high, word in (
        (0.01, 0.03, "grows by +2.0"),
        (-0.03, -0.01, "shrinks by −2.0"),
        (-0.01, 0.05, "not shown"),
    ):
        slope = (low + high) / 2
        frame = pd.DataFrame(
            [{"model": "mean_rank", "statistic": "precision_at_k", "slope": slope, "low": low, "high": high}]
        )
        assert word in trend_sentence(dataclasses.replace(evaluation, trends=frame), "mean_rank")
    context = type("Context", (), {"profile": "mean_rank"})()
    assert trend_sentence(evaluation, "mean_rank") in summary._helped(evaluation, context)
    assert comparisons.trend_sentence(evaluation, "logistic") == ""


def test_more_learners_than_colours_can_be_drawn():
    names = (
        "lightgbm",
        "xgboost",
        "random_forest",
        "logistic",
        "mlp",
        "lstm",
        "cnn1d",
    )
    many = [(name, "sliding", 1.0) for name in (*names, "mean_rank")]
    drawn = plots.precision_recall(evaluate(fleet(23, many), k=2, bootstrap=0, seed=0), "mean_rank")
    assert all(name in drawn.svg for name in names)
