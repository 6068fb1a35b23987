"""Where a collector on a node writes to, and what it sends from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from telemetry.collect.pushing import Pusher, Spool
    from telemetry.dataset.channels import Channel
    from telemetry.landing.folder import Landing


@dataclass(frozen=True, slots=True)
class SendingOptions:
    """Where a collector writes, and where it sends that."""

    dataset: Annotated[Path | None, typer.Option(help="Dataset; rows are staged in DATASET.live.")] = None
    spool: Annotated[Path | None, typer.Option(help="Local folder for rows, if the dataset is on another machine.")] = (
        None
    )
    push: Annotated[
        str | None,
        typer.Option(help="URL of a `predrain collect receive` to push rows to (https://…)."),
    ] = None
    bearer_token_file: Annotated[
        Path | None, typer.Option(help="File with a token of the receiver; reloaded on change.")
    ] = None
    ca_file: Annotated[Path | None, typer.Option(help="CA certificates (PEM), instead of those of the system.")] = None
    spool_limit: Annotated[
        str, typer.Option(help="Maximum size of unpushed rows; then the oldest samples are dropped.")
    ] = "1GiB"


_LAST_PUSH_S = 20.0


class Sending:
    """A landing folder, and what is pushed from it.

    ``writer``: whose files are pushed.
    Raises ``typer.BadParameter`` for options that do not go together.
    """

    def __init__(self, given: SendingOptions, *, writer: str, channels: Mapping[str, Channel] | None = None) -> None:
        from telemetry.collect.pushing import HttpTarget, Pusher, Spool, parse_bytes
        from telemetry.landing.folder import Landing, landing_of

        dataset, spool, push, token, ca = given.dataset, given.spool, given.push, given.bearer_token_file, given.ca_file
        if (dataset is None) == (spool is None):
            raise typer.BadParameter("give one of --dataset and --spool", param_hint="--dataset")
        if push is None and (token is not None or ca is not None):
            raise typer.BadParameter(
                "is only used with --push", param_hint="--bearer-token-file" if token else "--ca-file"
            )
        try:
            limit_bytes = parse_bytes(given.spool_limit)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        root = landing_of(dataset) if dataset is not None else spool
        assert root is not None
        self.landing: Landing = Landing(root, writer=writer, channels=channels)
        # Next to a dataset and without a push, what waits is left to the compaction and never dropped.
        self.spool: Spool = Spool(self.landing, writer, None if push is None and spool is None else limit_bytes)
        self._pusher: Pusher | None = None
        if push is not None:
            self._pusher = Pusher(self.spool, HttpTarget(push, token_file=token, ca_file=ca))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Push for the length of a block, and what landed last after it."""
        if self._pusher is None:
            yield
            return
        self._pusher.start()
        try:
            yield
        finally:
            self._pusher.stop(_LAST_PUSH_S)

    def send(self) -> None:
        """Push the waiting data; ``InputError`` if that fails."""
        from foundation.errors import InputError

        if self._pusher is not None and (later := self._pusher.push()) is not None:
            raise InputError(
                f"cannot push rows: {later}",
                "--push",
                "The rows wait in the spool. Run again when the receiver is reachable.",
            )

    @property
    def counts(self) -> dict[str, Any]:
        """What was pushed, waits and was dropped."""
        pushed = {} if self._pusher is None else {"files_pushed": self._pusher.sent}
        waiting = {} if self._pusher is None else {"files_pending": len(self.spool.files())}
        return pushed | waiting | {name: times for name, times in self.spool.counts.items() if times}
