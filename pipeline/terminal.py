"""The summary of a backtest for the terminal: the table that a reader looks at first, and where the page is."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from pipeline.artefacts import load_evaluation
from pipeline.report.summary import sentences


def summary_of(backtest: Path) -> dict[str, Any]:
    """Give the profile's main figures, JSON-able: counts, precision, recall, base rate, lead time, and the files.

    Raises ``InputError`` if ``backtest`` is not the output of a backtest.
    """
    evaluation, context = load_evaluation(backtest)
    row = evaluation.row(context.profile, "sliding")
    page = backtest / "report" / "index.html"
    found: dict[str, Any] = {"profile": context.profile, "k": evaluation.k, "simulated": context.simulated is not None}
    if row is not None:
        for name in ("precision_at_k", "recall", "base_rate", "average_precision", "roc_auc", "lead_time_median_hours"):
            value = float(row[name])
            found[name] = None if math.isnan(value) else round(value, 6)
        found |= {name: int(row[name]) for name in ("alerts", "incidents", "caught")}
    found |= {"metrics": str(backtest / "metrics.json"), "predictions": str(backtest / "predictions.parquet")}
    return found | {"report": str(page) if page.is_file() else None}


def print_summary(backtest: Path) -> None:
    """Print the table of all models, what the report says in words, and the report's path."""
    evaluation, context = load_evaluation(backtest)
    console = Console(file=sys.stdout, width=118, highlight=False)
    fleet = "simulated fleet" if context.simulated is not None else "fleet"
    table = Table(
        title=f"Replay of the {fleet}, at most {evaluation.k} alert{'s' if evaluation.k > 1 else ''} a decision time "
        f"(95 % intervals by {context.unit_word})",
        title_justify="left",
    )
    heads = ("model", "precision@K", "recall", "avg. precision", "ROC-AUC", "median lead", "trained once")
    for head in heads:
        table.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    frame = evaluation.table
    for _, row in frame[frame["variant"] != "train_once"].iterrows():
        once = evaluation.row(row["model"], "train_once")
        name = f"{row['model']} *" if row["model"] == context.profile else str(row["model"])
        table.add_row(
            name,
            _share(row, "precision_at_k"),
            _share(row, "recall"),
            _number(row["average_precision"]),
            _number(row["roc_auc"]),
            "" if pd.isna(row["lead_time_median_hours"]) else f"{row['lead_time_median_hours']:.1f} h",
            "" if once is None else f"{100 * once['precision_at_k']:.1f} %",
        )
    console.print(table)
    console.print("* the profile's choice; last column: precision@K of the same model, trained once and never again")
    console.print(
        "precision@K takes the K highest ranks of every model; recall counts a model's own alerts, which may be fewer"
    )
    for sentence in sentences(evaluation, context):
        console.print(f"\n{sentence}")
    page = (backtest / "report" / "index.html").resolve()
    console.print(
        f"\nReport: {page if page.is_file() else 'not written yet (predrain report --backtest)'}", soft_wrap=True
    )


def _share(row: pd.Series, name: str) -> str:
    value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    if pd.isna(value):
        return "undefined"
    bounds = "" if low is None or pd.isna(low) else f" [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{100 * value:.1f} %{bounds}"


def _number(value: float) -> str:
    return "undefined" if pd.isna(value) else f"{value:.3f}"
