"""Parsing of number columns from people and tools: units, separators, hexadecimal numbers, words for "no value"."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.values.tables import read_table


class Conversion(NamedTuple):
    """Unit conversion: ``number * scale + offset``."""

    scale: float
    offset: float


_UNITS: Final[Mapping[str, tuple[str, float, float]]] = {
    row["word"]: (row["quantity"], float(row["factor"]), float(row["offset"])) for row in read_table("units.csv")
}
_RATE: Final = re.compile(r"(?i)(?<=b)(?:ps| per second| ?/ ?sec(?:ond)?)\Z|(?<=bytes)(?:ps| per second)\Z")
_IN_HEADER: Final = re.compile(r"(?P<name>.*\S)\s*[\[(](?P<unit>[^\[\]()]{1,20})[\])]\s*\Z")


@cache
def conversion(word: str, unit: str) -> Conversion | None:
    """Return the conversion from a source's unit to ``unit``; None if ``word`` is not a unit of that quantity."""
    if word == unit:
        return Conversion(1.0, 0.0)
    source, target = _lookup(word), _lookup(unit)
    if source is None or target is None or source[0] != target[0]:
        return None
    return Conversion(source[1] / target[1], (source[2] - target[2]) / target[1])


@cache
def words_for(unit: str) -> dict[str, Conversion]:
    """Return the conversions of all lower-case unit names of the same quantity as ``unit``."""
    conversions = {word: conversion(word, unit) for word in _UNITS if word == word.lower()}
    return {word: conversion for word, conversion in conversions.items() if conversion is not None}


def split_header(name: str) -> tuple[str, str | None]:
    """Split ``power.draw [W]`` into name and unit; the unit is None if the header has none."""
    match = _IN_HEADER.match(name)
    return (name.strip(), None) if match is None else (match["name"].strip(), match["unit"].strip())


def is_unit(word: str) -> bool:
    """Whether a word is a unit of a source."""
    return _lookup(word) is not None


def _lookup(word: str) -> tuple[str, float, float] | None:
    plain = _RATE.sub("/s", word.strip().replace("\u00b5", "u"))
    return _UNITS.get(plain) or _UNITS.get(plain.lower())


_ROWS: Final = read_table("sentinels.csv")
_ALWAYS: Final = [(float(row["low"]), float(row["high"])) for row in _ROWS if row["applies"] == "always"]
_OUTSIDE: Final = [(float(row["low"]), float(row["high"])) for row in _ROWS if row["applies"] == "outside"]
_LOWEST: Final = min(low for low, _ in _ALWAYS)
_OF_64_BITS: Final = [(low, high) for low, high in _ALWAYS if low > 2.0**32]

WIDE_UNITS: Final = frozenset({"B/s", "mJ", "ns"})
"""Units whose normal values include the 32-bit sentinels: 2,147,483,648 B/s is a busy PCIe link."""


def is_sentinel(values: npt.ArrayLike, *, unit: str = "") -> npt.NDArray[np.bool_]:
    """Return the mask of sentinels for "not supported", without NaN and infinity. ``unit``: of the channel."""
    numbers = np.asarray(values).astype(np.float64, copy=False)
    # Fast path for nearly all columns of real telemetry.
    if not numbers.size or bool(np.nanmax(numbers, initial=-np.inf) < _LOWEST):
        return np.zeros(numbers.shape, np.bool_)
    return _within(numbers, _OF_64_BITS if unit in WIDE_UNITS else _ALWAYS)


