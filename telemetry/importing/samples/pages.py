"""Groups samples into pages when every channel has its own timestamp, as in sources with per-series timestamps.

Detecting frozen telemetry needs power, temperature and the other fields in one row. A page holds the samples of a
unit after one temperature up to and including the next, so that nothing in it is later than its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telemetry.importing.samples.block import Block, ChannelValues


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of selected rows of a block, sorted by (unit, ms).

    ``block``: one row per page. ``ends``: last row of each page in the original block.
    ``rows``, ``units``: the selected rows and their units.
    """

    block: Block
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    units: npt.NDArray[np.int32]

    @classmethod
    def of(cls, block: Block, rows: npt.NDArray[np.int64], temperatures: Sequence[str]) -> "Pages":
        """Split rows into pages at the first temperature channel that has values."""
        measured = [block.series[name].valid[rows] for name in temperatures if name in block.series]
        is_end = next((valid for valid in measured if valid.any()), np.zeros(len(rows), np.bool_))
        places = np.flatnonzero(is_end)
        ends = rows[places]
        page = np.searchsorted(places, np.arange(len(rows)))
        is_whole = page < len(places)  # rows after a unit's last temperature do not form a page yet
        is_whole[is_whole] = block.unit[rows[is_whole]] == block.unit[ends[page[is_whole]]]
        series = {}
        for name, channel_values in block.series.items():
            chosen = np.flatnonzero(is_whole & channel_values.valid[rows])
            values, valid = np.zeros(len(ends), channel_values.values.dtype), np.zeros(len(ends), np.bool_)
            values[page[chosen]], valid[page[chosen]] = channel_values.values[rows[chosen]], True
            series[name] = ChannelValues(values, valid)
        keys: dict[str, Any] = {
            key: getattr(block, key)[ends] for key in ("unit", "node", "ms", "order", "mig", "count")
        }
        return cls(Block(**keys, series=series), ends, rows, block.unit[rows])

    def complete(self, names: Sequence[str]) -> None:
        """Add channels of the previous page to each page that has any of ``names``: a scrape may span two pages."""
        present = [self.block.series[name] for name in names if name in self.block.series]
        if not present or not len(self.ends):
            return
        follows = np.append(False, self.block.unit[1:] == self.block.unit[:-1])
        follows &= np.logical_or.reduce([series.valid for series in present])
        for series in present:
            earlier = np.append(False, series.valid[:-1])
            series.valid = series.valid | (follows & earlier)

    def spread(self, of_pages: npt.NDArray[np.bool_], was_marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each row the flag of its unit's last complete page; ``was_marked``: initial flag by unit code."""
        last = np.searchsorted(self.ends, self.rows, side="right") - 1
        of_row = was_marked[self.units]
        has_page = np.flatnonzero(last >= 0)
        has_page = has_page[self.block.unit[last[has_page]] == self.units[has_page]]
        of_row[has_page] = of_pages[last[has_page]]
        return of_row
