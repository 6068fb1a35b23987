"""Reading answers of a Prometheus API: raw samples of a range selector as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from telemetry.http import HttpError

_EARLIEST_MS, _LATEST_MS = -(2.0**52), 2.0**52


class Unreadable(HttpError):
    """An answer that is not what the API promises; the text says in what."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Raw samples of some series.

    ``labels`` are those of each series, ``__name__`` among them; ``index``, ``ms`` (since 1970, UTC) and ``values`` are
    the series, time and value of each sample; shape (n,).
    """

    labels: list[dict[str, str]]
    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def read_matrix(data: Any) -> Matrix:
    """Read the data of an answer to a range selector; series and samples stay in its order.

    Raises ``Unreadable`` if it is no matrix, or holds a number that is none.
    """
    if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(data.get("result"), list):
        kind = data.get("resultType") if isinstance(data, dict) else None
        raise Unreadable(f"a matrix was asked for, and the answer holds {kind or 'something else'}")
    labels: list[dict[str, str]] = []
    counts: list[int] = []
    pairs: list[Any] = []
    for series in data["result"]:
        metric = series.get("metric") if isinstance(series, dict) else None
        if not isinstance(metric, dict) or not all(isinstance(text, str) for text in metric.values()):
            raise Unreadable("a series of the answer has no labels")
        values = series.get("values", [])  # a native histogram has none
        if not isinstance(values, list):
            raise Unreadable("the answer holds pairs that are none")
        labels.append(metric)
        counts.append(len(values))
        pairs += values
    try:
        seconds = np.array([second for second, _ in pairs], np.float64)
        numbers = np.array([float(number) for _, number in pairs], np.float64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise Unreadable(f"the answer holds pairs that are no numbers: {error}") from error
    scaled = np.round(seconds * 1000.0)
    if not bool(np.all((scaled > _EARLIEST_MS) & (scaled < _LATEST_MS))):
        raise Unreadable("the answer holds a time stamp that is none")
    index = np.repeat(np.arange(len(labels), dtype=np.int32), counts)
    return Matrix(labels, index, scaled.astype(np.int64), numbers)


def read_json(body: bytes) -> dict[str, Any]:
    """Read any answer of the API; raises ``Unreadable`` if it is no JSON object with a status."""
    try:
        document = orjson.loads(body)
    except ValueError as error:
        raise Unreadable(f"the answer is not JSON: {shown(body)}") from error
    if not isinstance(document, dict) or "status" not in document:
        raise Unreadable(f"the answer is not one of the Prometheus API: {shown(body)}")
    return document


def answer_warnings(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a server's warnings; VictoriaMetrics says ``isPartial`` instead."""
    given = document.get("warnings") or []
    warnings = [str(warning) for warning in given] if isinstance(given, list) else [str(given)]
    if document.get("isPartial"):
        warnings.append("isPartial: some storage nodes did not answer")
    return tuple(warnings)


def shown(body: bytes, most: int = 120) -> str:
    """Return the beginning of an answer for an error message."""
    text = " ".join(body[: 4 * most].decode("utf-8", "replace").split())
    return repr(text[:most] + "…" if len(text) > most else text)
