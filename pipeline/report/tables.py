"""The report's tables, as rows of text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from evaluation.metrics.comparison import SLIDING, TRAIN_ONCE
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.oracle import ORACLE
from features.wording import duration
from models.config import ALL_LEARNERS, BASELINES, CASCADE, COMBINERS
from models.explanation.alert_reasons import by_group
from pipeline.report.context import AlertEntry, ReportContext
from pipeline.report.wording import (
    NONE,
    count,
    day,
    hours,
    interval_text,
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
    """A cell; ``note``: printed below in a smaller font, e.g. an interval."""

    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    ``rows``: as long as the header; the first cell names the row.
    ``strong``: positions of emphasized rows; ``text_columns``: positions of columns with text rather than numbers.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    strong: frozenset[int] = frozenset()
    text_columns: frozenset[int] = frozenset({0})

    def lines(self) -> list[str]:
        """Format for a terminal: the header, and one line per row; emphasized rows end with a star."""
        rows = [[cell.strip() for cell in self.header]]
        rows += [[f"{cell.text} {cell.note}".strip() for cell in row] for row in self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.header))]
        return [
            "  ".join(
                f"{cell:<{width}}" if i in self.text_columns else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            + " *" * (number - 1 in self.strong)
            for number, row in enumerate(rows)
        ]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A section of the page.

    ``key``: its anchor: letters and dashes.
    ``name``: its label in the navigation.
    """

    key: str
    name: str
    title: str
    introduction: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


Column = tuple[str, Callable[[Any], "str | Cell"]]
"""A column's header, and the function from a row (of ``itertuples``) to its cell."""


def table_of(
    caption: str,
    frame: pd.DataFrame,
    *columns: Column,
    strong: Callable[[Any], bool] = lambda _: False,
    text_columns: frozenset[int] = frozenset({0}),
) -> Table | None:
    """Build a table with a row for each row of a frame; None if the frame is empty."""
    if frame.empty:
        return None
    rows, marked = [], set()
    for i, row in enumerate(frame.itertuples()):
        cells = (write(row) for _, write in columns)
        rows.append(tuple(cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in cells))
        if strong(row):
            marked.add(i)
    return Table(caption, tuple(header for header, _ in columns), tuple(rows), frozenset(marked), text_columns)


def models(evaluation: Evaluation, context: ReportContext) -> Table:
    """Every model, ensemble and baseline, with intervals."""
    table = _ordered(evaluation.table)
    with_oracle = "oracle_share_precision_at_k" in table
    columns: list[Column] = [
        ("model", lambda row: Cell(row.model, row.kind)),
        ("training", lambda row: _VARIANTS.get(row.variant, row.variant)),
        ("alerts", lambda row: count(row.alerts)),
        ("episode precision", _measured("episode_precision", percent)),
        (f"precision at K = {evaluation.k}", _measured("precision_at_k", percent)),
        ("precision per alert", _measured("precision", percent)),
        ("incidents caught", _measured("recall", percent)),
        ("average precision", _measured("average_precision", _three_decimals)),
        ("ROC-AUC", _measured("roc_auc", _three_decimals)),
        ("in top 5 %", _measured("capture", percent)),
        ("median lead time", lambda row: hours(row.lead_time_median_hours)),
        ("false episodes", lambda row: number(row.false_episodes_per_1000_node_days, 1)),
        ("calibration error", lambda row: percent(row.calibration_error)),
    ]
    caption = (
        "All models, pooled over all folds, by node. Brackets are 95 % bootstrap intervals by node "
        f"({evaluation.replicates} replicates). Shares of 0 and 100 % have exact intervals (Clopper-Pearson, each node "
        "counted once)."
        if evaluation.replicates
        else "All models, pooled over all folds, by node. No intervals: backtest.bootstrap is 0."
    )
    if with_oracle:
        columns.append(("of the oracle", _measured("oracle_share_precision_at_k", percent)))
        caption += (
            " The oracle is the best on average, not in each run: a share of its precision can exceed 100 % by chance."
        )
    strong = (context.profile, SLIDING)
    result = table_of(
        caption, table, *columns, strong=lambda row: (row.model, row.variant) == strong, text_columns=frozenset({0, 1})
    )
    assert result is not None  # there is a model
    return result


