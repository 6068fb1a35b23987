"""``predrain collect receive``: an endpoint for Prometheus' remote write and for pushes of other collectors."""

from pathlib import Path
from typing import Annotated

import typer

from predrain.collect.options import DatasetOption, SourceMappingOption, log_to_stderr
from predrain.console import show
from predrain.options import ParamsOption, read_params


def receive(
    dataset: DatasetOption,
    listen: Annotated[str, typer.Option(help="Address and port to listen on.")] = "127.0.0.1:9201",
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of bearer tokens, one per line; required unless the address is loopback. On "
            "loopback, the first start creates a token in DATASET.receive-token."
        ),
    ] = None,
    mapping: SourceMappingOption = None,
    params: ParamsOption = None,
) -> None:
    """Receive Prometheus remote write 1.0 (/api/v1/write) and pushed rows (/v1/telemetry) until SIGTERM.

    Both require a token, even on loopback.

    A request is acknowledged after an fsync, which takes up to a second. Configure Prometheus to send large
    requests (`queue_config: {max_samples_per_send: 10000}`) of these series only (`write_relabel_configs`).

    Example: predrain collect receive --listen 0.0.0.0:9201 --tokens tokens.txt --dataset fleet
    """
    from foundation.http import parse_listen
    from foundation.server.connections import refuse_open_port
    from foundation.server.token_file import own_token_file
    from telemetry.collect.remote_write.group_commit import ReceiverSettings
    from telemetry.collect.remote_write.receiver import Receiver, serve
    from telemetry.collect.series.identity import NODE_LABEL_STATE, SeriesCatalogue
    from telemetry.collect.series.mapping import load_source_mapping
    from telemetry.dataset.channels import resolve_channels
    from telemetry.landing.folder import Landing, landing_of

    log_to_stderr()
    host, port = parse_listen(listen)
    refuse_open_port(host, has_tokens=tokens is not None)
    if tokens is None:
        tokens = own_token_file(dataset.with_name(f"{dataset.name}.receive-token"))
        typer.echo(f"writers need the token in {tokens}")
    channels = resolve_channels(read_params(params).channels)
    landing = Landing(landing_of(dataset), writer="receive", channels=channels)
    catalogue = SeriesCatalogue(channels, load_source_mapping(mapping))
    catalogue.remember(landing.state(NODE_LABEL_STATE))
    receiver = Receiver(landing, ReceiverSettings(tokens=tokens), catalogue=catalogue)
    serve(receiver, host, port)
    show({"dataset": str(dataset)}, as_json=False, accounting=receiver.accounting)
