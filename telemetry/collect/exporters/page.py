"""One exporter's pages as rows of samples, observations of GPUs, and counts of XIDs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from telemetry.collect.exporters.targets import Target
from telemetry.collect.series.exposition import PageParser, is_openmetrics, parse_line
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.rows import assemble, observed_at
from telemetry.collect.series.unused import unused_reason
from telemetry.dataset.channel import Channel

NO_DEVICE: Final = "series of a channel without a GPU or a node in its labels"
MAX_LINES: Final = 50_000

NodeFrom = Literal["auto", "page", "target"]
"""Where a row's node comes from: ``auto`` is the target's node where it is known, else the page's labels, else the
host of the URL; ``page`` puts the labels first; ``target`` never looks at them."""

_TARGET_NODE: Final = "predrain_target_node"
_TARGET_HOST: Final = "predrain_target_host"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNEXPLAINED_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class PageRows:
    """What a page holds.

    ``samples``: rows of landed samples, one for each GPU and MIG instance, sorted by (gpu, timestamp).
    ``inventory``: rows of ``LANDED_INVENTORY``, one for each (gpu, node).
    ``xid_counts``: (gpu, node, xid, count) within the exporter's window.
    ``channels_per_gpu``: channels that have a value; MIG instances count with their GPU.
    ``same_as_before``: whether each value of the devices' series equals that of the page before: the exporter has not
    measured since. ``problems``: lines and values that could not be used, by reason.
    ``unexplained``: metrics that are neither a channel nor known and unused; at most 100.
    """

    samples: pa.Table
    inventory: pa.Table
    xid_counts: list[tuple[str, str, int, float]]
    channels_per_gpu: dict[str, int]
    same_as_before: bool
    complete: bool
    problems: dict[str, int]
    unexplained: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Unused:
    """A series that is not read: of an unknown metric, or of a channel without a device."""

    metric: str | None
    nameless: bool = False


def fleet_catalogue(channels: Mapping[str, Channel], mapping: SourceMapping) -> SeriesCatalogue:
    """Return the catalogue that all targets of a collector share; raises InputError for an unknown channel."""
    names = [_TARGET_NODE, *mapping.label_names("node"), _TARGET_HOST]
    return SeriesCatalogue(channels, mapping.model_copy(update={"labels": {**mapping.labels, "node": names}}))


def target_labels(target: Target, node_from: NodeFrom) -> dict[str, str]:
    """Return the labels that tell the node of a target's series, for :func:`fleet_catalogue`."""
    labels = {_TARGET_HOST: target.fallback_node}
    if node_from == "target" or (node_from == "auto" and target.node is not None):
        labels[_TARGET_NODE] = target.fallback_node
    return labels


class PageReader:
    """Reads the pages of one target; ``catalogue`` may be shared by all, ``labels`` are added to each series."""

    def __init__(self, catalogue: SeriesCatalogue, labels: dict[str, str] | None = None) -> None:
        self._catalogue = catalogue
        self._labels = labels or {}
        self._metrics = {*catalogue.metric_names(), XID_COUNT_METRIC}
        self._parser: PageParser[Series | XidCount | _Unused] = PageParser(self._identify)
        self._before: list[tuple[Series | XidCount, float | None, int | None]] = []

    def read(self, body: bytes, at_ms: int, *, openmetrics: bool | None = None, whole: bool = True) -> PageRows:
        """Read a page fetched at ``at_ms``, the time of all lines without a time stamp; faults are counted.

        ``openmetrics``: as the Content-Type says; None: by its last line.
        ``whole``: whether the transport delivered the body to its end.
        """
        text = body.decode("utf-8", "replace").replace("\r\n", "\n")
        ended = is_openmetrics(text)
        openmetrics = ended if openmetrics is None else openmetrics
        problems: Counter[str] = Counter()
        unexplained: dict[str, None] = {}
        found: list[tuple[Series | XidCount, float, int | None]] = []
        for identity, value, stamp_ms in self._parser.read(
            text, openmetrics=openmetrics, max_lines=MAX_LINES, problems=problems
        ):
            if not isinstance(identity, _Unused):
                found.append((identity, value, stamp_ms))
            elif identity.nameless:
                problems[NO_DEVICE] += 1
            elif identity.metric is not None and len(unexplained) < _UNEXPLAINED_KEPT:
                unexplained[identity.metric] = None
        # NaN equals nothing, itself included.
        reading = [(identity, None if math.isnan(value) else value, stamp) for identity, value, stamp in found]
        same = bool(reading) and reading == self._before
        self._before = reading
        series = [(identity, value, stamp) for identity, value, stamp in found if isinstance(identity, Series)]
        stamps = np.array([at_ms if stamp is None else stamp for _, _, stamp in series], np.int64)
        values = np.array([value for _, value, _ in series], np.float64)
        identities = [identity for identity, _, _ in series]
        samples = assemble(identities, np.arange(len(series), dtype=np.int32), stamps, values, problems=problems)
        return PageRows(
            samples,
            observed_at(identities, _EPOCH + timedelta(milliseconds=at_ms)),
            [(each.gpu, each.node, each.xid, value) for each, value, _ in found if isinstance(each, XidCount)],
            _channels_per_gpu(samples),
            same,
            whole and (ended if openmetrics else _ends_whole(text)),
            dict(problems),
            tuple(unexplained),
        )

    def _identify(self, name: str, labels: dict[str, str]) -> Series | XidCount | _Unused:
        identity = self._catalogue.identify(name, {**labels, **self._labels})
        if identity is not None:
            return identity
        if unused_reason(name) is not None:
            return _Unused(None)
        if name in self._metrics:
            # Of AMD's one metric for all clocks, some are no channel of ours.
            return _Unused(None, nameless="clock_type" not in labels)
        return _Unused(name)


def _ends_whole(text: str) -> bool:
    """Whether a page of format 0.0.4 ends with a line: the last may lack its line end, but not a part of its number."""
    try:
        parse_line(text.rpartition("\n")[2])
    except ValueError:
        return False
    return True


def _channels_per_gpu(samples: pa.Table) -> dict[str, int]:
    keys = {"timestamp", "node", "gpu", "mig_instance"}
    channels: dict[str, set[str]] = {}
    gpus = samples.column("gpu").to_pylist()
    for name in samples.column_names:
        if name not in keys:
            for gpu, is_valid in zip(gpus, samples.column(name).is_valid().to_pylist(), strict=True):
                if is_valid:
                    channels.setdefault(gpu, set()).add(name)
    return {gpu: len(names) for gpu, names in channels.items()}