def mechanisms(evaluation: Evaluation, context: ReportContext) -> Table | None:
    """Compare the paper's mechanisms, sliding and trained once; None if fewer than three were fitted."""
    table = evaluation.table[evaluation.table["variant"] == SLIDING].set_index("model")
    learners = table.loc[table["kind"] == "learner", "precision_at_k"].dropna()
    profile, combiner = context.profile, context.params.get("models.parallel.combiner", "")
    named = {} if learners.empty else {str(learners.idxmax()): "best single model"}
    named |= {combiner: "ensemble of the paper"}
    named |= {profile: "ensemble of the profile" if profile in COMBINERS else named.get(profile, "the profile")}
    named |= {CASCADE: "cascade"}
    rows = table[table.index.isin(named)].loc[lambda frame: [name for name in named if name in frame.index]]
    if len(rows) < 3:
        return None
    changes = evaluation.paired
    changes = changes[(changes["comparison"] == "sliding") & (changes["statistic"] == "precision_at_k")]
    by_model = changes.set_index("model")

    def static(row: Any) -> Cell | str:
        known = evaluation.row(row.Index, TRAIN_ONCE)
        return NONE if known is None else _measured("precision_at_k", percent)(known)

    def change(row: Any) -> Cell | str:
        return NONE if row.Index not in by_model.index else _difference(by_model.loc[row.Index])

    riskiest = "riskiest node" if evaluation.k == 1 else f"{evaluation.k} riskiest nodes"
    return table_of(
        f"The paper's mechanisms at equal alerts: the {riskiest} per {context.budget_period}, with 95 % intervals by "
        "node",
        rows,
        ("mechanism", lambda row: Cell(named[row.Index], "" if row.Index == CASCADE else f"({row.Index})")),
        ("precision, sliding", _measured("precision_at_k", percent)),
        ("static", static),
        ("sliding minus static, points", change),
        ("incidents caught", _measured("recall", percent)),
        strong=lambda row: row.Index == context.profile,
    )


def by_unit(evaluation: Evaluation, context: ReportContext) -> Table | None:
    """Metrics by GPU, in addition to those by node; None if nodes are scored."""
    if context.unit != "gpu":
        return None
    return table_of(
        "By GPU: a failure of four GPUs of a node counts four times.",
        _ordered(evaluation.table),
        ("model", lambda row: Cell(row.model, row.kind)),
        ("training", lambda row: _VARIANTS.get(row.variant, row.variant)),
        ("GPU alerts with known outcome", lambda row: count(row.unit_alerts_labelled)),
        ("precision", lambda row: percent(row.unit_precision)),
        ("GPU incidents", lambda row: count(row.unit_incidents)),
        ("recall", lambda row: percent(row.unit_recall)),
        strong=lambda row: (row.model, row.variant) == (context.profile, SLIDING),
        text_columns=frozenset({0, 1}),
    )


def paired(evaluation: Evaluation, comparison: str, caption: str) -> Table | None:
    """Paired differences of one comparison: precision at K and average precision."""
    compared = evaluation.paired[evaluation.paired["comparison"] == comparison]
    precision = compared[compared["statistic"] == "precision_at_k"].reset_index(drop=True)
    average = compared[compared["statistic"] == "average_precision"].reset_index(drop=True)
    against_static = comparison == "sliding"
    return table_of(
        caption,
        precision.join(average[["difference", "low", "high"]].add_suffix("_average")),
        ("model", lambda row: f"{row.model}, sliding" if against_static else row.model),
        ("against", lambda row: "trained once" if against_static else row.other_model),
        ("precision at K", lambda row: f"{percent(row.value)} / {percent(row.other_value)}"),
        ("difference in points", _difference),
        ("verdict", lambda row: verdict(row.low, row.high)),
        (
            "difference in average precision",
            lambda row: Cell(
                signed(row.difference_average), interval_text(signed(row.low_average), signed(row.high_average))
            ),
        ),
        ("verdict", lambda row: verdict(row.low_average, row.high_average)),
        text_columns=frozenset({0, 1, 4, 6}),
    )


def equal_alerts(evaluation: Evaluation) -> Table | None:
    """Every ensemble compared with the best single learner at the same number of alerts."""
    table = evaluation.equal_alerts
    return table_of(
        "Each ensemble and the learner that is best at the same number of alerts. An ensemble with fewer than K alerts "
        "is more precise for that reason alone. The learner is chosen on these decisions, which favors it.",
        table[(table["variant"] == SLIDING) & table["best"].astype(bool)],
        ("model", lambda row: row.model),
        ("best learner", lambda row: row.other_model),
        ("alerts", lambda row: count(row.alerts)),
        ("precision", lambda row: percent(row.precision)),
        ("of the learner", lambda row: percent(row.other_precision)),
        ("difference in points", _difference),
        ("verdict", lambda row: verdict(row.low, row.high)),
        text_columns=frozenset({0, 1, 6}),
    )


