"""The ``predrain`` command: collects the verbs; each verb imports what it needs only when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from predrain import (
    act,
    backtest,
    collect,
    dataset,
    doctor,
    features_verb,
    import_files,
    ledger,
    prepare,
    promote,
    report,
    score,
    serve,
    simulate,
    train,
)
from predrain.version import VERSION

app = typer.Typer(
    name="predrain",
    help="Learn from a GPU fleet's telemetry which GPUs are about to fail, and replay what that would have been worth.",
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Take the options that stand before a verb."""


simulate.add_to(app)
import_files.add_to(app)
collect.add_to(app)
dataset.add_to(app)
prepare.add_to(app)
features_verb.add_to(app)
train.add_to(app)
promote.add_to(app)
score.add_to(app)
serve.add_to(app)
act.add_to(app)
ledger.add_to(app)
backtest.add_to(app)
report.add_to(app)
doctor.add_to(app)


def main() -> None:
    """Run the command; the entry point of the installed script."""
    app()
