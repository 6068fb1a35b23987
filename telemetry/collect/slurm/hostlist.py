"""Slurm's short form of many node names, ``gpu[01-04,07],login1``, to the names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

MAX_NODES: Final = 1_000_000
"""A list of more names is taken for damage; the largest clusters have some ten thousand nodes."""

_RANGE = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+))?\Z")


def expand_hostlist(text: str) -> list[str]:
    """Return the names of a host list, in its order.

    ``text``: names with any number of bracketed ranges each, with text before, between and after them. A range keeps
    the width of its first number: ``[08-10]`` is 08, 09, 10, and ``[8-10]`` is 8, 9, 10.
    Raises ``ValueError`` if the brackets do not match, a range is none or falls, or it makes over :data:`MAX_NODES`
    names.

    Examples
    --------
    >>> expand_hostlist("gpu[01-03,07],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login1']
    """
    names: list[str] = []
    for part in _parts(text):
        pieces = [_numbers(piece) if bracketed else [piece] for piece, bracketed in _pieces(part)]
        size = 1
        for piece in pieces:
            size *= len(piece)
        if len(names) + size > MAX_NODES:
            raise ValueError(f"{text[:80]!r} stands for over {MAX_NODES:,} nodes")
        names += ["".join(chosen) for chosen in itertools.product(*pieces)]
    return names


def _parts(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    start = depth = 0
    for index, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"{text[:80]!r} has brackets that do not match")
        if letter == "," and depth == 0:
            if text[start:index].strip():
                yield text[start:index].strip()
            start = index + 1
    if depth:
        raise ValueError(f"{text[:80]!r} has brackets that do not match")
    if text[start:].strip():
        yield text[start:].strip()


def _pieces(part: str) -> Iterator[tuple[str, bool]]:
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        if piece or index % 2:
            yield piece, bool(index % 2)


def _numbers(ranges: str) -> list[str]:
    made: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.match(each.strip())
        if match is None:
            raise ValueError(f"{each!r} is no range of numbers")
        low, high = int(match["low"]), int(match["high"] or match["low"])
        if high < low or high - low >= MAX_NODES:
            raise ValueError(f"{each!r} is no range of numbers")
        width = len(match["low"])
        made += [f"{number:0{width}d}" for number in range(low, high + 1)]
    return made
