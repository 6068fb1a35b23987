"""Identity of a Prometheus series: its channel, GPU and node, from the metric name and the labels.

Workload labels (``pod``, ``namespace``, ``container``, ``job``) are not part of the identity: Prometheus series that
differ only in them are one series here. With ``honor_labels: false``, Prometheus renames an exporter's label to
``exported_NAME`` if it conflicts with a target label, so ``exported_NAME`` is tried first.
:class:`telemetry.identity.node_labels.NodeLabels` chooses the label that names the node.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from foundation.errors import InputError
from foundation.files import write_bytes
from foundation.text import nearest_hint
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel, Kind, by_source_name, channel_as_dict, is_unused, with_rollups
from telemetry.identity.devices import is_placeholder, normalise_pci_bus_id, place_identity
from telemetry.identity.node_labels import NodeLabelChoice, NodeLabels, label_value
from telemetry.values.names import EXACT_NAMES
from telemetry.values.numbers import conversion

XID_COUNT_METRICS: Final = frozenset({"DCGM_EXP_XID_ERRORS_COUNT", "nvidia_smi_xid_errors_total"})
"""Counts of XIDs by label ``xid``: of dcgm-exporter, within a sliding window, and of nvidia_gpu_exporter."""

NODE_LABEL_STATE: Final = "node-label.json"
"""State file with the label that names the node, shared by a dataset's collectors."""

_INVENTORY: Final = (
    *("slot", "pci_bus_id", "serial", "model", "driver"),
    *("cluster", "group", "rack", "nvlink_domain"),
)
_log = logging.getLogger(__name__)
_Device = tuple[str, str, str | None, tuple[tuple[str, str], ...]]
_DEVICES_KEPT: Final = 20_000  # about 1 kB each
_LINKS: Final = 18  # NVLink 4 and 5: 18 links per GPU, the most so far
_RANK_STEP: Final = 1000
_OTHER_EXPORTERS: Final = 20  # above the ranks of a channel's DCGM and AMD names
_OTHER_METRIC: Final = re.compile(r"(?:nvidia|gpu|GPU|all_smi|dcgm)_\w+")


