"""Streaming reader of JSON: lists, documents one after the other, JSON Lines, API responses, in any mixture."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from telemetry.importing.columns import COLUMN_NAMES, words_of
from telemetry.importing.files.csv_tables import BATCH_ROWS, MAX_COLUMNS, NULL_TEXTS, FileRows, distinct
from telemetry.importing.quarantine import Quarantine
from telemetry.packing import open_for_arrow

TOO_DEEP: Final = "nested too deeply"
SECOND_LIST: Final = "a second list of one document"

_MAX_VALUE: Final = 1 << 26
_CHUNK: Final = 1 << 20
_MAX_LITERAL: Final = 16
_MAX_NUMBER: Final = 64
_MAX_OUTER_OBJECTS: Final = 4
_SPACE: Final = re.compile(r"\s*")
_BETWEEN: Final = re.compile(r"[\s,\x1e]*")
_LISTS: Final = frozenset(COLUMN_NAMES["lists"])
_MAX_CELLS: Final = 1 << 22
_MAX_DEPTH: Final = 50
_DEVICE_LISTS: Final = frozenset(COLUMN_NAMES["device_lists"])
_FACTS: Final = ("timestamp", "known_at", "node", "gpu", "job", "started_at", "installed_at")
_FACT_NAMES: Final = frozenset(
    name for table in COLUMN_NAMES["keys"].values() for fact in _FACTS for name in table.get(fact, ())
)


class Malformed(Exception):
    """Raised for text that is not JSON."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(problem)
        self.text, self.problem = text[:1000], problem


def repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; a second value of a key is stored under the key plus a space, as a repeated column."""
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    content = dict.fromkeys(content)
    for key, value in pairs:
        if value is not None and value not in NULL_TEXTS:
            content[key if content[key] in (None, value) else f"{key} "] = value
    return content


_DECODER: Final = json.JSONDecoder(object_pairs_hook=repeated_keys)


def json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a file, numbered from 1: elements of lists and API responses, and other documents.

    Text that is not JSON is yielded as :class:`Malformed`. Raises ``InputError`` if a value exceeds 64 MiB.
    """
    with io.TextIOWrapper(open_for_arrow(path), encoding="utf-8-sig") as stream:
        yield from enumerate(_Documents(stream, path).values(), 1)


class _Documents:
    """The documents of a stream, whose text is read as needed and unread from ``_place`` on."""

    def __init__(self, stream: io.TextIOBase, path: Path) -> None:
        self._stream, self._path = stream, path
        self._text, self._place = "", 0

    def values(self) -> Iterator[Any]:
        """Yield the rows of all documents; see :func:`json_values`."""
        is_first = True
        while character := self._skip(_BETWEEN):
            if character == "[":
                self._place += 1
                for element in self._elements():
                    yield from _rows(element, is_alone=False)
            elif character == "{":
                value = self._value()
                yield from _rows(value, is_alone=is_first and not self._skip(_BETWEEN))
            else:
                yield self._malformed("not a JSON object")
            is_first = False

    def _elements(self) -> Iterator[Any]:
        """Yield the elements of a list from its first one on; after a malformed one, its rest is read as documents."""
        while (character := self._skip(_BETWEEN)) not in ("]", ""):
            value = self._value()
            yield value
            if isinstance(value, Malformed):
                return
            character = self._skip(_SPACE)
            if character not in (",", "]"):
                break
        if character != "]":
            yield Malformed(self._text[self._place :], "a list without an end")
        else:
            self._place += 1

    def _value(self) -> Any:
        """Return the value that begins here; :class:`Malformed` if it is not JSON."""
        if len(self._text) - self._place < _MAX_NUMBER:
            self._read_on()
        while True:
            try:
                value, self._place = _DECODER.raw_decode(self._text, self._place)
                return value
            except RecursionError:
                return self._malformed(TOO_DEEP)
            except json.JSONDecodeError as error:
                is_at_end = len(self._text) - error.pos < _MAX_LITERAL
                is_cut = is_at_end or error.msg.startswith("Unterminated")
            except ValueError:  # a number of thousands of digits
                is_cut = False
            if not is_cut or not self._read_on():
                return self._malformed("not JSON")

    def _malformed(self, problem: str) -> Malformed:
        """Skip a line, and those that continue its object."""
        line = self._line()
        while self._skip(_SPACE) in ('"', "}", "]", ","):
            self._line()
        return Malformed(line, problem)

    def _line(self) -> str:
        while (end := self._text.find("\n", self._place)) < 0:
            if not self._read_on():
                end = len(self._text)
                break
        line, self._place = self._text[self._place : end], end
        return line

    def _skip(self, gap: re.Pattern[str]) -> str:
        """Skip a gap; return the character behind it, or an empty string at the end of the file."""
        while True:
            match = gap.match(self._text, self._place)
            self._place = self._place if match is None else match.end()
            if self._place < len(self._text) or not self._read_on():
                return self._text[self._place : self._place + 1]

    def _read_on(self) -> bool:
        """Read a chunk; return False at the end of the file."""
        self._text, self._place = self._text[self._place :], 0
        if len(self._text) > _MAX_VALUE:
            advice = "Write one JSON object per line: `jq -c '.jobs[]'` of what `sacct --json` prints."
            raise InputError("one value is larger than 64 MiB", str(self._path), advice)
        chunk = self._stream.read(max(_CHUNK, len(self._text)))  # a value is parsed again after each chunk
        self._text += chunk
        return bool(chunk)


