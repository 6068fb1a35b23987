"""Pages of samples whose channels have an instant each, as sources with a stamp for every series write them.

What a dead instrument repeats shows only where power, temperature and the other fields are seen together. A page is
what one unit reported after one temperature, up to and with the next: nothing in it is later than its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telemetry.importing.samples.block import Block, ChannelValues


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of some rows of a block, sorted by (unit, ms).

    ``block``: a row for each page. ``ends``: the row of the given block that ends it.
    ``rows``, ``units``: all rows, and the unit of each.
    """

    block: Block
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    units: npt.NDArray[np.int32]

    @classmethod
    def of(cls, block: Block, rows: npt.NDArray[np.int64], temperatures: Sequence[str]) -> "Pages":
        """Divide rows into pages at the first of the temperatures that any of them has."""
        measured = [block.series[name].valid[rows] for name in temperatures if name in block.series]
        is_end = next((valid for valid in measured if valid.any()), np.zeros(len(rows), np.bool_))
        places = np.flatnonzero(is_end)
        ends = rows[places]
        page = np.searchsorted(places, np.arange(len(rows)))
        is_whole = page < len(places)  # what follows the last temperature of a unit belongs to no page yet
        is_whole[is_whole] = block.unit[rows[is_whole]] == block.unit[ends[page[is_whole]]]
        series = {}
        for name, given in block.series.items():
            chosen = np.flatnonzero(is_whole & given.valid[rows])
            values, valid = np.zeros(len(ends), given.values.dtype), np.zeros(len(ends), np.bool_)
            values[page[chosen]], valid[page[chosen]] = given.values[rows[chosen]], True
            series[name] = ChannelValues(values, valid)
        keys: dict[str, Any] = {
            key: getattr(block, key)[ends] for key in ("unit", "node", "ms", "order", "mig", "count")
        }
        return cls(Block(**keys, series=series), ends, rows, block.unit[rows])

    def complete(self, names: Sequence[str]) -> None:
        """Add to each page that has any of these channels those of the page before: scrapes overlap pages."""
        present = [self.block.series[name] for name in names if name in self.block.series]
        if not present or not len(self.ends):
            return
        follows = np.append(False, self.block.unit[1:] == self.block.unit[:-1])
        follows &= np.logical_or.reduce([series.valid for series in present])
        for series in present:
            earlier = np.append(False, series.valid[:-1])
            series.valid = series.valid | (follows & earlier)

    def spread(self, of_pages: npt.NDArray[np.bool_], before: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each row what holds of the last page that has ended by then; ``before``: of units, at first."""
        last = np.searchsorted(self.ends, self.rows, side="right") - 1
        of_row = before[self.units]
        has_page = np.flatnonzero(last >= 0)
        has_page = has_page[self.block.unit[last[has_page]] == self.units[has_page]]
        of_row[has_page] = of_pages[last[has_page]]
        return of_row
