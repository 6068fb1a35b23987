"""Which channel of which GPU a Prometheus series is, by its metric name and its labels.

Labels that change while the device stays (``pod``, ``namespace``, ``container``, ``job``, the scrape's ``instance``)
are no part of the identity: two Prometheus series that differ only in them are one series here. Where a label of
the scrape target had the same name as one of the exporter's, Prometheus keeps the exporter's as ``exported_NAME``
(``honor_labels`` off), so that one is tried first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from foundation.errors import InputError
from foundation.text import nearest_hint
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel, Kind, by_source_name, channel_as_dict, with_rollups
from telemetry.identity.pci import normalise_pci_bus_id

XID_COUNT_METRIC: Final = "DCGM_EXP_XID_ERRORS_COUNT"
"""The exporter's own count of XIDs in its last minutes, one series for each XID (label ``xid``)."""

_INVENTORY: Final = (
    *("slot", "pci_bus_id", "serial", "model", "driver"),
    *("cluster", "group", "rack", "nvlink_domain"),
)
_NO_VALUE: Final = frozenset({"", "-", "0x", "n/a", "[n/a]", "na", "none", "null", "unknown", "not supported"})
_PORT: Final = re.compile(r"^(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:]+)):\d{1,5}$")
_ADDRESS: Final = re.compile(r"^(?:\d{1,3}(?:\.\d{1,3}){3}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.%]*\]?)$")
_LINKS: Final = 18  # NVLink 4 and 5 have 18 links a GPU, the most so far
_RANK_STEP: Final = 1000


