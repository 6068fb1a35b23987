"""Splits log lines into entries: one message each, with the metadata of the program that stored it.

In plain text, each line is an entry. Structured logs use many field names: journald (JSON, export, verbose), Docker,
fluentd, Loki, Elastic, cloud loggers, ``dmesg --json``. Pretty-printed JSON and journal exports span several lines.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from telemetry.kernel_log.stamps import RelativeStamps, Stamp, parse_header, parse_time

MAX_LINE: Final = 1 << 20
"""Longer lines are truncated (characters); kernel messages have about 1000."""

_MAX_RECORD_LINES: Final = 1 << 16
_MAX_DEPTH: Final = 20
# Field names in lower case, in order of precedence.
TEXT_FIELDS: Final = ("message", "msg", "log", "line", "short_message", "textpayload", "_raw", "@message", "_msg",
                      "body", "body.stringvalue", "event.original", "log.original", "event", "entry", "syslogmessage",
                      "logmessage", "full_log", "@m")  # fmt: skip
_PROGRAM_FIELDS: Final = ("syslog_identifier", "appname", "processname", "program", "process.name",
                          "log.syslog.appname")  # fmt: skip
TIME_FIELDS: Final = ("_source_realtime_timestamp", "__realtime_timestamp", "@timestamp", "timestamp", "time", "ts",
                      "isodate", "date", "_time", "datetime", "timereported", "eventtime", "receivetimestamp",
                      "timeunixnano", "timegenerated", "timegenerated [utc]", "_timestamp", "@t")  # fmt: skip
_HOST_FIELDS: Final = ("_hostname", "hostname", "host.name", "host.hostname", "host", "k8s.node.name", "node",
                       "node_name", "pod_node_name", "node.name", "nodename", "computer",
                       "compute.googleapis.com/resource_name", "instance_name", "logsource", "_sourcehost",
                      "logstreamname", "@logstream", "agent.name")  # fmt: skip
_HOST_PLACES: Final = (
    "kubernetes",
    "resource.labels",
    "labels",
    "stream",
    "agent",
    "jsonpayload",
    "fields",
    "tags",
    "data",
)
# Nested objects whose fields are a fallback for the record's own.
_TEXT_PLACES: Final = ("jsonpayload", "fields", "data")
_NODE: Final = re.compile(r"(?=[\w.-]*\d)[A-Za-z][\w.-]*")
_BINARY_FIELDS: Final = ("MESSAGE",)
_JOURNAL_FIELD = re.compile(r"\s*(?P<name>_{0,2}[A-Z][A-Z0-9_]*)=(?P<value>.*)", re.DOTALL)
_VERBOSE_HEADER = re.compile(r"\S.{10,60} \[s=[0-9a-f]+;")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_REPEATED = re.compile(r"message repeated \d+ times: \[ ?")
_NEXT_MESSAGE: Final = re.compile(r"\n|\d{2,5} (?=<\d{1,3}>1 \d{4}-)")
# Log stores merge lines, and syslog over TCP separates messages by their length alone (RFC 6587).
_JSON_LINE = re.compile(r'"|[}\]],?\Z|[\[{](?:\s*[\[{])?\Z|},?\s*\{\Z|-?\d[\d.eE+-]*,?\Z|(?:true|false|null),?\Z')
_LOWERING_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=lambda pairs: {name.lower(): value for name, value in pairs}
)
_OPENINGS: Final = ("{", "[", "[{", "[ {")
_BEGINNINGS: Final = ("{", "[", " ", "\t", "_", "\x1e", "d")
_HOST_LINE: Final = re.compile(
    r'Common labels: .*?"(?:host|hostname|node|nodename|node_name|instance)":\s*"([\w.-]+)|'
    r"([\w.-]+) \| [A-Z]+ \| rc=\d+ >>\Z"
)
# Grafana and Ansible name the host once, above its lines.


class Entry(NamedTuple):
    """One stored message.

    ``number``: line number, from 1.
    ``text``: the message with its kernel or syslog prefix.
    ``stored``: timestamp added by the log store; plain text has it in ``text``.
    ``line``: text to quote in reports.
    """

    number: int
    text: str
    stored: Stamp | None = None
    host: str | None = None
    boot_id: str | None = None
    line: str = ""


class EntryReader:
    """Splits a log into entries.

    ``is_wanted``: filter for lines of text; rejected lines are only counted.
    ``number``: number of the last line read. ``extra``: number of entries beyond the first on a line.
    """

    def __init__(self, is_wanted: Callable[[str], object] = bool) -> None:
        self.number = self.extra = 0
        self._is_wanted = is_wanted
        self._kind = ""
        self._record: list[str] = []
        self._depth = 0
        self._host: str | None = None
        self._relative = RelativeStamps()

    def read(self, line: str) -> Iterable[Entry]:
        """Return the entries completed by a line."""
        self.number += 1
        return self._read(line.rstrip("\r\n"))

    def close(self) -> Iterator[Entry]:
        """Yield the entry completed by the end of the log."""
        return self._finish()

    def read_all(self, lines: Iterable[str]) -> Iterator[Entry]:
        """Yield the entries of a whole log."""
        for line in lines:
            yield from self.read(line)
        yield from self.close()

    def _read(self, line: str) -> Iterable[Entry]:
        if self._kind:
            return self._read_on(line)
        is_stamped = line[:1] == "[" and line[1:2] != "{" and line[-1] not in " \t[{"  # rather than opening JSON
        if (line[:1] in _BEGINNINGS and not is_stamped) or "[s=" in line:
            return self._begin(line)
        is_wanted = bool(self._is_wanted(line))
        stamp = self._relative.read(line, is_about_a_gpu=is_wanted)
        if is_wanted:
            return self._parts(plain_entry(self.number, line)._replace(stored=stamp, host=self._host))
        if (line[-2:] == ">>" or line[:7] == "Common ") and (match := _HOST_LINE.match(line)):
            self._host = match[1] or match[2]
        return ()

    def _read_on(self, line: str) -> Iterator[Entry]:
        if self._kind == "json":
            yield from self._read_json(line)
        elif self._belongs(line):
            self._record.append(line)
            if len(self._record) > _MAX_RECORD_LINES:
                self._kind = ""
        else:
            yield from self._finish()
            yield from self._read(line)

    def _belongs(self, line: str) -> bool:
        if self._kind == "verbose":
            return line[:1].isspace()
        # A bare field name is followed by a binary value on the next line.
        return bool(_JOURNAL_FIELD.match(line)) or line in _BINARY_FIELDS or self._record[-1] in _BINARY_FIELDS

    def _begin(self, line: str) -> Iterator[Entry]:
        bare = line.strip().removeprefix("\x1e").removeprefix("data: ")
        if bare in _OPENINGS:
            self._kind, self._record, self._depth = "json", [], 0
            yield from self._read_json(line)
        elif bare.startswith(("{", "[{")):
            entries = json_entries(bare, self.number)
            self.extra += max(len(entries) - 1, 0)
            yield from entries or self._parts(plain_entry(self.number, line))
        elif line.startswith("__CURSOR=") or _VERBOSE_HEADER.match(line):
            self._kind, self._record = "export" if line[0] == "_" else "verbose", [line]
        elif self._is_wanted(line):
            yield from self._parts(plain_entry(self.number, line)._replace(host=self._host))

    def _parts(self, entry: Entry) -> Iterable[Entry]:
        parts = _parts(entry)
        self.extra += len(parts) - 1
        return parts

    def _read_json(self, line: str) -> Iterator[Entry]:
        """Read a line of pretty-printed JSON; elements of an outermost list are documents."""
        bare = line.strip()
        if bare and not _JSON_LINE.match(bare):
            # A brace in a text log, or truncated JSON.
            yield from self._finish()
            yield from self._read(line)
            return
        is_end = bare[:1] == "}" and self._depth == 1
        if self._depth or bare[-1:] == "{":
            self._record.append("}" if is_end else bare if self._depth else "{")
            self._depth += bare.endswith(("{", "[")) - bare.startswith(("}", "]"))
        is_long = len(self._record) > (_MAX_RECORD_LINES if bare in _OPENINGS else 2 * _MAX_RECORD_LINES)
        if is_end or is_long:
            text = "\n".join(self._record)
            entries = json_entries(text, self.number) or list(_innermost(self._record, self.number))
            self.extra += max(len(entries) - 1, 0)
            yield from entries
            is_begun = bare[-1] == "{"
            self._record, self._depth = ["{"] * is_begun, int(is_begun)

    def _finish(self) -> Iterator[Entry]:
        kind, self._kind = self._kind, ""
        if kind == "json":
            yield from _innermost(self._record, self.number)
        if kind not in ("export", "verbose"):
            return
        fields: dict[str, str] = {}
        name = ""
        for line in self._record:
            match = _JOURNAL_FIELD.match(line)
            if match is not None:
                name = match["name"].lower()
                fields[name] = match["value"]
            elif line in _BINARY_FIELDS:
                name = line.lower()
            elif name:
                # The export format prefixes a multi-line value with its length in eight bytes.
                fields[name] = f"{fields[name]}\n{line.strip()}" if name in fields else line[8:]
        if kind == "verbose":
            fields.setdefault("time", self._record[0].split(" [s=")[0])
        entry = _entry(fields, self.number)
        if entry is not None:
            yield entry


def plain_entry(number: int, line: str) -> Entry:
    """Return a line of text as an entry."""
    return Entry(number, _plain(line), line=line)


def json_entries(text: str, number: int, limit: int | None = None) -> list[Entry]:
    """Return the messages of JSON documents in sequence; empty if they are not a log, or other text follows.

    ``limit``: maximum number of records to read.
    """
    documents, place = list[Any](), 0
    try:
        while place < len(text):
            document, end = _LOWERING_DECODER.raw_decode(text, place)
            documents.append(document)
            place = len(text) - len(text[end:].lstrip())
    except (ValueError, RecursionError):
        return []
    records = (record for document in documents for record in _records(document))
    entries = [entry for record in islice(records, limit) if (entry := _entry(record, number)) is not None]
    return [part for entry in entries for part in _parts(entry)]


def _parts(entry: Entry) -> Sequence[Entry]:
    """Return the entry, or its messages if its text is several lines or contains a JSON record."""
    text = entry.text
    if text[-1:] != "}" and "\n" not in text and ">1 " not in text:
        return (entry,)
    if text.endswith("}") and '{"' in text:
        start = text.index('{"')
        header = parse_header(text[:start])
        stored = header.stamps[-1] if header.stamps else entry.stored
        if inner := json_entries(text[start:], entry.number):
            return [
                part._replace(stored=part.stored or stored, host=part.host or header.host or entry.host)
                for part in inner
            ]
    if "\n" in text or text.count(">1 ") > 1:
        first, *others = filter(None, _NEXT_MESSAGE.split(text))
        # A line without a header has that of the line before, as has an indented one.
        return [entry._replace(text=first), *(entry._replace(text=f" {line}") for line in others)]
    return (entry,)


def _innermost(lines: Sequence[str], number: int) -> Iterator[Entry]:
    """Yield the messages of the innermost objects of a document that is truncated or too long."""
    record, depth = list[str](), 0
    for bare in lines:
        if bare in _OPENINGS:
            record, depth = [], int(bare[-1] == "{")
        elif bare[:1] == "}" and depth == 1:
            yield from json_entries("{" + "\n".join(record) + "}", number)
            record, depth = [], int(bare[-1] == "{")
        elif depth:
            depth += bare.endswith(("{", "[")) - bare.startswith(("}", "]"))
            record.append(bare)


def _records(document: Any, parent: Mapping[str, Any] | None = None, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the log records of a document at any nesting depth up to ``_MAX_DEPTH``.

    ``parent``: fields of the enclosing objects, for example stream labels; the record's own fields take precedence.
    """
    if depth > _MAX_DEPTH or not isinstance(document, dict | list):
        return
    if isinstance(document, list):
        pairs = _pairs(document)
        for part in [pairs] if pairs else document:
            yield from _records(part, parent, depth + 1)
        return
    for place in ("resource.attributes", "attributes", "body.kvlistvalue.values"):
        if pairs := _pairs(_lookup(document, place)):
            document = {**document, **pairs}
    rows = next((document[name] for name in ("rows", "datarows", "values") if name in document), None)
    columns = next((document[name] for name in ("columns", "schema", "fields") if document.get(name)), None)
    names = [_name(column) for column in columns] if isinstance(columns, list) else []
    if names and isinstance(rows, list):  # a table from Azure, InfluxDB, SQL or Splunk
        records = [dict(zip(names, row, strict=False)) for row in rows if isinstance(row, list)]
        document = {"rows": records}
    record = {**parent, **document} if parent else document
    if _field(document, TEXT_FIELDS, _TEXT_PLACES) is not None:
        yield record
        return
    outer = {name: value for name, value in record.items() if name not in TIME_FIELDS}
    for name, value in document.items():
        if name == "values" and isinstance(value, list):  # Loki: pairs of time and line
            pairs_of_loki = (pair for pair in value if isinstance(pair, list) and len(pair) >= 2)
            yield from ({**outer, "time": pair[0], "line": pair[1]} for pair in pairs_of_loki)
        else:
            yield from _records(value, outer, depth + 1)


