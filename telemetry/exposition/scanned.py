"""What a scan gives, what it may cost, and what can be wrong with a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

NO_TIMESTAMP: Final = -(2**63)
"""Time stamp of a line without one, on a page where others have one."""

CUT: Final = "last line is cut"
NO_END: Final = "no # EOF at the end"
AFTER_END: Final = "text after # EOF"
NOT_UTF8: Final = "not UTF-8"
TOO_LONG: Final = "line over the length limit"
TOO_MANY_LINES: Final = "line over the limit of lines"
TOO_MANY_SERIES: Final = "series over the limit"
"""Reasons of problems, beside those of :class:`~telemetry.exposition.tokens.GrammarError`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one page may cost, so that a broken or hostile exporter cannot fill the memory.

    ``lines``: lines of a page that are read; a node with 8 GPUs, MIG and every NVLink counter has some 5,000.
    """

    lines: int = 50_000
    series: int = 20_000
    line_bytes: int = 16_384
    series_bytes: int = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Scanned:
    """The samples of a page.

    ``keys``: the series of each sample, see :meth:`~telemetry.exposition.scanner.Scanner.labels`. It is the same object
    as for the page before if that page listed the same series in the same order. Do not change it.
    ``values``: the numbers; NaN and infinities as written; shape (n,).
    ``timestamps_ms``: milliseconds since 1970, UTC; :data:`NO_TIMESTAMP` for lines without; None if no line has any;
    shape (n,).
    ``texts``: the numbers as written, for integers that a float64 cannot hold.
    ``complete``: whether the page arrived whole. A page over the limit of lines is whole.
    ``problems``: lines that could not be read, by reason.
    """

    keys: list[int]
    values: npt.NDArray[np.float64]
    timestamps_ms: npt.NDArray[np.int64] | None
    texts: Sequence[bytes]
    is_openmetrics: bool
    complete: bool
    problems: dict[str, int]
