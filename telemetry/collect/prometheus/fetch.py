"""Which of a server's metrics are ours, and fetching one over a span, in pieces as small as the server asks for.

The samples of a span are gathered metric by metric until they become rows. PromQL is written here, too.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.collect.prometheus.answer import Matrix
from telemetry.collect.prometheus.client import PrometheusClient, TooMuch
from telemetry.collect.prometheus.progress import Pieces, Span
from telemetry.collect.series.batch import Tables, read_batch
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.unused import is_unused
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.errors import InputError

_LABEL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SPECIAL: Final = re.compile(r"([\\.+*?()|\[\]{}^$])")


class SpanTooLarge(Exception):
    """The span holds more samples than may be held at once."""


class SpanSamples:
    """Gathers what answers hold of a span, up to ``max_samples`` (None: without a bound).

    ``unknown`` takes metrics of which a series names no GPU or no node, and the label names of one such series.
    """

    def __init__(self, catalogue: SeriesCatalogue, max_samples: int | None, unknown: dict[str, str]) -> None:
        self._catalogue = catalogue
        self._max_samples = max_samples
        self.unknown = unknown
        self.samples = 0
        self._numbers: dict[Series | XidCount, int] = {}
        self._parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64]]] = []

    @property
    def has_series(self) -> bool:
        """Whether a series names a GPU and its node."""
        return any(isinstance(series, Series) for series in self._numbers)

    def take(self, matrix: Matrix, window: Span) -> None:
        """Take an answer's samples within the window: after its lower bound and up to its upper."""
        places = np.full(len(matrix.labels), -1, np.int32)
        for number, labels in enumerate(matrix.labels):
            name = labels.get("__name__", "")
            known = self._catalogue.identify(name, labels)
            if known is None:
                self.unknown.setdefault(name, ", ".join(sorted(set(labels) - {"__name__"})))
            else:
                places[number] = self._numbers.setdefault(known, len(self._numbers))
        index = places[matrix.index]
        # A stale marker is no sample; servers leave it out of range selectors, but not all exports do.
        chosen = (matrix.ms > window.after_ms) & (matrix.ms <= window.until_ms) & ~np.isnan(matrix.values)
        chosen &= index >= 0
        self._parts.append((index[chosen], matrix.ms[chosen], matrix.values[chosen]))
        self.samples += int(chosen.sum())
        if self._max_samples is not None and self.samples > self._max_samples:
            raise SpanTooLarge

    def tables(self, xids: XidCounts, problems: dict[str, int]) -> Tables:
        """Return the tables of the span, which give way to them in memory."""
        parts, self._parts = self._parts, []
        parts.append((np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0)))
        index, ms, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return read_batch(list(self._numbers), index, ms, values, xids=xids, problems=problems)


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
    ours = sorted(known & set(names))
    if not ours or ours == [XID_COUNT_METRIC]:
        raise _nothing_known(names, matchers)
    return ours


def _nothing_known(names: Sequence[str], matchers: str) -> InputError:
    if not names:
        return InputError(
            "the server has no metrics in this time",
            f"--match {{{matchers}}}" if matchers else "--start and --end",
            "Check the time against the server's retention, and --match against its labels.",
        )
    likely = [name for name in names if not is_unused(name)] or list(names)
    # What a GPU exporter or a recording rule over it is called, before the rest in alphabetical order.
    telling = ("gpu", "dcgm", "nvidia", "nvml", "amd", "xid")
    likely.sort(key=lambda name: (not any(word in name.lower() for word in telling), name))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return InputError(
        f"none of the server's {len(names)} metrics is known; there are {', '.join(likely[:_SHOWN])}{more}",
        f"--match {{{matchers}}}" if matchers else "the server's metric names",
        "Say which metric is which channel in a --mapping file, such as `metrics: {my_gpu_temperature: gpu_temp_c}`.",
    )


_log = logging.getLogger(__name__)

LEAST_WINDOW_MS: Final = 60_000
"""No window is made shorter than this: from then on the series are split."""

_PAST_END_MS: Final = 1
# VictoriaMetrics leaves out a block of samples that begins at the very instant a query ends, so the end is put past it.

_LONGEST_PATTERN: Final = 200_000
# Servers take forms of 10 MB; a pattern of this many characters is still compiled in milliseconds.