def _name(column: Any) -> str:
    return str(column.get("name") if isinstance(column, dict) else column).lower()


def _pairs(value: Any) -> dict[str, Any]:
    """Convert a list of name-value pairs (OpenTelemetry, CloudWatch Insights) to a dict; empty for other lists."""
    if not isinstance(value, list) or not all(isinstance(pair, dict) and "value" in pair for pair in value):
        return {}
    named = [(pair.get("key", pair.get("field")), pair["value"]) for pair in value]
    return {
        str(name).lower(): next(iter(value.values()), None) if isinstance(value, dict) else value
        for name, value in named
        if name is not None
    }


def _lookup(record: Mapping[str, Any], name: str) -> Any:
    if name in record:
        return record[name]
    first, _, subpath = name.partition(".")
    inner = record.get(first) if subpath else None
    return _lookup(inner, subpath) if isinstance(inner, dict) else None


def _field(record: Mapping[str, Any], names: tuple[str, ...], places: tuple[str, ...] = ()) -> Any:
    """Return the first of the fields ``names`` in a record, then in its nested objects ``places``."""
    for place in ("", *places):
        holder = _lookup(record, place) if place else record
        for name in names if isinstance(holder, Mapping) else ():
            if name not in holder and "." not in name:
                continue
            value = _lookup(holder, name)
            if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):  # Elastic `fields`
                value = value[0]
            if value is not None and not isinstance(value, dict):
                return value
    return None


