"""The channel catalogue, one row of ``catalogue.csv`` per channel, and channels declared in the parameters.

A row has the meaning of the series, its names in each source, and the range of valid values.

DCGM field ids and names are from ``dcgm_fields.h`` and its Python bindings (old names up to DCGM 3, new names since the
rename of 2026; ids never changed, so normalize by id). NVML names are those of ``nvidia-ml-py``, AMD names those of
ROCm's device-metrics-exporter. A valid range covers any current device with a margin, and excludes values in the usual
wrong units (milliwatts, Kelvin, bytes for MiB, percent for a ratio).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, cast

from foundation.errors import InputError
from telemetry.config import ChannelDeclaration
from telemetry.values.names import EXACT_NAMES, matches_unused
from telemetry.values.tables import read_table

Kind = Literal["gauge", "counter", "flags", "enum"]

ROLLUP_SUFFIXES = MappingProxyType({"gauge": ("_min", "_max"), "counter": ("_rise",), "flags": (), "enum": ()})
"""Suffixes of the columns that a roll-up adds to a channel, by kind."""

RESERVED_COLUMNS = ("timestamp", "node", "gpu", "sample_count")
"""Columns of the sample table that are not channels."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Channel:
    """One numeric telemetry series of a unit.

    ``name``: predrain's name, with the unit.
    ``kind``: ``gauge`` (float32), ``counter``: increasing, may reset (float64), ``flags``: bitmask (uint64), ``enum``:
    integer code (int32).
    ``low``, ``high``: inclusive valid range; None: unbounded.
    ``dcgm_names``: all names of the field in DCGM and its exporter, newest first.
    ``amd``: metric names of AMD's exporter with the same meaning and unit.
    ``max_rise_per_s``: for counters, a rate that no device reaches.
    """

    name: str
    kind: Kind
    unit: str
    low: float | None
    high: float | None
    help: str
    dcgm_id: int | None = None
    dcgm_names: tuple[str, ...] = ()
    nvml: str | None = None
    amd: tuple[str, ...] = ()
    max_rise_per_s: float | None = field(default=None, compare=False)

    def rollups(self) -> "tuple[Channel, ...]":
        """Return the channels that a roll-up to the step adds to this one.

        A gauge gets ``X_min`` and ``X_max``. A counter gets ``X_rise``, the reset-aware increase since the previous
        sample, which is a gauge: it can be summed, and must not be differenced again.
        """
        meanings = {"_min": "lowest raw value of", "_max": "highest raw value of", "_rise": "rise within the step of"}
        low, high = (0.0, None) if self.kind == "counter" else (self.low, self.high)
        return tuple(
            Channel(self.name + suffix, "gauge", self.unit, low, high, f"{meanings[suffix]} {self.name}: {self.help}")
            for suffix in ROLLUP_SUFFIXES[self.kind]
        )


def channel_as_dict(channel: Channel) -> dict[str, Any]:
    """Return a channel as JSON types for dataset.json."""
    content = asdict(channel) | {"dcgm_names": list(channel.dcgm_names), "amd": list(channel.amd)}
    del content["max_rise_per_s"]  # only used when reading sources
    return content


def resolve_channels(declared: Mapping[str, ChannelDeclaration]) -> dict[str, Channel]:
    """Return the catalogue merged with the user's declarations.

    A declared catalogue channel keeps its source names (DCGM id etc.) and gets kind, unit and range of the declaration.
    Raises ``InputError`` if a name is not a lower-case identifier, or is that of a key column or another's roll-up.
    """
    channels = dict(CATALOGUE)
    for name, declaration in declared.items():
        location = f"params channels.{name}"
        if not _NAME.match(name):
            raise InputError(
                f"{name!r} cannot be a channel name",
                location,
                "Use lower-case letters, digits and underscores, beginning with a letter, such as 'bus_errors_total'.",
            )
        if name in RESERVED_COLUMNS:
            raise InputError(f"{name!r} is a key column, not a channel", location, "Give the channel another name.")
        low, high = declaration.range
        if name in channels:
            unit = declaration.unit or channels[name].unit
            channels[name] = replace(channels[name], kind=declaration.kind, unit=unit, low=low, high=high)
        else:
            channels[name] = Channel(name, declaration.kind, declaration.unit, low, high, "declared in params")
    for channel in list(channels.values()):
        for rollup in channel.rollups():
            if rollup.name in channels:
                raise InputError(
                    f"the channel {rollup.name!r} has the name of a roll-up of {channel.name!r}",
                    f"params channels.{rollup.name}",
                    f"Rename it: importing finer samples of {channel.name!r} writes a column of that name.",
                )
    return channels


def with_rollups(channels: Mapping[str, Channel]) -> dict[str, Channel]:
    """Return ``channels``, each followed by its roll-ups."""
    return {derived.name: derived for channel in channels.values() for derived in (channel, *channel.rollups())}


def by_source_name(channels: Mapping[str, Channel] | None = None) -> dict[str, str]:
    """Map the names of a channel in all sources to predrain's name.

    Includes old and new DCGM names, DCGM field ids as text, AMD metric names (upper and lower case), query fields of
    nvidia-smi, and predrain's names. Metrics in another unit are not included.
    """
    channels = CATALOGUE if channels is None else channels
    names = {name: row.target for name, row in EXACT_NAMES.items() if row.target in channels and row.unit is None}
    for channel in channels.values():
        ids = () if channel.dcgm_id is None else (str(channel.dcgm_id),)
        amd = (*channel.amd, *(metric.lower() for metric in channel.amd))
        names |= dict.fromkeys((channel.name, *ids, *channel.dcgm_names, *amd), channel.name)
    return names


def _read_catalogue() -> dict[str, Channel]:
    channels = [
        Channel(
            row["name"],
            cast(Kind, row["kind"]),
            row["unit"],
            float(row["low"]) if row["low"] else None,
            float(row["high"]) if row["high"] else None,
            row["help"],
            int(row["dcgm_id"]) if row["dcgm_id"] else None,
            tuple(row["dcgm_names"].split()),
            row["nvml"] or None,
            tuple(row["amd"].split()),
            float(row["max_rise_per_s"]) if row["max_rise_per_s"] else None,
        )
        for row in read_table("catalogue.csv", __file__)
    ]
    return {channel.name: channel for channel in channels}


CATALOGUE: Mapping[str, Channel] = MappingProxyType(_read_catalogue())
_SOURCE_NAMES = frozenset(by_source_name())


def is_unused(name: str) -> bool:
    """Whether a metric or column is known but unused."""
    known = {name, name.removesuffix("_total")}  # OpenMetrics counters end in _total
    return known.isdisjoint(_SOURCE_NAMES) and name not in EXACT_NAMES and matches_unused(name)
