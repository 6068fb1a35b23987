"""The samples of one span of time, gathered metric by metric until they become rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.prometheus.answer import Matrix
from telemetry.collect.prometheus.progress import Span
from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount
from telemetry.collect.series.rows import assemble, observed_spans

_Gathered = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64]]


class SpanTooLarge(Exception):
    """The span holds more samples than may be held at once."""

    def __init__(self, samples: int) -> None:
        super().__init__(f"more than {samples} samples")
        self.samples = samples


@dataclass(slots=True)
class SpanSamples:
    """Gathers what answers hold of a span.

    ``max_samples``: bound on what is held, in samples; None for none.
    ``unknown``: metrics of which a series names no GPU or no node, and the label names of one such series.
    """

    catalogue: SeriesCatalogue
    max_samples: int | None
    unknown: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    series: list[Series] = field(default_factory=list)
    _counts: list[XidCount] = field(default_factory=list)
    _numbers: dict[Series, int] = field(default_factory=dict)
    _count_numbers: dict[XidCount, int] = field(default_factory=dict)
    _parts: list[_Gathered] = field(default_factory=list)
    _count_parts: list[_Gathered] = field(default_factory=list)

    def take(self, matrix: Matrix, window: Span) -> None:
        """Take an answer's samples within the window: after its lower bound and up to its upper."""
        # A stale marker is no sample; servers leave it out of range selectors, but not all exports do.
        inside = (matrix.ms > window.after_ms) & (matrix.ms <= window.until_ms) & ~np.isnan(matrix.values)
        places = np.full(len(matrix.labels), -1, np.int32)
        is_count = np.zeros(len(matrix.labels), np.bool_)
        for number, labels in enumerate(matrix.labels):
            name = labels.get("__name__", "")
            known = self.catalogue.identify(name, labels)
            if known is None:
                self.unknown.setdefault(name, ", ".join(sorted(set(labels) - {"__name__"})))
            elif isinstance(known, XidCount):
                is_count[number] = True
                places[number] = self._count_numbers.setdefault(known, len(self._counts))
                if places[number] == len(self._counts):
                    self._counts.append(known)
            else:
                places[number] = self._numbers.setdefault(known, len(self.series))
                if places[number] == len(self.series):
                    self.series.append(known)
        index = places[matrix.index]
        counted = is_count[matrix.index]
        for chosen, parts in ((inside & ~counted & (index >= 0), self._parts), (inside & counted, self._count_parts)):
            if chosen.all():
                parts.append((index, matrix.ms, matrix.values))
            elif chosen.any():
                parts.append((index[chosen], matrix.ms[chosen], matrix.values[chosen]))
            self.samples += int(chosen.sum())
        if self.max_samples is not None and self.samples > self.max_samples:
            raise SpanTooLarge(self.samples)

    def rows(self, problems: dict[str, int]) -> pa.Table:
        """Return the rows of the span, in the layout of landed samples, sorted by (gpu, timestamp)."""
        index, ms, values = _joined(self._parts)
        return assemble(self.series, index, ms, values, problems=problems)

    def sightings(self) -> pa.Table:
        """Return which GPU was seen where, first and last, with what its labels tell."""
        index, ms, _ = _joined(self._parts)
        return observed_spans(self.series, index, ms)

    def counts(self) -> tuple[list[XidCount], _Gathered]:
        """Return the XID counts."""
        return self._counts, _joined(self._count_parts)

    def watched(self) -> Mapping[str, tuple[int, int]]:
        """Return when each GPU was first and last seen in the span, ms."""
        index, ms, _ = _joined(self._parts)
        first = np.full(len(self.series), np.iinfo(np.int64).max)
        last = np.full(len(self.series), np.iinfo(np.int64).min)
        np.minimum.at(first, index, ms)
        np.maximum.at(last, index, ms)
        made: dict[str, tuple[int, int]] = {}
        for number in np.flatnonzero(first <= last).tolist():
            gpu = self.series[number].gpu
            low, high = made.get(gpu, (int(first[number]), int(last[number])))
            made[gpu] = (min(low, int(first[number])), max(high, int(last[number])))
        return made


def _joined(parts: list[_Gathered]) -> _Gathered:
    if not parts:
        return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0)
    if len(parts) > 1:
        parts[:] = [
            (
                np.concatenate([part[0] for part in parts]),
                np.concatenate([part[1] for part in parts]),
                np.concatenate([part[2] for part in parts]),
            )
        ]
    return parts[0]
