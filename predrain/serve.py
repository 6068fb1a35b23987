"""``predrain serve``: the HTTP service for scripts, people and schedulers."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.options import ModelNameOption, RegistryOption, check_scores, duration_option, store_uri

if TYPE_CHECKING:
    from serving.champion import FolderBundle
    from serving.server import Tls


class ExtenderFilter(StrEnum):
    """Values of ``--extender-filter``."""

    LEDGER = "ledger"
    SCORES = "scores"


def serve(
    scores: Annotated[Path, typer.Option(help="Output directory of `predrain score`; may not exist yet.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Bundle for /v1/predict, or `champion` for the champion of the registry; reloaded on "
            "change. Default: no predictions."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder that caches the champion's bundle across restarts. Requires --model champion."),
    ] = None,
    registry: RegistryOption = None,
    name: ModelNameOption = "predrain",
    champion_interval: Annotated[str, typer.Option(help="Polling interval of the registry.")] = "30s",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen address; port 0 selects a free port.")
    ] = "127.0.0.1:8080",
    extender_listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Loopback address of the Kubernetes scheduler extender."),
    ] = "127.0.0.1:8081",
    extender: Annotated[bool, typer.Option(help="Serve the scheduler extender.")] = True,
    extender_filter: Annotated[
        ExtenderFilter,
        typer.Option(
            help="Nodes that the extender removes: those closed to new work by the newest decision in "
            "--ledger (without it: none), or all nodes of tier high in the scores."
        ),
    ] = ExtenderFilter.LEDGER,
    extender_max_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Maximum share of nodes that the extender removes; at least one node."),
    ] = 0.1,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File with hashes and scopes of bearer tokens; required unless the address is loopback."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger of `predrain act`, for pages and extender; may not exist yet."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate chain (PEM); reloaded on change. Default: plain HTTP."),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) without a password.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional host name accepted without tokens, such as the name of a local proxy. Repeatable."
        ),
    ] = None,
    stale_after: Annotated[
        str | None,
        typer.Option(
            help="Age, such as 13h, at which scores fail /readyz and are ignored by the extender. Default: "
            "their expiry."
        ),
    ] = None,
) -> None:
    """Serve node risks with reasons, predictions, health, metrics and the scheduler extender over HTTP.

    Each request is logged to stderr as a line of JSON. New scores are reloaded automatically.

    Example: predrain serve --scores scores --tokens tokens.txt --listen 0.0.0.0:8080
    """
    from dataclasses import replace
    from functools import partial

    from foundation.http import parse_listen
    from foundation.server.connections import refuse_open_port
    from serving.http.limits import ServiceSettings
    from serving.logs import log_to_stderr
    from serving.server import be_responsive
    from serving.server import serve as run
    from serving.service import Service

    check_scores(scores)
    log_to_stderr()
    be_responsive()
    address, number = parse_listen(listen)
    refuse_open_port(address, has_tokens=tokens is not None, allows="read risks")
    extender_address, extender_number = parse_listen(extender_listen, "--extender-listen")
    refuse_open_port(extender_address, has_tokens=False, allows="read risks", option="--extender-listen")
    settings = ServiceSettings(extender_filter=extender_filter.value, extender_max_share=extender_max_share)
    if stale_after is not None:
        settings = replace(settings, stale_after_s=duration_option(stale_after, "--stale-after").total_seconds())
    reader = None
    if ledger is not None:
        from scheduler.ledger.reader import LedgerReader

        reader = partial(LedgerReader, ledger)
    service = Service(
        scores,
        _source(model, store_uri(registry), name, state, champion_interval),
        tokens=tokens,
        settings=settings,
        ledger=reader,
        hosts=allow_host or (),
    )
    chosen = extender_number if extender else None
    tls = _tls(tls_cert, tls_key)
    run(service, address, number, extender_port=chosen, extender_host=extender_address, tls=tls)


def _source(
    model: str | None, registry: str, name: str, state: Path | None, champion_interval: str
) -> "FolderBundle | None":
    from foundation.errors import InputError
    from serving.champion import ChampionBundle, FolderBundle, locked_folder, temporary_folder

    if state is not None and model != "champion":
        raise InputError(
            "only the champion's bundle is cached", "--state without --model champion", "Leave --state out."
        )
    if model is None:
        return None
    if model != "champion":
        return FolderBundle(Path(model))
    every_s = duration_option(champion_interval, "--champion-interval").total_seconds()
    return ChampionBundle(temporary_folder() if state is None else locked_folder(state), registry, name, every_s)


def _tls(certificate: Path | None, key: Path | None) -> "Tls | None":
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise typer.BadParameter("--tls-cert and --tls-key must be given together")
    from serving.server import Tls

    return Tls(certificate, key)
