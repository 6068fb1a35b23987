"""``predrain report`` and ``predrain compare``: a backtest as a page or a table, and a comparison of two."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foundation.text import quantity
from predrain.console import Stages, print_json, show
from predrain.options import JsonOption, ParamsOption, read_params, read_place

if TYPE_CHECKING:
    from pipeline.report.tables import Table


def report(
    backtest: Annotated[Path | None, typer.Option(help="Output directory of `predrain backtest`.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for report/index.html. Default: the backtest.")] = None,
    summary: Annotated[
        Path | None, typer.Option("--show", help="Only print the summary table of this backtest.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Dataset, with --matrix: adds the GPU-hours saved and spent by actions."),
    ] = None,
    matrix: Annotated[Path | None, typer.Option(help="Feature matrix of the backtest.")] = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a backtest as a self-contained HTML page, or print its summary.

    Example: predrain report --backtest replay
    """
    if (backtest is None) == (summary is None):
        raise typer.BadParameter("give either --backtest or --show")
    if (dataset is None) != (matrix is None) or (dataset is not None and backtest is None):
        raise typer.BadParameter("--dataset, --matrix and --backtest must be given together")
    from pipeline.report.terminal import summary_lines, summary_of
    from pipeline.stages import write_report_for

    if summary is not None:
        if as_json:
            show(summary_of(summary), as_json=True)
        else:
            sys.stdout.write("\n".join(summary_lines(summary)) + "\n")
        return
    assert backtest is not None
    if dataset is not None and matrix is not None:
        from features.matrix.matrix import FeatureMatrix
        from pipeline.assessment.workflow import write_value

        with Stages() as stages:
            matrix_data = FeatureMatrix.open(matrix)
            write_value(backtest, read_place(dataset, backtest), matrix_data, read_params(params), stages.begin)
    page = write_report_for(backtest, out)
    show({"report": str(page)}, as_json=as_json)


def compare(
    one: Annotated[Path, typer.Argument(help="Output directory of `predrain backtest`.")],
    two: Annotated[Path, typer.Argument(help="Another backtest of the same fleet and horizon.")],
    as_json: JsonOption = False,
) -> None:
    """Compare the profiles of two backtests at equal numbers of alerts, and list differing parameters.

    Example: predrain compare replay replay-short-window
    """
    from pipeline.compare import compare_backtests

    result = compare_backtests(one, two)
    if as_json:
        print_json(result)
        return
    table = _table(result, one, two)
    lines = [table.caption, *table.lines()]
    lines += [f"{name}: {before} against {after}" for name, (before, after) in result["params"].items()]
    sys.stdout.write("\n".join(lines if result["params"] else [*lines, "no parameter differs"]) + "\n")


def _table(result: dict[str, Any], one: Path, two: Path) -> "Table":
    from pipeline.report.tables import Cell, Table

    rows, clear = [], set()
    for place, (name, row) in enumerate(result["statistics"].items()):
        low, high = row["low"], row["high"]
        known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
        if known and (low > 0 or high < 0):
            clear.add(place)
        texts = (name.replace("_", " "), f"{row['one']:.4f}", f"{row['two']:.4f}", f"{row['difference']:+.4f}")
        rows.append((*map(Cell, texts), Cell(f"[{low:+.4f}, {high:+.4f}]" if known else "")))
    caption = (
        f"{quantity(result['decisions'], 'decision')}, {quantity(result['incidents'], 'incident')}, "
        f"{quantity(result['k'], 'alert')} per decision "
        "(95 % intervals of the difference, by node; * excludes zero)"
    )
    return Table(caption, ("", str(one), str(two), "difference", ""), tuple(rows), frozenset(clear))
