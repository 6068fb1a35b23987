"""Which of a server's metrics are ours."""

from __future__ import annotations

from collections.abc import Sequence

from telemetry.collect.prometheus.client import PrometheusClient, TooMuch
from telemetry.collect.prometheus.spans import Span
from telemetry.collect.series.identity import XID_COUNT_METRIC, SeriesCatalogue
from telemetry.collect.series.unused import unused_reason
from telemetry.errors import InputError

_SHOWN = 12


async def find_metrics(client: PrometheusClient, catalogue: SeriesCatalogue, matchers: str, whole: Span) -> list[str]:
    """Ask which metrics there are, and keep those that hold channels of ours.

    ``matchers``: the user's, without braces.
    Raises ``InputError`` if none is known: the message names some of those that are there.
    """
    try:
        names = await client.metric_names("{" + matchers + "}" if matchers else None, whole.after_ms, whole.until_ms)
    except TooMuch as error:
        raise InputError(
            f"the server does not list its metrics: {error}",
            "--match",
            "Narrow it down, such as --match '{job=\"dcgm\"}'.",
        ) from error
    known = {*catalogue.metric_names(), XID_COUNT_METRIC}
    found = sorted(known & set(names))
    if not found or found == [XID_COUNT_METRIC]:
        raise _nothing_known(names, matchers)
    return found


def _nothing_known(names: Sequence[str], matchers: str) -> InputError:
    if not names:
        return InputError(
            "the server has no metrics in this time",
            f"--match {{{matchers}}}" if matchers else "--start and --end",
            "Check the time against the server's retention, and --match against its labels.",
        )
    likely = [name for name in names if unused_reason(name) is None] or list(names)
    # What a GPU exporter or a recording rule over it is called, before the rest in alphabetical order.
    telling = ("gpu", "dcgm", "nvidia", "nvml", "amd", "xid")
    likely.sort(key=lambda name: (not any(word in name.lower() for word in telling), name))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return InputError(
        f"none of the server's {len(names)} metrics is known; there are {', '.join(likely[:_SHOWN])}{more}",
        f"--match {{{matchers}}}" if matchers else "the server's metric names",
        "Say which metric is which channel in a --mapping file, such as `metrics: {my_gpu_temperature: gpu_temp_c}`.",
    )
