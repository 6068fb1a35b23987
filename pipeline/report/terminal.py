"""Summary of a backtest for the terminal: the main table, and the path of the report."""

import json
from pathlib import Path
from typing import Any

from pipeline.artefacts import VALUE, figures, load_evaluation
from pipeline.assessment.text import verdict_lines
from pipeline.report import tables
from pipeline.report.report import sentences


def summary_of(backtest: Path) -> dict[str, Any]:
    """Return the profile's main metrics, JSON-able: counts, precision, recall, base rate, lead time, and the files.

    Raises ``InputError`` if ``backtest`` is not the output of a backtest.
    """
    evaluation, context = load_evaluation(backtest)
    page = backtest / "report" / "index.html"
    summary: dict[str, Any] = {
        "profile": context.profile, "k": evaluation.k, "simulated": context.simulated is not None
    } | figures(evaluation, context.profile)  # fmt: skip
    summary |= {"metrics": str(backtest / "metrics.json"), "predictions": str(backtest / "predictions.parquet")}
    return summary | {"report": str(page) if page.is_file() else None}


def summary_lines(backtest: Path) -> list[str]:
    """Format what was replayed, the comparison of the paper's mechanisms, the value of actions, and the report's path.

    A backtest of the profile alone shows the table of all models instead of the mechanisms.
    """
    evaluation, context = load_evaluation(backtest)
    table = tables.mechanisms(evaluation, context) or tables.models(evaluation, context)
    lines = [sentences(evaluation, context)[0], "", table.caption, *table.lines(), f"* the profile, {context.profile}"]
    if (backtest / VALUE).is_file():
        lines += ["", *verdict_lines(json.loads((backtest / VALUE).read_text(encoding="utf-8")))]
    page = (backtest / "report" / "index.html").resolve()
    return [*lines, "", f"Report: {page if page.is_file() else 'not written yet (predrain report --backtest)'}"]
