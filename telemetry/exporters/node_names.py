"""Which node the series of a target's page belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from telemetry.channel import Channel
from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.exporters.settings import NodeFrom
from telemetry.exporters.targets import Target

_KNOWN: Final = "predrain_target_node"
_FALLBACK: Final = "predrain_target_host"


def fleet_catalogue(channels: Mapping[str, Channel], mapping: SourceMapping) -> SeriesCatalogue:
    """Return the catalogue that all targets of a collector share.

    ``channels``: see :func:`telemetry.channels.resolve_channels`.
    Raises ``InputError`` if the mapping names a channel that does not exist.
    """
    names = [_KNOWN, *mapping.label_names("node"), _FALLBACK]
    return SeriesCatalogue(channels, mapping.model_copy(update={"labels": {**mapping.labels, "node": names}}))


class TargetCatalogue(SeriesCatalogue):
    """The fleet's catalogue, as one target's pages see it.

    ``fleet``: of :func:`fleet_catalogue`. A fleet of a thousand targets shares its tables.
    """

    def __init__(self, fleet: SeriesCatalogue, target: Target, node_from: NodeFrom) -> None:
        super().__init__({})
        self._fleet = fleet
        self._added = {_FALLBACK: target.fallback_node}
        if node_from == "target" or (node_from == "auto" and target.node is not None):
            self._added[_KNOWN] = target.fallback_node

    def identify(self, name: str, labels: Mapping[str, str]) -> Series | XidCount | None:
        """Tell what a series is; see :meth:`telemetry.collect.series.identity.SeriesCatalogue.identify`."""
        return self._fleet.identify(name, {**labels, **self._added})

    def metric_names(self) -> dict[str, str]:
        """Return every metric name that may hold one of our channels, and the channel."""
        return self._fleet.metric_names()
