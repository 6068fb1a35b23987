"""Reader of tables in JSON."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from telemetry.importing.columns import COLUMN_NAMES
from telemetry.importing.files.csv_tables import BATCH_ROWS, MAX_COLUMNS, NULL_TEXTS, FileRows, distinct
from telemetry.importing.files.json_documents import TOO_DEEP, Malformed, json_values, repeated_keys
from telemetry.importing.quarantine import Quarantine

_MAX_CELLS: Final = 1 << 22
_MAX_DEPTH: Final = 50
_LISTS: Final = frozenset(COLUMN_NAMES["device_lists"])


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
        elif key.lower() in _LISTS and isinstance(part, list) and any(isinstance(device, Mapping) for device in part):
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
