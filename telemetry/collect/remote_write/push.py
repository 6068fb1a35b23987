"""The bodies of ``POST /v1/telemetry``: landing tables as an Arrow stream, or rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, get_args

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.collect.remote_write.arrow_body import BodyError, BodyTooLarge, read_stream
from telemetry.collect.remote_write.problems import Refused
from telemetry.dataset.channel import Channel
from telemetry.dataset.channels import with_rollups
from telemetry.dataset.schema import (
    CHANNEL_TYPES,
    EVENT_TYPES,
    INSTANT,
    JOBS,
)
from telemetry.importing.mapping import nearest_hint
from telemetry.landing.tables import LANDED_EVENTS, LANDED_INVENTORY, SAMPLE_KEYS, Kind, lay_out

KIND_ORDER: Final[tuple[Kind, ...]] = ("inventory", "events", "jobs", "samples")
"""The order in which several tables of one body land: what others refer to comes first."""

_EARLIEST: Final = pa.scalar(946_684_800_000, pa.int64()).cast(INSTANT)  # 2000-01-01
_AHEAD: Final = timedelta(days=1)
# The fold could never place later ones, and they would hide all that follows them.
_ZONED: Final = 'instants such as timestamp("ms", tz="UTC")'
_LONGEST_KEY: Final = 253
# RFC 1035: the longest host name; all other keys are far shorter.
_KEYS: Final = frozenset({"node", "gpu", "mig_instance", "pci_bus_id", "job"})
_LONGEST_TEXT: Final = 1000
_LONGEST_DETAIL: Final = 4000
_NULL_OR_FILLED: Final = {"gpu": ": write null for the whole node", "mig_instance": ": write null for the whole GPU"}
_XID_CODE: Final = r"^[0-9]{1,6}$"


def read_arrow(
    body: bytes,
    kind: str | None,
    channels: Mapping[str, Channel],
    *,
    now: datetime,
    row_limit: int,
    byte_limit: int,
) -> dict[Kind, pa.Table]:
    """Read one landing table.

    ``now``: instants more than a day later are refused.
    ``row_limit``, ``byte_limit``: most rows, and most bytes of memory that the table may take.
    Raises ``Refused``: 400 (no Arrow), 413 (too large) or 422 (no such table, or times without a zone).

    Infinite values are taken: our collectors write them for a gauge beyond float32, and the fold sets aside those
    values alone, where a refusal would lose the whole file.
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
    for field in table.schema:  # the layout takes them for UTC, which nobody has said
        if pa.types.is_timestamp(field.type) and field.type.tz is None:
            raise Refused(422, f"{known}: {field.name} has no time zone: send {_ZONED}", "invalid")
    return {known: _checked(known, table, channels, now)}


