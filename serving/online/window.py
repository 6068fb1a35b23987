"""The window: all samples that features still look back on, as frames that succeed one another in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from features.service import duration_ms
from serving.online.blocks import concat, keys_of, settle
from serving.online.frame import Frame
from telemetry.block import Block
from telemetry.channel import Channel

SPANS = 120
"""Spans of time that a window is cut into; the oldest goes as a whole, so it holds a 120th more than asked for."""

FAN_IN = 6
"""Frames of one tier that are joined into one of the next: a row is packed again two or three times in all."""

_LONGEST_ROW = 8 * FAN_IN  # joined at once, if nobody has tidied
_WHOLE = 99  # tier of a frame that holds a span which has passed


@dataclass(frozen=True, slots=True)
class Join:
    """Frames of a span, one after the other, that should become one of a tier."""

    span: int
    frames: tuple[Frame, ...]
    tier: int


class SampleWindow:
    """Samples by span of time; used under its owner's lock."""

    def __init__(self, channels: Mapping[str, Channel], keep: timedelta, step: timedelta) -> None:
        self._channels = dict(channels)
        self._step_ms = duration_ms(step)
        self._keep_ms = duration_ms(keep)
        self._span_ms = max(-(-self._keep_ms // SPANS // self._step_ms), 1) * self._step_ms
        self._spans: dict[int, list[Frame]] = {}
        self._next = 1

    @property
    def frames(self) -> tuple[Frame, ...]:
        """All frames, by time and then by number."""
        return tuple(frame for span in sorted(self._spans) for frame in self._spans[span])

    @property
    def rows(self) -> int:
        """Rows held."""
        return sum(len(frame) for frame in self.frames)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(frame.nbytes for frame in self.frames)

    def oldest_ms(self, now_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the times that samples which come at some times must lie after to be kept."""
        return now_ms - self._keep_ms

    def add(self, block: Block) -> None:
        """Take rows in, sorted by (unit, time), none twice. Rows of an instant that is held replace what they say."""
        if not len(block):
            return
        span = block.ms // self._span_ms
        first = int(span[0])
        if bool((span == first).all()):
            self._put(first, block)
            return
        for each in np.unique(span).tolist():
            self._put(each, block.take(np.flatnonzero(span == each)))

    def expire(self, now_ms: int) -> None:
        """Let the spans go that are out of reach of the newest samples, whatever a clock says that runs ahead."""
        newest = max(((span + 1) * self._span_ms for span in self._spans), default=now_ms)
        oldest = min(now_ms, newest) - self._keep_ms
        for span in [each for each in self._spans if (each + 1) * self._span_ms <= oldest]:
            del self._spans[span]

    def due(self, closed_ms: int) -> Join | None:
        """Give the next frames that should be joined; None: there are none.

        ``closed_ms``: time up to which samples have been put in: for spans before it nothing but late ones comes any
        more.
        """
        for span, frames in self._spans.items():
            if len(frames) > 1 and frames[0].tier < _WHOLE and (span + 1) * self._span_ms <= closed_ms:
                return Join(span, tuple(frames), _WHOLE)
            same = _newest_tier(frames)
            if len(same) >= FAN_IN:
                return Join(span, same, min(same[0].tier + 1, _WHOLE - 1))
        return None

    def join(self, work: Join) -> Frame:
        """Make one frame of several. Reads nothing that changes, so it needs no lock."""
        block, _ = settle(concat([frame.read(None, self._channels) for frame in work.frames], self._channels))
        number = max(frame.number for frame in work.frames)
        return Frame.of(block, number=number, tier=work.tier, step_ms=self._step_ms)

    def replace(self, work: Join, joined: Frame) -> None:
        """Put a joined frame in the place of those it was made of, unless they have gone meanwhile."""
        frames = self._spans.get(work.span, [])
        names = [frame.name for frame in frames]
        first = work.frames[0].name
        if first not in names:
            return
        at = names.index(first)
        if names[at : at + len(work.frames)] == [frame.name for frame in work.frames]:
            frames[at : at + len(work.frames)] = [joined]

    def restore(self, frames: Sequence[Frame]) -> None:
        """Take the frames of a snapshot, in the order in which :attr:`frames` gave them."""
        for frame in frames:
            ms = int(frame.read(frame.units[:1], {}).ms[0])
            self._spans.setdefault(ms // self._span_ms, []).append(frame)
            self._next = max(self._next, frame.number + 1)

    def _put(self, span: int, block: Block) -> None:
        frames = self._spans.setdefault(span, [])
        frames.append(Frame.of(block, number=self._take_number(), tier=0, step_ms=self._step_ms))
        same = _newest_tier(frames)
        if len(same) >= _LONGEST_ROW:
            work = Join(span, same, min(same[0].tier + 1, _WHOLE - 1))
            self.replace(work, self.join(work))

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1


def _newest_tier(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Give the frames of the newest one's tier: tiers never rise from one to the next, so they stand in a row."""
    return tuple(frame for frame in frames if frame.tier == frames[-1].tier)


def read_frames(
    frames: Sequence[Frame],
    units: NDArray[np.int32] | None,
    channels: Mapping[str, Channel],
    *,
    after_ms: int,
    upto_ms: int,
    further: Block | None = None,
) -> Block:
    """Read units' samples out of frames.

    ``units``: Ascending; None: all.
    ``after_ms``, ``upto_ms``: only rows after (not at) and up to these times.
    ``further``: rows that stand in no frame yet and are newer than what the frames say of the same instants.
    Returns: sorted by (unit, time), none twice.
    """
    parts = [frame.read(units, channels, after_ms=after_ms, upto_ms=upto_ms) for frame in frames]
    if further is not None and len(further):
        wanted = (further.ms > after_ms) & (further.ms <= upto_ms)
        if units is not None:
            wanted &= np.isin(further.unit, units)
        rows = further.take(np.flatnonzero(wanted))
        rows.order = np.full(len(rows), -(1 << 62), np.int64)
        parts.append(rows)
    return settle(concat([part for part in parts if len(part)], channels))[0]


def held(frames: Sequence[Frame], block: Block) -> NDArray[np.bool_]:
    """Tell which rows' instants are held already."""
    found = np.zeros(len(block), dtype=np.bool_)
    if not len(block):
        return found
    keys = keys_of(block)
    units = np.unique(block.unit)
    low, high = int(block.ms.min()) - 1, int(block.ms.max())
    for frame in frames:
        found |= np.isin(keys, keys_of(frame.read(units, {}, after_ms=low, upto_ms=high)))
    return found


def batches(sizes: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Cut a row of sizes into ranges whose sums stay near a limit."""
    begin = total = 0
    for at, size in enumerate(sizes.tolist()):
        if total and total + size > limit:
            yield begin, at
            begin, total = at, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)
