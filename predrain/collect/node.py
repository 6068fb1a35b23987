"""``predrain collect nvml`` and ``kernel-log``: collectors that run on a node, and their push to a receiver."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import fail, show
from predrain.options import (
    IntervalOption,
    JsonOption,
    ListenOption,
    OnceOption,
    ParamsOption,
    collecting,
    grouped,
    instant_option,
    read_params,
    seconds,
)

if TYPE_CHECKING:
    from telemetry.dataset.channels import Channel


@dataclass(frozen=True, slots=True)
class SendingOptions:
    """Where a collector writes rows, and where it pushes them."""

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
        str, typer.Option(help="Maximum size of unpushed rows; above it, the oldest samples are dropped.")
    ] = "1GiB"


_LAST_PUSH_S = 20.0


class Sending:
    """A staging folder, and the push of its rows.

    ``writer``: only its files are pushed.
    Raises ``typer.BadParameter`` if options contradict each other.
    """

    def __init__(
        self, options: SendingOptions, *, writer: str, channels: "Mapping[str, Channel] | None" = None
    ) -> None:
        from telemetry.collect.pushing import HttpTarget, Pusher, Spool, parse_bytes
        from telemetry.staging.folder import StagingFolder, staging_of

        dataset, spool, push, token, ca = (
            options.dataset,
            options.spool,
            options.push,
            options.bearer_token_file,
            options.ca_file,
        )
        if (dataset is None) == (spool is None):
            raise typer.BadParameter("give one of --dataset and --spool", param_hint="--dataset")
        if push is None and (token is not None or ca is not None):
            raise typer.BadParameter(
                "is only used with --push", param_hint="--bearer-token-file" if token else "--ca-file"
            )
        try:
            limit_bytes = parse_bytes(options.spool_limit)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        root = staging_of(dataset) if dataset is not None else spool
        assert root is not None
        self.staging: StagingFolder = StagingFolder(root, writer=writer, channels=channels)
        # Next to a dataset and without a push, rows wait for compaction and are never dropped.
        self.spool: Spool = Spool(self.staging, writer, None if push is None and spool is None else limit_bytes)
        self._pusher: Pusher | None = None
        if push is not None:
            self._pusher = Pusher(self.spool, HttpTarget(push, token_file=token, ca_file=ca))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Push during a block, and once more after it for the last rows."""
        if self._pusher is None:
            yield
            return
        self._pusher.start()
        try:
            yield
        finally:
            self._pusher.stop(_LAST_PUSH_S)

    def send(self) -> None:
        """Push the waiting rows; raises ``InputError`` if that fails."""
        from foundation.errors import InputError

        if self._pusher is not None and (failure := self._pusher.push()) is not None:
            raise InputError(
                f"cannot push rows: {failure}",
                "--push",
                "The rows wait in the spool. Run again when the receiver is reachable.",
            )

    @property
    def counts(self) -> dict[str, Any]:
        """Counts of pushed, pending and dropped data."""
        pushed = {} if self._pusher is None else {"files_pushed": self._pusher.sent}
        waiting = {} if self._pusher is None else {"files_pending": len(self.spool.files())}
        return pushed | waiting | {name: times for name, times in self.spool.counts.items() if times}


