"""``predrain collect exporters`` and ``predrain collect gpud``: pages that each node serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import show
from predrain.options import CaFileOption, JsonOption, ParamsOption, SkipVerifyOption, duration_option, read_params


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

    from foundation.http import connect_to
    from telemetry.collect.exporters.collector import ScrapeSettings
    from telemetry.collect.exporters.service import collect_exporters
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels

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


def gpud(
    targets: Annotated[
        list[str],
        typer.Option(
            help="Where gpud runs: host, host:port (15132) or a URL (several with commas between), or a file, as for "
            "`collect exporters`; may be repeated."
        ),
    ],
    dataset: Annotated[Path, typer.Option(help="The dataset; rows are written to the folder DATASET.live next to it.")],
    interval: Annotated[str, typer.Option(help="Time between two looks at a node.")] = "60s",
    timeout: Annotated[str, typer.Option(help="Time for one answer, to its last byte.")] = "10s",
    ca_file: CaFileOption = None,
    insecure_skip_verify: SkipVerifyOption = False,
    once: Annotated[bool, typer.Option("--once", help="Ask each node once, then exit.")] = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask gpud on each node, until SIGTERM: XIDs, boots, and other trouble of GPUs, days back the first time.

    gpud's certificate is signed by itself, and new at each start: --insecure-skip-verify, or put a proxy before it.

    Example: predrain collect gpud --targets gpu-nodes.txt --insecure-skip-verify --dataset fleet
    """
    import functools
    import logging
    from datetime import UTC, datetime

    from foundation.http import connect_to
    from foundation.running import stop_on_signals
    from telemetry.collect.exporters.targets import read_targets
    from telemetry.collect.exporters.watch import Scraper
    from telemetry.collect.gpud import EVENTS, GpudCollector
    from telemetry.collect.outbox import Outbox
    from telemetry.landing.folder import Landing, landing_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    interval_s, timeout_s = (
        duration_option(given, "--interval or --timeout").total_seconds() for given in (interval, timeout)
    )
    if interval_s <= 0 or timeout_s <= 0:
        raise typer.BadParameter("must be positive", param_hint="--interval or --timeout")
    connection = connect_to("https://targets", ca_file=ca_file, insecure_skip_verify=insecure_skip_verify)
    landing = Landing(landing_of(dataset), writer="gpud")
    with stop_on_signals() as stop, Outbox(landing, "gpud") as outbox:
        collector = GpudCollector(
            outbox,
            Scraper(connection, timeout_s=timeout_s),
            functools.partial(read_targets, targets, EVENTS),
            clock=functools.partial(datetime.now, UTC),
            delay=read_params(params).features.delay,
        )
        collector.run(interval_s, stop.wait, once=once)
    names = ("answers", "failed", "events", "unreadable")
    show({"dataset": str(dataset), **{name: collector.counts[name] for name in names}}, as_json=as_json)