def _entry(record: Mapping[str, Any], number: int) -> Entry | None:
    text = _field(record, TEXT_FIELDS, _TEXT_PLACES)
    if isinstance(text, list):  # journald exports non-UTF-8 text as an array of bytes
        try:
            text = bytes(text).decode("utf-8", errors="replace")
        except (TypeError, ValueError):
            return None
    if not isinstance(text, str):
        return None
    text = _plain(text[:MAX_LINE].rstrip("\r\n"))
    host, boot_id = _field(record, _HOST_FIELDS, _HOST_PLACES), _field(record, ("_boot_id",))
    if host is None and _NODE.fullmatch(str(record.get("source"))):  # the host in Graylog, the program elsewhere
        host = record["source"]
    program = _field(record, _PROGRAM_FIELDS)
    stored = _stored(record)
    return Entry(
        number,
        f"{program}[0]: {text}" if isinstance(program, str) and "kernel" not in program else text,
        stored,
        host.encode("utf-8", "replace").decode() if isinstance(host, str) and host else None,
        boot_id if isinstance(boot_id, str) else None,
        text,
    )


def _stored(record: Mapping[str, Any]) -> Stamp | None:
    value = _field(record, TIME_FIELDS, _TEXT_PLACES)
    if "pri" in record and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return parse_time(f"[{value:.6f}]")  # `dmesg --json`: seconds since boot
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value) if len(value) < 20 else None
    return parse_time(value)


def _plain(text: str) -> str:
    """Remove terminal colors, syslog escapes and ``message repeated`` from a message."""
    if not text.isascii():
        # JSON, or a file read with surrogateescape, may contain lone surrogates, which cannot be stored.
        text = text.encode("utf-8", "replace").decode()
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if "#01" in text:
        text = text.replace("#011", "\t").replace("#012", "\n").replace("#015", "")
    if "message repeated" in text and (match := _REPEATED.search(text)):
        text = text[: match.start()] + text[match.end() :].rstrip().removesuffix("]")
    return text
