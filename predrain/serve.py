"""``predrain serve``: the HTTP service that scripts, people and schedulers ask."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from predrain.console import reported
from predrain.options import ModelNameOption, RegistryOption, store_uri

if TYPE_CHECKING:
    from serving.champion.local_copy import StateFolder
    from serving.champion.sources import BundleSource
    from serving.pages.dataset_reader import DatasetReader
    from serving.server import Tls

REMOVED: Final = {
    "--params": "Leave it out: the service reads no parameters; `predrain score` does.",
    "--state": "Leave --state out. Collectors write into a dataset, `predrain collect compact` adds what came to it, "
    "and `predrain score --every` scores it; the service takes no telemetry.",
}
"""Options and uses of them that earlier versions had, and what to do now."""


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
    champion_every: Annotated[str, typer.Option(help="How often the registry is asked who is champion.")] = "30s",
    params: Annotated[list[Path] | None, typer.Option(hidden=True)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    extender_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the Kubernetes scheduler extender, on 127.0.0.1 only.")
    ] = 8081,
    extender: Annotated[bool, typer.Option(help="Whether to serve the scheduler extender.")] = True,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File of bearer tokens' hashes and scopes; needed unless the address is a loopback one."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Dataset whose racks, channels and outcomes the fleet page shows.  Default: none."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger of `predrain act`, for the fleet page; need not exist yet.")
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate and those above it, PEM; renewed when the file changes.  Default: plain HTTP."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="The certificate's private key, PEM, without a password.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, help="Most requests a second of one token (or address); 429 beyond.  Default: any."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name under which requests may come, beside localhost and addresses, where no token is asked for: of "
            "a proxy on this machine.  May be given more than once."
        ),
    ] = None,
    tracing: Annotated[
        bool, typer.Option("--tracing", help="Make OpenTelemetry spans; run under opentelemetry-instrument.")
    ] = False,
    stale_after: Annotated[
        str | None,
        typer.Option(
            help="Scores older than this, such as 13h, fail /readyz and keep no pod away.  Default: they expire."
        ),
    ] = None,
) -> None:
    """Answer over HTTP until SIGTERM: node risks with reasons, predictions, health, metrics, the scheduler extender.

    One line of JSON a request goes to standard error. Newer scores are taken up by themselves.

    Example: predrain serve --scores scores --tokens tokens.txt --host 0.0.0.0
    """
    with reported():
        import logging
        from dataclasses import replace

        from serving.http.access_log import Tracing
        from serving.http.settings import ServiceSettings
        from serving.json_log import JsonLines
        from serving.server import be_responsive, refuse_open_port
        from serving.server import serve as run
        from serving.service import Service
        from telemetry.dataset.place import refuse_storage
        from telemetry.errors import InputError

        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        be_responsive()
        if dataset is not None:
            refuse_storage(dataset)
        refuse_open_port(host, has_tokens=tokens is not None)
        settings = ServiceSettings()
        if stale_after is not None:
            settings = replace(settings, stale_after_s=_seconds(stale_after))
        if rate is not None:
            settings = replace(settings, rate_per_s=rate, rate_burst=max(1, round(2 * rate)))
        if params is not None:
            raise InputError("the option has been removed", "--params", REMOVED["--params"])
        kept = _state_folder(state, model)
        service = Service(
            scores,
            _source(model, store_uri(registry), name, kept, champion_every),
            tokens=tokens,
            settings=settings,
            reader=None if dataset is None else page_reader(scores, dataset, ledger),
            ledger=None if ledger is None else LedgerFile(ledger),
            tracing=Tracing() if tracing else None,
            hosts=allow_host or (),
        )
        run(service, host, port, extender_port=extender_port if extender else None, tls=_tls(tls_cert, tls_key))


def page_reader(scores: Path, dataset: Path, ledger: Path | None) -> DatasetReader:
    """Return what reads a dataset for the pages, in processes of its own.

    Raises ``InputError`` if there is no dataset.
    """
    from predrain.page_reader import command
    from serving.pages.dataset_reader import DatasetReader
    from telemetry.errors import InputError

    if not (dataset / "dataset.json").is_file():
        raise InputError("there is no dataset here", str(dataset), "Give a folder that `predrain import` wrote.")
    watched = [scores / "latest.json", dataset / "dataset.json", *([] if ledger is None else [ledger])]
    return DatasetReader(command(scores, dataset, ledger), watched)


class LedgerFile:
    """The ledger of a controller, opened anew for each question: it may be made, or moved away, meanwhile.

    ``path``: need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def why(self, node: str, most: int) -> list[dict[str, Any]]:
        """Tell what was decided about a node, the newest first.

        Raises ``InputError`` if nothing is recorded about it, or there is no ledger.
        """
        from scheduler.ledger.reader import LedgerReader

        with contextlib.closing(LedgerReader(self._path)) as reader:
            return reader.why(node, most)

    def rounds(self, most: int) -> list[dict[str, Any]]:
        """List the newest decisions, the newest first.

        Raises ``InputError`` if there is no ledger.
        """
        from scheduler.ledger.reader import LedgerReader

        with contextlib.closing(LedgerReader(self._path)) as reader:
            return reader.rounds(most)


def _state_folder(state: Path | None, model: str | None) -> StateFolder | None:
    if state is None:
        return None
    from features.errors import InputError
    from serving.champion.local_copy import StateFolder

    if model != "champion":
        raise InputError("only the champion's bundle is kept", "--state without --model champion", REMOVED["--state"])
    return StateFolder(state)


def _source(
    model: str | None, registry: str, name: str, kept: StateFolder | None, champion_every: str
) -> BundleSource | None:
    from serving.champion.sources import FolderBundle

    if model is None:
        return None
    if model != "champion":
        return FolderBundle(Path(model))
    from serving.champion.follower import ChampionBundle
    from serving.champion.local_copy import temporary_folder

    every_s = _seconds(champion_every, "--champion-every")
    return ChampionBundle(registry, name, temporary_folder() if kept is None else kept.champion, every_s)


def _tls(certificate: Path | None, key: Path | None) -> Tls | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise typer.BadParameter("--tls-cert and --tls-key belong together")
    from serving.server import Tls

    return Tls(certificate, key)


def _seconds(text: str, option: str = "--stale-after") -> float:
    from telemetry.config import parse_duration
    from telemetry.errors import InputError

    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        raise InputError(str(error), option, "Write a duration such as 13h.") from None
