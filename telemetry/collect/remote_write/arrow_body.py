"""Untrusted Arrow IPC bodies, read without memory amplification.

A compressed buffer of a few bytes may claim terabytes, so compressed messages are rejected by their headers (Arrow
columnar format, "Serialization and IPC": Message.fbs, Schema.fbs). Uncompressed buffers lie within the body; only
dictionary columns can grow when decoded, by repeating a long string.
"""

import struct

import pyarrow as pa
import pyarrow.compute as pc

from foundation.server.problems import RequestRefused

_RECORD_BATCH, _DICTIONARY = "record batch", "dictionary"
_HEADER_FIELD = 2
_DICTIONARY_DATA = 1
_BATCH_COMPRESSION = 3
_OLD_COMPRESSION = b"ARROW:experimental_compression"  # of Arrow 0.17, which pyarrow still reads
_PLAIN = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_timestamp),
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_null),
)


def read_stream(body: bytes, *, row_limit: int, byte_limit: int) -> pa.Table:
    """Read an Arrow IPC stream.

    ``row_limit``: maximum rows. ``byte_limit``: maximum bytes of strings in decoded dictionary columns.
    Raises ``RequestRefused``: 413 above a limit, 400 if the stream is corrupt or compressed, or a column has a type
    other than number, string or timestamp.
    """
    try:
        if any(map(_is_compressed, pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))):
            raise RequestRefused.unreadable("the Arrow stream has compressed buffers: send it without compression")
        table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
        table.validate(full=True)
        names = table.column_names  # decodes the names, which validation does not
    except (pa.ArrowException, struct.error, EOFError, OSError, UnicodeDecodeError) as error:
        raise RequestRefused.unreadable(f"the body is not an Arrow IPC stream: {error}") from error
    if table.num_rows > row_limit:
        raise RequestRefused.too_large(f"the body has more than {row_limit} rows: send smaller requests")
    for name, column_type in zip(names, table.schema.types, strict=True):
        value_type = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
        if not any(is_of_kind(value_type) for is_of_kind in _PLAIN):
            problem = f"column {name!r} has the type {column_type}: send numbers, strings and timestamps"
            raise RequestRefused.unreadable(problem)
    _check_dictionaries(table, byte_limit)
    return table


def _is_compressed(message: pa.Message) -> bool:
    if message.type not in (_RECORD_BATCH, _DICTIONARY):
        return False
    header = message.metadata.to_pybytes()
    batch = _follow(header, _field(header, _follow(header, 0), _HEADER_FIELD))
    if message.type == _DICTIONARY:
        batch = _follow(header, _field(header, batch, _DICTIONARY_DATA))
    return _field(header, batch, _BATCH_COMPRESSION) != 0 or _OLD_COMPRESSION in header


def _field(content: bytes, table: int, number: int) -> int:
    """Return the position of field ``number`` of a flatbuffers table, 0 if it is absent."""
    (vtable_offset,) = struct.unpack_from("<i", content, table)
    vtable = table - vtable_offset
    (size,) = struct.unpack_from("<H", content, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", content, vtable + entry)
    return table + offset if offset else 0


def _follow(content: bytes, position: int) -> int:
    (offset,) = struct.unpack_from("<I", content, position)
    return position + int(offset)


def _check_dictionaries(table: pa.Table, byte_limit: int) -> None:
    total = 0
    for column in table.columns:
        if pa.types.is_dictionary(column.type) and column.type.value_type in (pa.string(), pa.large_string()):
            for chunk in column.chunks:
                lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
                total += pc.sum(lengths.cast(pa.int64())).as_py() or 0
    if total > byte_limit:
        raise RequestRefused.too_large(f"the body unpacks to more than {byte_limit} bytes: send smaller requests")
