"""``predrain serve``: the HTTP service that scripts, people and schedulers ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from predrain.console import reported


def serve(
    scores: Annotated[Path, typer.Option(help="Folder that `predrain score --out` writes; need not exist yet.")],
    model: Annotated[
        Path | None, typer.Option(help="Bundle that scores feature rows.  Default: rows are not scored.")
    ] = None,
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

        from serving.http.access_log import JsonLines
        from serving.http.server import refuse_open_port
        from serving.http.server import serve as run
        from serving.http.service import Service
        from serving.http.settings import ServiceSettings

        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        refuse_open_port(host, has_tokens=tokens is not None)
        settings = ServiceSettings()
        if stale_after is not None:
            settings = replace(settings, stale_after_s=_seconds(stale_after))
        service = Service(scores, model, tokens=tokens, settings=settings)
        run(service, host, port, extender_port=extender_port if extender else None)


def _seconds(text: str) -> float:
    from telemetry.config import parse_duration
    from telemetry.errors import InputError

    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        raise InputError(str(error), "--stale-after", "Write a duration such as 13h.") from None


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("serve")(serve)
