"""Channel values as sources write them, to numbers of the channel's type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.dataset.channels import Channel, is_sentinel
from telemetry.importing.samples.block import DTYPES

_WORDS: Final[Mapping[str, float]] = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "on": 1.0, "off": 0.0}


@dataclass(slots=True)
class Parsed:
    """A parsed column.

    ``values``: numbers of the channel's type; anything where not ``valid``.
    ``sentinels``: values that meant "not supported".
    """

    values: npt.NDArray[np.generic]
    valid: npt.NDArray[np.bool_]
    problems: dict[str, npt.NDArray[np.bool_]]
    sentinels: int


def parse_values(column: pa.ChunkedArray, channel: Channel, scale: float | None, offset: float | None) -> Parsed:
    """Parse the values of one channel.

    ``scale``, ``offset``: ``value * scale + offset`` is taken before the range is looked at.
    """
    numbers, exact, unreadable = _numbers(column, channel)
    present = ~np.isnan(numbers)
    blanks = present & is_sentinel(np.where(present, numbers, 0.0))
    valid = present & ~blanks
    if scale is not None or offset is not None:
        numbers = numbers * (1.0 if scale is None else scale) + (offset or 0.0)
        exact = None
    with np.errstate(invalid="ignore"):
        outside = valid & ~np.isfinite(numbers)
        if channel.low is not None:
            outside |= valid & (numbers < channel.low)
        if channel.high is not None:
            outside |= valid & (numbers > channel.high)
    problems = {}
    if unreadable.any():
        problems["not a number"] = unreadable
    if channel.kind in ("flags", "enum"):
        broken = valid & ~outside & (numbers != np.floor(numbers))
        low, high = (0.0, 2.0**62) if channel.kind == "flags" else (-(2.0**31), 2.0**31 - 1)
        outside |= valid & ~broken & ((numbers < low) | (numbers > high))
        if broken.any():
            problems["not an integer"] = broken
            valid &= ~broken
    if outside.any():
        problems["value out of range"] = outside
        valid &= ~outside
    kept = np.where(valid, numbers, 0.0)
    values = exact if exact is not None and channel.kind == "flags" else kept.astype(DTYPES[channel.kind])
    return Parsed(values, valid, problems, int(blanks.sum()))


def _numbers(
    column: pa.ChunkedArray, channel: Channel
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64] | None, npt.NDArray[np.bool_]]:
    """Return float64 with NaN for null, exact integers for flags where possible, and the rows that are no number."""
    none = np.zeros(len(column), dtype=bool)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan), None, none
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column.cast(pa.string()))
        column = pc.if_else(pc.equal(column, ""), None, column)
        try:
            return _numbers(column.cast(pa.int64()), channel)
        except pa.ArrowInvalid:
            pass
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            numbers = _text_numbers(column).to_numpy()
            return numbers, None, np.asarray(column.is_valid().to_numpy() & np.isnan(numbers), dtype=bool)
    exact = None
    if channel.kind == "flags" and pa.types.is_integer(column.type):
        filled = column.fill_null(0)
        least = pc.min(filled).as_py()
        if least is None or least >= 0:
            exact = filled.cast(pa.uint64()).to_numpy()
    missing = np.asarray(column.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    numbers = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy()
    return np.where(missing, np.nan, numbers), exact, none


def _text_numbers(column: pa.ChunkedArray) -> pd.Series:
    texts = column.to_pandas().astype(object)
    numbers = pd.Series(pd.to_numeric(texts, errors="coerce"), dtype=np.float64)
    for index in np.flatnonzero(numbers.isna().to_numpy() & texts.notna().to_numpy()):
        text = str(texts.iloc[index]).lower()
        if text in _WORDS:
            numbers.iloc[index] = _WORDS[text]
        elif text.startswith("0x"):
            try:
                numbers.iloc[index] = float(int(text, 16))
            except ValueError:
                continue
    return numbers
