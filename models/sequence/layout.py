"""Where a raw window and the static features stand among the columns of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from features.vocabulary import FeatureColumn

STEP_STATISTICS = ("step_mean", "step_rise")
"""Statistics of the columns that make up a flattened raw window; see :class:`features.sequences.SequencePlan`."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Where a window and its statics stand in a row.

    ``begin``: first column of the flattened window, which is ordered by step (oldest first), in it by channel.
    ``statics``: columns that are repeated at every step.
    ``categories``: for each of ``statics`` how many categories its codes have; 0: a number.
    """

    begin: int
    steps: int
    channels: int
    statics: tuple[int, ...] = ()
    categories: tuple[int, ...] = ()

    @classmethod
    def plain(cls, features: int) -> SequenceLayout:
        """Take every feature for a step of a single channel."""
        return cls(0, features, 1)

    @property
    def width(self) -> int:
        """Columns that a row has at least."""
        return max([self.begin + self.steps * self.channels, *(at + 1 for at in self.statics)])

    def split(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give the windows, shape (n, steps, channels), and the statics, shape (n, statics), of rows.

        Raises ``ValueError`` if the rows are narrower than the layout.
        """
        if X.shape[1] < self.width:
            raise ValueError(f"rows of {X.shape[1]} features cannot hold a layout of {self.width} columns")
        window = X[:, self.begin : self.begin + self.steps * self.channels]
        return window.reshape(len(X), self.steps, self.channels), X[:, list(self.statics)]

    def to_json(self) -> dict[str, Any]:
        """Give the layout as a JSON object."""
        return {
            "begin": self.begin,
            "steps": self.steps,
            "channels": self.channels,
            "statics": list(self.statics),
            "categories": list(self.categories),
        }

    @classmethod
    def from_json(cls, content: Any) -> SequenceLayout:
        """Read what :meth:`to_json` wrote."""
        return cls(
            int(content["begin"]),
            int(content["steps"]),
            int(content["channels"]),
            tuple(map(int, content["statics"])),
            tuple(map(int, content["categories"])),
        )


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """The raw window among the columns of a run or bundle.

    ``tabular``: columns before the window: what learners that do not read it as a sequence are given.
    ``channels``: its channels, in order.
    ``window``, ``step``: its length and that of its steps.
    """

    tabular: int
    channels: tuple[str, ...]
    window: timedelta
    step: timedelta
    layout: SequenceLayout

    def to_json(self) -> dict[str, Any]:
        """Give the facts as a manifest says them."""
        return {
            "channels": list(self.channels),
            "window_seconds": self.window.total_seconds(),
            "step_seconds": self.step.total_seconds(),
            "tabular_features": self.tabular,
        }


def window_of(columns: Sequence[FeatureColumn]) -> WindowFacts | None:
    """Find the raw window among columns; None where they have none."""
    spans = [column.window for column in columns if column.statistic in STEP_STATISTICS and column.window is not None]
    if not spans:
        return None
    begin = len(columns) - len(spans)
    newest = min(spans)
    channels = tuple(str(column.channel) for column in columns[begin:] if column.window == newest)
    statics = tuple(at for at, column in enumerate(columns[:begin]) if column.group == "static")
    layout = SequenceLayout(
        begin,
        len(spans) // len(channels),
        len(channels),
        statics,
        tuple(len(columns[at].categories) for at in statics),
    )
    return WindowFacts(begin, channels, max(spans), newest, layout)