@grouped
def nvml(
    *,
    sending_options: SendingOptions,
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

    period = timedelta(seconds=seconds(interval, "--interval"))
    channels = resolve_channels(read_params(params).channels)
    name = node or socket.gethostname()
    sending = Sending(sending_options, writer=writer_of(name), channels=channels)
    collector = NvmlCollector(
        sending.staging,
        name,
        channels,
        Process,
        clock=lambda: datetime.now(UTC),
        interval=period,
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
        "folder": str(sending.staging.root),
        "samples": collector.accounting.tables["samples"].used,
        "events_written": collector.accounting.tables["events"].used,
        **sending.counts,
    }
    show(result, as_json=as_json, accounting=collector.accounting)


@grouped
def kernel_log(
    source: Annotated[
        list[str],
        typer.Option(help="`journal`, or a log file (syslog, dmesg --time-format iso). Repeatable."),
    ],
    *,
    sending_options: SendingOptions,
    node: Annotated[
        str | None,
        typer.Option(help="Node name. Default: the host name; for files, the hosts in the log."),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Time zone of timestamps without an offset. Default: the zone of this machine.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Time from which to read a journal (ISO 8601). Default: the last boot.")
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(help="Mapping file (YAML) with rules for further messages (`kernel_log: {messages: …}`)."),
    ] = None,
    listen: ListenOption = None,
    once: OnceOption = False,
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow the kernel log until SIGTERM, across rotations and restarts, without gaps or duplicates.

    Example: predrain collect kernel-log --source journal --dataset fleet

    On a node without the dataset: --spool /var/lib/predrain --push https://HOST --bearer-token-file token
    """
    import functools
    import socket
    from datetime import UTC, datetime

    from telemetry.accounting import Accounting
    from telemetry.collect.kernel_log import collect_kernel_log
    from telemetry.collect.outbox import Outbox
    from telemetry.importing.mapping import load_mapping
    from telemetry.kernel_log.catalogue import MessageCatalogue
    from telemetry.kernel_log.journal import Journal
    from telemetry.kernel_log.log_files import LogFiles
    from telemetry.kernel_log.reader import TABLE, UNCLEAR, UNDATED, LogSource

    if "journal" in source and len(source) > 1:
        raise typer.BadParameter("one collector cannot read both the journal and files", param_hint="--source")
    paths = [] if source == ["journal"] else [Path(name).absolute() for name in source]
    start = None if since is None else instant_option(since, "--since")
    zone = _zone(timezone)
    delay = read_params(params).features.delay
    node_name = node or (None if paths else socket.gethostname())
    state = _state_name(node_name or socket.gethostname(), paths)
    sending = Sending(sending_options, writer=state[:60].rstrip("-."))
    now = functools.partial(datetime.now, UTC)
    catalogue = MessageCatalogue(load_mapping(mapping).kernel_log.messages if mapping else ())
    accounting = Accounting()
    with (
        collecting(lambda: accounting, listen) as stop,
        sending.going_on(),
        Outbox(sending.staging, state, accounting) as outbox,
    ):

        def open_source(position: dict[str, Any]) -> LogSource:
            if paths:
                return LogFiles(paths, position, clock=now, zone=zone, once=once, sleep=stop.wait, catalogue=catalogue)
            return Journal(position, follow=not once, since=start, catalogue=catalogue)

        collect_kernel_log(
            outbox,
            open_source,
            node=node_name,
            fixed=node is not None and not paths,
            clock=now,
            stop=stop.wait,
            once=once,
            delay=delay,
            catalogue=catalogue,
        )
    if once:
        sending.send()
    account = accounting.tables[TABLE]
    counts = {
        "lines": account.read,
        "events": outbox.staged["events"],
        "unclear": account.left_out[UNCLEAR],
        "undated": account.left_out[UNDATED],
    }
    written = {"folder": str(sending.staging.root), "events_written": outbox.staged["events"]}
    show(written | counts | sending.counts, as_json=as_json, accounting=accounting)
    if once and counts["undated"] and not counts["events"]:
        fail(
            f"none of {counts['undated']} lines about XIDs has a readable timestamp. Write the log with "
            "`dmesg --time-format iso`, or give it to `predrain import --events`, whose mapping knows boot times."
        )


def _state_name(node: str, paths: list[Path]) -> str:
    """Return the name of a collector's state, unique to the node and the journal or set of files."""
    import hashlib
    import re

    plain = re.sub(r"[^A-Za-z0-9.-]", "-", node)[:80]
    if not paths:
        return f"kernel-log-{plain}-journal"
    files = "\0".join(sorted(map(str, paths)))
    return f"kernel-log-{plain}-file-{hashlib.sha256(files.encode()).hexdigest()[:12]}"


def _zone(name: str | None) -> Any:
    from zoneinfo import ZoneInfo

    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise typer.BadParameter(
            f"{name!r} is not a time zone: write a name such as UTC or Europe/Berlin", param_hint="--timezone"
        ) from None
