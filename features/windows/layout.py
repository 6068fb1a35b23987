"""How the channels of a dataset lie in the arrays that the kernels read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telemetry.dataset.channel import ROLLUP_SUFFIXES, Channel


@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """The channels of a dataset, by kind, with their roll-up columns taken out of the list.

    A roll-up column (``X_min``, ``X_max`` of a gauge, ``X_rise`` of a counter) is not a channel of its own here: it
    refines the statistics of ``X``. In the value array of a block the gauges come first, then the lows, highs,
    counters, rises and enums; flags have their own array because a bitmask does not fit a float.

    ``gauges``, ``counters``, ``flags``, ``enums``: channels of each kind, in the order of the dataset's list of
    channels.
    ``low_of``, ``high_of``: for each of ``lows`` (``highs``) the position of its gauge.
    ``rise_of``: for each of ``rises`` the position of its counter.
    """

    gauges: tuple[Channel, ...]
    counters: tuple[Channel, ...]
    flags: tuple[Channel, ...]
    enums: tuple[Channel, ...]
    lows: tuple[str, ...]
    low_of: tuple[int, ...]
    highs: tuple[str, ...]
    high_of: tuple[int, ...]
    rises: tuple[str, ...]
    rise_of: tuple[int, ...]

    @classmethod
    def of(cls, channels: Mapping[str, Channel]) -> ChannelLayout:
        """Sort the channels of a dataset (roll-ups among them) into a layout."""
        base: dict[str, list[Channel]] = {"gauge": [], "counter": [], "flags": [], "enum": []}
        rolled: dict[str, list[tuple[str, str]]] = {"_min": [], "_max": [], "_rise": []}
        for channel in channels.values():
            owner = _rolled_up(channel.name, channels)
            if owner is None:
                base[channel.kind].append(channel)
            else:
                rolled[channel.name[len(owner) :]].append((channel.name, owner))
        gauge_at = {channel.name: i for i, channel in enumerate(base["gauge"])}
        counter_at = {channel.name: i for i, channel in enumerate(base["counter"])}
        return cls(
            gauges=tuple(base["gauge"]),
            counters=tuple(base["counter"]),
            flags=tuple(base["flags"]),
            enums=tuple(base["enum"]),
            lows=tuple(name for name, _ in rolled["_min"]),
            low_of=tuple(gauge_at[owner] for _, owner in rolled["_min"]),
            highs=tuple(name for name, _ in rolled["_max"]),
            high_of=tuple(gauge_at[owner] for _, owner in rolled["_max"]),
            rises=tuple(name for name, _ in rolled["_rise"]),
            rise_of=tuple(counter_at[owner] for _, owner in rolled["_rise"]),
        )

    def counting(self, counters: Collection[str]) -> ChannelLayout:
        """Return the layout of the named counters with their rises, and of all bitmasks; in the same order."""
        kept = [at for at, channel in enumerate(self.counters) if channel.name in counters]
        rises = [(name, kept.index(at)) for name, at in zip(self.rises, self.rise_of, strict=True) if at in kept]
        return ChannelLayout(
            gauges=(),
            counters=tuple(self.counters[at] for at in kept),
            flags=self.flags,
            enums=(),
            lows=(),
            low_of=(),
            highs=(),
            high_of=(),
            rises=tuple(name for name, _ in rises),
            rise_of=tuple(at for _, at in rises),
        )

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
        """For each gauge the row of the value array with its lows; -1: it has none."""
        return _positions(self.low_of, self.offset("lows"), len(self.gauges))

    @property
    def high_at(self) -> npt.NDArray[np.int64]:
        """For each gauge the row of the value array with its highs; -1: it has none."""
        return _positions(self.high_of, self.offset("highs"), len(self.gauges))

    @property
    def rise_at(self) -> npt.NDArray[np.int64]:
        """For each counter the row of the value array with its rises; -1: it has none."""
        return _positions(self.rise_of, self.offset("rises"), len(self.counters))

    def offset(self, part: str) -> int:
        """Return where ``lows``, ``highs``, ``counters``, ``rises``, ``enums`` or ``end`` begin in the value array."""
        sizes = {
            "gauges": len(self.gauges),
            "lows": len(self.lows),
            "highs": len(self.highs),
            "counters": len(self.counters),
            "rises": len(self.rises),
            "enums": len(self.enums),
        }
        names = [*sizes, "end"]
        return sum(list(sizes.values())[: names.index(part)])


def _positions(owners: tuple[int, ...], offset: int, count: int) -> npt.NDArray[np.int64]:
    at = np.full(count, -1, dtype=np.int64)
    at[list(owners)] = offset + np.arange(len(owners))
    return at


def _rolled_up(name: str, channels: Mapping[str, Channel]) -> str | None:
    for kind, suffixes in ROLLUP_SUFFIXES.items():
        for suffix in suffixes:
            owner = name.removesuffix(suffix)
            if owner != name and owner in channels and channels[owner].kind == kind and channels[name].kind == "gauge":
                return owner
    return None
