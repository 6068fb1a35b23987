"""``predrain collect nvml``: the GPUs of this node, read from the driver."""

from typing import Annotated

import typer

from predrain.collect.options import IntervalOption, ListenOption, OnceOption, collecting, seconds
from predrain.collect.sending import Sending, SendingOptions
from predrain.console import show
from predrain.options import JsonOption, ParamsOption, grouped, read_params


@grouped
def nvml(
    *,
    given: SendingOptions,
    interval: IntervalOption = "30s",
    node: Annotated[str | None, typer.Option(help="Node name. Default: the host name.")] = None,
    listen: ListenOption = None,
    once: OnceOption = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read the GPUs of this node through NVML until SIGTERM, with the XIDs reported by the driver.

    For nodes without an exporter. A lost or hanging GPU does not block the others.

    Example: predrain collect nvml --spool /var/lib/predrain --push https://predrain.example --bearer-token-file token
    """
    import socket
    from datetime import UTC, datetime, timedelta

    from telemetry.collect.nvml.collector import NvmlCollector, boot_id, writer_of
    from telemetry.collect.nvml.node_reader import Process
    from telemetry.dataset.channels import resolve_channels

    every = timedelta(seconds=seconds(interval, "--interval"))
    channels = resolve_channels(read_params(params).channels)
    name = node or socket.gethostname()
    sending = Sending(given, writer=writer_of(name), channels=channels)
    collector = NvmlCollector(
        sending.landing,
        name,
        channels,
        Process,
        clock=lambda: datetime.now(UTC),
        interval=every,
        boot=boot_id(),
        trim=sending.spool.trim,
    )
    with collecting(lambda: collector.accounting, listen) as stop:
        if once:
            collector.once()
            sending.send()
        else:
            with sending.going_on():
                collector.run(stop)
    result = {
        "node": name,
        "folder": str(sending.landing.root),
        "samples": collector.accounting.tables["samples"].used,
        "events_written": collector.accounting.tables["events"].used,
        **sending.counts,
    }
    show(result, as_json=as_json, accounting=collector.accounting)
