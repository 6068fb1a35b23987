"""The report's tables, as rows of text."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from evaluation.metrics.comparison import SLIDING, TRAIN_ONCE
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.oracle import ORACLE
from models.config import ALL_LEARNERS, BASELINES
from models.explanation.importance import by_group
from pipeline.report.context import AlertEntry, ReportContext
from pipeline.report.wording import (
    NONE,
    between,
    count,
    day,
    duration,
    hours,
    minute,
    number,
    percent,
    points,
    signed,
    verdict,
)

_VARIANTS = {SLIDING: "sliding", TRAIN_ONCE: "trained once", ORACLE: ""}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    ``note``: said smaller beneath, such as an interval.
    """

    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    ``rows``: rows as long as the header; the first cell names the row.
    ``words``: columns that hold words rather than numbers.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    strong: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset({0})


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the page.

    ``key``: its anchor: letters and dashes.
    ``name``: what the page's navigation calls it.
    ``before``: paragraphs before the tables, in plain words.
    """

    key: str
    name: str
    title: str
    before: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    after: tuple[str, ...] = ()


def models(evaluation: Evaluation, context: ReportContext) -> Table:
    """Every model, ensemble and baseline, with intervals."""
    table = _ordered(evaluation.table)
    with_oracle = "oracle_share_precision_at_k" in table
    header = [
        "model", "training", "alerts", f"precision at K = {evaluation.k}", "of its own alerts", "incidents caught",
        "average precision", "ROC-AUC", "in top 5 %", "median lead", "false alert days", "calibr. error",
    ]  # fmt: skip
    if with_oracle:
        header.append("of the oracle")
    rows = []
    for _, row in table.iterrows():
        cells = [
            Cell(str(row["model"]), str(row["kind"])),
            Cell(_VARIANTS.get(row["variant"], str(row["variant"]))),
            Cell(count(row["alerts"])),
            _share(row, "precision_at_k"),
            _share(row, "precision"),
            _share(row, "recall"),
            _plain(row, "average_precision"),
            _plain(row, "roc_auc"),
            _share(row, "capture"),
            Cell(hours(row["lead_time_median_hours"])),
            Cell(number(row["false_alert_days_per_1000_unit_days"], 1)),
            Cell(percent(row["calibration_error"])),
        ]
        if with_oracle:
            cells.append(_share(row, "oracle_share_precision_at_k"))
        rows.append(tuple(cells))
    strong = frozenset(
        at
        for at, name in enumerate(zip(table["model"], table["variant"], strict=True))
        if name == (context.profile, SLIDING)
    )
    caption = (
        f"Every model, pooled over all folds. In brackets: 95 % intervals from {evaluation.replicates} resamples of "
        f"whole {context.unit_word}s; a share of 0 or 100 %, which resampling cannot vary, has exact bounds instead "
        f"(Clopper and Pearson's, each {context.unit_word} counted once)."
        if evaluation.replicates
        else "Every model, pooled over all folds. No intervals: backtest.bootstrap is 0."
    )
    if with_oracle:
        caption += (
            " The oracle is the best in the mean, not in each run: a share of its precision, or a bound of one, can "
            "pass 100 % by chance."
        )
    return Table(caption, tuple(header), tuple(rows), strong, words=frozenset({0, 1}))


def paired(evaluation: Evaluation, comparison: str, caption: str) -> Table | None:
    """Paired differences of one comparison: precision at K and average precision."""
    mine = evaluation.paired[evaluation.paired["comparison"] == comparison]
    precision = mine[mine["statistic"] == "precision_at_k"].reset_index(drop=True)
    average = mine[mine["statistic"] == "average_precision"].reset_index(drop=True)
    if precision.empty:
        return None
    rows = []
    for one, two in zip(precision.itertuples(), average.itertuples(), strict=True):
        left = one.model if comparison != "sliding" else f"{one.model}, sliding"
        right = one.other_model if comparison != "sliding" else "trained once"
        rows.append(
            (
                Cell(left),
                Cell(right),
                Cell(f"{percent(one.value)} / {percent(one.other_value)}"),
                Cell(points(one.difference), between(points(one.low), points(one.high))),
                Cell(verdict(one.low, one.high)),
                Cell(signed(two.difference), between(signed(two.low), signed(two.high))),
                Cell(verdict(two.low, two.high)),
            )
        )
    header = (
        "model", "against", "precision at K", "difference in points", "verdict",
        "difference in average precision", "verdict",
    )  # fmt: skip
    return Table(caption, header, tuple(rows), words=frozenset({0, 1, 4, 6}))


def equal_alerts(evaluation: Evaluation) -> Table | None:
    """Every ensemble beside the single learner that is best at as many alerts."""
    table = evaluation.equal_alerts
    best = table[(table["variant"] == SLIDING) & table["best"].astype(bool)]
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
        "Every ensemble beside the single learner that is best at as many alerts. An ensemble that alerts less than K "
        "allows looks more precise for that alone; the learner is chosen after the fact, which favours it.",
        header,
        rows,
        words=frozenset({0, 1, 6}),
    )


def budgets(evaluation: Evaluation, context: ReportContext) -> Table | None:
    """Precision of every model at several budgets."""
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


def by_month(evaluation: Evaluation, profile: str) -> Table | None:
    """Precision at K by month, sliding and trained once."""
    mine = evaluation.monthly[evaluation.monthly["model"] == profile]
    sliding = mine[mine["variant"] == SLIDING].set_index("month")
    once = mine[mine["variant"] == TRAIN_ONCE].set_index("month")
    if sliding.empty:
        return None
    rows = tuple(
        (
            Cell(str(month)),
            Cell(percent(row["base_rate"])),
            Cell(count(row["incidents"])),
            Cell(count(row["caught"])),
            Cell(percent(row["precision_at_k"])),
            Cell(percent(once.loc[month, "precision_at_k"]) if month in once.index else NONE),
        )
        for month, row in sliding.iterrows()
    )
    header = ("month", "base rate", "incidents", "caught", "precision at K, sliding", "precision at K, trained once")
    return Table(f"{profile} by calendar month of the decision (UTC).", header, rows)


def by_class(evaluation: Evaluation, profile: str) -> Table | None:
    """Recall by failure class."""
    mine = evaluation.by_class
    mine = mine[(mine["model"] == profile) & (mine["variant"] == SLIDING)]
    if mine.empty:
        return None
    rows = tuple(
        (
            Cell(row.failure_class),
            Cell(count(row.incidents)),
            Cell(count(row.caught)),
            Cell(percent(row.recall)),
            Cell(hours(row.lead_time_median_hours)),
        )
        for row in mine.itertuples()
    )
    header = ("failure class", "incidents", "caught", "recall", "median lead time")
    return Table(f"Incidents by failure class, {profile} at K = {evaluation.k}.", header, rows)


def folds(evaluation: Evaluation, context: ReportContext) -> Table | None:
    """Each refit: when, on what, and what its decisions were worth."""
    mine = context.folds[context.folds["variant"] == SLIDING].drop_duplicates("fold").sort_values("fold")
    if mine.empty:
        return None
    measured = evaluation.folds
    measured = measured[(measured["model"] == context.profile) & (measured["variant"] == SLIDING)].set_index("fold")
    rows = []
    for row in mine.itertuples():
        found = measured.loc[row.fold] if row.fold in measured.index else None
        rows.append(
            (
                Cell(str(row.fold)),
                Cell(minute(row.refit_at)),
                Cell(_span(row.span)),
                Cell(day(row.train_start), f"to {day(row.train_end)}"),
                Cell(f"{count(row.n_positive)} / {count(row.n_negative)}"),
                Cell(NONE if found is None else percent(found["base_rate"])),
                Cell(NONE if found is None else percent(found["precision_at_k"])),
                Cell(NONE if found is None else f"{count(found['caught'])} of {count(found['incidents'])}"),
                Cell(NONE if found is None else number(found["average_precision"], 3)),
            )
        )
    header = (
        "fold", "refitted at (UTC)", "span", "trained on", "positive / negative rows", "base rate", "precision at K",
        "incidents caught", "average precision",
    )  # fmt: skip
    caption = f"Each refit of the sliding training, and what {context.profile} was worth on the decisions it scored."
    return Table(caption, header, tuple(rows))


def made_of(context: ReportContext) -> Table | None:
    """Show what the profile's scores are made of, by feature group; None where nothing was explained."""
    if context.attributions is None or context.attributions.empty:
        return None
    rows = tuple(
        (
            Cell(str(row.group)),
            Cell(percent(row.share)),
            Cell(", ".join(f"{name} {percent(share)}" for name, share in row.channels.items())),
        )
        for row in by_group(context.attributions).itertuples()
    )
    caption = f"Shares of the attributions of {context.profile}: mean absolute contribution, averaged over the folds."
    return Table(caption, ("group", "share", "most by"), rows, words=frozenset({0, 2}))


