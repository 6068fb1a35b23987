"""What an import is told when it folds landed files into a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Fold:
    """What differs when an import folds landed files (see :mod:`telemetry.landing.compaction`) into a dataset.

    The inventory given is then the whole one, files are not remembered by their content but by ``landed``, and sources
    without a usable row are no error: nobody stands beside to mend them.

    ``landed``: names that the dataset keeps in the same step, so that a fold cut short is never done twice.
    ``expected_rows``: rows that the dataset is going to hold; a new one gets buckets for them.
    """

    landed: tuple[str, ...]
    keep_from: datetime | None = None
    expected_rows: int = 0
    not_before: datetime | None = None
    not_after: datetime | None = None

    def wrong_clock(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether instants, in milliseconds, cannot be right."""
        wrong = np.zeros(len(ms), dtype=bool)
        if self.not_before is not None:
            wrong |= ms < int(self.not_before.timestamp() * 1000)
        if self.not_after is not None:
            wrong |= ms > int(self.not_after.timestamp() * 1000)
        return wrong


LANDED_ROLE: Final = "landed"
"""Role, in a dataset's sources, of the landed files that its last fold took."""
