"""Where a sample belongs: in a step that is still open, or beside those of steps that have been closed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serving.online.blocks import settle
from serving.online.stepper import Stepper
from serving.online.window import SampleWindow, held
from telemetry.block import Block

_NEVER = -(1 << 62)
_SET_BACK = 2  # steps; a clock that is slewed by seconds opens nothing again


class Placing:
    """Puts samples into the open steps and into the window; used under its owner's lock.

    ``newest``: time of each unit's newest sample of a closed step. Default: it is read from the window where it is
    needed.
    """

    def __init__(self, window: SampleWindow, stepper: Stepper, newest: NDArray[np.int64] | None = None) -> None:
        self.newest = np.full(0, _NEVER, np.int64) if newest is None else newest
        self._window, self._stepper = window, stepper

    def read_newest(self) -> None:
        """Find each unit's newest sample in the window, where that is ever asked for."""
        if self._stepper.has_rises:
            for frame in self._window.frames:
                self._note(frame.read(None, {}))

    def grow(self, units: int) -> None:
        """Make room for units up to a number."""
        self._stepper.grow(units)
        have = len(self.newest)
        if units > have:
            more = np.full(max(units, have + have // 2), _NEVER, np.int64)
            more[:have] = self.newest
            self.newest = more

    def advance(self, closed_ms: int, now_ms: int) -> None:
        """Close the steps that are over, and let go what is out of reach."""
        self.set_back(closed_ms)
        if closed_ms > self._stepper.closed_ms:
            made = self._stepper.close(closed_ms)
            self._note(made)
            self._window.add(made)
            self._window.expire(now_ms)

    def set_back(self, closed_ms: int) -> None:
        """Open the steps again that lie after now, where the clock has been set back by two or more.

        Their raw samples would else be turned away until the clock has caught up.
        """
        if closed_ms <= self._stepper.closed_ms - _SET_BACK * self._stepper.step_ms:
            self._stepper.closed_ms = closed_ms

    def take(self, block: Block, *, replayed: bool) -> int:
        """Let rows wait for the end of their step, or put those of steps that are closed in their place.

        Returns: rows that are held now; the others are raw ones of a step that has been rolled up without them.
        """
        over = self._stepper.is_closed(block.ms)
        if not over.any():
            self._stepper.wait(block)
            return len(block)
        self._stepper.wait(block.take(np.flatnonzero(~over)))
        finer = self._stepper.finer[block.unit] & (not replayed)
        past = block.take(np.flatnonzero(over & ~finer))
        past, _ = settle(past)
        if len(past) and replayed:
            past = self._stepper.replay(past)
        elif len(past) and self._stepper.has_rises:
            again = held(self._window.frames, past)
            between = (past.ms < self.newest[past.unit]) & ~again
            past = self._stepper.beside(past, between=between, again=again)
        elif len(past):
            none = np.zeros(len(past), dtype=np.bool_)
            past = self._stepper.beside(past, between=none, again=none)
        self._note(past)
        self._window.add(past)
        return len(block) - int((over & finer).sum())

    def _note(self, block: Block) -> None:
        np.maximum.at(self.newest, block.unit, block.ms)
