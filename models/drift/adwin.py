"""ADWIN: a window over a stream that drops its older part as soon as that part's mean differs from the newer one's.

Bifet and Gavalda, "Learning from time-changing data with adaptive windowing", SIAM Data Mining 2007: the second one,
which keeps the window in buckets of exponentially growing size, so that n values take O(log n) memory. The bound is the
paper's with the observed variance: a false cut has a probability of at most ``delta`` at each check, where the values
are independent and lie between 0 and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_BUCKETS = 5
"""Buckets of one size before the two oldest are joined (the paper's M)."""

_LEAST = 5
"""Values that each side of a cut must hold."""


@dataclass(slots=True)
class _Row:
    """Buckets of one size, the oldest first: each one's sum, and the sum of squares about its own mean."""

    totals: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)


class Adwin:
    """An adaptive window.

    ``max_buckets``: buckets of one size; more of them make cuts finer and the window's memory larger.

    Examples
    --------
    >>> window = Adwin()
    >>> cut = [at for at in range(400) if window.update(0.2 if at < 200 else 0.8)]
    >>> 200 < cut[0] < 230, round(window.mean, 1)
    (True, 0.8)
    """

    def __init__(self, delta: float = 0.002, *, check_every: int = 1, max_buckets: int = MAX_BUCKETS) -> None:
        self.delta = delta
        self.check_every = check_every
        self.max_buckets = max_buckets
        self._rows: list[_Row] = [_Row()]  # row r holds buckets of 2**r values
        self._width = 0
        self._total = 0.0
        self._spread = 0.0
        self._seen = 0

    @property
    def width(self) -> int:
        """Values in the window."""
        return self._width

    @property
    def mean(self) -> float:
        """Mean of the window; NaN while it is empty."""
        return self._total / self._width if self._width else math.nan

    @property
    def variance(self) -> float:
        """Variance of the window (over n); NaN while it is empty."""
        return self._spread / self._width if self._width else math.nan

    def update(self, value: float) -> bool:
        """Take one value from 0 to 1.

        Raises ``ValueError`` if the value lies outside 0 to 1: the bound would not hold.
        """
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"a value from 0 to 1 is needed, not {value}")
        if self._width:
            self._spread += (value - self.mean) ** 2 * self._width / (self._width + 1)
        self._rows[0].totals.append(float(value))
        self._rows[0].spreads.append(0.0)
        self._width += 1
        self._total += value
        self._seen += 1
        self._compress()
        if self._seen % self.check_every:
            return False
        dropped = False
        while self._drop_oldest_if_cut():
            dropped = True
        return dropped

    def _compress(self) -> None:
        for at, row in enumerate(self._rows):
            if len(row.totals) <= self.max_buckets:
                return
            if at + 1 == len(self._rows):
                self._rows.append(_Row())
            (one, two), (spread_one, spread_two) = row.totals[:2], row.spreads[:2]
            size = 2**at
            joined = spread_one + spread_two + (one / size - two / size) ** 2 * size / 2
            del row.totals[:2], row.spreads[:2]
            self._rows[at + 1].totals.append(one + two)
            self._rows[at + 1].spreads.append(joined)

    def _drop_oldest_if_cut(self) -> bool:
        """Drop the oldest bucket if any cut between buckets tells an older part from a newer one."""
        if self._width < 2 * _LEAST:
            return False
        old_n, old_total = 0, 0.0
        for at in range(len(self._rows) - 1, -1, -1):
            for total in self._rows[at].totals:
                old_n += 2**at
                old_total += total
                new_n = self._width - old_n
                if new_n < _LEAST:
                    return False
                if old_n < _LEAST:
                    continue
                if abs(old_total / old_n - (self._total - old_total) / new_n) >= self.bound(old_n, new_n):
                    self._drop_oldest()
                    return True
        return False

    def bound(self, old_n: int, new_n: int) -> float:
        """Give the difference of means at which a cut into so many older and newer values is made."""
        harmonic = 1.0 / (1.0 / old_n + 1.0 / new_n)
        log = math.log(2.0 * math.log(self._width) / self.delta)
        return math.sqrt(2.0 / harmonic * max(self.variance, 0.0) * log) + 2.0 / (3.0 * harmonic) * log

    def _drop_oldest(self) -> None:
        while not self._rows[-1].totals:
            self._rows.pop()
        at = len(self._rows) - 1
        size = 2**at
        total, spread = self._rows[at].totals.pop(0), self._rows[at].spreads.pop(0)
        rest = self._width - size
        gap = total / size - (self._total - total) / rest
        self._spread = max(0.0, self._spread - spread - gap**2 * size * rest / self._width)
        self._width = rest
        self._total -= total
