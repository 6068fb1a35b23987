"""A scraping collector as a process: its signals, its own ``/metrics`` and what it reports at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foundation.running import stop_loop_on_signals
from telemetry.collect.exposure import exposing
from telemetry.collect.scraping.collector import SCRAPES, Collector

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def run_collector(
    collector: Collector[Any], name: str, *, listen: str | None = None, once: bool = False
) -> dict[str, Any]:
    """Collect until SIGTERM or SIGINT, or one round; return what was done, in JSON types.

    ``name``: of the source, in the names of metrics.
    Raises InputError as :meth:`Collector.run` and :meth:`Collector.once` do, or if ``listen`` cannot be used.
    """

    async def run() -> None:
        stop = stop_loop_on_signals()
        await (collector.once() if once else collector.run(stop))

    with exposing(
        listen, lambda: collector.accounting, problem=lambda: collector.problem, more=lambda: _metrics(collector, name)
    ):
        asyncio.run(run())
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


def _metrics(collector: Collector[Any], name: str) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    watches = list(collector.watches.values())
    yield GaugeMetricFamily(f"predrain_{name}_targets_owned", "Targets that this process scrapes.", len(watches))
    states = GaugeMetricFamily(f"predrain_{name}_targets", "Targets by state.", labels=["state"])
    counts = Counter("failing" if watch.is_failing else "good" for watch in watches)
    for state in ("failing", "good"):
        states.add_metric([state], counts[state])
    yield states
