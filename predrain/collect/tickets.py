"""``predrain collect tickets``: repairs, replacements and RMAs from a table of tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from predrain.collect.options import DatasetOption, every_file
from predrain.console import show
from predrain.options import JsonOption, ParamsOption, read_params


def tickets(
    file: Annotated[
        Path,
        typer.Argument(help="CSV, Parquet or JSON with timestamp, type, and node or gpu; or a folder of such files."),
    ],
    dataset: DatasetOption,
    mapping: Annotated[
        Path | None, typer.Option(help="YAML file with an `events` section, as for `predrain import --mapping`.")
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of a table's rows that may be unusable before it is refused."),
    ] = 0.05,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the events of a table of tickets; the same table again changes nothing.

    Example: predrain collect tickets rma.csv --dataset fleet --mapping rma.yaml
    """
    from telemetry.accounting import Accounting
    from telemetry.collect.tickets import collect_tickets
    from telemetry.dataset.meta import META_NAME
    from telemetry.dataset.store import Dataset
    from telemetry.importing.inventory import Installations
    from telemetry.importing.mapping import load_mapping
    from telemetry.importing.reading import expand_sources
    from telemetry.landing.folder import Landing, landing_of

    stays, rules = None, load_mapping(mapping)
    if (dataset / META_NAME).exists():
        known = Dataset.open(dataset)
        stays = Installations(known.inventory(), known.meta.unit, aliases=rules.nodes.aliases)
    landing, accounting = Landing(landing_of(dataset), writer="tickets"), Accounting()
    shown: dict[str, Any] = {}
    files = expand_sources((file,), "tickets")

    def read(path: Path) -> None:
        result, account = collect_tickets(
            path,
            landing,
            mapping=rules.events,
            delay=read_params(params).features.delay,
            stays=stays,
            max_loss=max_loss,
        )
        accounting.add(account)
        shown.update({str(path): result} if len(files) > 1 else result)

    with every_file(files, read, accounting):
        show({"dataset": str(dataset), **shown}, as_json=as_json, accounting=accounting)
