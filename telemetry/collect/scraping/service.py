"""A scraping collector as a process: its signals, its own ``/metrics`` and what it reports at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foundation.running import stop_loop_on_signals
from telemetry.collect.exposure import exposing
from telemetry.collect.scraping.collector import SCRAPES, Collector

if TYPE_CHECKING:
    from prometheus_client.core import Metric


async def run_collector(collector: Collector[Any], *, listen: str | None = None, once: bool = False) -> None:
    """Collect until SIGTERM or SIGINT, or one round.

    Raises InputError as :meth:`Collector.run` and :meth:`Collector.once` do, or if ``listen`` cannot be used.
    """
    stop = stop_loop_on_signals()
    async with exposing(
        listen, lambda: collector.accounting, problem=lambda: collector.problem, more=lambda: _metrics(collector)
    ):
        await (collector.once() if once else collector.run(stop))


def summary(collector: Collector[Any]) -> dict[str, Any]:
    """Return what a collector did, in JSON types; the rest is in its accounting."""
    scrapes, samples, events = (collector.accounting.tables[name] for name in (SCRAPES, "samples", "events"))
    return {
        "targets": len(collector.watches),
        "scrapes": scrapes.read,
        "scrapes_succeeded": scrapes.used,
        "scrapes_failed": scrapes.left_out.total(),
        "scrapes_late": collector.late,
        "rows_written": samples.used,
        "events_written": events.used,
    }


def _metrics(collector: Collector[Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    watches = list(collector.watches.values())
    yield GaugeMetricFamily("predrain_exporters_targets_owned", "Targets that this process scrapes.", len(watches))
    states = GaugeMetricFamily("predrain_exporters_targets", "Targets by state.", labels=["state"])
    counts = Counter("failing" if watch.is_failing else "good" for watch in watches)
    for name in ("failing", "good"):
        states.add_metric([name], counts[name])
    yield states
