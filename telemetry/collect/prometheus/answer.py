"""Reading a matrix answer: the numbers in bulk, the rest as the small JSON document that it is without them.

``{"status":"success","data":{"resultType":"matrix","result":[{"metric":{…},"values":[[1700000000.5,"41"],…]},…]}}``

Nearly all of an answer is pairs of numbers. Servers write them without blanks, so each series' pairs lie between the
bytes ``"values":[[`` and the next ``]]``; neither can occur elsewhere, for quotes within a JSON text are escaped, and
numbers hold no brackets. Those stretches are cut out and read as one table of two columns; what stays is parsed as JSON
and so checked as a whole. An answer that is written otherwise is parsed as JSON altogether: slower, the same result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

_OPEN = b'"values":[['
_CLOSE = b"]]"
_HELD = b'"values":[]'
_EARLIEST_MS, _LATEST_MS = -(2.0**52), 2.0**52


class Unreadable(ValueError):
    """An answer that is not what the API promises; the text says in what."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Raw samples of some series.

    ``labels``: labels of each series, ``__name__`` among them.
    ``index``: series of each sample; shape (n,).
    ``ms``: milliseconds since 1970, UTC; shape (n,).
    ``values``: shape (n,).
    """

    labels: list[dict[str, str]]
    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    warnings: tuple[str, ...]


def read_matrix(body: bytes) -> Matrix:
    """Read the answer to a range selector.

    Returns: series in the order of the answer, samples in the order of each.
    Raises ``Unreadable`` if it is no JSON, no matrix, cut off, or holds a number that is none.
    """
    skeleton, blocks = _cut(body)
    document = read_json(skeleton)
    data = document.get("data")
    if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(data.get("result"), list):
        kind = data.get("resultType") if isinstance(data, dict) else None
        raise Unreadable(f"a matrix was asked for, and the answer holds {kind or 'something else'}")
    labels: list[dict[str, str]] = []
    pairs: list[Any] = []
    for series in data["result"]:
        metric = series.get("metric") if isinstance(series, dict) else None
        if not isinstance(metric, dict) or not all(isinstance(text, str) for text in metric.values()):
            raise Unreadable("a series of the answer has no labels")
        labels.append(metric)
        pairs.append(series.get("values", []))
    warnings = answer_warnings(document)
    # A block for each series, in their order; a server writes either all of them compactly or none.
    if len(blocks) == len(pairs) and not any(pairs):
        counts, ms, values = _from_blocks(blocks)
    elif not blocks:
        counts, ms, values = _from_lists(pairs)
    else:
        return _plainly(body)
    index = np.repeat(np.arange(len(labels), dtype=np.int32), counts)
    return Matrix(labels, index, ms, values, warnings)


def read_json(body: bytes) -> dict[str, Any]:
    """Read any answer of the API.

    Raises ``Unreadable`` if it is no JSON object with a status.
    """
    try:
        document = json.loads(body)
    except ValueError as error:
        raise Unreadable(f"the answer is not JSON: {shown(body)}") from error
    if not isinstance(document, dict) or "status" not in document:
        raise Unreadable(f"the answer is not one of the Prometheus API: {shown(body)}")
    return document


def answer_warnings(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a server's warnings; VictoriaMetrics says ``isPartial`` instead."""
    said = document.get("warnings") or []
    warnings = [str(each) for each in said] if isinstance(said, list) else [str(said)]
    if document.get("isPartial"):
        warnings.append("isPartial: some storage nodes did not answer")
    return tuple(warnings)


def shown(body: bytes, most: int = 120) -> str:
    """Return the beginning of an answer for an error message."""
    text = " ".join(body[: 4 * most].decode("utf-8", "replace").split())
    return repr(text[:most] + "…" if len(text) > most else text)


def _cut(body: bytes) -> tuple[bytes, list[bytes]]:
    pieces = body.split(_OPEN)
    skeleton, blocks = [pieces[0]], []
    for piece in pieces[1:]:
        end = piece.find(_CLOSE)
        if end < 0:
            raise Unreadable("the answer is cut off")
        blocks.append(piece[:end])
        skeleton += (_HELD, piece[end + 2 :])
    return b"".join(skeleton), blocks


def _from_blocks(
    blocks: list[bytes],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    counts = np.fromiter((block.count(b"],[") + 1 for block in blocks), np.int64, len(blocks))
    if not blocks:
        return counts, np.empty(0, np.int64), np.empty(0)
    text = b"],[".join(blocks).replace(b"],[", b"\n").replace(b'"', b"")
    double = pa.float64()
    try:
        table = csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(column_names=["t", "v"], use_threads=False, block_size=1 << 22),
            parse_options=csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(column_types={"t": double, "v": double}, null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise Unreadable(f"the answer holds pairs that are no numbers: {str(error).splitlines()[0][:120]}") from error
    values = table.column("v").to_numpy()
    if len(values) != counts.sum():
        raise Unreadable("the answer holds pairs that are none")
    return counts, _milliseconds(table.column("t").to_numpy()), values


def _from_lists(
    pairs: list[Any],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    try:
        counts = np.array([len(each) for each in pairs], np.int64)
        seconds = np.array([pair[0] for each in pairs for pair in each], np.float64)
        values = np.array([float(pair[1]) for each in pairs for pair in each], np.float64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise Unreadable(f"the answer holds pairs that are no numbers: {error}") from error
    return counts, _milliseconds(seconds), values


def _plainly(body: bytes) -> Matrix:
    """Read an answer in which some series have compact pairs and others not, such as native histograms."""
    document = read_json(body)
    result = document["data"]["result"]
    counts, ms, values = _from_lists([series.get("values", []) for series in result])
    index = np.repeat(np.arange(len(result), dtype=np.int32), counts)
    return Matrix([series["metric"] for series in result], index, ms, values, answer_warnings(document))


def _milliseconds(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    scaled = np.round(seconds * 1000.0)
    if not bool(np.all((scaled > _EARLIEST_MS) & (scaled < _LATEST_MS))):
        raise Unreadable("the answer holds a time stamp that is none")
    return scaled.astype(np.int64)
