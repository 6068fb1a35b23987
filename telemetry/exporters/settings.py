"""How live scraping is paced and bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from telemetry.errors import InputError

NodeFrom = Literal["auto", "page", "target"]
"""Where a row's node comes from: ``auto`` is the target's node where it is known, else the page's labels, else the
host of the URL; ``page`` puts the labels first; ``target`` never looks at them."""


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """Pace and bounds of a collector.

    ``interval_s``: seconds between two scrapes of a target. 30: dcgm-exporter itself reads its GPUs every 30 s by
    default.
    ``timeout_s``: seconds for one scrape as a whole, from connecting to the last byte.
    ``concurrency``: scrapes under way at once.
    ``max_body_bytes``: a page larger than this (unpacked) is refused. A page of 8 GPUs has about 60 kB.
    ``max_in_flight_bytes``: bytes of all pages under way together; past it, pages of over 1 MiB are refused.
    ``land_every_s``: seconds between two landings; what a killed collector loses at most. None: the interval.
    ``land_rows``: rows that are landed without waiting for that.
    ``max_held_rows``: rows held while nothing can be landed (full disk); past it the oldest are dropped, counted.
    """

    interval_s: float = 30.0
    timeout_s: float = 10.0
    concurrency: int = 512
    max_body_bytes: int = 8 << 20
    max_lines: int = 50_000
    max_in_flight_bytes: int = 128 << 20
    land_every_s: float | None = None
    land_rows: int = 50_000
    max_held_rows: int = 600_000
    hung_intervals: float = 5.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise InputError(f"{value:g} s cannot be used", f"--{name[:-2]}", "Give a time between 1s and 1d.")
        if self.timeout_s > self.interval_s:
            raise InputError(
                f"a timeout of {self.timeout_s:g} s is longer than the interval of {self.interval_s:g} s",
                "--timeout",
                "Give a timeout of at most the interval: two scrapes of one target never overlap.",
            )
        if not 0 < self.concurrency <= 10_000:
            raise InputError(f"{self.concurrency} cannot be used", "--concurrency", "Give a number from 1 to 10000.")

    @property
    def landing_interval_s(self) -> float:
        """Seconds between two landings."""
        return self.interval_s if self.land_every_s is None else self.land_every_s
