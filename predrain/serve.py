"""``predrain serve``: the HTTP service that scripts, people and schedulers ask."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.options import ModelNameOption, RegistryOption, check_scores, duration_option, store_uri

if TYPE_CHECKING:
    from serving.champion.sources import FolderBundle
    from serving.server import Tls


class ExtenderFilter(StrEnum):
    """What ``--extender-filter`` takes."""

    LEDGER = "ledger"
    SCORES = "scores"


def serve(
    scores: Annotated[Path, typer.Option(help="Folder that `predrain score --out` writes; need not exist yet.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Bundle that scores rows, or `champion`: that of the registry.  A newer one is taken up "
            "by itself.  Default: rows are not scored."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the champion's bundle between restarts.  Needs --model champion."),
    ] = None,
    registry: RegistryOption = None,
    name: ModelNameOption = "predrain",
    champion_interval: Annotated[str, typer.Option(help="How often the registry is asked who is champion.")] = "30s",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:8080",
    extender_listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address of the Kubernetes scheduler extender, of this machine only."),
    ] = "127.0.0.1:8081",
    extender: Annotated[bool, typer.Option(help="Whether to serve the scheduler extender.")] = True,
    extender_filter: Annotated[
        ExtenderFilter,
        typer.Option(
            help="Nodes that the extender removes: those that the newest decision in --ledger keeps new work off (none "
            "without it), or all of tier high by the scores."
        ),
    ] = ExtenderFilter.LEDGER,
    extender_max_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Largest share of nodes that the extender removes; at least one."),
    ] = 0.1,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File of bearer tokens' hashes and scopes; needed unless the address is a loopback one."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger of `predrain act`, for the fleet page and the extender; need not exist yet."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate and those above it, PEM; renewed when the file changes.  Default: plain HTTP."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="The certificate's private key, PEM, without a password.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name under which requests may come, next to localhost and addresses, where no token is asked for: of "
            "a proxy on this machine.  May be given more than once."
        ),
    ] = None,
    stale_after: Annotated[
        str | None,
        typer.Option(
            help="Scores older than this, such as 13h, fail /readyz and keep no pod away.  Default: they expire."
        ),
    ] = None,
) -> None:
    """Answer over HTTP until SIGTERM: node risks with reasons, predictions, health, metrics, the scheduler extender.

    One line of JSON a request goes to standard error. Newer scores are taken up by themselves.

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
    refuse_open_port(address, has_tokens=tokens is not None, allows="ask")
    extender_address, extender_number = parse_listen(extender_listen, "--extender-listen")
    refuse_open_port(extender_address, has_tokens=False, allows="ask", option="--extender-listen")
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
) -> FolderBundle | None:
    from foundation.errors import InputError
    from serving.champion.sources import ChampionBundle, FolderBundle, held_folder, temporary_folder

    if state is not None and model != "champion":
        raise InputError("only the champion's bundle is kept", "--state without --model champion", "Leave --state out.")
    if model is None:
        return None
    if model != "champion":
        return FolderBundle(Path(model))
    every_s = duration_option(champion_interval, "--champion-interval").total_seconds()
    return ChampionBundle(temporary_folder() if state is None else held_folder(state), registry, name, every_s)


def _tls(certificate: Path | None, key: Path | None) -> Tls | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise typer.BadParameter("--tls-cert and --tls-key belong together")
    from serving.server import Tls

    return Tls(certificate, key)
