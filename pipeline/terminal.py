"""The summary of a backtest for the terminal: the table that a reader looks at first, and where the page is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.artefacts import figures, load_evaluation
from pipeline.report import tables
from pipeline.report.summary import sentences

_SHOWN = (0, 1, 3, 4, 6, 7, 10)  # columns of the report's table of models


def summary_of(backtest: Path) -> dict[str, Any]:
    """Give the profile's main figures, JSON-able: counts, precision, recall, base rate, lead time, and the files.

    Raises ``InputError`` if ``backtest`` is not the output of a backtest.
    """
    evaluation, context = load_evaluation(backtest)
    page = backtest / "report" / "index.html"
    summary: dict[str, Any] = {
        "profile": context.profile, "k": evaluation.k, "simulated": context.simulated is not None
    } | figures(evaluation, context.profile)  # fmt: skip
    summary |= {"metrics": str(backtest / "metrics.json"), "predictions": str(backtest / "predictions.parquet")}
    return summary | {"report": str(page) if page.is_file() else None}


def print_summary(backtest: Path) -> None:
    """Print the table of all models, the report's summary, and the report's path."""
    evaluation, context = load_evaluation(backtest)
    models = tables.models(evaluation, context)
    console = Console(file=sys.stdout, width=118, highlight=False)
    fleet = "simulated fleet" if context.simulated is not None else "fleet"
    shown = Table(
        title=f"Replay of the {fleet}, at most {evaluation.k} alert{'s' if evaluation.k > 1 else ''} per "
        f"{context.budget_period} (95 % intervals by node)",
        title_justify="left",
    )
    for at in _SHOWN:
        shown.add_column(models.header[at], justify="left" if at in models.text_columns else "right")
    for number, row in enumerate(models.rows):
        mark = " *" if number in models.strong else ""
        cells = [f"{row[at].text} {row[at].note}".strip() for at in _SHOWN[1:]]
        shown.add_row(f"{row[0].text}{mark}", *cells)
    console.print(shown)
    console.print("* the profile's choice")
    console.print(
        "an episode is a drain: an alert opens it, later ones within the drain horizon belong to it; precision at K "
        "takes the K highest ranks of every model; incidents are caught by a model's own alerts, which may be fewer"
    )
    for sentence in sentences(evaluation, context):
        console.print(f"\n{sentence}")
    page = (backtest / "report" / "index.html").resolve()
    console.print(
        f"\nReport: {page if page.is_file() else 'not written yet (predrain report --backtest)'}", soft_wrap=True
    )
