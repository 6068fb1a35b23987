"""``predrain collect tickets``: repairs, replacements and RMAs from a table of tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import show
from predrain.options import JsonOption, ParamsOption, read_params


def tickets(
    file: Annotated[
        Path, typer.Argument(help="CSV (or Parquet, JSON) with timestamp, type, and node or gpu; known_at: entry time.")
    ],
    dataset: Annotated[Path, typer.Option(help="The dataset; events are written to DATASET.live next to it.")],
    mapping: Annotated[
        Path | None, typer.Option(help="YAML file with an `events` section, as for `predrain import --mapping`.")
    ] = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the events of a table of tickets; the same table again changes nothing.

    Example: predrain collect tickets rma.csv --dataset fleet --mapping rma.yaml
    """
    from foundation.errors import InputError
    from telemetry.collect.tickets import collect_tickets
    from telemetry.dataset.meta import META_NAME
    from telemetry.dataset.store import Dataset
    from telemetry.importing.inventory import Installations
    from telemetry.importing.mapping import load_mapping
    from telemetry.landing.folder import Landing, landing_of

    stays = None
    if (dataset / META_NAME).exists():
        known = Dataset.open(dataset)
        stays = Installations(known.inventory(), known.meta.unit)
    if not file.is_file():
        raise InputError("the file of tickets does not exist", str(file), "Check the path.")
    result, accounting = collect_tickets(
        file,
        Landing(landing_of(dataset), writer="tickets"),
        mapping=load_mapping(mapping).events,
        delay=read_params(params).features.delay,
        stays=stays,
    )
    show({"dataset": str(dataset), **result}, as_json=as_json, accounting=accounting)
