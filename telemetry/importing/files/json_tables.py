"""Reader of tables in JSON."""

import json
import re
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
_MAX_CHARACTERS: Final = 1 << 26
_MAX_EMPTY: Final = 200_000
_MAX_DEPTH: Final = 50
_OF_GPUS: Final = ("samples", "inventory")
_NUMBERED: Final = re.compile(r"(?:gpu|card|device)?[ _]?\d+", re.IGNORECASE)
_LISTS: Final = (*COLUMN_NAMES["gpus"], *COLUMN_NAMES["devices"], *COLUMN_NAMES["nodes"])
_GPU: Final = re.compile(r"gpu|graphic|display|3d|vga|accelerator", re.IGNORECASE)
_OTHER_DEVICE: Final = re.compile(rf"\b(?:{'|'.join(COLUMN_NAMES['other_devices'])})\b", re.IGNORECASE)
TOO_MUCH: Final = "the devices of one object repeat too much text"
NO_GPU: Final = "a device that is no GPU"
"""Reason for leaving out an element of a list of devices."""


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

    Raises ``InputError`` if a value exceeds 16 MiB or the objects have more than ``MAX_COLUMNS`` keys.
    """
    numbers: list[int] = []
    records: list[dict[str, str | None]] = []
    names: dict[str, None] = {}
    n_characters, is_empty = 0, True
    for number, record in _records(path, table):
        if isinstance(record, Malformed):
            quarantine.read_rows(table, path, 1)
            if record.problem == NO_GPU:
                quarantine.leave_out(table, path, NO_GPU, 1, record.text)
            else:
                quarantine.set_aside("malformed row", table, path, number, record.text, record.problem)
            continue
        numbers.append(number)
        records.append(record)
        names |= dict.fromkeys(record)
        n_characters += _characters(record)
        _check_columns(names, path)
        is_full = len(records) >= BATCH_ROWS or len(records) * len(names) >= _MAX_CELLS
        if is_full or n_characters >= _MAX_CHARACTERS:
            yield _batch(numbers, records, names)
            numbers, records, names, n_characters, is_empty = [], [], {}, 0, False
    if records or is_empty:
        yield _batch(numbers, records, names)


def _batch(numbers: list[int], records: list[dict[str, str | None]], names: Mapping[str, None]) -> FileRows:
    columns = [pa.array([record.get(name) for record in records], pa.string()) for name in names]
    return FileRows(np.array(numbers, np.int64), *distinct(list(names), columns))


def _check_columns(names: Mapping[str, None], path: Path) -> None:
    if len(names) > MAX_COLUMNS:
        raise InputError(f"the objects have more than {MAX_COLUMNS} keys", str(path), "Move variable keys to values.")


def _records(path: Path, table: str) -> Iterator[tuple[int, dict[str, str | None] | Malformed]]:
    n_empty = 0
    for number, value in json_values(path):
        is_object = isinstance(value, Mapping)
        n_empty += not (is_object and value)
        if n_empty > max(_MAX_EMPTY, number // 2):
            problem = f"{n_empty:,} of the first {number:,} values are no JSON objects with keys"
            raise InputError(problem, str(path), "Check that the file is a table.")
        if isinstance(value, Malformed):
            yield number, value
        elif is_object:
            yield from ((number, row) for row in _flat_rows(value, table))
        else:
            yield number, Malformed(json.dumps(value), "not a JSON object")


def _flat_rows(value: Mapping[str, Any], table: str) -> Iterator[dict[str, str | None] | Malformed]:
    n_repeated = 0
    try:
        rows = _jobs_in(value) if table == "jobs" else _rows_in(value) if table in _OF_GPUS else [value]
        for place, row in enumerate(rows):
            flat = row if isinstance(row, Malformed) else repeated_keys(_flat(row))
            if place > 0 and not isinstance(flat, Malformed):
                n_repeated += _characters(flat)
                if n_repeated > _MAX_CHARACTERS:
                    yield Malformed("", TOO_MUCH)
                    return
            yield flat
    except RecursionError:
        yield Malformed("", TOO_DEEP)


def _characters(record: Mapping[str, str | None]) -> int:
    return sum(map(len, record)) + sum(map(len, filter(None, record.values())))


def _rows_in(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any] | Malformed]:
    """Yield a row for each GPU that an object lists at any depth, with the keys around it; otherwise the object.

    Other devices of such a list are :class:`Malformed` with :data:`NO_GPU`.
    """
    name = next((name for name in _LISTS if _devices(value.get(name))), None)
    if name is not None:
        around = {key: outer for key, outer in value.items() if key != name}
        has_gpu = False
        for device in _devices(value[name]):
            if name in COLUMN_NAMES["devices"] and _is_other(device):
                yield Malformed(json.dumps(device), NO_GPU)
            else:
                has_gpu = True
                yield from _rows_in({**around, **device})
        if not has_gpu:
            yield from _rows_in(around)
        return
    for key, part in value.items():
        lists = {name for name in _LISTS if isinstance(part, Mapping) and _devices(part.get(name))}
        if lists:
            raised = {name if name in lists else f"{key}.{name}": inner for name, inner in part.items()}
            yield from _rows_in({**{name: outer for name, outer in value.items() if name != key}, **raised})
            return
    cards = _devices({key: card for key, card in value.items() if _NUMBERED.fullmatch(key)})
    shared = {key: outer for key, outer in value.items() if key not in {card["device"] for card in cards}}
    yield from [{**shared, **card} for card in cards] if cards else [dict(value)]


def _devices(listed: Any) -> list[dict[str, Any]]:
    """Return the objects of a list, or of an object whose keys are indices (``card0``); otherwise nothing."""
    if isinstance(listed, Mapping) and all(map(_NUMBERED.fullmatch, listed)):
        listed = [{"device": key, **card} for key, card in listed.items() if isinstance(card, Mapping)]
    return listed if isinstance(listed, list) and all(isinstance(device, Mapping) for device in listed) else []


def _is_other(device: Mapping[str, Any]) -> bool:
    """Return whether the fields of a device identify it as something other than a GPU."""
    text = " ".join(str(part) for key, part in device.items() if key.lower() in COLUMN_NAMES["kinds_of_device"])
    return bool(_OTHER_DEVICE.search(text)) and not _GPU.search(text)


def _jobs_in(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a row for each job of an object that has them by number, as those of qstat and oarstat."""
    jobs = value.get("Jobs", value)
    is_numbered = isinstance(jobs, Mapping) and all(
        key[:1].isdecimal() and isinstance(job, Mapping) for key, job in jobs.items()
    )
    return [{"job": key} | job for key, job in jobs.items()] if jobs and is_numbered else [value]


def _flat(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str | None]]:
    if depth > _MAX_DEPTH:
        raise RecursionError
    flat: list[tuple[str, str | None]] = []
    for key, value in record.items():
        name = f"{prefix}{key}".encode("utf-8", "replace").decode().strip()
        if isinstance(value, Mapping):
            flat += _flat(value, f"{name}.", depth + 1)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            if not text.isascii():
                text = text.encode("utf-8", "replace").decode()
            flat.append((name, None if text in NULL_TEXTS else text))
    return flat
