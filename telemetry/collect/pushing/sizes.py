"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """Read a size such as ``1GiB`` or ``500 MB``; a number alone is bytes.

    Raises ``ValueError`` if the text is no size, or is no more than 0.
    """
    match = _SIZE.match(text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write a number and a unit (KiB, MiB, GiB, TiB), such as '1GiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])
