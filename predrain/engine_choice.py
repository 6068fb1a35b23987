"""The options of every verb whose work can be given to a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipeline.dask_engine import DaskEngine


class EngineName(StrEnum):
    """Who does the work."""

    local = "local"
    dask = "dask"


EngineOption = Annotated[
    EngineName, typer.Option("--engine", help="Who does the work: this process, or a Dask cluster (extra `dask`).")
]
"""The ``--engine`` option."""

AddressOption = Annotated[
    str | None,
    typer.Option("--dask-address", help="Scheduler of a running cluster, tcp://HOST:PORT. It sees the same folders."),
]
"""The ``--dask-address`` option."""

WorkersOption = Annotated[
    int | None,
    typer.Option("--dask-workers", min=1, help="Workers to start on this machine instead. Default: one for each core."),
]
"""The ``--dask-workers`` option."""


def check_engine(name: EngineName, address: str | None, workers: int | None) -> None:
    """Refuse options that contradict each other."""
    if name is EngineName.local and (address is not None or workers is not None):
        raise typer.BadParameter("--dask-address and --dask-workers need --engine dask")
    if address is not None and workers is not None:
        raise typer.BadParameter("give either --dask-address or --dask-workers")


@contextmanager
def chosen_engine(name: EngineName, address: str | None, workers: int | None) -> Iterator[DaskEngine | None]:
    """Give the engine that was chosen, and end it afterwards; None: this process.

    Raises ``InputError`` if Dask is not installed, or the cluster cannot be used.
    """
    if name is EngineName.local:
        yield None
        return
    from pipeline.dask_engine import DaskEngine

    with DaskEngine(address, workers) as engine:
        yield engine
