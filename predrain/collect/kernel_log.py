"""``predrain collect kernel-log``: XIDs, losses, driver loads and boots from the kernel's own messages."""

from pathlib import Path
from typing import Annotated, Any

import typer

from predrain.collect.options import ListenOption, OnceOption, collecting
from predrain.collect.sending import Sending, SendingOptions
from predrain.console import fail, show
from predrain.options import JsonOption, ParamsOption, grouped, instant_option, read_params


@grouped
def kernel_log(
    source: Annotated[
        list[str],
        typer.Option(help="`journal`, or a log file (syslog, dmesg --time-format iso). Repeatable."),
    ],
    *,
    given: SendingOptions,
    node: Annotated[
        str | None,
        typer.Option(help="Node name. Default: the host name; for files, the hosts in the log."),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Time zone of timestamps without an offset. Default: the zone of this machine.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="First position in a journal (ISO 8601). Default: the last boot.")
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
        raise typer.BadParameter("the journal and files cannot be read by one collector", param_hint="--source")
    paths = [] if source == ["journal"] else [Path(name).absolute() for name in source]
    start = None if since is None else instant_option(since, "--since")
    zone = _zone(timezone)
    delay = read_params(params).features.delay
    named = node or (None if paths else socket.gethostname())
    state = _state_name(named or socket.gethostname(), paths)
    sending = Sending(given, writer=state[:60].rstrip("-."))
    now = functools.partial(datetime.now, UTC)
    catalogue = MessageCatalogue(load_mapping(mapping).kernel_log.messages if mapping else ())
    accounting = Accounting()
    with (
        collecting(lambda: accounting, listen) as stop,
        sending.going_on(),
        Outbox(sending.landing, state, accounting) as outbox,
    ):

        def open_source(position: dict[str, Any]) -> LogSource:
            if paths:
                return LogFiles(paths, position, clock=now, zone=zone, once=once, sleep=stop.wait, catalogue=catalogue)
            return Journal(position, follow=not once, since=start, catalogue=catalogue)

        collect_kernel_log(
            outbox,
            open_source,
            node=named,
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
        "events": outbox.landed["events"],
        "unclear": account.left_out[UNCLEAR],
        "undated": account.left_out[UNDATED],
    }
    written = {"folder": str(sending.landing.root), "events_written": outbox.landed["events"]}
    show(written | counts | sending.counts, as_json=as_json, accounting=accounting)
    if once and counts["undated"] and not counts["events"]:
        fail(
            f"none of {counts['undated']} lines about XIDs has a readable timestamp. Write the log with "
            "`dmesg --time-format iso`, or give it to `predrain import --events`, whose mapping knows boot times."
        )


def _state_name(node: str, paths: list[Path]) -> str:
    """Return the name of a collector's state: of a node, and the journal or the very files."""
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
