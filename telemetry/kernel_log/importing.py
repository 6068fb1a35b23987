"""Import of a saved kernel log."""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Final

import pandas as pd

from foundation.errors import InputError
from foundation.files import check_regular
from foundation.running import gc_paused
from telemetry.accounting import Accounting
from telemetry.dataset.event import Event
from telemetry.kernel_log.catalogue import MessageCatalogue, MessageRule, shipped
from telemetry.kernel_log.entries import MAX_LINE, EntryReader
from telemetry.kernel_log.reader import KernelLogReader, log_lines
from telemetry.kernel_log.stamps import LogContext
from telemetry.packing import open_packed, read_errors

_MAX_WITHOUT_END: Final = 1 << 26
# More characters without a newline: a decompression bomb or a binary file.

_NO_LOGS: Final = {
    b"PK\x03\x04": ("a workbook or a zip archive", "Save the sheet as CSV, or unpack the archive."),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", "Save the sheet as CSV."),
    b"LPKSHHRH": ("a binary journal", "Export it: `journalctl --file FILE -k -o short-iso`."),
    b"\x1f\x8b": ("packed by gzip", "Give its name the ending .gz."),
}
"""Magic numbers of files that are not text logs, each with a description and the remedy."""


@dataclass(frozen=True, slots=True)
class KernelLog:
    """Events of a kernel log, and the lines that were skipped.

    ``events``: one column per field of :class:`telemetry.dataset.event.Event`; ``gpu`` is set only if the log gives
    the UUID.
    ``unparsed``: line number (from 1), line and reason for each event that could not be parsed or dated.
    ``accounting``: covers all lines, in table :data:`telemetry.kernel_log.reader.TABLE`.
    """

    events: pd.DataFrame
    unparsed: list[tuple[int, str, str]]
    accounting: Accounting


def parse_kernel_log(
    lines: Iterable[str],
    *,
    node: str | None = None,
    boot_time: datetime | None = None,
    reference_time: datetime | None = None,
    timezone: tzinfo | None = None,
    messages: Sequence[MessageRule] = (),
    source: str = "kernel_log",
) -> KernelLog:
    """Extract the events from a kernel log.

    ``node``: node of lines without a hostname.
    ``boot_time``: aware; origin of ``[ 12.345]`` timestamps.
    ``reference_time``: aware, after the last line, for example the time of download; used to infer the year of
    timestamps without one.
    ``timezone``: zone of timestamps without an offset.
    ``messages``: rules that take precedence over the catalogue.
    Raises ``InputError`` if an event has no node, or no timestamp for lack of ``boot_time``, ``reference_time`` or
    ``timezone``; the message names the missing parameter.
    """
    catalogue = MessageCatalogue(messages) if messages else shipped()
    splitter = EntryReader(catalogue.mentions)
    reader = KernelLogReader(catalogue, node=node, asks=True, source=source)
    with gc_paused():
        log = log_lines(splitter.read_all(lines), catalogue, LogContext(timezone, reference_time, boot_time))
        events = list(reader.read(log))
        reader.count(splitter.number + splitter.extra, len(log))
        frame = pd.DataFrame(events, columns=list(Event._fields))
    frame["timestamp"] = pd.to_datetime(frame["timestamp"], utc=True).astype("datetime64[ms, UTC]")
    return KernelLog(frame, reader.unused, reader.accounting)


def read_lines(path: Path) -> Iterator[str]:
    """Yield a text log's lines, truncated to :data:`MAX_LINE`; raises ``InputError`` for another file."""
    check_regular(path)
    # A flood of one message packs to a thousandth and less.
    with read_errors(path), open_packed(path, max_ratio=math.inf) as (_, stream):
        beginning = stream.peek(8)[:8]
        for magic, (content, advice) in _NO_LOGS.items():
            if beginning.startswith(magic):
                raise InputError(f"this is {content}, not a text log", str(path), advice)
        # PowerShell redirects output as UTF-16.
        encoding = "utf-16" if beginning[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
        with io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline="\n") as text:
            length = 0
            while piece := text.readline(MAX_LINE):
                if length == 0:
                    yield piece
                length = 0 if piece.endswith("\n") else length + len(piece)
                if length > _MAX_WITHOUT_END:
                    raise InputError(
                        f"a line of the kernel log is longer than {_MAX_WITHOUT_END >> 20} MiB",
                        str(path),
                        "Check that it is a text log with line ends.",
                    )


def last_written(path: Path) -> datetime:
    """Return the modification time of a log, an upper bound of its timestamps (UTC)."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)
