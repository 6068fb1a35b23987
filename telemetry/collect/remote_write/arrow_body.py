"""Arrow IPC bodies from outside, measured before they are believed.

A compressed buffer of a few bytes may announce terabytes, and a dictionary may repeat a long text a million times, so
sizes are taken from the messages' headers first (Arrow columnar format, "Serialization and IPC": Message.fbs,
Schema.fbs; a compressed buffer begins with its size, a signed 64-bit little-endian integer, -1 for "not compressed").
"""

from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.compute as pc

_RECORD_BATCH, _DICTIONARY = "record batch", "dictionary"
_HEADER_FIELD = 2
_DICTIONARY_DATA = 1
_BATCH_LENGTH, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 2, 3


class BodyError(ValueError):
    """A body that is no usable Arrow stream."""


class BodyTooLarge(ValueError):
    """A body whose content would take more than is allowed."""


def read_stream(body: bytes, *, row_limit: int, byte_limit: int) -> pa.Table:
    """Read an Arrow IPC stream.

    ``row_limit``, ``byte_limit``: most rows, and most bytes of memory that the table may take.
    Raises ``BodyTooLarge`` if it holds more; found out before it is unpacked.
    Raises ``BodyError`` if it is damaged, or has columns of nested types.
    """
    try:
        _measure(body, row_limit, byte_limit)
        table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
        table.validate(full=True)
        names = table.column_names  # decodes them, which validation does not
    except (pa.ArrowException, struct.error, EOFError, OSError, UnicodeDecodeError) as error:
        raise BodyError(f"the body is no Arrow IPC stream: {error}") from error
    kinds = table.schema.types
    fit = {kind: _is_plain(kind) for kind in set(kinds)}  # hundreds of columns are of few types
    for name, kind in zip(names, kinds, strict=True):
        if not fit[kind]:
            raise BodyError(f"column {name!r} has the type {kind}: send numbers, strings and timestamps")
    _check_dictionaries(table, byte_limit)
    return table


def _measure(body: bytes, row_limit: int, byte_limit: int) -> None:
    rows = size = 0
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
        if message.type not in (_RECORD_BATCH, _DICTIONARY):
            continue
        header = message.metadata.to_pybytes()
        batch = _follow(header, _field(header, _follow(header, 0), _HEADER_FIELD))
        if message.type == _DICTIONARY:
            batch = _follow(header, _field(header, batch, _DICTIONARY_DATA))
        place = _field(header, batch, _BATCH_LENGTH)
        rows += _int64(header, place) if place else 0
        size += _unpacked(header, batch, message.body)
        if rows > row_limit or rows < 0:
            raise BodyTooLarge(f"the body holds more than {row_limit} rows: send smaller ones")
        if size > byte_limit:
            raise BodyTooLarge(f"the body unpacks to more than {byte_limit} bytes: send smaller ones")


def _unpacked(header: bytes, batch: int, body: pa.Buffer | None) -> int:
    place = _field(header, batch, _BATCH_BUFFERS)
    if not place or body is None:
        return 0
    compressed = _field(header, batch, _BATCH_COMPRESSION) != 0
    vector = _follow(header, place)
    (count,) = struct.unpack_from("<I", header, vector)
    total = 0
    content = memoryview(body)
    for number in range(count):
        offset, length = struct.unpack_from("<qq", header, vector + 4 + 16 * number)
        if length < 0 or offset < 0 or offset + length > len(content):
            raise BodyError("the body is no Arrow IPC stream: a buffer lies outside of it")
        if compressed and length >= 8:
            (announced,) = struct.unpack_from("<q", content, offset)
            length = length if announced < 0 else announced
        total += length
    return total


def _field(content: bytes, table: int, number: int) -> int:
    """Return where field ``number`` of a flatbuffers table stands, 0 if it is absent."""
    (back,) = struct.unpack_from("<i", content, table)
    vtable = table - back
    (size,) = struct.unpack_from("<H", content, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", content, vtable + entry)
    return table + offset if offset else 0


def _follow(content: bytes, place: int) -> int:
    (offset,) = struct.unpack_from("<I", content, place)
    return place + int(offset)


def _int64(content: bytes, place: int) -> int:
    (value,) = struct.unpack_from("<q", content, place)
    return int(value)


def _is_plain(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_null(kind)
    )


def _check_dictionaries(table: pa.Table, byte_limit: int) -> None:
    total = 0
    for at, kind in enumerate(table.schema.types):
        if pa.types.is_dictionary(kind) and kind.value_type in (pa.string(), pa.large_string()):
            for chunk in table.column(at).chunks:
                lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
                total += pc.sum(lengths.cast(pa.int64())).as_py() or 0
    if total > byte_limit:
        raise BodyTooLarge(f"the body unpacks to more than {byte_limit} bytes: send smaller ones")
