"""Which combination to use when: said from the measured rows, at equal numbers of alerts."""

from __future__ import annotations

import pandas as pd

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.evaluation import Evaluation
from models.config import CASCADE
from pipeline.report.context import ReportContext
from pipeline.report.tables import Cell, Section, Table
from pipeline.report.wording import between, count, join, number, percent, points, verdict

_OURS = ("ensemble", "learner")
_STATISTICS = {"precision_at_k": "precision at K", "average_precision": "average precision"}

_SIMPLE = {
    "mean_log_odds": (
        "needs neither fitted weights nor a best member known before, and gives a risk that compares from day to day, "
        "so it can carry promises"
    ),
    "mean_rank": "needs neither fitted weights nor a best member known before; it only orders, so it promises nothing",
}
"""What speaks for the ensembles that are put together by nothing but a mean; the first is advised first."""


def combining(evaluation: Evaluation, context: ReportContext) -> Section | None:
    """Make the section that compares ensembles with single learners and budgets with each other.

    ``context``: everything else.
    Returns: none where there is no ensemble.
    """
    equal = evaluation.equal_alerts
    equal = equal[equal["variant"] == SLIDING]
    if not (evaluation.table["kind"] == "ensemble").any():
        return None
    tables = [_ensembles(equal), _budgets(evaluation, context), _trends(evaluation)]
    return Section(
        key="combining",
        name="Combining",
        title="Which combination to use when",
        before=tuple(combiner_advice(evaluation.table, equal, evaluation.budgets, context.profile)),
        tables=tuple(table for table in tables if table is not None),
        after=(
            "The best single learner is chosen after the fact on these decisions, which favours it. These sentences "
            "are made from this backtest alone; another fleet may say otherwise.",
        ),
    )


def combiner_advice(table: pd.DataFrame, equal: pd.DataFrame, budgets: pd.DataFrame, profile: str) -> list[str]:
    """Say which combiner serves which purpose, from measured rows.

    ``table``: ``model``, ``variant``, ``kind``, ``alerts``, ``precision_at_k`` with bounds.
    ``equal``: sliding ensembles beside learners at as many alerts: ``model``, ``other_model``, ``alerts``,
    ``precision``, ``other_precision``, ``difference``, ``low``, ``high``, ``best``.
    ``budgets``: ``model``, ``variant``, ``k``, ``precision``.
    Returns: Sentences; empty where nothing was measured.
    """
    sliding = table[(table["variant"] == SLIDING) & table["kind"].isin(_OURS)].set_index("model")
    sliding = sliding[sliding["precision_at_k"].notna()]
    if sliding.empty:
        return []
    ensembles = [name for name in sliding.index if sliding.loc[name, "kind"] == "ensemble"]
    beside = {row.model: row for row in equal[equal["best"]].itertuples() if row.model in ensembles}
    said = [_beside_members(beside), _full_budget(sliding, beside, profile), _other_budgets(sliding, budgets)]
    full = int(sliding["alerts"].max())
    said += [_agreement(row, full) for row in beside.values() if row.alerts < full]
    return [sentence for sentence in said if sentence]


def _beside_members(beside: dict[str, tuple]) -> str:  # type: ignore[type-arg]  # rows of itertuples have no static type
    verdicts: dict[str, list[str]] = {}
    for name, row in beside.items():
        verdicts.setdefault(verdict(row.low, row.high), []).append(f"{name} ({points(row.difference)})")  # type: ignore[attr-defined]  # columns of the table
    if not verdicts:
        return ""
    parts = []
    if "better" in verdicts:
        parts.append(f"more precise than it is shown for {join(verdicts['better'])}")
    if "worse" in verdicts:
        parts.append(f"less precise for {join(verdicts['worse'])}")
    open_ones = verdicts.get("no difference shown", []) + verdicts.get("no interval", [])
    if open_ones:
        parts.append(f"no difference is shown for {join(open_ones)}")
    text = f"Beside its best single learner at as many alerts (points of precision): {', '.join(parts)}."
    if "better" not in verdicts:
        text += " So no combination here earns its place by precision alone."
    return text


def _full_budget(sliding: pd.DataFrame, beside: dict[str, tuple], profile: str) -> str:  # type: ignore[type-arg]  # as above
    order = sliding.sort_values("precision_at_k", ascending=False, kind="stable")
    best = order.iloc[0]
    tied = [
        str(name)
        for name, row in order.iloc[1:].iterrows()
        if best["precision_at_k_low"] <= row["precision_at_k"]  # False where there is no interval
    ]
    text = (
        f"With the whole budget, {order.index[0]} was the most precise ({percent(best['precision_at_k'])} "
        f"{between(percent(best['precision_at_k_low']), percent(best['precision_at_k_high']))})"
    )
    if tied:
        text += f"; {join(tied)} lie{'s' if len(tied) == 1 else ''} within its interval"
    text += "."
    if tied:
        text += _simple_choice((order.index[0], *tied), beside)
    if profile in sliding.index and profile not in (order.index[0], *tied):
        text += f" The profile, {profile}, reaches {percent(sliding.loc[profile, 'precision_at_k'])} and lies below it."
    return text


