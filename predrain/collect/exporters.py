"""``predrain collect exporters``: live scraping of exporter pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import show
from predrain.options import JsonOption, ParamsOption, duration_option, read_params


def exporters(
    targets: Annotated[
        list[str],
        typer.Option(
            help="What to scrape: host:port or a URL (several with commas between), a file (a target and its node a "
            "line, or Prometheus file_sd JSON/YAML; read again when it changes), or "
            "kubernetes:NAMESPACE/SERVICE[:PORT]; may be repeated."
        ),
    ],
    dataset: Annotated[Path, typer.Option(help="The dataset; rows are written to the folder DATASET.live next to it.")],
    interval: Annotated[str, typer.Option(help="Time between two scrapes of a target.")] = "30s",
    timeout: Annotated[
        str | None,
        typer.Option(help="Time for one scrape, to its last byte. Default: 10s, or the interval if shorter."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Scrapes under way at once.")] = 512,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates (PEM) to trust instead of the system's.")] = None,
    bearer_token_file: Annotated[
        Path | None, typer.Option(help="File with a bearer token; read again when it changes.")
    ] = None,
    basic_auth_file: Annotated[
        Path | None, typer.Option(help="File with user:password; read again when it changes.")
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option(help="YAML file that maps metric names and labels that differ from the exporters'.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Serve the collector's own /metrics and /healthz here, such as 127.0.0.1:9210.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Scrape each target once and exit.")] = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Scrape dcgm-exporter's and AMD's pages until SIGTERM. How the scraping goes is telemetry too.

    Example: predrain collect exporters --targets gpu-nodes.txt --interval 30s --dataset fleet
    """
    given = {"--interval": interval, "--timeout": timeout or "10s"}
    seconds = {name: duration_option(text, name).total_seconds() for name, text in given.items()}
    if timeout is None:
        seconds["--timeout"] = min(seconds.values())
    import asyncio
    import logging

    from telemetry.collect.exporters.collector import ScrapeSettings
    from telemetry.collect.exporters.service import collect_exporters
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.http import connect_to

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    work = collect_exporters(
        dataset,
        targets,
        channels=resolve_channels(read_params(params).channels),
        mapping=load_source_mapping(mapping),
        settings=ScrapeSettings(seconds["--interval"], seconds["--timeout"], concurrency),
        connection=connect_to(
            "http://targets", bearer_token_file=bearer_token_file, basic_auth_file=basic_auth_file, ca_file=ca_file
        ),
        listen=listen,
        once=once,
    )
    show(asyncio.run(work), as_json=as_json)
