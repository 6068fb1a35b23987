"""``predrain collect nvml``: the GPUs of this node, read from the driver."""

from __future__ import annotations

from typing import Annotated

import typer

from predrain.collect.sending import (
    DatasetOrSpoolOption,
    PushCaOption,
    PushOption,
    PushTokenOption,
    Sending,
    SpoolLimitOption,
    SpoolOption,
)
from predrain.console import show
from predrain.options import JsonOption, ParamsOption, duration_option, read_params


def nvml(
    dataset: DatasetOrSpoolOption = None,
    spool: SpoolOption = None,
    push: PushOption = None,
    bearer_token_file: PushTokenOption = None,
    ca_file: PushCaOption = None,
    interval: Annotated[str, typer.Option(help="From one reading to the next.")] = "30s",
    node: Annotated[str | None, typer.Option(help="Name of this node. Default: its host name.")] = None,
    spool_limit: SpoolLimitOption = "1GiB",
    once: Annotated[bool, typer.Option("--once", help="Read once, send it, and exit.")] = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read this node's GPUs through NVML, every 30 s until SIGTERM, with the XIDs that the driver reports.

    For nodes without an exporter. One GPU that is lost or blocks the driver does not stop the others.

    Example: predrain collect nvml --spool /var/lib/predrain --push https://predrain.example --bearer-token-file token
    """
    import logging
    import sys

    every = duration_option(interval, "--interval")
    if not every:
        raise typer.BadParameter("an interval of 0 s would never rest: write 1s or more", param_hint="--interval")
    import socket
    from datetime import UTC, datetime

    from foundation.running import stop_on_signals
    from telemetry.collect.nvml.collector import Collector, boot_id, writer_of
    from telemetry.collect.nvml.node_reader import Process
    from telemetry.dataset.channels import resolve_channels

    channels = resolve_channels(read_params(params).channels)
    name = node or socket.gethostname()
    sending = Sending(
        dataset, spool, push, token=bearer_token_file, ca=ca_file, limit=spool_limit, writer=writer_of(name),
        channels=channels,
    )  # fmt: skip
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    collector = Collector(
        sending.landing,
        name,
        channels,
        Process,
        clock=lambda: datetime.now(UTC),
        interval=every,
        boot=boot_id(),
        trim=sending.spool.trim,
    )
    if once:
        collector.once()
        sending.send()
    else:
        with stop_on_signals() as stopped, sending.going_on():
            collector.run(stopped)
    result = {
        "node": name,
        "folder": str(sending.landing.root),
        "samples": collector.accounting.tables["samples"].used,
        "events_written": collector.accounting.tables["events"].used,
        **sending.counts,
    }
    show(result, as_json=as_json, accounting=collector.accounting)