async def fetch_metric(
    client: PrometheusClient,
    metric: str,
    matchers: str,
    span: Span,
    pieces: Pieces,
    *,
    take: Callable[[Matrix, Span], None],
) -> None:
    """Fetch the raw samples of one metric.

    ``matchers``: the user's, without braces.
    ``pieces``: what is known of the server's limits for this metric; made smaller when it refuses.
    ``take``: given each answer and the window that it is of; samples at the window's lower bound, if any, are to be
    left out.
    Raises ``InputError`` if the server refuses even one minute of one series, or for good.
    """
    waiting = deque((matcher, span.after_ms) for matcher in pieces.matchers)
    while waiting:
        matcher, after_ms = waiting.popleft()
        while after_ms < span.until_ms:
            longest_ms = span.length_ms if pieces.window_ms is None else max(pieces.window_ms, LEAST_WINDOW_MS)
            window = Span(after_ms, min(span.until_ms, after_ms + longest_ms))
            query = f"{selector(metric, (matchers, matcher))}[{window.length_ms + _PAST_END_MS}ms]"
            try:
                matrix = await client.samples(query, window.until_ms + _PAST_END_MS)
            except TooMuch as refusal:
                if window.length_ms > LEAST_WINDOW_MS:
                    pieces.window_ms = max(LEAST_WINDOW_MS, -(-window.length_ms // 2))
                    _log.info("%s: refused, from now on %d s at once", metric, pieces.window_ms // 1000)
                    continue
                parts = await _split(client, metric, (matchers, matcher), window, refusal)
                at = pieces.matchers.index(matcher)
                pieces.matchers[at : at + 1] = parts
                # Fewer series may be had for longer: VictoriaMetrics counts whole blocks, however short the time.
                pieces.window_ms = None
                _log.info("%s: refused, from now on in %d sets of series", metric, len(pieces.matchers))
                waiting.extendleft((part, after_ms) for part in reversed(parts))
                break
            take(matrix, window)
            after_ms = window.until_ms


async def _split(
    client: PrometheusClient, metric: str, matchers: tuple[str, str], window: Span, refusal: TooMuch
) -> list[str]:
    """Return two matchers in place of one: some values of a label, and all but these, so that no series is missed."""
    try:
        listed = await client.series(selector(metric, matchers), window.after_ms, window.until_ms)
    except TooMuch as error:
        refusal, listed = error, []
    values: dict[str, set[str]] = {}
    for name in {name for labels in listed for name in labels if _LABEL.match(name) and name != "__name__"}:
        values[name] = {labels.get(name, "") for labels in listed}
    # The label that tells the series apart best, if its pattern is not too long; else the one with the shortest.
    telling = sorted((name for name in values if len(values[name]) > 1), key=lambda name: (-len(values[name]), name))
    if not telling:
        raise InputError(
            f"the server refuses even one minute of one series: {refusal}",
            f"metric {metric}",
            "Raise its limits (Prometheus: --query.max-samples, --query.timeout), or leave the metric out by --match.",
        ) from refusal
    fitting = [name for name in telling if _pattern_length(values[name]) <= _LONGEST_PATTERN]
    label = fitting[0] if fitting else min(telling, key=lambda name: _pattern_length(values[name]))
    some = sorted(values[label])[: len(values[label]) // 2]
    parts = [one_of(label, some), one_of(label, some, negated=True)]
    return [f"{matchers[1]},{part}" if matchers[1] else part for part in parts]


def _pattern_length(values: set[str]) -> int:
    return sum(map(len, values)) // 2


def check_match(match: str | None) -> str:
    """Return the matchers of ``--match`` without their braces; an empty text where there are none.

    Raises ``InputError`` if the text is not in braces, or holds a metric's name before them.
    """
    if match is None or not match.strip():
        return ""
    text = match.strip()
    if not (text.startswith("{") and text.endswith("}")):
        raise InputError(
            f"{text!r} is not a list of matchers", "--match", 'Write it in braces, such as {job="dcgm-exporter"}.'
        )
    return text[1:-1].strip().rstrip(",").strip()


def selector(metric: str, matchers: Iterable[str] = ()) -> str:
    """Return an instant selector of a metric; any name will do, dots and colons included.

    Examples
    --------
    >>> selector("up", ['job="dcgm"'])
    '{__name__="up",job="dcgm"}'
    """
    parts = [f"__name__={quoted(metric)}", *filter(None, matchers)]
    return "{" + ",".join(parts) + "}"


def quoted(text: str) -> str:
    """Return a PromQL string; its escapes are those of JSON for whatever a label may hold."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def one_of(label: str, values: Iterable[str], *, negated: bool = False) -> str:
    r"""Return the matcher for a label having one of some values, or none of them; an empty value is an absent label.

    Examples
    --------
    >>> one_of("Hostname", ["n1", "n2.x"])
    'Hostname=~"n1|n2\\\\.x"'
    """
    pattern = "|".join(_SPECIAL.sub(r"\\\1", value) for value in values)
    return f"{label}{'!~' if negated else '=~'}{quoted(pattern)}"
