"""Slurm's short form of many node names, ``gpu[01-04,07],login1``, to the names."""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

MAX_NODES: Final = 1_000_000
"""A list of more names is taken for damage; the largest clusters have some ten thousand nodes."""

_PART: Final = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # commas within brackets do not end one
_PIECE: Final = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE: Final = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+))?\Z")


def expand_hostlist(text: str) -> list[str]:
    """Return the names of a host list, in its order: ``gpu[08-10,12],login1``; ``[8-10]`` is 8, 9, 10.

    Raises ``ValueError`` if the brackets do not match, a range is none or falls, or it makes over :data:`MAX_NODES`
    names.
    """
    if set("[]") & set(_PART.sub("", text)):
        raise ValueError(f"{text[:80]!r} has brackets that do not match")
    names: list[str] = []
    for part in filter(None, map(str.strip, _PART.findall(text))):
        pieces = [[plain] if plain else _numbers(ranges) for ranges, plain in _PIECE.findall(part)]
        if len(names) + math.prod(map(len, pieces)) > MAX_NODES:
            raise ValueError(f"{text[:80]!r} stands for over {MAX_NODES:,} nodes")
        names += map("".join, itertools.product(*pieces))
    return names


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for written in map(str.strip, ranges.split(",")):
        match = _RANGE.match(written)
        low, high = (0, -1) if match is None else (int(match["low"]), int(match["high"] or match["low"]))
        if match is None or not 0 <= high - low < MAX_NODES:
            raise ValueError(f"{written!r} is no range of numbers")
        numbers += [f"{number:0{len(match['low'])}d}" for number in range(low, high + 1)]
    return numbers
