"""Layout of a dataset's channels in the arrays that the kernels read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from foundation.errors import InputError
from foundation.text import nearest_hint
from telemetry.dataset.channels import ROLLUP_SUFFIXES, Channel


@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """Channels of a dataset by kind, without their roll-up columns.

    A roll-up column (``X_min``, ``X_max`` of a gauge, ``X_rise`` of a counter) is not a separate channel: it refines
    the statistics of ``X``. The value array of a block holds gauges, lows, highs, counters, rises and enums, in this
    order; flags have their own array because a bitmask does not fit into a float.

    ``gauges``, ``counters``, ``flags``, ``enums``: channels of each kind, in dataset order.
    ``lows``, ``highs``, ``rises``: position of its gauge or counter, by roll-up column.
    """

    gauges: tuple[Channel, ...]
    counters: tuple[Channel, ...]
    flags: tuple[Channel, ...]
    enums: tuple[Channel, ...]
    lows: Mapping[str, int]
    highs: Mapping[str, int]
    rises: Mapping[str, int]

    @classmethod
    def of(cls, channels: Mapping[str, Channel]) -> Self:
        """Build a layout from the channels of a dataset, including roll-ups."""
        base: dict[str, list[Channel]] = {"gauge": [], "counter": [], "flags": [], "enum": []}
        owners = {name: _rolled_up(name, channels) for name in channels}
        for name, channel in channels.items():
            if owners[name] is None:
                base[channel.kind].append(channel)
        position = {channel.name: i for kind in ("gauge", "counter") for i, channel in enumerate(base[kind])}
        rolled = {
            suffix: {name: position[owner] for name, owner in owners.items() if owner and name == owner + suffix}
            for suffix in ("_min", "_max", "_rise")
        }
        gauges, counters, flags, enums = (tuple(channels_of_kind) for channels_of_kind in base.values())
        return cls(gauges, counters, flags, enums, rolled["_min"], rolled["_max"], rolled["_rise"])

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the rows of a block's value array, in order."""
        return (
            *(channel.name for channel in self.gauges),
            *self.lows,
            *self.highs,
            *(channel.name for channel in self.counters),
            *self.rises,
            *(channel.name for channel in self.enums),
        )

    @property
    def masks(self) -> tuple[str, ...]:
        """Names of the rows of a block's flags array, in order."""
        return tuple(channel.name for channel in self.flags)

    @property
    def low_at(self) -> npt.NDArray[np.int64]:
        """Row of the value array with each gauge's lows; -1: none."""
        return _positions(self.lows, self.offset("lows"), len(self.gauges))

    @property
    def high_at(self) -> npt.NDArray[np.int64]:
        """Row of the value array with each gauge's highs; -1: none."""
        return _positions(self.highs, self.offset("highs"), len(self.gauges))

    @property
    def rise_at(self) -> npt.NDArray[np.int64]:
        """Row of the value array with each counter's rises; -1: none."""
        return _positions(self.rises, self.offset("rises"), len(self.counters))

    def offset(self, part: str) -> int:
        """Return the first row of ``lows``, ``highs``, ``counters``, ``rises``, ``enums`` or ``end``."""
        groups = ("gauges", "lows", "highs", "counters", "rises", "enums", "end")
        return sum(len(getattr(self, group)) for group in groups[: groups.index(part)])


def unknown_channel(name: str, channels: Mapping[str, Channel], location: str) -> InputError:
    """Build the error for a parameter that names a channel missing from the dataset."""
    hint = nearest_hint(name, channels, f"It has: {', '.join(sorted(channels)) or 'none'}.")
    return InputError(f"the dataset has no channel '{name}'", location, hint)


def _positions(owners: Mapping[str, int], offset: int, count: int) -> npt.NDArray[np.int64]:
    position = np.full(count, -1, dtype=np.int64)
    position[list(owners.values())] = offset + np.arange(len(owners))
    return position


def _rolled_up(name: str, channels: Mapping[str, Channel]) -> str | None:
    for kind, suffixes in ROLLUP_SUFFIXES.items():
        for suffix in suffixes:
            owner = name.removesuffix(suffix)
            if owner != name and owner in channels and channels[owner].kind == kind and channels[name].kind == "gauge":
                return owner
    return None