def by_class(evaluation: Evaluation, profile: str) -> Table | None:
    """Recall by failure class, of the profile and of the oracle."""
    table = evaluation.by_class
    best = table[table["model"] == ORACLE].set_index("failure_class")["recall"]
    return table_of(
        f"Node incidents by failure class, {profile} at K = {evaluation.k}. An incident of several classes counts in "
        "each. Alerts have no class, so there is no precision by class.",
        table[(table["model"] == profile) & (table["variant"] == SLIDING)],
        ("failure class", lambda row: row.failure_class),
        ("incidents", lambda row: count(row.incidents)),
        ("caught", lambda row: count(row.caught)),
        ("recall", lambda row: percent(row.recall)),
        ("recall of the oracle", lambda row: percent(best.get(row.failure_class, float("nan")))),
        ("median lead time", lambda row: hours(row.lead_time_median_hours)),
    )


def folds(evaluation: Evaluation, context: ReportContext) -> Table | None:
    """Each refit: its time, its training data, and the metrics of its decisions."""
    folds = context.folds[context.folds["variant"] == SLIDING].drop_duplicates("fold").sort_values("fold")
    measured = evaluation.folds
    measured = measured[(measured["model"] == context.profile) & (measured["variant"] == SLIDING)]
    names = ["fold", "base_rate", "precision_at_k", "caught", "incidents", "average_precision"]
    return table_of(
        f"Refits of the sliding training, and the metrics of {context.profile} on the decisions that each scored.",
        folds.merge(measured[names], on="fold", how="left"),
        ("fold", lambda row: row.fold),
        ("refitted at (UTC)", lambda row: minute(row.refit_at)),
        ("window", lambda row: _span(row.span)),
        ("trained on", lambda row: Cell(day(row.train_start), f"to {day(row.train_end)}")),
        ("positive / negative rows", lambda row: f"{count(row.n_positive)} / {count(row.n_negative)}"),
        ("base rate", lambda row: percent(row.base_rate)),
        ("precision at K", lambda row: percent(row.precision_at_k)),
        (
            "incidents caught",
            lambda row: NONE if pd.isna(row.incidents) else f"{count(row.caught)} of {count(row.incidents)}",
        ),
        ("average precision", lambda row: _three_decimals(row.average_precision)),
    )


def made_of(context: ReportContext) -> Table | None:
    """Contributions to the profile's scores by feature group; None if nothing was explained."""
    if context.attributions is None or context.attributions.empty:
        return None
    return table_of(
        f"Shares of the mean absolute contribution to the scores of {context.profile}, averaged over the folds.",
        by_group(context.attributions),
        ("group", lambda row: row.group),
        ("share", lambda row: percent(row.share)),
        ("largest shares", lambda row: ", ".join(f"{name} {percent(share)}" for name, share in row.channels.items())),
        text_columns=frozenset({0, 2}),
    )


def outcome(alert: AlertEntry) -> str:
    """Describe the outcome of an alert."""
    if alert.label is None:
        return "not known yet"
    if alert.label == 0:
        return "wrong: no incident followed"
    outcome_text = f"right: {alert.failure_class or 'incident'}"
    if alert.incident_start is None:
        return outcome_text
    return f"{outcome_text} {hours((alert.incident_start - alert.decision_time).total_seconds() / 3600)} later"


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    kinds = {"ensemble": 0, "learner": 1, "baseline": 2, "oracle": 3}
    place = {name: i for i, name in enumerate((*ALL_LEARNERS, *BASELINES))}
    key = pd.DataFrame(
        {
            "kind": table["kind"].map(kinds),
            "place": table["model"].map(place).fillna(-1),
            "model": table["model"],
            "variant": table["variant"].map({SLIDING: 0, TRAIN_ONCE: 1}).fillna(2),
        }
    )
    return table.loc[key.sort_values(["kind", "place", "model", "variant"], kind="stable").index].reset_index(drop=True)


def _difference(row: Any) -> Cell:
    return Cell(points(row.difference), interval_text(points(row.low), points(row.high)))


def _measured(name: str, write: Callable[[float], str]) -> Callable[[Any], Cell]:
    def cell(row: Any) -> Cell:
        value, low, high = (write(getattr(row, f"{name}{end}")) for end in ("", "_low", "_high"))
        return Cell(value, interval_text(low, high))

    return cell


def _three_decimals(value: float) -> str:
    return number(value, 3)


def _span(value: object) -> str:
    try:
        return duration(pd.Timedelta(value).to_pytimedelta())
    except ValueError:
        return str(value)
