"""``predrain report`` and ``predrain compare``: a backtest as one page or a table, and two of them side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import print_json, show
from predrain.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table


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


def compare(
    one: Annotated[Path, typer.Argument(help="Folder that `predrain backtest` wrote.")],
    two: Annotated[Path, typer.Argument(help="Another, of the same fleet and question.")],
    as_json: JsonOption = False,
) -> None:
    """Compare the profiles of two backtests at equal alerts, and name the parameters that differ.

    Example: predrain compare replay replay-short-window
    """
    from pipeline.compare import compare_backtests

    result = compare_backtests(one, two)
    if as_json:
        print_json(result)
        return
    from rich.console import Console

    console = Console(width=118, highlight=False)
    console.print(_table(result, one, two))
    for name, (before, after) in result["params"].items():
        console.print(f"{name}: {before} against {after}")
    if not result["params"]:
        console.print("no parameter differs")


def _table(result: dict[str, Any], one: Path, two: Path) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{result['decisions']} decisions, {result['incidents']} incidents, {result['k']} alerts a decision "
        "(95 % intervals by unit of the difference; * excludes zero)",
        title_justify="left",
    )
    for name in ("", str(one), str(two), "difference", ""):
        table.add_column(name, justify="right" if name else "left")
    for name, row in result["statistics"].items():
        low, high = row["low"], row["high"]
        known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
        interval = f"[{low:+.4f}, {high:+.4f}]" if known else ""
        cells = [f"{row[key]:.4f}" for key in ("one", "two")]
        shown = f"{interval} *" if known and (low > 0 or high < 0) else interval
        table.add_row(name.replace("_", " "), *cells, f"{row['difference']:+.4f}", shown)
    return table