def read_json(
    body: bytes, kind: str | None, channels: Mapping[str, Channel], *, now: datetime, row_limit: int
) -> dict[Kind, pa.Table]:
    """Read ``{"samples": [...], "events": [...], "inventory": [...], "jobs": [...]}``, or a list of one ``kind``.

    ``body``: rows are objects; instants are ISO 8601 with a zone; an absent key is null.
    ``kind``: kind of the rows where the body is a list.
    ``now``: ``known_at`` of events that give none; instants more than a day later are refused.
    Returns: kind to table, in the layout in which it lands, kinds in :data:`KIND_ORDER`.
    Raises ``Refused``: 400 (no JSON), 413 (too many rows) or 422 (a row that cannot be used; it is named, and nothing
    lands).
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
    return {each: read_rows(each, content[each], channels, now=now) for each in KIND_ORDER if content.get(each)}


def read_rows(kind: Kind, rows: list[Any], channels: Mapping[str, Channel], *, now: datetime) -> pa.Table:
    """Read the rows of one kind, decoded already.

    ``rows``: Objects, as :func:`read_json` takes them.
    ``now``: as :func:`read_json` takes it.
    Raises ``Refused``: 422; the row is named.
    """
    return _checked(kind, _from_rows(kind, rows, channels, now), channels, now)


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
        array = pa.array(values, type_)
        if pa.types.is_floating(type_):
            infinite = pc.index(pc.is_inf(array), True).as_py()
            if infinite >= 0:
                given = f"{values[infinite]:g}"
                raise Refused(
                    422, f"{kind} row {infinite}: {name} is {given}, beyond any {type_}: write null", "invalid"
                )
        return array
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


def _checked(kind: Kind, table: pa.Table, channels: Mapping[str, Channel], now: datetime) -> pa.Table:
    """Lay a table out as it lands; refuse what the fold would have to set aside."""
    try:
        for name, do in _NULL_OR_FILLED.items():
            if name in table.column_names:
                _check_filled(kind, name, table.column(name).cast(pa.string()), do)
        laid = lay_out(kind, table, channels)
    except (ValueError, pa.ArrowException) as error:
        raise Refused(422, str(error), "invalid") from error
    latest = pa.scalar(now + _AHEAD, INSTANT)
    for number, field in enumerate(laid.schema):
        column = laid.column(number)
        if pa.types.is_timestamp(field.type):
            _check_instants(kind, field.name, column, latest)
        elif pa.types.is_string(field.type):
            if field.name == "detail":
                laid = laid.set_column(number, field, pc.utf8_slice_codeunits(column, 0, _LONGEST_DETAIL))
            else:
                _check_texts(kind, field, column)
    if kind == "events":
        _check_events(laid)
    if kind == "samples" and laid.num_rows:
        keys = {*SAMPLE_KEYS.names, "sample_count"}
        if all(laid.column(name).null_count == laid.num_rows for name in laid.column_names if name not in keys):
            raise Refused(422, "samples hold no value of any channel: send at least one", "invalid")
    return laid


def _check_instants(kind: Kind, name: str, column: pa.ChunkedArray, latest: pa.Scalar) -> None:
    for outside, what in (
        (pc.less(column, _EARLIEST), "before 2000"),
        (pc.greater(column, latest), "more than a day from now"),
    ):
        number = pc.index(outside, True).as_py()
        if number >= 0:
            given = column[number].cast(pa.int64()).as_py()
            raise Refused(
                422,
                f"{kind} row {number}: {name} is an instant {what} ({given} ms since 1970): check the sender's clock",
                "invalid",
            )


def _check_texts(kind: Kind, field: pa.Field, column: pa.ChunkedArray) -> None:
    longest = _LONGEST_KEY if field.name in _KEYS else _LONGEST_TEXT
    length = pc.utf8_length(column)
    number = pc.index(pc.greater(length, longest), True).as_py()
    if number >= 0:
        raise Refused(
            422,
            f"{kind} row {number}: {field.name} has {length[number]} characters, more than {longest}",
            "invalid",
        )
    if not field.nullable:
        _check_filled(kind, field.name, column, "")


def _check_filled(kind: Kind, name: str, column: pa.ChunkedArray, do: str) -> None:
    number = pc.index(pc.equal(pc.utf8_trim_whitespace(column), ""), True).as_py()
    if number >= 0:
        raise Refused(422, f"{kind} row {number}: {name} is empty{do}", "invalid")


def _check_events(laid: pa.Table) -> None:
    kinds, codes = laid.column("type"), laid.column("code")
    unknown = set(pc.unique(kinds).to_pylist()) - set(EVENT_TYPES)
    if unknown:
        raise Refused(422, f"events: no such type {sorted(unknown)}: use one of {', '.join(EVENT_TYPES)}", "invalid")
    plain = pc.fill_null(pc.match_substring_regex(codes, _XID_CODE), False)
    number = pc.index(pc.and_(pc.equal(kinds, "xid"), pc.invert(plain)), True).as_py()
    if number >= 0:
        given = codes[number].as_py()
        shown = "null" if given is None else repr(given[:40])
        raise Refused(422, f"events row {number}: the code of an xid is {shown}, not 1 to 6 digits", "invalid")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number: write null")
