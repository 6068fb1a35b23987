"""Options that several sources share."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.options import duration_option

if TYPE_CHECKING:
    from telemetry.accounting import Accounting

DatasetOption = Annotated[
    Path,
    typer.Option("--dataset", help="Dataset; rows are staged in DATASET.live."),
]
IntervalOption = Annotated[str, typer.Option("--interval", help="Interval between rounds.")]
ListenOption = Annotated[
    str | None,
    typer.Option("--listen", help="Address of the collector's /metrics and /healthz, such as 127.0.0.1:9210."),
]
OnceOption = Annotated[bool, typer.Option("--once", help="Run one round, then exit.")]
RulesOption = Annotated[
    Path | None,
    typer.Option("--rules", help="Rules (YAML) for taints, conditions and events; they precede the defaults."),
]
SourceMappingOption = Annotated[
    Path | None,
    typer.Option("--mapping", help="Mapping file (YAML) for renamed metrics and labels."),
]


def seconds(written: str, option: str) -> float:
    """Read a duration of at least a second; raises ``typer.BadParameter``."""
    return duration_option(written, option, least="1s").total_seconds()


def log_to_stderr() -> None:
    """Log what a running collector reports."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@contextmanager
def collecting(accounting: "Callable[[], Accounting]", listen: str | None) -> Iterator[threading.Event]:
    """Yield an event that a signal sets, and serve the account of a collector meanwhile."""
    from foundation.running import stop_on_signals
    from telemetry.collect.exposure import exposing

    log_to_stderr()
    with stop_on_signals() as stop, exposing(listen, accounting):
        yield stop
