"""Totals of counters that are reported per NVLink."""

from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_COUNTERS_KEPT: Final = 200_000  # about 2 kB each


class LinkTotals:
    """Sums the counters of links; a link that is missing from a row has its previous value.

    Without it, the total would fall, and the return of the link would be a rise.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[int, dict[str, float]]] = {}

    def sums(
        self, counter: Hashable, ms: npt.NDArray[np.int64], links: Sequence[str], values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the sum of each row of ``values``, which continues the rows of earlier calls.

        ``counter``: GPU and channel. ``ms``: ascending; shape (n,). ``values``: NaN where missing; shape (n, links).
        Before its first value, a link has that value. After a restart of any link, a missing one has counted nothing.
        """
        last_ms, last = self._last.get(counter, (0, {}))
        if last_ms > ms[0]:
            last = {}
        names = [*links, *sorted(last.keys() - set(links))]
        rows = np.full((len(ms) + 1, len(names)), np.nan)
        rows[0] = [last.get(name, np.nan) for name in names]
        rows[1:, : len(links)] = values
        is_known = ~np.isnan(rows)
        number = np.arange(len(rows))[:, None]
        newest = np.maximum.accumulate(np.where(is_known, number, 0), axis=0)
        filled = np.take_along_axis(rows, newest, axis=0)
        with np.errstate(invalid="ignore"):
            has_restarted = np.append(False, (filled[1:] < filled[:-1]).any(axis=1))
        restart = np.maximum.accumulate(np.where(has_restarted, number[:, 0], 0))
        filled[newest < restart[:, None]] = 0.0
        first = np.take_along_axis(rows, is_known.argmax(axis=0)[None], axis=0)
        filled = np.where(np.isnan(filled), first, filled)
        if len(self._last) >= _COUNTERS_KEPT:  # bounds memory if a source keeps naming new GPUs
            self._last.clear()
        known = zip(names, filled[-1].tolist(), strict=True)
        self._last[counter] = int(ms[-1]), {name: value for name, value in known if not np.isnan(value)}
        return np.asarray(np.nansum(filled[1:], axis=1))

    def of_table(
        self,
        names: Sequence[Hashable],
        codes: npt.NDArray[np.int64],
        ms: npt.NDArray[np.int64],
        links: Sequence[str],
        values: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Return the sums of rows in any order, NaN without a link; ``names``: counter by the code of a row."""
        sums = np.full(len(ms), np.nan)
        rows = np.flatnonzero(~np.isnan(values).all(axis=1))
        rows = rows[np.lexsort((ms[rows], codes[rows]))]
        for of_code in np.split(rows, np.flatnonzero(np.diff(codes[rows])) + 1):
            if len(of_code):
                sums[of_code] = self.sums(names[codes[of_code[0]]], ms[of_code], links, values[of_code])
        return sums
