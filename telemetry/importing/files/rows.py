"""What the readers of files share."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BATCH_ROWS: Final = 1 << 17
MAX_COLUMNS: Final = 20_000

NULL_TEXTS: Final = ("", "NA", "N/A", "n/a", "[N/A]", "NaN", "nan", "null", "NULL", "None", "[Not Supported]")
"""Texts that are null in any column."""


class FileRows(NamedTuple):
    """Rows of a file.

    ``numbers``: shape (n,).
    ``disagreeing``: columns that the header has several times with different values in one row, with an example.
    """

    numbers: npt.NDArray[np.int64]
    table: pa.Table
    disagreeing: dict[str, str]
