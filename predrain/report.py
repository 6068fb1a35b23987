"""``predrain report``: the one-page report of a backtest, or its summary on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import show
from predrain.options import JsonOption


def report(
    backtest: Annotated[Path | None, typer.Option(help="Folder that `predrain backtest` wrote.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report/index.html; default: the backtest's own.")] = None,
    summary: Annotated[
        Path | None, typer.Option("--show", help="Only print the summary table of this backtest.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a backtest as one self-contained HTML page, or print its summary.

    Example: predrain report --backtest replay
    """
    if (backtest is None) == (summary is None):
        raise typer.BadParameter("give either --backtest or --show")
    from pipeline.stages import write_report_for
    from pipeline.terminal import print_summary, summary_of

    if summary is not None:
        if as_json:
            show(summary_of(summary), as_json=True)
        else:
            print_summary(summary)
        return
    assert backtest is not None
    page = write_report_for(backtest, out)
    show({"report": str(page)}, as_json=as_json)
