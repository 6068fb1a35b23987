"""Reads the channel catalogue: a new channel is a line of ``catalogue.csv``, a user's own one of the parameters.

A line says what the series means, where it comes from, and which values are possible.

DCGM field ids and names were read in ``dcgm_fields.h`` and its Python twin (old names up to DCGM 3, new names since the
rename of 2026; ids never changed, so normalise by id). NVML names are those of ``nvidia-ml-py``. AMD names are those of
ROCm's device-metrics-exporter. A valid range is wide enough for any device of today with a margin, and narrow enough
that the usual wrong unit (milliwatts, Kelvin, bytes for MiB, percent for a ratio) falls out of it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from foundation.errors import InputError
from telemetry.config import ChannelDeclaration

Kind = Literal["gauge", "counter", "flags", "enum"]

ROLLUP_SUFFIXES = MappingProxyType({"gauge": ("_min", "_max"), "counter": ("_rise",), "flags": (), "enum": ()})
"""The columns that a roll-up adds to a channel of each kind."""

RESERVED_COLUMNS = ("timestamp", "node", "gpu", "sample_count")
"""Column names of the sample table that can never be a channel."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_SENTINEL_FROM = 2.0**62
# DCGM's blank values: base, not found, not supported, not permissioned (dcgm_structs.h: DCGM_INT32_BLANK,
# DCGM_INT64_BLANK, DCGM_FP64_BLANK); the 64-bit ones lie above _SENTINEL_FROM.
_INT32_BLANKS = (2147483632.0, 2147483635.0)
_FP64_BLANKS = (140737488355328.0, 140737488355331.0)


@dataclass(frozen=True, slots=True)
class Channel:
    """One numeric telemetry series of a unit.

    ``name``: our name, with the unit in it.
    ``kind``: ``gauge`` is a level (stored as float32), ``counter`` only rises but may reset (float64), ``flags`` is a
    bitmask (uint64), ``enum`` an integer code (int32).
    ``low``, ``high``: inclusive valid range; None leaves that side open.
    ``dcgm_names``: every name that DCGM and its exporter have given the field, newest first.
    ``amd``: metric names of AMD's exporter with the same meaning and unit.
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

    def rollups(self) -> tuple[Channel, ...]:
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
    return asdict(channel) | {"dcgm_names": list(channel.dcgm_names), "amd": list(channel.amd)}


def is_sentinel(values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Mark values that mean "not supported": 2**62 or more, and DCGM's 32-bit and floating-point blanks.

    NaN and infinity are none. Older exporters pass DCGM's 64-bit blanks through, such as 9223372036854775794.
    """
    array = np.asarray(values)
    numbers = array.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        mask = (numbers >= _SENTINEL_FROM) & np.isfinite(numbers)
        if numbers.size and not bool(np.nanmax(numbers, initial=-np.inf) < _INT32_BLANKS[0]):
            for low, high in (_INT32_BLANKS, _FP64_BLANKS):
                mask |= (numbers >= low) & (numbers <= high)
    return np.asarray(mask, dtype=np.bool_)


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

    DCGM names (old and new), DCGM field ids as text, AMD metric names (upper and lower case), and our own.
    """
    names: dict[str, str] = {}
    for channel in (CATALOGUE if channels is None else channels).values():
        ids = () if channel.dcgm_id is None else (str(channel.dcgm_id),)
        amd = (*channel.amd, *(metric.lower() for metric in channel.amd))
        names |= dict.fromkeys((channel.name, *ids, *channel.dcgm_names, *amd), channel.name)
    return names


def _read_catalogue() -> dict[str, Channel]:
    lines = Path(__file__).with_name("catalogue.csv").read_text(encoding="utf-8").splitlines()
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
        )
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    ]
    return {channel.name: channel for channel in channels}


CATALOGUE: Mapping[str, Channel] = MappingProxyType(_read_catalogue())
"""Every channel that predrain knows by itself, by name."""
