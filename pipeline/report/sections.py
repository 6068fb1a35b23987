"""The report's sections on decisions (precision targets, recall, failures without precursor) and on drift."""

import math
from typing import Any

import pandas as pd

from evaluation.drift.verdict import CAUSES
from evaluation.metrics.lead_time import TOP_SHARE
from pipeline.report.context import ReportContext
from pipeline.report.tables import Cell, Column, ReportSection, Table, table_of
from pipeline.report.wording import NONE, count, day, interval_text, number, percent, percent_at_least


def decisions(context: ReportContext) -> ReportSection | None:
    """Build the section on decisions; None if there are no promises."""
    promises, targets = context.extras.get("promises"), context.extras.get("decisions")
    if promises is None or targets is None or promises.empty:
        return None
    tables = [_target_table(targets[targets["model"] == context.profile], context), _promise_table(promises, context)]
    unforeseen = context.extras.get("unforeseen")
    notes = [
        "A promise is made at a refit and evaluated on the decisions until the next refit. It is based on decisions of "
        "earlier refits whose outcomes were known by then. Its bound treats alerts of one node, and of nodes with a "
        "common cause, as dependent, and is corrected for the search for the threshold. It assumes that the future "
        "resembles the past.",
    ]
    if unforeseen is not None and not unforeseen.empty:
        tables.append(_classes(unforeseen))
        notes.append("No threshold catches failures without a precursor: use redundancy and frequent checkpoints.")
    return ReportSection(
        key="decisions",
        name="Decisions",
        title="Promised precisions",
        introduction=(_kept_text(promises),),
        tables=tuple(table for table in tables if table is not None),
        notes=tuple(notes),
    )


def _kept_text(promises: pd.DataFrame) -> str:
    evaluated = promises[promises["kept"].notna()]
    if evaluated.empty:
        return "No model of this run made a promise that could be evaluated."
    n_kept = int(evaluated["kept"].sum())
    return (
        f"Across all models and targets, {count(len(evaluated))} promises could be evaluated, and {count(n_kept)} were "
        "kept. They are not independent, because models share incidents."
    )


def _target_table(targets: pd.DataFrame, context: ReportContext) -> Table | None:
    def asked(row: Any) -> str:
        return {
            "precision": f"a precision of {percent(row.asked)}",
            "budget": f"{number(row.asked, 1)} nodes per decision",
        }[str(row.kind)]

    confidence = percent(float(targets["confidence"].iloc[0])) if len(targets) else NONE
    return table_of(
        f"Promises of {context.profile} for the time after the data, at {confidence} confidence.",
        targets,
        ("target", asked),
        ("promised", _promise),
        ("alert at a risk of", lambda row: _risk(row.threshold)),
        ("precision at least", lambda row: percent_at_least(row.bound_lower) if _has_threshold(row) else NONE),
        ("drains per decision", lambda row: number(row.drains_per_decision, 2) if _has_threshold(row) else NONE),
        ("recall", lambda row: percent(row.recall) if _has_threshold(row) else NONE),
        ("why", lambda row: row.why),
        text_columns=frozenset({0, 1, 6}),
    )


def _has_threshold(row: Any) -> bool:
    return not math.isnan(row.threshold)  # NaN: nothing is alerted


def _promise(row: Any) -> str:
    """Return whether a row is a promise, or a threshold set by a budget."""
    if row.kind == "precision":
        return "yes" if row.promised else "no"
    if not _has_threshold(row):
        return "not set"
    return "set, not promised"


def _promise_table(promises: pd.DataFrame, context: ReportContext) -> Table | None:
    return table_of(
        "Promises made at each refit from earlier outcomes, and evaluated until the next refit. Models without a "
        "promise are omitted.",
        promises[(promises["promised"] > 0) | (promises["model"] == context.profile)],
        ("model", lambda row: row.model),
        ("target", lambda row: percent(row.target)),
        ("refits with a promise", lambda row: f"{count(row.promised)} of {count(row.folds)}"),
        ("drains", lambda row: count(row.drains)),
        ("precision", lambda row: percent(row.precision) if row.known_drains else NONE),
        ("", lambda row: ("kept" if row.kept else "broken") if row.known_drains else NONE),
        ("recall", lambda row: percent(row.recall) if row.known_drains else NONE),
        ("recall while in force", lambda row: percent(row.recall_promised) if row.promised else NONE),
        ("highest possible promise", lambda row: percent_at_least(row.best) if row.best > 0 else NONE),
        strong=lambda row: row.model == context.profile,
        text_columns=frozenset({0, 5}),
    )


