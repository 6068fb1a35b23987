"""The description of one numeric telemetry series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["gauge", "counter", "flags", "enum"]

ROLLUP_SUFFIXES = MappingProxyType({"gauge": ("_min", "_max"), "counter": ("_rise",), "flags": (), "enum": ()})
"""The columns that a roll-up adds to a channel of each kind."""


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
        """Return the channels that a roll-up to the step adds beside this one.

        A gauge gets ``X_min`` and ``X_max``; a counter gets ``X_rise``, the reset-aware rise since the previous
        sample, which is a gauge: it can be summed, and must not be differenced again.
        """
        made: list[Channel] = []
        for suffix in ROLLUP_SUFFIXES[self.kind]:
            words = {"_min": "lowest raw value of", "_max": "highest raw value of", "_rise": "rise within the step of"}
            low, high = (0.0, None) if suffix == "_rise" else (self.low, self.high)
            text = f"{words[suffix]} {self.name}: {self.help}"
            made.append(Channel(self.name + suffix, "gauge", self.unit, low, high, text))
        return tuple(made)


def channel_as_dict(channel: Channel) -> dict[str, Any]:
    """Return a channel as plain JSON types, the way dataset.json keeps it."""
    return asdict(channel) | {"dcgm_names": list(channel.dcgm_names), "amd": list(channel.amd)}


def channel_from_dict(content: Mapping[str, Any]) -> Channel:
    """Read back what :func:`channel_as_dict` wrote."""
    return Channel(**{**content, "dcgm_names": tuple(content["dcgm_names"]), "amd": tuple(content["amd"])})
