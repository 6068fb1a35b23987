"""Streaming JSON reader: a list of objects, a single object, or JSON Lines."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from telemetry.importing.columns import COLUMN_NAMES
from telemetry.importing.files.csv_tables import BATCH_ROWS, MAX_COLUMNS, NULL_TEXTS, FileRows, distinct
from telemetry.importing.quarantine import Quarantine
from telemetry.packing import open_for_arrow

_MAX_VALUE: Final = 1 << 24
_CHUNK: Final = 1 << 20
_MAX_CELLS: Final = 1 << 22
_MAX_DEPTH: Final = 50
_KEY: Final = re.compile(r'[\s,}]*"(?P<name>[^"\\]*)"\s*:\s*')
_OF_GPUS: Final = ("samples", "inventory")
_TOO_DEEP: Final = "nested too deeply"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; a second value of a key is stored under the key plus a space, as a repeated column."""
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    content = dict.fromkeys(content)
    for key, value in pairs:
        if value is not None and value not in NULL_TEXTS:
            content[key if content[key] in (None, value) else f"{key} "] = value
    return content


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object)


class _Malformed(Exception):
    def __init__(self, text: str, problem: str) -> None:
        super().__init__(problem)
        self.text, self.problem = text, problem


def json_columns(path: Path, table: str) -> list[str]:
    """Return the columns of a file, which is read completely."""
    names: dict[str, None] = {}
    for _, record in _records(path, table):
        if not isinstance(record, _Malformed):
            names |= dict.fromkeys(map(str.strip, record))
            _check_columns(names, path)
    return list(names)


def read_json(path: Path, table: str, quarantine: Quarantine) -> Iterator[FileRows]:
    """Read all values as strings, like a CSV; nested objects become columns named ``outer.inner``.

    Raises ``InputError`` if a value exceeds 16 MiB or the objects have more than ``MAX_COLUMNS`` keys.
    """
    numbers: list[int] = []
    records: list[dict[str, str | None]] = []
    names: dict[str, None] = {}
    is_empty = True
    for number, record in _records(path, table):
        if isinstance(record, _Malformed):
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


def _records(path: Path, table: str) -> Iterator[tuple[int, dict[str, str | None] | _Malformed]]:
    for number, value in json_values(path):
        if isinstance(value, _Malformed):
            yield number, value
        elif isinstance(value, Mapping):
            try:
                for row in _rows_in(value) if table in _OF_GPUS else [value]:
                    yield number, _object(_flat(row))
            except RecursionError:
                yield number, _Malformed("", _TOO_DEEP)
        else:
            yield number, _Malformed(json.dumps(value)[:1000], "not a JSON object")


def _rows_in(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a row for each GPU that an object lists, with the object's other keys; otherwise the object."""
    for name in COLUMN_NAMES["gpus"]:
        gpus = value.get(name)
        if isinstance(gpus, list) and gpus and all(isinstance(gpu, Mapping) for gpu in gpus):
            return [{key: outer for key, outer in value.items() if key != name} | gpu for gpu in gpus]
    return [value]


def json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield row numbers and parsed values."""
    with io.TextIOWrapper(open_for_arrow(path), encoding="utf-8-sig") as stream:
        head = stream.read(_CHUNK)
        start = head.lstrip()
        line, _, rest = start.partition("\n")
        is_object = start.startswith("{")
        is_whole = is_object and not isinstance(_parse(line), _Malformed)
        is_alone = is_object and not (is_whole and (rest.strip() or len(head) == _CHUNK))
        place = _list_in(start) if is_alone else None
        if start.startswith("[") or place is not None:
            yield from _elements(start[place or 1 :], stream, path)
        elif is_object and not is_whole:
            text = start + stream.read(_MAX_VALUE - len(start))
            read = partial(_elements, is_list=False) if _starts_whole(text) else _lines
            yield from read(text, stream, path)
        else:
            yield from _lines(head, stream, path)


def _starts_whole(text: str) -> bool:
    try:
        _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _list_in(text: str) -> int | None:
    """Return the offset of the first row in an API response (``{"meta": {…}, "jobs": [{…``), found by list name."""
    place = 1
    while (key := _KEY.match(text, place)) is not None:
        place = key.end()
        is_list = key["name"].lower() in COLUMN_NAMES["lists"]
        if is_list and text.startswith("[", place):
            return place + 1
        if is_list and text.startswith("{", place):
            place += 1
            continue
        try:
            _, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
    return None


def _lines(head: str, stream: io.TextIOBase, path: Path) -> Iterator[tuple[int, Any]]:
    number, rest = 0, head
    while True:
        chunk = stream.read(_CHUNK)
        lines = rest.split("\n")
        rest = lines.pop() if chunk else ""
        for line in lines:
            number += 1
            if line.strip():
                yield number, _parse(line)
        rest += chunk
        _check_size(rest, path)
        if not chunk:
            return


def _elements(text: str, stream: io.TextIOBase, path: Path, *, is_list: bool = True) -> Iterator[tuple[int, Any]]:
    """Yield the elements of lists, or objects one after the other, as a tool that is called repeatedly prints them.

    Elements after a malformed one cannot be delimited and are lost; objects are, as each starts a line.
    """
    number, place = 0, 0
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if is_list and text[place : place + 1] == "]":
            text, place = text[place + 1 :].lstrip() or stream.read(_CHUNK).lstrip(), 1
            if not text.startswith("["):
                return
            continue
        problem = "not JSON"
        try:
            value, end = _DECODER.raw_decode(text, place)
            if end < len(text) or not (chunk := stream.read(_CHUNK)):  # a number may continue in the next chunk
                number, place = number + 1, end
                yield number, value
                continue
        except RecursionError:
            chunk, problem = "", _TOO_DEEP
        except ValueError:
            chunk = stream.read(_CHUNK)
        text, place = text[place:] + chunk, 0
        if not chunk:
            line, _, rest = text.partition("\n")
            number += 1
            if is_list or text:
                yield number, _Malformed((text if is_list else line)[:1000], problem)
            if is_list or not text:
                return
            text = rest
        _check_size(text, path)


def _parse(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        return _Malformed(text[:1000], _TOO_DEEP)
    except ValueError:
        return _Malformed(text[:1000], "not JSON")


def _check_size(text: str, path: Path) -> None:
    if len(text) > _MAX_VALUE:
        raise InputError("one value is larger than 16 MiB", str(path), "Write one JSON object per line.")


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
