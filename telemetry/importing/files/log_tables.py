"""Exports of log stores as CSV or as a JSON document: kernel logs, converted to JSON lines."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from telemetry.importing.columns import aliases_by_words
from telemetry.importing.files.csv_tables import read_csv, read_header
from telemetry.importing.files.json_documents import json_values
from telemetry.importing.instants import order_shown
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.kernel_log.catalogue import shipped
from telemetry.kernel_log.entries import MAX_LINE, TEXT_FIELDS, TIME_FIELDS, json_entries
from telemetry.packing import open_packed
from telemetry.values.dates import DateOrder

_DATE: Final = re.compile(r"^(\d{1,2})/(\d{1,2})/(\d{4})\b")
_YEAR_FIRST: Final[dict[DateOrder | None, str]] = {"dmy": r"\3-\2-\1", "mdy": r"\3-\1-\2"}
_LOG_COLUMNS: Final = {"_raw", "_msg", "@message", "short_message", "textpayload", "syslogmessage", "logmessage"}
_TICKET_COLUMNS: Final = {"gpu", "serial", "type", "known_at", "resolved_at", "resolution", "replaced_at"}
_PROSE: Final = re.compile(r"\bgpus?\b|replac|repair|\brma\b", re.IGNORECASE)
_DECISIVE_VOTES: Final = 20
_DECISIVE_RECORDS: Final = 10_000
_LOG_FIELD: Final = re.compile(
    r'"(?:MESSAGE|log|line|short_message|textPayload|_raw|@message|@timestamp|logStreamName|ingestionTime|streams?|dmesg)"'
)


def is_log_table(path: Path) -> bool:
    """Whether a CSV is a kernel log: it has timestamps, mostly driver messages, and no ticket columns."""
    names = read_header(path).names
    fields = {name.lower() for name in names}
    if not fields & {*TEXT_FIELDS} or not fields & {*TIME_FIELDS}:
        return False
    return not _is_of_tickets(names) and _are_kernel_messages(table_lines(path, Quarantine()))


def is_log_document(path: Path) -> bool:
    """Whether JSON is a kernel log: it has timestamps, fields of a log store or driver messages, no ticket columns."""
    messages: list[str] = []
    for _, value in islice(json_values(path), _DECISIVE_RECORDS):
        if isinstance(value, dict) and _is_of_tickets(list(value)):
            return False
        text = json.dumps(value) if isinstance(value, dict | list) else ""
        stored = [entry.text for entry in json_entries(text, 0, _DECISIVE_RECORDS) if entry.stored is not None]
        if stored and _LOG_FIELD.search(text):
            return True
        messages += stored
    return _are_kernel_messages(messages)


def _is_of_tickets(names: list[str]) -> bool:
    fields = {name.lower() for name in names}
    aliases = aliases_by_words(names, TableMapping(), "events")
    ticket_columns = {aliases.get(name, name) for name in names if name.lower() not in TEXT_FIELDS} & _TICKET_COLUMNS
    return bool(ticket_columns) and not fields & _LOG_COLUMNS


def _are_kernel_messages(lines: Iterable[str]) -> bool:
    votes = 0
    for line in lines:
        votes += 1 if shipped().start(line) >= 0 else -bool(_PROSE.search(line))
        if abs(votes) == _DECISIVE_VOTES:
            break
    return votes > 0


def is_document(path: Path) -> bool:
    """Whether a file is JSON in which a record spans lines, or one line is the whole answer of a log store."""
    with open_packed(path) as (_, stream):
        line = stream.readline(MAX_LINE).removeprefix(BOM_UTF8).strip()
    if not line.startswith((b"{", b"[{", b"[ {")) and line != b"[":
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def document_lines(path: Path) -> Iterator[str]:
    """Yield the values of a JSON document as JSON lines."""
    for _, value in json_values(path):
        yield json.dumps(value) if isinstance(value, dict | list) else str(getattr(value, "text", value))


def table_lines(path: Path, quarantine: Quarantine) -> Iterator[str]:
    """Yield CSV rows as JSON lines; dates become year-first if a column reveals its day-month order."""
    order: DateOrder | None = None
    for rows in read_csv(path, read_header(path), "events", quarantine):
        times = [name for name in rows.table.column_names if name.lower() in TIME_FIELDS]
        order = order or order_shown(rows.table.column(name) for name in times)
        for record in rows.table.to_pylist():
            for name in times if order in _YEAR_FIRST else ():
                zone = " UTC" if name.upper().endswith("[UTC]") else ""
                record[name] = record[name] and _DATE.sub(_YEAR_FIRST[order], record[name]) + zone
            yield json.dumps({name: _value(cell) for name, cell in record.items()})


def _value(cell: str | None) -> Any:
    """Parse a cell that holds a JSON object, for example stream labels."""
    if cell is not None and cell.startswith("{"):
        with suppress(ValueError, RecursionError):
            return json.loads(cell)
    return cell
