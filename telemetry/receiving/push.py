"""The bodies of ``POST /v1/telemetry``: landing tables as an Arrow stream, or rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, get_args

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.channel import Channel
from telemetry.channels import with_rollups
from telemetry.landing.tables import LANDED_EVENTS, LANDED_INVENTORY, SAMPLE_KEYS, Kind, lay_out
from telemetry.mapping import nearest_hint
from telemetry.receiving.arrow_body import BodyError, BodyTooLarge, read_stream
from telemetry.receiving.problems import Refused
from telemetry.schema import CHANNEL_TYPES, EVENT_TYPES, INSTANT, JOBS

KIND_ORDER: Final[tuple[Kind, ...]] = ("inventory", "events", "jobs", "samples")
"""The order in which several tables of one body land: what others refer to comes first."""

_EARLIEST: Final = pa.scalar(946_684_800_000, pa.int64()).cast(INSTANT)  # 2000-01-01
_LATEST: Final = pa.scalar(7_258_118_400_000, pa.int64()).cast(INSTANT)  # 2200-01-01


def read_arrow(
    body: bytes, kind: str | None, channels: Mapping[str, Channel], *, row_limit: int, byte_limit: int
) -> dict[Kind, pa.Table]:
    """Read one landing table.

    Returns
    -------
    dict
        The kind and its table, in the layout in which it lands.

    Raises
    ------
    Refused
        400 (no Arrow), 413 (too large) or 422 (no such table).
    """
    known = _known_kind(kind)
    try:
        table = read_stream(body, row_limit=row_limit, byte_limit=byte_limit)
    except BodyTooLarge as error:
        raise Refused(413, str(error), "too_large") from error
    except BodyError as error:
        raise Refused(400, str(error), "garbage") from error
    if len(set(table.column_names)) != len(table.column_names):
        raise Refused(422, f"a column occurs twice: {table.column_names}", "invalid")
    return {known: _checked(known, table, channels)}


def read_json(
    body: bytes, kind: str | None, channels: Mapping[str, Channel], *, now: datetime, row_limit: int
) -> dict[Kind, pa.Table]:
    """Read ``{"samples": [...], "events": [...], "inventory": [...], "jobs": [...]}``, or a list of one ``kind``.

    Parameters
    ----------
    body : bytes
        Rows are objects; instants are ISO 8601 with a zone; an absent key is null.
    kind : str or None
        Kind of the rows where the body is a list.
    channels : mapping of str to Channel
    now : datetime.datetime
        ``known_at`` of events that give none.
    row_limit : int
        Most rows.

    Returns
    -------
    dict
        Kind to table, in the layout in which it lands, kinds in :data:`KIND_ORDER`.

    Raises
    ------
    Refused
        400 (no JSON), 413 (too many rows) or 422 (a row that cannot be used; it is named, and nothing lands).
    """
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}", "garbage") from error
    if isinstance(content, list):
        content = {_known_kind(kind): content}
    if not isinstance(content, dict):
        raise Refused(422, 'the body is neither a list nor an object such as {"samples": [...]}', "invalid")
    for key, rows in content.items():
        _known_kind(key)
        if not isinstance(rows, list):
            raise Refused(422, f"{key} is no list of rows", "invalid")
    if sum(map(len, content.values())) > row_limit:
        raise Refused(413, f"the body holds more than {row_limit} rows: send smaller ones", "too_large")
    tables: dict[Kind, pa.Table] = {}
    for each in KIND_ORDER:
        if content.get(each):
            table = _from_rows(each, content[each], channels, now)
            tables[each] = _checked(each, table, channels)
    return tables


def _known_kind(kind: str | None) -> Kind:
    if kind not in get_args(Kind):
        given = "the request names no kind" if kind is None else f"{kind!r} is no kind of telemetry"
        raise Refused(422, f"{given}: use one of {', '.join(KIND_ORDER)}", "invalid")
    return kind  # type: ignore[return-value]  # one of the literal's values, as just checked


def _from_rows(kind: Kind, rows: list[Any], channels: Mapping[str, Channel], now: datetime) -> pa.Table:
    types = _types(kind, channels)
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise Refused(422, f"{kind} row {number} is no object", "invalid")
        for name in row:
            if name not in types:
                hint = nearest_hint(name, list(types)) or "A channel of your own must be declared in params."
                raise Refused(422, f"{kind} row {number}: unknown column {name!r}. {hint}", "invalid")
            columns.setdefault(name, [None] * number)
        for name, values in columns.items():
            values.append(row.get(name))
    if kind == "events":
        known = columns.setdefault("known_at", [None] * len(rows))
        columns["known_at"] = [now.isoformat() if value is None else value for value in known]
    return pa.table({name: _array(kind, name, values, types[name]) for name, values in columns.items()})


def _types(kind: Kind, channels: Mapping[str, Channel]) -> dict[str, pa.DataType]:
    if kind == "samples":
        types = {field.name: field.type for field in SAMPLE_KEYS}
        types |= {name: CHANNEL_TYPES[channel.kind] for name, channel in with_rollups(channels).items()}
        return types | {"sample_count": pa.int32()}
    schema = {"events": LANDED_EVENTS, "inventory": LANDED_INVENTORY, "jobs": JOBS}[kind]
    return {field.name: field.type for field in schema}


def _array(kind: Kind, name: str, values: list[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(type_):
        return pa.array([_instant(kind, name, number, value) for number, value in enumerate(values)], type_)
    fits = str if pa.types.is_string(type_) else (int, float) if pa.types.is_floating(type_) else int
    for number, value in enumerate(values):
        if value is not None and (not isinstance(value, fits) or isinstance(value, bool)):
            wanted = "a text" if fits is str else "a whole number" if fits is int else "a number"
            raise Refused(422, f"{kind} row {number}: {name} is {value!r}, not {wanted}", "invalid")
    try:
        return pa.array(values, type_)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise Refused(422, f"{kind}: {name}: {error}", "invalid") from error


def _instant(kind: Kind, name: str, number: int, value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        instant = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        instant = None
    if instant is None or instant.tzinfo is None:
        raise Refused(
            422,
            f"{kind} row {number}: {name} is {value!r}, not an instant with its zone such as 2026-03-01T12:00:00Z",
            "invalid",
        )
    return instant


def _checked(kind: Kind, table: pa.Table, channels: Mapping[str, Channel]) -> pa.Table:
    try:
        laid = lay_out(kind, table, channels)
    except (ValueError, pa.ArrowException) as error:
        raise Refused(422, str(error), "invalid") from error
    for field in laid.schema:
        column = laid.column(field.name)
        if pa.types.is_timestamp(field.type):
            outside = pc.or_(pc.less(column, _EARLIEST), pc.greater_equal(column, _LATEST))
            if pc.any(outside).as_py():
                raise Refused(422, f"{kind}: {field.name} holds an instant before 2000 or after 2200", "invalid")
        elif not field.nullable and pa.types.is_string(field.type) and pc.any(pc.equal(column, "")).as_py():
            raise Refused(422, f"{kind}: {field.name} is empty in a row", "invalid")
    if kind == "events":
        unknown = set(pc.unique(laid.column("type")).to_pylist()) - set(EVENT_TYPES)
        if unknown:
            raise Refused(
                422, f"events: no such type {sorted(unknown)}: use one of {', '.join(EVENT_TYPES)}", "invalid"
            )
    return laid


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number: write null")