def _simple_choice(ties: tuple[str, ...], beside: dict[str, tuple]) -> str:  # type: ignore[type-arg]  # as above
    """Advise one simple mean of those as precise as the most precise one; rather one that is not shown to be worse."""
    worse = {name for name, row in beside.items() if verdict(row.low, row.high) == "worse"}  # type: ignore[attr-defined]  # columns of the table
    simple = sorted((name for name in _SIMPLE if name in ties), key=worse.__contains__)
    if not simple:
        return ""
    text = f" Among these, {simple[0]} {_SIMPLE[simple[0]]}"
    if simple[0] in worse:
        text += "; its best single learner is shown to be more precise, but is known only afterwards"
    return f"{text}."


def _other_budgets(sliding: pd.DataFrame, budgets: pd.DataFrame) -> str:
    mine = budgets[(budgets["variant"] == SLIDING) & budgets["model"].isin(sliding.index)].dropna(subset="precision")
    parts = []
    for k, at in mine.groupby("k", sort=True):
        best = at.sort_values("precision", ascending=False, kind="stable").iloc[0]
        parts.append(f"{best['model']} at {k} ({percent(best['precision'])})")
    return f"By budget of alerts a decision time, the most precise: {join(parts)}." if len(parts) > 1 else ""


def _agreement(row: tuple, full: int) -> str:  # type: ignore[type-arg]  # a row of itertuples
    cascade = row.model == CASCADE  # type: ignore[attr-defined]  # columns
    where = "what survives its first stages" if cascade else "where its members agree"
    text = (
        f"{row.model} alerts only {where}: {count(row.alerts)} alerts, "  # type: ignore[attr-defined]
        f"{percent(row.alerts / full)} of the budget, at a precision of {percent(row.precision)}. "  # type: ignore[attr-defined]
        f"{row.other_model} cut to as many reaches {percent(row.other_precision)}: "  # type: ignore[attr-defined]
    )
    said = verdict(row.low, row.high)  # type: ignore[attr-defined]
    if cascade:
        return text + {
            "better": "the stages themselves add precision, so use it where few and sure alerts are wanted.",
            "worse": "the stages cost precision; a smaller budget serves better.",
        }.get(said, "the stages are not shown to add anything that a smaller budget would not.")
    if said == "better":
        return text + "the agreement itself adds precision, so use it where few and sure alerts are wanted."
    if said == "worse":
        return text + "asking for agreement costs precision; a smaller budget serves better."
    return text + "agreement is not shown to add anything that a smaller budget would not."


def _ensembles(equal: pd.DataFrame) -> Table | None:
    best = equal[equal["best"]]
    if best.empty:
        return None
    rows = tuple(
        (
            Cell(row.model),
            Cell(row.other_model),
            Cell(count(row.alerts)),
            Cell(percent(row.precision)),
            Cell(percent(row.other_precision)),
            Cell(points(row.difference), between(points(row.low), points(row.high))),
            Cell(verdict(row.low, row.high)),
        )
        for row in best.itertuples()
    )
    header = (
        "model", "the best learner", "alerts", "its precision", "the learner's", "difference in points", "verdict",
    )  # fmt: skip
    return Table(
        "Every ensemble beside the single learner that is best at as many alerts.",
        header,
        rows,
        words=frozenset({0, 1, 6}),
    )


def _budgets(evaluation: Evaluation, context: ReportContext) -> Table | None:
    frame = evaluation.budgets[evaluation.budgets["variant"] == SLIDING]
    if frame.empty:
        return None
    steps = sorted(frame["k"].unique())
    rows = []
    strong = set()
    for at, (model, mine) in enumerate(frame.groupby("model", sort=False)):
        by_k = mine.set_index("k")
        cells = [Cell(str(model))]
        for k in steps:
            row = by_k.loc[k]
            cells.append(Cell(percent(row["precision"]), between(percent(row["low"]), percent(row["high"]))))
        rows.append(tuple(cells))
        if model == context.profile:
            strong.add(at)
    header = ("model", *(f"K = {k}" for k in steps))
    return Table(
        "Precision as the budget of alerts at each decision time changes.", header, tuple(rows), frozenset(strong)
    )


def _trends(evaluation: Evaluation) -> Table | None:
    if evaluation.trends.empty:
        return None
    rows = tuple(
        (
            Cell(row.model),
            Cell(_STATISTICS[row.statistic]),
            Cell(points(row.first)),
            Cell(points(row.last)),
            Cell(points(row.slope), between(points(row.low), points(row.high))),
            Cell("grows" if row.low > 0 else "shrinks" if row.high < 0 else "not shown"),
        )
        for row in evaluation.trends.itertuples()
    )
    months = number(float(evaluation.trends["months"].max()), 1)
    caption = (
        f"Sliding minus trained once, in points, along a line over the {months} months (of 30 days) since the first "
        "fit; both begin as the same model."
    )
    header = ("model", "statistic", "at first", "at last", "change a month", "verdict")
    return Table(caption, header, rows, words=frozenset({0, 1, 5}))


def trend_sentence(evaluation: Evaluation, model: str) -> str:
    """Say how a model's gain from sliding training changes with the months; empty where that was not measured."""
    frame = evaluation.trends
    found = frame[(frame["model"] == model) & (frame["statistic"] == "precision_at_k")] if len(frame) else frame
    for row in found.itertuples():
        bounds = between(points(row.low), points(row.high))
        if row.low > 0:
            return f"That gain grows by {points(row.slope)} points a month {bounds}."
        if row.high < 0:
            return f"That gain shrinks by {points(row.slope)} points a month {bounds}."
        if bounds:
            return f"Whether it grows with time is not shown: {points(row.slope)} points a month {bounds}."
    return ""
