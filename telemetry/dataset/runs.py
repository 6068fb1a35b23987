"""Runs: the stretches of time that a bucket's samples are cut into, so that what is new leaves what is old alone."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import numpy.typing as npt

RUN_ROWS: Final = 1 << 17
"""Rows that a run of a bucket should hold at least: below, opening a file costs as much as reading it."""

MOST_RUN_DAYS: Final = 64
"""A dataset whose runs would have to be longer is small: it stays one run."""

DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Runs:
    """How a dataset's time is cut.

    ``days``: length of a run in days of UTC, a power of two; run 0 begins on 1970-01-01. None: all time is run 0.
    Raises ``ValueError`` if ``days`` is no power of two.
    """

    days: int | None = None

    def __post_init__(self) -> None:
        if self.days is not None and (self.days < 1 or self.days & (self.days - 1)):
            raise ValueError(f"runs of {self.days} days: their length must be a power of two")

    @property
    def groups(self) -> "Runs":
        """How a run's file is cut into row groups: quarters of a run, of a day at least; not where time is one run."""
        return Runs(None if self.days is None else max(1, self.days // 4))

    def of(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the run of each instant, given in milliseconds since 1970."""
        return np.zeros(len(ms), np.int64) if self.days is None else ms // (self.days * DAY_MS)

    def begin_ms(self, run: int) -> int:
        """Return where a run begins, in milliseconds since 1970; only where time is cut."""
        assert self.days is not None
        return run * self.days * DAY_MS

    def span(self, run: int) -> tuple[datetime, datetime] | None:
        """Return where a run begins and where the next one does, aware; None where all time is one run."""
        if self.days is None:
            return None
        begin, end = (_EPOCH + timedelta(milliseconds=self.begin_ms(number)) for number in (run, run + 1))
        return begin, end

    def begin_of(self, instant: datetime) -> datetime | None:
        """Return where the run of an instant begins, both aware; None where all time is one run."""
        span = None if self.days is None else self.span((instant - _EPOCH) // timedelta(days=self.days))
        return None if span is None else span[0]

    def overlaps(self, run: int, since_ms: int | None, until_ms: int | None) -> bool:
        """Whether a run may hold an instant of ``since_ms <= t < until_ms``; None leaves a side open."""
        if self.days is None:
            return True
        return (since_ms is None or self.begin_ms(run + 1) > since_ms) and (
            until_ms is None or self.begin_ms(run) < until_ms
        )

    def file_name(self, run: int) -> str:
        """Name the file of a run: by its first day, or ``part-00000.parquet`` where all time is one run."""
        span = self.span(run)
        return "part-00000.parquet" if span is None else f"part-{span[0]:%Y%m%d}.parquet"

    def of_file(self, name: str) -> int:
        """Return the run of a file that :meth:`file_name` named."""
        if self.days is None:
            return 0
        first = datetime.strptime(name, "part-%Y%m%d.parquet").replace(tzinfo=UTC)
        run, rest = divmod((first - _EPOCH).days, self.days)
        if rest:
            raise ValueError(f"{name} begins no run of {self.days} days")
        return run


def choose_runs(rows_a_day: float, days: float | None = None) -> Runs:
    """Return the shortest runs with :data:`RUN_ROWS` rows in a bucket that gets so many a day.

    ``days``: how long the dataset is, where it is known never to grow.
    One run where they would exceed :data:`MOST_RUN_DAYS`, or a dataset that does not grow would have fewer than two.
    """
    length = 1
    while length <= MOST_RUN_DAYS and length * rows_a_day < RUN_ROWS:
        length *= 2
    if length > MOST_RUN_DAYS or (days is not None and days < 2 * length):
        return Runs(None)
    return Runs(length)


def since_in_ms(instant: datetime | None) -> int | None:
    """Return the first millisecond that is not before an aware instant."""
    if instant is None:
        return None
    if instant.tzinfo is None:
        raise ValueError(f"{instant} is naive; give aware UTC")
    return -((_EPOCH - instant) // timedelta(milliseconds=1))
