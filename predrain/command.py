"""The ``predrain`` command: collects the verbs; each verb imports what it needs only when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from predrain.act.command import act
from predrain.backtest import backtest
from predrain.collect.command import SOURCES
from predrain.doctor import doctor
from predrain.features import features
from predrain.import_files import import_files
from predrain.ledger import ledger_app
from predrain.prepare import prepare
from predrain.promote import promote
from predrain.report import report
from predrain.score import score
from predrain.serve import serve
from predrain.simulate import ExplainingScenarios, simulate
from predrain.train import train
from predrain.version import VERSION

app = typer.Typer(
    name="predrain",
    help="Learn from a GPU fleet's telemetry which GPUs are about to fail, and backtest what that would have saved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"predrain {VERSION}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    """Read the options before a verb."""


app.command("simulate", cls=ExplainingScenarios)(simulate)
app.command("import")(import_files)
app.add_typer(SOURCES)
app.command("prepare")(prepare)
app.command("features")(features)
app.command("train")(train)
app.command("promote")(promote)
app.command("score")(score)
app.command("serve")(serve)
app.command("act")(act)
app.add_typer(ledger_app)
app.command("backtest")(backtest)
app.command("report")(report)
app.command("doctor")(doctor)


def main() -> None:
    """Run the command; the entry point of the installed script."""
    app()