def is_sentinel_outside(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return the mask of sentinels that count only outside a channel's valid range, e.g. -1 for a counter."""
    return _within(numbers, _OUTSIDE)


def _within(numbers: npt.NDArray[np.float64], ranges: list[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(numbers.shape, np.bool_)
    for low, high in ranges:
        mask |= (numbers >= low) & (numbers <= high)
    return mask


Decimal = Literal[".", ","]

ANY_UNIT: Final = ""
"""Unit of a column of any quantity: units are recognized, but not converted."""

_VALUE, _UNREADABLE, _ABSENT, _LOST = range(4)
_MEANINGS: Final[Mapping[str, str]] = {row["text"]: row["meaning"] for row in read_table("words.csv")}
NO_VALUE_WORDS: Final = frozenset(text for text, meaning in _MEANINGS.items() if meaning in ("none", "lost"))
_BRACKETED: Final = re.compile(r"(?:\[+[^\[\]]*\]+|<+[^<>]*>+|\(+[^()]*\)+)\Z")
_NUMBER: Final = re.compile(
    r"(?P<number>[+-]?(?:\d[\d.,' \u00a0\u202f\u2019]*|[.,]\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\d\s.,+-][^\d]{0,20})?\Z"
)
_THOUSANDS: Final = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?\Z")
_THOUSANDS_AND_POINT: Final = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+\.\d")
_DECIMAL_COMMA: Final = re.compile(r"[+-]?(?:\d{1,3}(?:\.\d{3})+|\d*),(?:\d{1,2}|\d{4,})\Z|[+-]?0?,\d+\Z|.*\.\d{3},")
_UNITS_OF_STATES: Final = ("bool", "action", "pages", ANY_UNIT)
_UNITS_WITH_PREFIX: Final = ("P-state", "generation", "lanes", "XID", ANY_UNIT)
_PREFIXED: Final = re.compile(r"(?:p|x|gen ?|pcie gen ?|pcie |xid[ :=#]*(?=\d))?(\d{1,3})x?\Z", re.IGNORECASE)
_GENERATION_OF_SPEED: Final = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
_LARGEST_BYTE_FACTOR: Final = 1e-4
_BLANKS: Final = re.compile(r"[\s\u00a0\u202f\u2019']")


_OF_REASONS: Final = re.compile(r"\A(?:nvml)?clocks(?:event|throttle)reasons?(?=.)")
_CLOCK_REASONS: Final = {row["name"].replace(" ", ""): int(row["bit"]) for row in read_table("clock_reasons.csv")}


def clock_reason(name: str) -> int | None:
    """Return the bit of a clock event reason (``SW Power Cap``, ``clocks_event_reasons.sw_power_cap``)."""
    return _CLOCK_REASONS.get(_OF_REASONS.sub("", re.sub(r"[^a-z0-9]", "", name.lower())))


class Numbers(NamedTuple):
    """A parsed column; all arrays have shape (n,).

    ``values``: float64, NaN without a value.
    ``unreadable``: texts that are neither a number nor a word for "no value".
    ``absent``: words and sentinels for "no value", without nulls.
    ``lost``: words that mean that the driver has lost the GPU.
    """

    values: npt.NDArray[np.float64]
    unreadable: npt.NDArray[np.bool_]
    absent: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]


class _Read(NamedTuple):
    number: float
    code: int
    scale: float = 1.0
    offset: float = 0.0


def read_numbers(
    column: pa.ChunkedArray, unit: str, *, header_unit: str | None = None, convert: bool = True, decimal: Decimal = "."
) -> Numbers:
    """Parse a column of a channel.

    ``unit``: unit of the channel; numbers in other units of its quantity are converted.
    ``header_unit``: unit of numbers without one; None: ``unit``.
    ``convert``: False leaves numbers unconverted, for mappings with their own factors.
    ``decimal``: decimal separator, unless the column itself shows another.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    header = conversion(header_unit, unit) if header_unit and convert else None
    none = np.zeros(len(column), np.bool_)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        column = pc.utf8_trim_whitespace(column.cast(pa.string()))
        column = pc.if_else(pc.equal(column, ""), None, column)
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            return _from_texts(column, unit, header_unit, convert, decimal)
    values = column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()
    scale, offset = header or (1.0, 0.0)
    absent = _sentinels(values, np.float64(scale), unit)
    values = values if header is None else values * scale + offset
    return Numbers(np.where(absent, np.nan, values) if absent.any() else values, none, absent, none)


def _sentinels(
    numbers: npt.NDArray[np.float64], scale: npt.NDArray[np.float64] | np.float64, unit: str
) -> npt.NDArray[np.bool_]:
    """Mark sentinels before conversion; 32-bit sentinels are valid values of memory in bytes (2 and 4 GiB)."""
    mask = is_sentinel(numbers, unit=unit)
    if not mask.any():  # nearly all columns
        return mask
    with np.errstate(invalid="ignore"):
        return mask & ((scale > _LARGEST_BYTE_FACTOR) | (numbers >= 2.0**47))


def _from_texts(
    column: pa.ChunkedArray, unit: str, header_unit: str | None, convert: bool, decimal: Decimal
) -> Numbers:
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    with_comma = [match["number"].strip() for text in texts if "," in text and (match := _NUMBER.match(text))]
    if any(_DECIMAL_COMMA.match(_BLANKS.sub("", number)) for number in with_comma):
        decimal = ","
    elif decimal == "," and any(text.count(",") > 1 or _THOUSANDS_AND_POINT.match(text) for text in with_comma):
        decimal = "."
    factors = _factors(unit, header_unit, convert)
    read = [_number(text, unit, factors, decimal) for text in texts]
    codes = np.array([entry.code for entry in read], np.int8)
    raw = np.array([entry.number for entry in read], np.float64)
    scales = np.array([entry.scale for entry in read], np.float64)
    codes[_sentinels(raw, scales, unit)] = _ABSENT
    offsets = np.array([entry.offset for entry in read], np.float64)
    numbers = np.append(np.where(codes == _VALUE, raw * scales + offsets, np.nan), np.nan)
    codes = np.append(codes, np.int8(_VALUE))
    index = encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    codes = codes[index]
    return Numbers(numbers[index], codes == _UNREADABLE, (codes == _ABSENT) | (codes == _LOST), codes == _LOST)


def _factors(unit: str, header_unit: str | None, convert: bool) -> Callable[[str | None], tuple[float, float] | None]:
    """Return a function from a value's unit to scale and offset; None for a unit of another quantity."""

    def factor(word: str | None) -> tuple[float, float] | None:
        if unit == ANY_UNIT:
            return (1.0, 0.0) if word is None or _lookup(word) is not None else None
        unit_text = word or header_unit
        if unit_text is None or (word is None and conversion(unit_text, unit) is None):
            return 1.0, 0.0
        factors = conversion(unit_text, unit)
        return (1.0, 0.0) if factors is not None and not convert else factors

    return factor


def _number(
    text: str, unit: str, factors: Callable[[str | None], tuple[float, float] | None], decimal: Decimal
) -> _Read:
    match = _NUMBER.match(text.replace("\u2212", "-"))
    if match is not None:
        number, word = _plain(match["number"], decimal), (match["unit"] or "").strip() or None
        if number is not None and unit == "generation" and word and word.lower().startswith("gt/s"):
            generation = _GENERATION_OF_SPEED.get(number)
            return _Read(np.nan, _UNREADABLE) if generation is None else _Read(float(generation), _VALUE)
        factor = factors(word)
        if number is not None and factor is not None:
            return _Read(number, _VALUE, *factor)
    if unit == "bitmask":
        reasons = [clock_reason(part) for part in re.split(r"[,;|+&]|\band\b", text)]
        if None not in reasons:
            return _Read(float(np.bitwise_or.reduce(np.array(reasons, np.int64))), _VALUE)
        read = _word(text)  # "Active" does not say which reason
        return _Read(np.nan, _UNREADABLE) if read.number == 1 and not text.lower().startswith("0x") else read
    if unit == "action" and text.strip("[] ").lower() == "none":
        return _Read(0.0, _VALUE)
    read = _word(text)
    is_hex = text.strip().lower().startswith("0x")
    units = _UNITS_WITH_PREFIX if _PREFIXED.match(text.strip().lower()) else _UNITS_OF_STATES
    return _Read(np.nan, _UNREADABLE) if read.code == _VALUE and not is_hex and unit not in units else read


def _word(text: str) -> _Read:
    lowered = " ".join(text.lower().replace("_", " ").split())
    try:
        if lowered.startswith("0x"):
            return _Read(float(int(lowered, 16)), _VALUE)
    except (ValueError, OverflowError):
        return _Read(np.nan, _UNREADABLE)
    prefixed = _PREFIXED.match(lowered)
    if prefixed is not None:
        return _Read(float(prefixed[1]), _VALUE)
    meaning = _MEANINGS.get(lowered.strip("[]<>()# "), "none" if _BRACKETED.match(lowered) else None)
    if meaning is None:
        return _Read(np.nan, _UNREADABLE)
    if meaning in ("none", "lost"):
        return _Read(np.nan, _LOST if meaning == "lost" else _ABSENT)
    return _Read(float(meaning), _VALUE)


def _plain(digits: str, decimal: Decimal) -> float | None:
    digits = _BLANKS.sub("", digits)
    if "," in digits:
        digits = digits.replace(".", "").replace(",", ".", 1) if decimal == "," else digits
        if decimal == "." and not _THOUSANDS.match(digits):
            return None
        digits = digits.replace(",", "")
    try:
        return float(digits)
    except ValueError:
        return None
