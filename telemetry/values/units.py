"""Conversion between units of one quantity, as words of sources name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from telemetry.values.tables import read_table


class Conversion(NamedTuple):
    """From one unit to another: ``number * scale + offset``."""

    scale: float
    offset: float


_UNITS: Final[Mapping[str, tuple[str, float, float]]] = {
    row["word"]: (row["quantity"], float(row["factor"]), float(row["offset"])) for row in read_table("units.csv")
}
_RATE: Final = re.compile(r"(?i)(?<=b)(?:ps| per second| ?/ ?sec(?:ond)?)\Z|(?<=bytes)(?:ps| per second)\Z")
_IN_HEADER: Final = re.compile(r"(?P<name>.*\S)\s*[\[(](?P<unit>[^\[\]()]{1,20})[\])]\s*\Z")


@cache
def conversion(word: str, unit: str) -> Conversion | None:
    """Return how to convert from a source's unit into ``unit``; None if the word is no unit of that quantity."""
    if word == unit:
        return Conversion(1.0, 0.0)
    source, target = _lookup(word), _lookup(unit)
    if source is None or target is None or source[0] != target[0]:
        return None
    return Conversion(source[1] / target[1], (source[2] - target[2]) / target[1])


def is_unit(word: str) -> bool:
    """Whether a word names a unit of any quantity."""
    return _lookup(word) is not None


@cache
def words_for(unit: str) -> dict[str, Conversion]:
    """Return every lower-case word that names a unit of the quantity of ``unit``."""
    found = {word: conversion(word, unit) for word in _UNITS if word == word.lower()}
    return {word: conversion for word, conversion in found.items() if conversion is not None}


def split_header(name: str) -> tuple[str, str | None]:
    """Split ``power.draw [W]`` into the name and the unit; None if the header names no unit."""
    match = _IN_HEADER.match(name)
    return (name.strip(), None) if match is None else (match["name"].strip(), match["unit"].strip())


def _lookup(word: str) -> tuple[str, float, float] | None:
    plain = _RATE.sub("/s", word.strip().replace("\u00b5", "u"))
    return _UNITS.get(plain) or _UNITS.get(plain.lower())