def alert_rows(alerts: tuple[AlertEntry, ...]) -> list[dict[str, object]]:
    """Alerts for the template: when, where, risk, outcome, reasons."""
    return [
        {
            "time": minute(alert.decision_time),
            "unit": alert.unit,
            "node": "" if alert.node == alert.unit else alert.node,
            "risk": percent(alert.risk),
            "outcome": _outcome(alert),
            "right": alert.label == 1,
            "reasons": alert.reasons,
            "explained": bool(alert.method),
        }
        for alert in alerts
    ]


def _outcome(alert: AlertEntry) -> str:
    if alert.label is None:
        return "not known yet"
    if alert.label == 0:
        return "wrong: no incident followed"
    what = f"right: {alert.failure_class or 'incident'}"
    if alert.incident_start is None:
        return what
    return f"{what} {hours((alert.incident_start - alert.decision_time).total_seconds() / 3600)} later"


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    kinds = {"ensemble": 0, "learner": 1, "baseline": 2, "oracle": 3}
    place = {name: at for at, name in enumerate((*ALL_LEARNERS, *BASELINES))}
    key = pd.DataFrame(
        {
            "kind": table["kind"].map(kinds),
            "place": table["model"].map(place).fillna(-1),
            "model": table["model"],
            "variant": table["variant"].map({SLIDING: 0, TRAIN_ONCE: 1}).fillna(2),
        }
    )
    return table.loc[key.sort_values(["kind", "place", "model", "variant"], kind="stable").index].reset_index(drop=True)


def _share(row: pd.Series, name: str) -> Cell:
    return Cell(percent(row[name]), between(percent(row[f"{name}_low"]), percent(row[f"{name}_high"])))


def _plain(row: pd.Series, name: str) -> Cell:
    return Cell(number(row[name], 3), between(number(row[f"{name}_low"], 3), number(row[f"{name}_high"], 3)))


def _span(value: object) -> str:
    try:
        return duration(pd.Timedelta(value).to_pytimedelta())
    except ValueError:
        return str(value)
