"""The task of all peers: trailing windows of samples at decision times, from Parquet to Parquet."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

STATISTICS = ("mean", "std", "min", "max", "slope")
"""Statistics of each window; the slope is by least squares, per hour."""


@dataclass(frozen=True, slots=True)
class Task:
    """Input and output of the task.

    ``files``: Parquet files with ``timestamp`` (UTC), ``node``, ``gpu`` and the channels.
    ``windows``: the window at decision time t has the samples in (t - delay - window, t - delay].
    ``times``: decision times, aware, evenly spaced.
    ``out``: Parquet file with ``gpu``, ``decision_time`` and columns ``CHANNEL__STATISTIC__HOURSh``.
    """

    files: Sequence[Path]
    channels: Sequence[str]
    windows: Sequence[timedelta]
    times: Sequence[datetime]
    delay: timedelta
    out: Path

    @property
    def every(self) -> timedelta:
        """Time between decisions."""
        return self.times[1] - self.times[0]


def hours(window: timedelta) -> int:
    """Return a window in hours."""
    return round(window / timedelta(hours=1))
