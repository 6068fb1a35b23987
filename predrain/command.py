"""The ``predrain`` command and its verbs; each verb imports its dependencies only when it runs."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foundation.version import VERSION
from predrain.act.command import act
from predrain.assess import assess
from predrain.collect.compact import compact
from predrain.collect.files import diagnostics, openmetrics, tickets
from predrain.collect.metrics import collect_prometheus, exporters, gpud, receive
from predrain.collect.node import kernel_log, nvml
from predrain.collect.schedulers import collect_kubernetes, slurm
from predrain.console import reported
from predrain.demo.command import demo
from predrain.doctor import doctor
from predrain.import_files import import_files
from predrain.learn.init import init
from predrain.learn.prior import prior_app
from predrain.learn.promotion import promote, retrain
from predrain.learn.report import compare, report
from predrain.learn.stages import backtest, features, prepare, train
from predrain.ledger import ledger_app
from predrain.score import score
from predrain.serve import serve
from predrain.simulate import ExplainingScenarios, simulate


def _repeated(command: Any, words: list[str]) -> list[str]:
    """Repeat a repeatable option before each of its words, so that it accepts a shell glob (``part-*.parquet``)."""
    if any(param.param_type_name == "argument" for param in command.params):
        return words
    lists = {name for param in command.params if getattr(param, "multiple", False) for name in param.opts}
    repeated: list[str] = []
    option = None
    for word in words:
        if word.startswith("-"):
            option = word if word in lists else None
        elif option is not None and repeated[-1] != option:
            repeated.append(option)
        repeated.append(word)
    return repeated


class Verbs(TyperGroup):
    """Accepts shell globs after repeatable options, and reports errors without a traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the verb."""
        verb, command, arguments = super().resolve_command(ctx, args)
        return verb, command, _repeated(command, arguments)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; on a user error, print one line and exit with code 1."""
        with reported():
            return super().invoke(ctx)


SOURCES = typer.Typer(
    name="collect",
    help="Collect telemetry, events and jobs from their sources into a dataset.\n\n"
    "Example: predrain collect exporters --targets gpu-nodes.txt --dataset fleet",
    no_args_is_help=True,
)
SOURCES.command("compact")(compact)
SOURCES.command("prometheus")(collect_prometheus)
SOURCES.command("openmetrics")(openmetrics)
SOURCES.command("exporters")(exporters)
SOURCES.command("receive")(receive)
SOURCES.command("nvml")(nvml)
SOURCES.command("kernel-log")(kernel_log)
SOURCES.command("slurm")(slurm)
SOURCES.command("kubernetes")(collect_kubernetes)
SOURCES.command("gpud")(gpud)
SOURCES.command("tickets")(tickets)
SOURCES.command("diagnostics")(diagnostics)


app = typer.Typer(
    name="predrain",
    cls=Verbs,
    help="Predict GPU failures from fleet telemetry, and drain nodes before they fail.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"predrain {VERSION}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    """Parse the global options."""


app.command("assess")(assess)
app.command("demo")(demo)
app.command("init")(init)
app.command("simulate", cls=ExplainingScenarios)(simulate)
app.command("import")(import_files)
app.add_typer(SOURCES)
app.command("prepare")(prepare)
app.command("features")(features)
app.command("train")(train)
app.command("promote")(promote)
app.command("retrain")(retrain)
app.command("score")(score)
app.command("serve")(serve)
app.command("act")(act)
app.add_typer(ledger_app)
app.add_typer(prior_app)
app.command("backtest")(backtest)
app.command("compare")(compare)
app.command("report")(report)
app.command("doctor")(doctor)


def main() -> None:
    """Run the command; the entry point of the installed script."""
    app()
