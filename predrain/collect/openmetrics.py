"""``predrain collect openmetrics``: dumps of a Prometheus database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.collect.options import DatasetOption, SourceMappingOption, every_file
from predrain.console import progress, show
from predrain.options import JsonOption, ParamsOption, read_params


def openmetrics(
    files: Annotated[
        list[Path],
        typer.Argument(help="Dumps of lines `name{labels} value timestamp`, plain, .gz or .zst.", metavar="FILE"),
    ],
    dataset: DatasetOption,
    mapping: SourceMappingOption = None,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read what `promtool tsdb dump`, `dump-openmetrics` or a backfill tool wrote. A file counts once.

    Run the same command again after an interruption: nothing counts twice. The file is sorted on disk, which takes some
    20 bytes a sample next to the dataset while it runs.

    Example: predrain collect openmetrics march.om.gz --dataset fleet
    """
    from telemetry.accounting import Accounting
    from telemetry.collect.openmetrics import land_dump
    from telemetry.collect.series.identity import NODE_LABEL_STATE, SeriesCatalogue
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.landing.folder import Landing, landing_of

    loaded, accounting, results = read_params(params), Accounting(), []
    channels = resolve_channels(loaded.channels)
    catalogue = SeriesCatalogue(channels, load_source_mapping(mapping))
    landing = Landing(landing_of(dataset), writer="openmetrics", channels=channels)
    catalogue.remember(landing.state(NODE_LABEL_STATE))

    def read(path: Path) -> None:
        with progress(path.name) as advance:
            result = land_dump(
                path, landing, catalogue, accounting=accounting, delay=loaded.features.delay, progress=advance
            )
        results.append({"file": str(path), "landed before": result["files landed"] == 0, **result})

    with every_file(files, read, accounting):
        show({"files": results}, as_json=as_json, accounting=accounting)
