"""``predrain collect nvml``: the GPUs of this node, read from the driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import show
from predrain.options import JsonOption, ParamsOption, duration_option, read_params

if TYPE_CHECKING:
    from telemetry.collect.nvml.collector import Collector
    from telemetry.collect.pushing import Pusher

_LAST_PUSH_S = 20.0


def nvml(
    dataset: Annotated[
        Path | None, typer.Option(help="Dataset to write next to; `predrain collect compact` adds the rows to it.")
    ] = None,
    spool: Annotated[
        Path | None, typer.Option(help="Folder to write to instead, where the dataset is on another machine.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(help="Send what was written to `predrain collect receive` at this address (https://…)."),
    ] = None,
    bearer_token_file: Annotated[
        Path | None, typer.Option(help="File with a token of the receiver; read again when it changes.")
    ] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates (PEM) to trust instead of the system's.")] = None,
    interval: Annotated[str, typer.Option(help="From one reading to the next.")] = "30s",
    node: Annotated[str | None, typer.Option(help="Name of this node. Default: its host name.")] = None,
    spool_limit: Annotated[
        str, typer.Option(help="Size beyond which the oldest samples that could not be pushed are dropped.")
    ] = "1GiB",
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

    from telemetry.collect.pushing import parse_bytes

    if (dataset is None) == (spool is None):
        raise typer.BadParameter("give one of --dataset and --spool", param_hint="--dataset")
    if push is None and (bearer_token_file is not None or ca_file is not None):
        unused = "--bearer-token-file" if bearer_token_file else "--ca-file"
        raise typer.BadParameter("is only used with --push", param_hint=unused)
    every = duration_option(interval, "--interval")
    if not every:
        raise typer.BadParameter("an interval of 0 s would never rest: write 1s or more", param_hint="--interval")
    try:
        limit_bytes = parse_bytes(spool_limit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    import socket
    from datetime import UTC, datetime

    from telemetry.collect.nvml.collector import Collector, boot_id, writer_of
    from telemetry.collect.nvml.node_reader import Process
    from telemetry.collect.pushing import HttpTarget, Pusher, Spool
    from telemetry.dataset.channels import resolve_channels
    from telemetry.landing.folder import Landing, landing_of

    channels = resolve_channels(read_params(params).channels)
    name = node or socket.gethostname()
    root = landing_of(dataset) if dataset is not None else spool
    assert root is not None
    landing = Landing(root, writer=writer_of(name), channels=channels)
    # Next to a dataset and without a push, what waits is left to the compaction and never dropped.
    held = Spool(landing, writer_of(name), None if push is None and spool is None else limit_bytes)
    pusher = None if push is None else Pusher(held, HttpTarget(push, token_file=bearer_token_file, ca_file=ca_file))
    collector = Collector(
        landing,
        name,
        channels,
        Process,
        clock=lambda: datetime.now(UTC),
        interval=every,
        boot=boot_id(),
        trim=held.trim,
    )
    _run(collector, pusher, once=once)
    counts: dict[str, Any] = {"node": name, "folder": str(root), **collector.counts}
    if collector.errors:
        counts["read_errors"] = collector.errors
    if pusher is not None:
        counts |= {"files_pushed": pusher.sent, "files_pending": len(held.files())}
    show(counts | {name: times for name, times in held.counts.items() if times}, as_json=as_json)


def _run(collector: Collector, pusher: Pusher | None, *, once: bool) -> None:
    from telemetry.collect.running import stop_on_signals
    from telemetry.errors import InputError

    if once:
        collector.once()
        if pusher is not None and (later := pusher.push()) is not None:
            raise InputError(
                f"what was read could not be pushed: {later}",
                "--push",
                "It waits in the spool; run again when the other side is up.",
            )
        return
    if pusher is not None:
        pusher.start()
    with stop_on_signals() as stopped:
        try:
            collector.run(stopped)
        finally:
            if pusher is not None:
                pusher.stop(_LAST_PUSH_S)
