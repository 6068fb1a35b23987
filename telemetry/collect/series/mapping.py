"""Mapping file of Prometheus-like sources: metric names, labels and units that differ from the exporters' defaults.

YAML; every key is optional::

    metrics:                          # metric name -> channel, or any of the channel's names in the catalogue
      job:gpu_temperature:avg: gpu_temp_c
      acme_board_power_mw: power_w
    scale: {power_w: 0.001}           # channel -> factor for its values
    labels:                           # field -> label names, tried in order; a list replaces the default
      node: [kubernetes_node, Hostname]
      gpu: [device_uuid]

The defaults cover the labels of dcgm-exporter (old and new) and of AMD's device-metrics-exporter. ``labels.node``
overrides the automatic choice of :mod:`telemetry.identity.node_labels`: the first of its labels that a series has
names the node.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from foundation.settings import Section, read_settings
from foundation.text import nearest_hint
from telemetry.identity.node_labels import NODE_LABELS

DEFAULT_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "node": NODE_LABELS,
    # A board's serial number is the identity only if the exporter (older ones of AMD) reports no UUID.
    "gpu": ("UUID", "uuid", "gpu_uuid", "serial_number"),
    "slot": ("gpu", "gpu_id", "index", "gpu_index"),
    "pci_bus_id": ("pci_bus_id",),
    "serial": ("DCGM_FI_DEV_SERIAL", "serial", "serial_number"),
    "model": ("modelName", "model_name", "card_series", "card_model", "devicename", "gpu_name"),
    "driver": ("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION", "driver_version"),
    "mig_instance": ("GPU_I_ID", "gpu_partition_id"),
    "cluster": ("cluster", "cluster_name"),
    "group": ("node_group",),
    "rack": ("rack",),
    "nvlink_domain": ("nvlink_domain",),
}
"""Default label names of each field, in order of precedence."""


class SourceMapping(Section):
    """Mapping file of a Prometheus-like source."""

    metrics: dict[str, str] = Field(default_factory=dict)
    """Metric name to channel; a DCGM name, DCGM field ID (as a string) or AMD name maps to its channel too."""

    scale: dict[str, float] = Field(default_factory=dict)
    """Channel to the factor for its values."""

    labels: dict[str, list[str]] = Field(default_factory=dict)
    """Field to label names, in order of precedence; an empty list disables the field."""

    @field_validator("labels", mode="before")
    @classmethod
    def _single_names(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {key: [names] if isinstance(names, str) else names for key, names in value.items()}

    @field_validator("labels")
    @classmethod
    def _known(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        for key in value:
            if key not in DEFAULT_LABELS:
                hint = nearest_hint(key, list(DEFAULT_LABELS)) or f"Known labels: {', '.join(DEFAULT_LABELS)}."
                raise ValueError(f"labels cannot hold {key!r}. {hint}")
        return value

    @field_validator("scale")
    @classmethod
    def _usable(cls, value: dict[str, float]) -> dict[str, float]:
        for channel, factor in value.items():
            if not math.isfinite(factor) or factor == 0:
                raise ValueError(f"the factor of {channel!r} is {factor}: write a number other than 0")
        return value

    def label_names(self, field: str) -> tuple[str, ...]:
        """Return the label names of a field, in order of precedence."""
        return tuple(self.labels[field]) if field in self.labels else DEFAULT_LABELS[field]


def load_source_mapping(path: Path | None) -> SourceMapping:
    """Load and validate a mapping file; None returns the defaults.

    Raises ``InputError`` if the file is missing, is not YAML, or has an unknown key or an invalid value.
    """
    return SourceMapping() if path is None else read_settings(path, SourceMapping)
