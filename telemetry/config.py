"""Parameters of the telemetry room."""

from datetime import timedelta
from typing import Literal

from pydantic import field_validator

from foundation.durations import Duration, PositiveDuration
from foundation.settings import Section


class RetentionSection(Section):
    """``telemetry.retention``: how long what was collected is kept; events, inventory and jobs always are."""

    raw: Duration = timedelta(days=3)
    """Retention of staged files after compaction; ``0s``: none."""

    samples: Duration | None = None
    """Retention of the samples of a collected dataset, applied at a compaction; ``null``: unlimited."""


class TelemetrySection(Section):
    """``telemetry``: how samples are stored."""

    step: PositiveDuration | None = None
    """Nominal sample interval, aligned to 00:00 UTC; finer sources are rolled up. ``null``: the dataset's; of a new one
    the interval of its samples, at least ``10m``."""

    retention: RetentionSection = RetentionSection()
    """What is kept how long, by `predrain collect compact`."""


class ChannelDeclaration(Section):
    """``channels.NAME``: a channel that the catalogue does not know, or an override of one it does."""

    kind: Literal["gauge", "counter", "flags", "enum"]
    """``gauge``, ``counter`` (may reset), ``flags`` (bitmask) or ``enum``."""

    unit: str = ""
    """Unit, for reports."""

    range: tuple[float | None, float | None] = (None, None)
    """Inclusive valid range; values outside are quarantined. ``null``: unlimited."""

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
    """Events with the same (gpu, code) from several sources within this time are one event."""
