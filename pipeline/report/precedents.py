"""The report's section on past incidents that looked like the alerts: what they were, and how often they were right."""

from __future__ import annotations

import pandas as pd

from models.evaluation import Evaluation
from pipeline.report.context import ReportContext
from pipeline.report.sections import Section
from pipeline.report.tables import Cell, Table
from pipeline.report.wording import count, minute, percent

VERY_ALIKE = 0.8
"""Likeness from which an alert and its precedent are counted as much alike."""


def precedents(_evaluation: Evaluation, context: ReportContext) -> Section | None:
    """Make the section; None where no alert was explained."""
    frame = context.extras.get("precedents")
    if frame is None or frame.empty:
        return None
    tables = [table for table in (_shown(frame, context), _worth(frame)) if table is not None]
    return Section(
        key="precedents",
        name="Precedents",
        title="Past incidents that looked the same",
        before=(
            "For each alert explained, the incidents known at that refit are searched for those that looked most like "
            "it at their last decision before. Only features that the alert's score is made of count, each by what it "
            "added, and no group of features for more than half. A likeness of 100 % means the same in all of them, "
            "0 % no nearer than a unit with the usual values.",
            _agreement(frame),
        ),
        tables=tuple(tables),
        after=(
            "A likeness is told only where incidents come as close at least twice as often as healthy units do; the "
            "class of a precedent is a hint where to look first, not a prediction.",
        ),
    )


def _nearest(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["place"] <= 1]


def _agreement(frame: pd.DataFrame) -> str:
    """Say how often the nearest precedent had the class of what followed, against chance."""
    nearest = _nearest(frame)
    followed = nearest[nearest["alike"] & nearest["failure_class"].notna() & nearest["chance"].notna()]
    if followed.empty:
        return (
            "No explained alert with a precedent was followed by an incident, so nothing can be said of their classes."
        )
    # One incident may be behind many alerts: each counts once, by its riskiest alert.
    followed = followed.drop_duplicates(["unit", "failure_class", "fold"])
    right = int((followed["precedent_class"] == followed["failure_class"]).sum())
    return (
        f"Of {count(len(followed))} incidents that followed such alerts (each unit once a fold), the nearest precedent "
        f"had the same class in {count(right)} ({percent(right / len(followed))}); an incident drawn from the past at "
        f"random would have had it in {percent(float(followed['chance'].mean()))}, and always naming the commonest "
        f"class would have been right in {percent(float(followed['commonest'].mean()))}."
    )


def _worth(frame: pd.DataFrame) -> Table:
    nearest = _nearest(frame)
    close = nearest["alike"] & (nearest["likeness"] >= VERY_ALIKE)
    kinds = (
        (f"a precedent at least {percent(VERY_ALIKE)} alike", close),
        ("a precedent less alike", nearest["alike"] & ~close),
        ("nothing in the past looked like it", ~nearest["alike"]),
    )
    rows = []
    for name, chosen in kinds:
        own = nearest[chosen]
        known = own[own["label"].notna()]
        right = percent(float((known["label"] == 1).mean())) if len(known) else "none known"
        rows.append((Cell(name), Cell(count(len(own))), Cell(right)))
    return Table(
        "Explained alerts by how much the nearest past incident looked the same: how many, and how many an incident "
        "followed.",
        ("alerts with", "explained", "followed by an incident"),
        tuple(rows),
    )


def _shown(frame: pd.DataFrame, context: ReportContext) -> Table | None:
    rows = []
    for alert in context.alerts:
        own = frame[(frame["unit"] == alert.unit) & (frame["decision_time"] == pd.Timestamp(alert.decision_time))]
        if own.empty:
            continue
        told = [text for text in own.sort_values("place", kind="stable")["text"] if text]
        first = Cell(told[0], str(own["worth"].iloc[0])) if told else Cell(str(own["worth"].iloc[0]))
        rows.append((Cell(alert.unit), Cell(minute(alert.decision_time)), first, Cell("; ".join(told[1:]))))
    if not rows:
        return None
    return Table(
        "The alerts shown above, and what they looked like.",
        (context.unit_word, "decision (UTC)", "most like", "and"),
        tuple(rows),
        words=frozenset({0, 1, 2, 3}),
    )
