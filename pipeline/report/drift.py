"""The report's section on what changed: verdicts, precision and calibration over time."""

from typing import Any

import pandas as pd

from evaluation.drift.verdict import CAUSES
from pipeline.report.context import ReportContext
from pipeline.report.tables import Cell, ReportSection, Table, table_of
from pipeline.report.wording import between, count, day, number, percent

_FACTS_SHOWN = 5


def what_changed(context: ReportContext) -> ReportSection | None:
    """Make the section; None where no check was made, as with a single fold."""
    checks = context.extras.get("drift_checks")
    if checks is None or checks.empty:
        return None
    verdicts = context.extras["drift_verdicts"]
    tables = [
        _checks(checks),
        _verdicts(verdicts),
        _outcomes(context.extras["drift_outcomes"], context),
    ]
    return ReportSection(
        key="what-changed",
        name="What changed",
        title="What changed between the refits",
        before=(_summary(checks, verdicts), _reading(context)),
        tables=tuple(table for table in tables if table is not None),
        after=(
            "A stability index of 0.1 is little and 0.25 much (Siddiqi); a feature counts as moved from 0.2 on, if the "
            "index also is twice the largest that weeks of the training window showed among themselves, and the "
            "Kolmogorov-Smirnov distance is at least 0.1.",
            "docs/drift.md explains the causes and how they are distinguished.",
        ),
    )


def _summary(checks: pd.DataFrame, verdicts: pd.DataFrame) -> str:
    drifted = int(checks["drift"].sum())
    if not drifted:
        return f"None of {count(len(checks))} checks found drift."
    causes = verdicts[verdicts["drift"]]["cause"]
    listed = [
        f"{description} ({int((causes == cause).sum())})"
        for cause, description in CAUSES.items()
        if (causes == cause).any()
    ]
    return f"{count(drifted)} of {count(len(checks))} checks found drift: {'; '.join(listed)}."


def _reading(context: ReportContext) -> str:
    refits = context.folds[context.folds["variant"] == "sliding"]["refit_fold"].nunique()
    folds = context.folds["fold"].nunique()
    return (
        "Before each fold the rows since the last fit are held against the rows of that fit, with what was known then. "
        f"The {count(folds)} folds were scored by the models of {count(refits)} "
        f"{'refit' if refits == 1 else 'refits'}."
    )


def _checks(checks: pd.DataFrame) -> Table | None:
    return table_of(
        "Each check: what it found, and incidents in the training window and since, with the ratio of the rates and "
        "its exact 95 % interval.",
        checks,
        ("check", lambda row: Cell(day(row.check_at), f"rows from {day(row.window_start)} on")),
        ("found", lambda row: row.summary),
        (
            "incidents before / since",
            lambda row: Cell(
                f"{count(row.incidents_before)} / {count(row.incidents_now)}",
                f"rate × {number(row.ratio)} {between(number(row.ratio_low), number(row.ratio_high))}"
                if pd.notna(row.ratio)
                else "",
            ),
        ),
        text_columns=frozenset({0, 1}),
    )


def _verdicts(verdicts: pd.DataFrame) -> Table | None:
    def evidence(row: Any) -> Cell:
        facts = row.facts.split("\n")
        shown = "; ".join(facts[:_FACTS_SHOWN])
        shown += f"; and {len(facts) - _FACTS_SHOWN} more" if len(facts) > _FACTS_SHOWN else ""
        return Cell(row.text, shown)

    return table_of(
        "Every verdict with its evidence. What is worth knowing only is no reason to refit by itself.",
        verdicts,
        ("check", lambda row: day(row.check_at)),
        ("cause", lambda row: Cell(row.cause, "" if row.drift else "worth knowing")),
        ("verdict", evidence),
        text_columns=frozenset({0, 1, 2}),
    )


def _outcomes(outcomes: pd.DataFrame, context: ReportContext) -> Table | None:
    def precision(row: Any) -> Cell:
        bounds = between(percent(row.precision_low), percent(row.precision_high))
        return Cell(percent(row.precision), bounds if row.right + row.wrong else "")

    return table_of(
        f"Outcomes of {context.profile} as they came in, in windows of at most 28 days: alerted nodes "
        "that failed, that did not, and that nothing is known of yet (each node once a window), with "
        "the exact 95 % interval of the share; and positives over the sum of risks, with the exact interval of the "
        "number of incidents behind them (1: calibrated).",
        outcomes.rename(columns={"from": "since"}),  # a keyword is no name of a tuple's field
        ("decisions", lambda row: f"{day(row.since)} to {day(row.until)}"),
        ("right", lambda row: count(row.right)),
        ("wrong", lambda row: count(row.wrong)),
        ("open", lambda row: count(row.open)),
        ("share right", precision),
        ("incidents", lambda row: count(row.incidents)),
        (
            "positives / risk",
            lambda row: Cell(
                number(row.calibration), between(number(row.calibration_low), number(row.calibration_high))
            ),
        ),
    )
