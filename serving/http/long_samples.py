"""Samples one value a row, as exporters and time-series databases give them, brought to one row an instant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from serving.http.request import unknown_name
from telemetry.receiving.arrow_body import BodyError, BodyTooLarge, read_stream
from telemetry.receiving.problems import Refused

CELLS_A_ROW: Final = 32
"""How many values of one row's instant a body may hold on the average: its limit of rows counts instants."""

_CHANNEL: Final = "channel"
_VALUE: Final = "value"
_KEYS: Final = ("timestamp", "node", "gpu", "mig_instance")


def is_long(body: bytes) -> bool:
    """Tell whether an Arrow stream says that it has one value a row; what cannot be read says nothing."""
    try:
        names = pa.ipc.open_stream(pa.py_buffer(body)).schema.names
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError):
        return False
    return _CHANNEL in names and _VALUE in names


def wide_samples(body: bytes, channels: Mapping[str, Any], *, row_limit: int, byte_limit: int) -> pa.Table:
    """Read an Arrow stream of ``timestamp``, ``node``, ``gpu``, ``mig_instance`` (at will), ``channel`` and ``value``.

    ``row_limit``: most instants; rows may be :data:`CELLS_A_ROW` times as many.
    ``byte_limit``: most bytes of memory, of the rows and of what is made of them.
    Returns: one row an instant and unit in the order in which they first come, one column a channel; of a value that
    comes twice the last counts.
    Raises ``Refused``: 400, 413, 422, as for a wide body.
    """
    try:
        table = read_stream(body, row_limit=row_limit * CELLS_A_ROW, byte_limit=byte_limit)
    except BodyTooLarge as error:
        raise Refused(413, str(error), "too_large") from error
    except BodyError as error:
        raise Refused(400, str(error)[:500], "garbage") from error
    names = table.column_names
    for name in names:
        if name not in (*_KEYS, _CHANNEL, _VALUE):
            raise Refused(422, unknown_name(name, [*_KEYS, _CHANNEL, _VALUE], "column"), "invalid")
    if len(set(names)) < len(names):
        raise Refused(422, f"a column occurs twice: {names}", "invalid")
    if table.num_rows == 0:
        raise Refused(422, "the table holds no row", "invalid")
    kind = table.schema.field(_VALUE).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise Refused(422, f"value has the type {str(kind)[:60]}: send numbers", "invalid")
    keys = [name for name in _KEYS if name in names]
    row, first = _instants(table, keys)
    if len(first) > row_limit:
        raise Refused(413, f"the body holds {len(first)} instants of units: send at most {row_limit}", "too_large")
    code, told = _codes(table.column(_CHANNEL))
    for name in told:
        if name is None or name not in channels:
            raise Refused(422, unknown_name(str(name), list(channels), "channel"), "invalid")
    if len(first) * len(told) * 8 > byte_limit:
        raise Refused(413, "the body unpacks to too many values: send smaller ones", "too_large")
    columns = {name: table.column(name).take(pa.array(first)) for name in keys}
    values = table.column(_VALUE).combine_chunks()
    for number, name in enumerate(told):
        mine = np.flatnonzero(code == number)
        place = np.full(len(first), -1, dtype=np.int64)
        place[row[mine]] = mine  # of several the last stays
        columns[str(name)] = values.take(pa.array(place, mask=place < 0))
    return pa.table(columns)


def _instants(table: pa.Table, keys: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give each row the number of its unit's instant, in the order in which they come, and where each one begins."""
    combined = np.zeros(table.num_rows, dtype=np.int64)
    for name in keys:
        code, told = _codes(table.column(name))
        _, combined = np.unique(combined * max(1, len(told)) + code, return_inverse=True)
    _, first, row = np.unique(combined, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[row], first[order]


def _codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[Any]]:
    """Give each value of a column, null among them, a number."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    told = encoded.dictionary
    texts = pa.types.is_string(told.type) or pa.types.is_large_string(told.type)
    # Only texts are looked at; instants are counted, and some have no datetime.
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), (
        told.to_pylist() if texts else [None] * len(told)
    )