class Series(NamedTuple):
    """Identity of a series.

    ``mig_instance``: MIG instance or AMD partition; None for the whole GPU. ``part``: NVLink link; parts are summed
    unless there is a total. ``scale``: factor to the channel's unit. ``inventory``: pairs of staged inventory field and
    label value. ``rank``: priority among the metrics of a channel; the lowest rank with a value is used.
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


class XidCount(NamedTuple):
    """Identity of a series of :data:`XID_COUNT_METRICS`, which counts one XID of a GPU."""

    gpu: str
    node: str
    xid: int
    mig_instance: str | None = None
    metric: str = "DCGM_EXP_XID_ERRORS_COUNT"


class _Metric(NamedTuple):
    channel: str
    kind: Kind
    scale: float
    rank: int
    part: str | None = None


class SeriesCatalogue:
    """Identifies series by metric name and labels; thread-safe.

    ``default_node``: node of series without a node label, for a page scraped from a known node.
    ``first_node``, ``last_node``: a collector's node labels that take precedence over the series' own, or are the
    fallback for them.
    Raises ``InputError`` if the mapping names a channel that does not exist.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        mapping: SourceMapping | None = None,
        *,
        default_node: str | None = None,
        first_node: Sequence[str] = (),
        last_node: Sequence[str] = (),
    ) -> None:
        self.channels = channels
        self._mapping = mapping = mapping or SourceMapping()
        self.nodes = NodeLabels(
            mapping.labels.get("node"),
            trusted=first_node,
            fallback=last_node,
            default=default_node,
        )
        self._labels = {
            field: tuple(label for name in mapping.label_names(field) for label in (f"exported_{name}", name))
            for field in ("gpu", "mig_instance", *_INVENTORY)
        }
        mapped = (label for labels in self._labels.values() for label in labels)
        self._device_labels = {*self.nodes.labels, *mapped}
        self._deciding = self._device_labels | {"nvlink", "link", "clock_type", "clock_index", "xid"}
        self._devices: dict[tuple[tuple[str, str], ...], _Device | None] = {}
        self._revision = self.nodes.revision
        self._metrics = _metrics(channels, mapping)
        self._state: Path | None = None
        self._reported = ""
        self.by_place: dict[str, str] = {}
        """GPUs identified by node and PCI address or slot instead of UUID or serial number, and their placeholders."""
        self.targets: defaultdict[str, set[str]] = defaultdict(set)
        """The targets (label ``instance``) of the values that were read last, by GPU."""

    def remember(self, path: Path) -> None:
        """Load the saved choice of node label from ``path`` and save later choices there, so that runs agree."""
        self._state = path
        try:
            self.nodes.prefer(json.loads(path.read_bytes())["label"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s: cannot read which label names the node, determining it again: %s", path, error)

    def report_nodes(self) -> NodeLabelChoice:
        """Return the choice of node label after a batch; a changed choice is logged and saved."""
        decision = self.nodes.decision()
        chosen = f"{decision.label} {decision.doubt} {dict(decision.rejected)}"
        if chosen != self._reported and (decision.label or decision.rejected):
            uncertain = decision.doubt or (decision.label is None and not self.nodes.has_other)
            _log.log(logging.WARNING if uncertain else logging.INFO, "node = %s", decision)
            if self._state is not None and decision.label is not None:
                write_bytes(self._state, json.dumps({"label": decision.label}).encode())
            self._reported = chosen
        return decision

    def deciding(self, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Return the labels that are part of the identity, sorted."""
        return tuple(sorted(item for item in labels.items() if item[0] in self._deciding))

    def placed(self) -> str:
        """Return a summary of the GPUs that are identified by their place because their UUID is a placeholder."""
        if not self.by_place:
            return "none"
        gpu, placeholder = next(iter(self.by_place.items()))
        return f"{len(self.by_place):,}, such as {gpu} (its UUID is {placeholder!r})"

    def observe(self, series: Iterable[Mapping[str, str]]) -> None:
        """Use the labels of a batch as evidence for the choice of node label; call before :meth:`identify`."""
        for labels in series:
            key = self._device_key(labels)
            if key in self._devices:
                continue
            if len(self._devices) >= _DEVICES_KEPT:
                self._devices.clear()
            self._devices[key] = None
            gpu, placeholder = self._gpu(labels)
            if gpu is not None or placeholder is not None:
                address = self._first("pci_bus_id", labels)
                place = self._first("slot", labels) if address is None else normalise_pci_bus_id(address)
                self.nodes.observe(labels, gpu, place)

    def _gpu(self, labels: Mapping[str, str]) -> tuple[str | None, str | None]:
        """Return the GPU's identifier and None, or None and the placeholder found instead of a UUID."""
        placeholder = None
        for field in ("gpu", "serial"):
            for name in self._labels[field]:
                value = labels.get(name)
                if value is None:
                    continue
                if not is_placeholder(value):
                    if field == "gpu" or placeholder is not None:
                        return value.strip(), None
                elif field == "gpu":
                    placeholder = value.strip() or "empty"
        return None, placeholder

    def rules(self) -> bytes:
        """Return the mapping and channels as canonical JSON, for fingerprints."""
        channels = [channel_as_dict(channel) for channel in self.channels.values()]
        rules = {"mapping": self._mapping.model_dump(mode="json"), "channels": channels}
        return json.dumps(rules, sort_keys=True).encode()

    def metric_names(self) -> dict[str, str]:
        """Return the channel of each known metric name, without :data:`XID_COUNT_METRICS`."""
        return {name: metric.channel for name, metric in self._metrics.items()}

    def identify(self, name: str, labels: Mapping[str, str]) -> Series | XidCount | None:
        """Return the identity of a series; None if the metric is no channel or the labels lack a GPU or a node.

        Only labels given to :meth:`observe` before are evidence for the choice of node label.
        """
        if name in XID_COUNT_METRICS:
            return self._xid_count(name, labels)
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

    def left_out_reason(self, name: str) -> str:
        """Return why :meth:`identify` returned None for a series of this metric."""
        if name in self._metrics or name in XID_COUNT_METRICS:
            return f"{name}: its labels do not name a GPU and a node"
        return f"{name}: {'known, and not used' if is_unused(name) else 'no channel'}"

    def _xid_count(self, name: str, labels: Mapping[str, str]) -> XidCount | None:
        device = self._device(labels)
        text = labels.get("xid", "")
        if device is None or not (text.isascii() and text.isdigit() and len(text) < 7):
            return None
        gpu, node, instance, _ = device
        return XidCount(gpu, node, int(text), instance, name)

    def _device(self, labels: Mapping[str, str]) -> _Device | None:
        """Return GPU, node, MIG instance and inventory, which all series of a GPU share; cached."""
        if self._revision != self.nodes.revision:
            self._revision = self.nodes.revision
            self._devices.clear()
        key = self._device_key(labels)
        known = self._devices.get(key)
        if known is None:
            known = self._devices[key] = self._read_device(labels)
        return known

    def _device_key(self, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        deciding = self._device_labels
        return tuple([item for item in labels.items() if item[0] in deciding])

    def _read_device(self, labels: Mapping[str, str]) -> _Device | None:
        gpu, placeholder = self._gpu(labels)
        if gpu is None and placeholder is None:
            return None
        node = self.nodes.node_of(labels, gpu)
        if not node:
            return None
        instance = self._first("mig_instance", labels)
        if instance == "0" and labels.get("GPU_I_ID") is None and labels.get("exported_GPU_I_ID") is None:
            # AMD numbers partitions from 0, and reports 0 for unpartitioned GPUs too.
            instance = None
        inventory = {}
        for field in _INVENTORY:
            value = self._first(field, labels)
            if value is not None and field == "pci_bus_id":
                value = normalise_pci_bus_id(value)
            if value is not None and not (field == "serial" and is_placeholder(value)):
                inventory[field] = value
        if gpu is None:
            gpu = place_identity(node, pci_bus_id=inventory.get("pci_bus_id"), slot=inventory.get("slot"))
            if gpu is None:
                return None
            self.by_place[gpu] = str(placeholder)
        return gpu, node, instance, tuple(inventory.items())

    def _first(self, field: str, labels: Mapping[str, str]) -> str | None:
        values = (label_value(labels, name) for name in self._labels[field])
        is_slot = field == "slot"  # in all-smi, the label `gpu` is the name of the product
        return next((value for value in values if value is not None and not (is_slot and " " in value)), None)


def _metrics(channels: Mapping[str, Channel], mapping: SourceMapping) -> dict[str, _Metric]:
    # Recording rules may export roll-ups (`power_w_max`) under channel names.
    all_channels = with_rollups(channels)
    sources = by_source_name(all_channels)
    scale = {_channel_of(name, sources, "scale"): factor for name, factor in mapping.scale.items()}
    metrics: dict[str, _Metric] = {}

    def add(metric: str, channel: Channel, rank: int, part: str | None = None, factor: float = 1.0) -> None:
        scaled = scale.get(channel.name, 1.0) * factor
        metrics.setdefault(metric, _Metric(channel.name, channel.kind, scaled, rank * _RANK_STEP, part))

    for metric, target in mapping.metrics.items():
        add(metric, all_channels[_channel_of(target, sources, f"metrics.{metric}")], 0)
    # A channel's explicit names take precedence over names derived for another channel.
    for channel in all_channels.values():
        add(channel.name, channel, 0)
        for rank, metric in enumerate((*channel.dcgm_names, *channel.amd), start=1):
            add(metric, channel, rank)
    for channel in channels.values():
        for rank, metric in enumerate(channel.amd, start=1 + len(channel.dcgm_names)):
            add(metric.lower(), channel, rank)
            add(f"amd_{metric.lower()}", channel, rank)
        if channel.kind == "counter":  # OpenMetrics counters end in _total
            for rank, metric in enumerate((channel.name, *channel.dcgm_names)):
                if not metric.endswith("_total"):
                    add(f"{metric}_total", channel, rank)
        for rank, metric in enumerate(channel.dcgm_names, start=1):
            if metric.startswith("DCGM_FI_DEV_NVLINK_") and metric.endswith("_TOTAL"):
                for link in range(_LINKS):
                    add(f"{metric.removesuffix('_TOTAL')}_L{link}", channel, rank, str(link))
    others = [row for row in EXACT_NAMES.values() if row.target in channels and _OTHER_METRIC.fullmatch(row.name)]
    for rank, row in enumerate(others, start=_OTHER_EXPORTERS):
        channel = channels[row.target]
        converted = conversion(row.unit or channel.unit, channel.unit)
        add(row.name, channel, rank, factor=1.0 if converted is None else converted.scale)
    return metrics


def _channel_of(name: str, sources: Mapping[str, str], location: str) -> str:
    if name not in sources:
        hint = nearest_hint(name, list(sources))
        raise InputError(
            f"the mapping names a channel {name!r} that does not exist",
            f"mapping, {location}",
            f"{hint} A channel of your own must be declared in params `channels:`.".strip(),
        )
    return sources[name]


def _amd_clock(metric: _Metric, labels: Mapping[str, str], channels: Mapping[str, Channel]) -> _Metric | None:
    """Resolve AMD's single clock metric by ``clock_type`` (which clock) and ``clock_index`` (which engine).

    Of the engines' clocks, the one with the lowest index represents the GPU.
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
