"""Parameters of the telemetry room."""

from datetime import timedelta
from typing import Literal

from pydantic import field_validator

from foundation.durations import Duration
from foundation.settings import Section


class RetentionSection(Section):
    """``telemetry.retention``: how long what was collected is kept; events, inventory and jobs always are."""

    raw: Duration = timedelta(days=3)
    """Landed files stay this long after they were compacted, to look at; 0s: not at all."""

    samples: Duration | None = None
    """Samples of the dataset older than this go at a compaction; null: never."""


class TelemetrySection(Section):
    """``telemetry``: how samples are stored."""

    step: Duration | None = None
    """Nominal sample interval of a dataset, aligned to 00:00 UTC; finer sources are rolled up to it.

    null: the dataset's; of a new one the interval of its samples, 10m at least."""

    retention: RetentionSection = RetentionSection()
    """What is kept how long, by `predrain collect compact`."""


class ChannelDeclaration(Section):
    """``channels.NAME``: a channel that the catalogue does not know, or an override of one it does."""

    kind: Literal["gauge", "counter", "flags", "enum"]
    """How the series behaves; a counter may reset, flags is a bitmask, enum an integer code."""

    unit: str = ""
    """Unit in words, shown in reports (``C``, ``W``, ``count``)."""

    range: tuple[float | None, float | None] = (None, None)
    """Inclusive valid range; a value outside it is quarantined. ``null`` leaves that side open."""

    @field_validator("range")
    @classmethod
    def _ordered(cls, value: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
        low, high = value
        if low is not None and high is not None and low >= high:
            raise ValueError(f"range {list(value)} is empty: the first number must be below the second")
        return value


class EventsSection(Section):
    """``events``: how events from several sources become one list."""

    dedupe: Duration = timedelta(seconds=60)
    """The same (gpu, code) from several sources within this span is one event; the first known is kept."""
