"""Reads the channel catalogue: a new channel is a line of ``catalogue.csv``, a user's own one of the parameters.

A line says what the series means, where it comes from, and which values are possible.

DCGM field ids and names were read in ``dcgm_fields.h`` and its Python twin (old names up to DCGM 3, new names since the
rename of 2026; ids never changed, so normalise by id). NVML names are those of ``nvidia-ml-py``. AMD names are those of
ROCm's device-metrics-exporter. A valid range is wide enough for any device of today with a margin, and narrow enough
that the usual wrong unit (milliwatts, Kelvin, bytes for MiB, percent for a ratio) falls out of it.
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
"""The columns that a roll-up adds to a channel of each kind."""

RESERVED_COLUMNS = ("timestamp", "node", "gpu", "sample_count")
"""Column names of the sample table that can never be a channel."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Channel:
    """One numeric telemetry series of a unit.

    ``name``: our name, with the unit in it.
    ``kind``: ``gauge`` is a level (stored as float32), ``counter`` only rises but may reset (float64), ``flags`` is a
    bitmask (uint64), ``enum`` an integer code (int32).
    ``low``, ``high``: inclusive valid range; None leaves that side open.
    ``dcgm_names``: every name that DCGM and its exporter have given the field, newest first.
    ``amd``: metric names of AMD's exporter with the same meaning and unit.
    ``max_rise_per_s``: what no device counts in a second; of counters.
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

        A gauge gets ``X_min`` and ``X_max``; a counter gets ``X_rise``, the reset-aware rise since the previous
        sample, which is a gauge: it can be summed, and must not be differenced again.
        """
        meanings = {"_min": "lowest raw value of", "_max": "highest raw value of", "_rise": "rise within the step of"}
        low, high = (0.0, None) if self.kind == "counter" else (self.low, self.high)
        return tuple(
            Channel(self.name + suffix, "gauge", self.unit, low, high, f"{meanings[suffix]} {self.name}: {self.help}")
            for suffix in ROLLUP_SUFFIXES[self.kind]
        )


def channel_as_dict(channel: Channel) -> dict[str, Any]:
    """Return a channel as plain JSON types, the way dataset.json keeps it."""
    content = asdict(channel) | {"dcgm_names": list(channel.dcgm_names), "amd": list(channel.amd)}
    del content["max_rise_per_s"]  # a rule of reading, which a dataset does not keep
    return content


def resolve_channels(declared: Mapping[str, ChannelDeclaration]) -> dict[str, Channel]:
    """Return the catalogue with the user's declarations laid over it.

    A name of the catalogue keeps its sources (DCGM id and so on) and takes kind, unit and range from the declaration.
    Raises ``InputError`` if a name is not a lower-case identifier, is a key column, or is that of another's roll-up.
    """
    channels = dict(CATALOGUE)
    for name, declaration in declared.items():
        where = f"params channels.{name}"
        if not _NAME.match(name):
            raise InputError(
                f"{name!r} cannot be a channel name",
                where,
                "Use lower-case letters, digits and underscores, beginning with a letter, such as 'bus_errors_total'.",
            )
        if name in RESERVED_COLUMNS:
            raise InputError(f"{name!r} is a key column, not a channel", where, "Give the channel another name.")
        low, high = declaration.range
        if name in channels:
            unit = declaration.unit or channels[name].unit
            channels[name] = replace(channels[name], kind=declaration.kind, unit=unit, low=low, high=high)
        else:
            channels[name] = Channel(name, declaration.kind, declaration.unit, low, high, "declared in params")
    for channel in list(channels.values()):
        for made in channel.rollups():
            if made.name in channels:
                raise InputError(
                    f"the channel {made.name!r} has the name of a roll-up of {channel.name!r}",
                    f"params channels.{made.name}",
                    f"Rename it: importing finer samples of {channel.name!r} writes a column of that name.",
                )
    return channels


def with_rollups(channels: Mapping[str, Channel]) -> dict[str, Channel]:
    """Return ``channels`` with the roll-up channels of each right after it."""
    return {made.name: made for channel in channels.values() for made in (channel, *channel.rollups())}


def by_source_name(channels: Mapping[str, Channel] | None = None) -> dict[str, str]:
    """Map every name under which a source may report a channel to our name.

    DCGM names (old and new), DCGM field ids as text, AMD metric names (upper and lower case), nvidia-smi's query
    fields, and our own; names of metrics in another unit are left out.
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
"""Every channel that predrain knows by itself, by name."""

_SOURCE_NAMES = frozenset(by_source_name())


def is_unused(name: str) -> bool:
    """Whether a metric or column is known, and not used."""
    known = {name, name.removesuffix("_total")}  # OpenMetrics ends counters in _total
    return known.isdisjoint(_SOURCE_NAMES) and name not in EXACT_NAMES and matches_unused(name)
