"""The report's section on what changed: verdicts, features by group, precision and calibration over time."""

from __future__ import annotations

import pandas as pd

from evaluation.drift.verdict import CAUSES
from evaluation.metrics.evaluation import Evaluation
from features.config import GROUPS
from pipeline.report.context import ReportContext
from pipeline.report.tables import Cell, Section, Table
from pipeline.report.wording import NONE, between, count, day, number, percent

_FACTS_SHOWN = 5


def what_changed(_evaluation: Evaluation, context: ReportContext) -> Section | None:
    """Make the section; None where no check was made, as with a single fold."""
    checks = context.extras.get("drift_checks")
    if checks is None or checks.empty:
        return None
    verdicts = context.extras["drift_verdicts"]
    tables = [
        _checks(checks),
        _verdicts(verdicts),
        _groups(context.extras["drift_groups"]),
        _outcomes(context.extras["drift_outcomes"], context),
    ]
    return Section(
        key="what-changed",
        name="What changed",
        title="What changed between the refits",
        before=(_summary(checks, verdicts), _reading(context)),
        tables=tuple(table for table in tables if table is not None),
        after=(
            "A stability index of 0.1 is little and 0.25 much (Siddiqi); a feature counts as moved from 0.2 on, if the "
            "index also is twice the largest that weeks of the training span showed among themselves, and the "
            "Kolmogorov-Smirnov distance is at least 0.1.",
            "What is told apart, and how, stands in docs/drift.md.",
        ),
    )


def _summary(checks: pd.DataFrame, verdicts: pd.DataFrame) -> str:
    drifted = int(checks["drift"].sum())
    if not drifted:
        return f"None of {count(len(checks))} checks found drift."
    causes = verdicts[verdicts["drift"]]["cause"]
    told = [f"{words} ({int((causes == cause).sum())})" for cause, words in CAUSES.items() if (causes == cause).any()]
    return f"{count(drifted)} of {count(len(checks))} checks found drift: {'; '.join(told)}."


def _reading(context: ReportContext) -> str:
    refits = context.folds[context.folds["variant"] == "sliding"]["refit_fold"].nunique()
    folds = context.folds["fold"].nunique()
    return (
        "Before each fold the rows since the last fit are held against the rows of that fit, with what was known then. "
        f"The {count(folds)} folds were scored by the models of {count(refits)} "
        f"{'refit' if refits == 1 else 'refits'}."
    )


def _checks(checks: pd.DataFrame) -> Table:
    rows = []
    for row in checks.itertuples():
        rows.append(
            (
                Cell(day(row.check_at), f"rows from {day(row.window_start)} on"),
                Cell(row.summary),
                Cell(
                    f"{count(row.incidents_before)} / {count(row.incidents_now)}",
                    f"rate × {number(row.ratio)} {between(number(row.ratio_low), number(row.ratio_high))}"
                    if pd.notna(row.ratio)
                    else "",
                ),
            )
        )
    caption = (
        "Each check: what it found, and incidents in the training span and since, with the ratio of the rates and its "
        "exact 95 % interval."
    )
    header = ("check", "found", "incidents before / since")
    return Table(caption, header, tuple(rows), words=frozenset({0, 1}))


def _verdicts(verdicts: pd.DataFrame) -> Table | None:
    if verdicts.empty:
        return None
    rows = []
    for row in verdicts.itertuples():
        facts = row.facts.split("\n")
        shown = "; ".join(facts[:_FACTS_SHOWN])
        shown += f"; and {len(facts) - _FACTS_SHOWN} more" if len(facts) > _FACTS_SHOWN else ""
        rows.append(
            (Cell(day(row.check_at)), Cell(row.cause, "" if row.drift else "worth knowing"), Cell(row.text, shown))
        )
    caption = "Every verdict with its evidence. What is worth knowing only is no reason to refit by itself."
    return Table(caption, ("check", "cause", "verdict"), tuple(rows), words=frozenset({0, 1, 2}))


def _groups(groups: pd.DataFrame) -> Table | None:
    if groups.empty:
        return None
    names = [name for name in GROUPS if (groups["group"] == name).any()]
    rows = []
    for at, mine in groups.groupby("check_at", sort=True):
        by_name = mine.set_index("group")
        cells = [Cell(day(at))]
        for name in names:
            if name not in by_name.index:
                cells.append(Cell(NONE))
                continue
            row = by_name.loc[name]
            missing = f"missing {percent(row['missing_before'])} → {percent(row['missing_now'])}"
            cells.append(
                Cell(
                    f"{percent(row['moved'] / row['features'])}, {number(row['psi'])}, {number(row['ks'])}",
                    missing if row["missing_moved"] else "",
                )
            )
        rows.append(tuple(cells))
    caption = (
        "By feature group: the share of features that moved, the largest stability index, and the largest "
        "Kolmogorov-Smirnov distance; beneath, the mean share of missing values where that moved. History grows with "
        "the data at hand, and onset follows errors, which are there to be alerted on: neither decides by itself."
    )
    return Table(caption, ("check", *names), tuple(rows))


def _outcomes(outcomes: pd.DataFrame, context: ReportContext) -> Table | None:
    if outcomes.empty:
        return None
    rows = [
        (
            Cell(f"{day(row['from'])} to {day(row['until'])}"),
            Cell(count(row["right"])),
            Cell(count(row["wrong"])),
            Cell(count(row["open"])),
            Cell(
                percent(row["precision"]),
                between(percent(row["precision_low"]), percent(row["precision_high"]))
                if row["right"] + row["wrong"]
                else "",
            ),
            Cell(count(row["incidents"])),
            Cell(
                number(row["calibration"]),
                between(number(row["calibration_low"]), number(row["calibration_high"])),
            ),
        )
        for _, row in outcomes.iterrows()
    ]
    caption = (
        f"Outcomes of {context.profile} as they came in, in windows of at most 28 days: alerted {context.unit_word}s "
        f"that failed, that did not, and that nothing is known of yet (each {context.unit_word} once a window), with "
        "the exact 95 % interval of the share; and positives over the sum of risks, with the exact interval of the "
        "number of incidents behind them (1: calibrated)."
    )
    header = ("decisions", "right", "wrong", "open", "share right", "incidents", "positives / risk")
    return Table(caption, header, tuple(rows))