def _classes(frame: pd.DataFrame) -> Table | None:
    silent = frame["announced"].map({True: 0.0, False: 1.0})  # NaN: not known
    counted = frame.assign(unseen=~frame["seen"], unlucky=1 - frame["chance"], silent=silent)
    counted = pd.concat([counted.assign(failure_class="all"), counted])
    measures = {"size": ("seen", "size"), "unseen": ("unseen", "sum"), "by_chance": ("unlucky", "sum")}
    measures |= {"silent": ("silent", "sum"), "known": ("silent", "count")}
    columns: list[Column] = [
        ("failure class", lambda row: row.Index),
        ("incidents", lambda row: count(row.size)),
        ("without a precursor", lambda row: Cell(count(row.unseen), percent(row.unseen / row.size))),
        ("expected by chance", lambda row: number(row.by_chance, 1)),
    ]
    if silent.notna().any():
        columns.append(("true risk never above the fleet mean", _silent))
    return table_of(
        f"Failures without a precursor: no model ranked the node in its top {percent(TOP_SHARE)} at any decision "
        "within the horizon.",
        counted.groupby("failure_class", sort=True).agg(**measures),
        *columns,
    )


def _silent(row: Any) -> Cell:
    return Cell(count(row.silent), percent(row.silent / row.known) if row.known else NONE)


def _risk(value: float) -> str:
    return NONE if math.isnan(value) else f"{100 * value:.3g} %"


_MAX_FACTS_SHOWN = 5


def what_changed(context: ReportContext) -> ReportSection | None:
    """Build the section on drift; None if there were no checks, e.g. with a single fold."""
    checks = context.extras.get("drift_checks")
    if checks is None or checks.empty:
        return None
    verdicts = context.extras["drift_verdicts"]
    tables = [_checks(checks), _verdicts(verdicts)]
    return ReportSection(
        key="what-changed",
        name="Drift",
        title="Drift between refits",
        introduction=(_summary(checks, verdicts), _reading(context)),
        tables=tuple(table for table in tables if table is not None),
        notes=(
            "A population stability index of 0.1 is small and 0.25 is large (Siddiqi). A feature counts as drifted if "
            "its index is at least 0.2 and at least twice the largest between weeks of the training window, and its "
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
        "Before each fold, the rows since the last fit are compared with the rows of that fit, using only data known "
        f"at that time. The {count(folds)} folds were scored by the models of {count(refits)} "
        f"{'refit' if refits == 1 else 'refits'}."
    )


def _checks(checks: pd.DataFrame) -> Table | None:
    return table_of(
        "Result of each check, and incidents in the training window and since, with the ratio of the rates and its "
        "exact 95 % interval.",
        checks,
        ("check", lambda row: Cell(day(row.check_at), f"rows from {day(row.window_start)} on")),
        ("result", lambda row: row.summary),
        (
            "incidents before / since",
            lambda row: Cell(
                f"{count(row.incidents_before)} / {count(row.incidents_now)}",
                f"rate × {number(row.ratio)} {interval_text(number(row.ratio_low), number(row.ratio_high))}"
                if pd.notna(row.ratio)
                else "",
            ),
        ),
        text_columns=frozenset({0, 1}),
    )


def _verdicts(verdicts: pd.DataFrame) -> Table | None:
    def evidence(row: Any) -> Cell:
        facts = row.facts.split("\n")
        text = "; ".join(facts[:_MAX_FACTS_SHOWN])
        text += f"; and {len(facts) - _MAX_FACTS_SHOWN} more" if len(facts) > _MAX_FACTS_SHOWN else ""
        return Cell(row.text, text)

    return table_of(
        "All findings with their evidence. A finding marked “no drift” does not require a refit.",
        verdicts,
        ("check", lambda row: day(row.check_at)),
        ("cause", lambda row: Cell(row.cause, "" if row.drift else "no drift")),
        ("finding", evidence),
        text_columns=frozenset({0, 1, 2}),
    )