def _rows(value: Any, *, is_alone: bool) -> Iterator[Any]:
    """Yield the elements of a response's list, or any other value itself.

    Among several documents, an object with a time, node, GPU or job of its own is a row, whatever it lists.
    """
    lists = sorted(_lists(value), key=bool, reverse=True) if isinstance(value, Mapping) else []
    if not lists or (not is_alone and _has_facts(value)):
        yield value
        return
    yield from lists[0]
    yield from (Malformed(json.dumps(rows), SECOND_LIST) for rows in lists[1:] if rows)


def _has_facts(value: Mapping[str, Any]) -> bool:
    return any(words_of(key) & _FACT_NAMES for key, part in value.items() if not isinstance(part, Mapping | list))


def _lists(value: Mapping[str, Any], depth: int = 0) -> Iterator[list[Any]]:
    """Yield the lists of objects in a response, found by name."""
    for name, part in value.items():
        if name.lower() not in _LISTS:
            continue
        if isinstance(part, Mapping) and depth < _MAX_OUTER_OBJECTS:
            yield from _lists(part, depth + 1)
        elif isinstance(part, list) and (not part or isinstance(part[0], Mapping)):
            yield part


def json_columns(path: Path, table: str) -> list[str]:
    """Return the columns of a file, which is read completely."""
    names: dict[str, None] = {}
    for _, record in _records(path, table):
        if not isinstance(record, Malformed):
            names |= dict.fromkeys(map(str.strip, record))
            _check_columns(names, path)
    return list(names)


def read_json(path: Path, table: str, quarantine: Quarantine) -> Iterator[FileRows]:
    """Read all values as strings, like a CSV; nested objects become columns named ``outer.inner``.

    Raises ``InputError`` if a value exceeds 64 MiB or the objects have more than ``MAX_COLUMNS`` keys.
    """
    numbers: list[int] = []
    records: list[dict[str, str | None]] = []
    names: dict[str, None] = {}
    is_empty = True
    for number, record in _records(path, table):
        if isinstance(record, Malformed):
            quarantine.read_rows(table, path, 1)
            quarantine.set_aside("malformed row", table, path, number, record.text, record.problem)
            continue
        numbers.append(number)
        records.append(record)
        names |= dict.fromkeys(record)
        _check_columns(names, path)
        if len(records) >= BATCH_ROWS or len(records) * len(names) >= _MAX_CELLS:
            yield _batch(numbers, records, names)
            numbers, records, names, is_empty = [], [], {}, False
    if records or is_empty:
        yield _batch(numbers, records, names)


def _batch(numbers: list[int], records: list[dict[str, str | None]], names: Mapping[str, None]) -> FileRows:
    columns = [pa.array([record.get(name) for record in records], pa.string()) for name in names]
    return FileRows(np.array(numbers, np.int64), *distinct(list(names), columns))


def _check_columns(names: Mapping[str, None], path: Path) -> None:
    if len(names) > MAX_COLUMNS:
        raise InputError(f"the objects have more than {MAX_COLUMNS} keys", str(path), "Move variable keys to values.")


def _records(path: Path, table: str) -> Iterator[tuple[int, dict[str, str | None] | Malformed]]:
    for number, value in json_values(path):
        if isinstance(value, Malformed):
            yield number, value
        elif isinstance(value, Mapping):
            if table in ("samples", "inventory"):
                _refuse_lists(value, path)
            try:
                yield number, repeated_keys(_flat(value))
            except RecursionError:
                yield number, Malformed("", TOO_DEEP)
        else:
            yield number, Malformed(json.dumps(value), "not a JSON object")


def _refuse_lists(record: Mapping[str, Any], path: Path) -> None:
    """Raise ``InputError`` if an object lists devices: a node with its GPUs is no row."""
    for key, part in record.items():
        if isinstance(part, Mapping):
            _refuse_lists(part, path)
        elif (
            key.lower() in _DEVICE_LISTS
            and isinstance(part, list)
            and any(isinstance(device, Mapping) for device in part)
        ):
            raise InputError(
                f"the rows have a list of devices, {key!r}",
                str(path),
                f"Write a row for each GPU: `jq -c '. as $node | .{key}[] | $node + . | del(.{key})'`.",
            )


def _flat(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str | None]]:
    if depth > _MAX_DEPTH:
        raise RecursionError
    flat: list[tuple[str, str | None]] = []
    for key, value in record.items():
        name = f"{prefix}{key}".encode("utf-8", "replace").decode().strip()
        if isinstance(value, Mapping):
            flat += _flat(value, f"{name}.", depth + 1)
        else:
            text = value.encode("utf-8", "replace").decode() if isinstance(value, str) else json.dumps(value)
            flat.append((name, None if text in NULL_TEXTS else text))
    return flat