@dataclass(frozen=True, slots=True)
class Series:
    """One series as we understand it.

    ``mig_instance``: the MIG instance or partition that the value is of; None is the whole GPU. ``part``: NVLink link:
    values of several parts are summed, unless the whole is given too. ``scale``: factor that brings values into the
    channel's unit. ``inventory``: what the labels hold of the device: field of the landed inventory and value.
    ``rank``: of several metrics that may be one channel, the lowest rank that has a value counts.
    """

    channel: str
    kind: Kind
    gpu: str
    node: str
    mig_instance: str | None = None
    part: str | None = None
    scale: float = 1.0
    inventory: tuple[tuple[str, str], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class XidCount:
    """One series of :data:`XID_COUNT_METRIC`: how often a GPU had one XID within the exporter's window."""

    gpu: str
    node: str
    xid: int
    mig_instance: str | None = None


@dataclass(frozen=True, slots=True)
class _Metric:
    channel: str
    kind: Kind
    scale: float
    rank: int
    part: str | None = None


class SeriesCatalogue:
    """Tells what series are; safe to share between threads.

    ``default_node``: node of series whose labels name none, such as those of a page that was fetched from a known node.
    Raises ``InputError`` if the mapping names a channel that does not exist.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        mapping: SourceMapping | None = None,
        *,
        default_node: str | None = None,
    ) -> None:
        self.channels = channels
        self._mapping = mapping = mapping or SourceMapping()
        self._default_node = default_node
        self._labels = {
            what: tuple(label for name in mapping.label_names(what) for label in (f"exported_{name}", name))
            for what in ("node", "gpu", "mig_instance", *_INVENTORY)
        }
        self._metrics = _metrics(channels, mapping)

    def rules(self) -> bytes:
        """Return all that decides what a series is, as text that is the same for the same rules."""
        channels = [channel_as_dict(channel) for channel in self.channels.values()]
        rules = {"mapping": self._mapping.model_dump(mode="json"), "channels": channels}
        return json.dumps(rules, sort_keys=True).encode()

    def metric_names(self) -> dict[str, str]:
        """Return every metric name that may hold a channel, and the channel; not :data:`XID_COUNT_METRIC`."""
        return {name: metric.channel for name, metric in self._metrics.items()}

    def identify(self, name: str, labels: Mapping[str, str]) -> Series | XidCount | None:
        """Return what a series is; None if the metric is no channel, or the labels name no GPU or no node."""
        if name == XID_COUNT_METRIC:
            return self._xid_count(labels)
        metric = self._metrics.get(name)
        if metric is None:
            return None
        device = self._device(labels)
        if device is None:
            return None
        if "clock_type" in labels or "clock_index" in labels:
            clock = _amd_clock(metric, labels, self.channels)
            if clock is None:
                return None
            metric = clock
        part = metric.part or labels.get("nvlink") or labels.get("link") or None
        gpu, node, instance, inventory = device
        return Series(metric.channel, metric.kind, gpu, node, instance, part, metric.scale, inventory, metric.rank)

    def _xid_count(self, labels: Mapping[str, str]) -> XidCount | None:
        device = self._device(labels)
        text = labels.get("xid", "")
        if device is None or not (text.isascii() and text.isdigit() and len(text) < 7):
            return None
        gpu, node, instance, _ = device
        return XidCount(gpu, node, int(text), instance)

    def _device(self, labels: Mapping[str, str]) -> tuple[str, str, str | None, tuple[tuple[str, str], ...]] | None:
        gpu = self._first("gpu", labels)
        named = self._first("node", labels)
        node = self._default_node if named is None else self._node(named)
        if gpu is None or not node:
            return None
        instance = self._first("mig_instance", labels)
        if instance == "0" and labels.get("GPU_I_ID") is None and labels.get("exported_GPU_I_ID") is None:
            # AMD numbers the partitions from 0 and gives 0 to whole GPUs as well.
            instance = None
        inventory = []
        for field in _INVENTORY:
            value = self._first(field, labels)
            if value is not None and field == "pci_bus_id":
                value = normalise_pci_bus_id(value)
            if value is not None:
                inventory.append((field, value))
        return gpu, node, instance, tuple(inventory)

    def _first(self, what: str, labels: Mapping[str, str]) -> str | None:
        for name in self._labels[what]:
            value = labels.get(name)
            if value is not None:
                value = value.strip()
                if value.lower() not in _NO_VALUE:
                    return value
        return None

    def _node(self, value: str) -> str:
        if self._mapping.node.drop_port:
            match = _PORT.match(value)
            if match is not None:
                value = match["v6"] or match["host"]
        if self._mapping.node.drop_domain and not _ADDRESS.match(value):
            value = value.split(".", 1)[0]
        return value


def _metrics(channels: Mapping[str, Channel], mapping: SourceMapping) -> dict[str, _Metric]:
    # Recording rules may give roll-ups (`power_w_max`) under the names of channels.
    every = with_rollups(channels)
    sources = by_source_name(every)
    scale = {_channel_of(name, sources, "scale"): factor for name, factor in mapping.scale.items()}
    metrics: dict[str, _Metric] = {}

    def add(metric: str, channel: Channel, rank: int, part: str | None = None) -> None:
        made = _Metric(channel.name, channel.kind, scale.get(channel.name, 1.0), rank * _RANK_STEP, part)
        metrics.setdefault(metric, made)

    for metric, target in mapping.metrics.items():
        add(metric, every[_channel_of(target, sources, f"metrics.{metric}")], 0)
    # A name written in full by one channel goes before a name that is derived from another's.
    for channel in every.values():
        add(channel.name, channel, 0)
        for rank, metric in enumerate((*channel.dcgm_names, *channel.amd), start=1):
            add(metric, channel, rank)
    for channel in channels.values():
        for rank, metric in enumerate(channel.amd, start=1 + len(channel.dcgm_names)):
            add(metric.lower(), channel, rank)
            add(f"amd_{metric.lower()}", channel, rank)
        if channel.kind == "counter":  # OpenMetrics writers end the name of a counter so
            for rank, metric in enumerate((channel.name, *channel.dcgm_names)):
                if not metric.endswith("_total"):
                    add(f"{metric}_total", channel, rank)
        for rank, metric in enumerate(channel.dcgm_names, start=1):
            if metric.startswith("DCGM_FI_DEV_NVLINK_") and metric.endswith("_TOTAL"):
                for link in range(_LINKS):
                    add(f"{metric.removesuffix('_TOTAL')}_L{link}", channel, rank, str(link))
    return metrics


def _channel_of(name: str, sources: Mapping[str, str], where: str) -> str:
    if name not in sources:
        hint = nearest_hint(name, list(sources))
        raise InputError(
            f"the mapping names a channel {name!r} that does not exist",
            f"mapping, {where}",
            f"{hint} A channel of your own must be declared in params `channels:`.".strip(),
        )
    return sources[name]


def _amd_clock(metric: _Metric, labels: Mapping[str, str], channels: Mapping[str, Channel]) -> _Metric | None:
    """Tell the clocks of AMD's one metric apart: ``clock_type`` says which clock, ``clock_index`` which engine.

    Several engines have a clock each; the one with the lowest index stands for the GPU.
    """
    kind = labels.get("clock_type", "").upper()
    index = labels.get("clock_index", "0")
    rank = metric.rank + (min(int(index), _RANK_STEP - 1) if index.isascii() and index.isdigit() else 0)
    if "MEM" in kind:
        memory = channels.get("mem_clock_mhz")
        return None if memory is None else _Metric(memory.name, memory.kind, metric.scale, rank)
    if kind and "SYS" not in kind and "GFX" not in kind:
        return None
    return _Metric(metric.channel, metric.kind, metric.scale, rank)
