"""The fleet as pairs of node and unit: which rows, samples and installations belong together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from features.windows.blocks import IntArray, Pair
from telemetry.dataset.installations import Installations, Timeline


@dataclass(frozen=True, slots=True)
class Fleet:
    """Every pair of node and unit that an inventory knows, in order of (node, unit), with its installations.

    ``pairs``: the pairs; a pair's number is its position.
    ``first_of_node``, ``last_of_node``: range of the pairs of its node.
    ``stay_pair``, ``installed``, ``removed``: Pair, beginning and end (milliseconds, ``NEVER`` while it lasts), sorted
    by (pair, beginning).
    ``installation_row``: row of the inventory that the installation came from.
    """

    pairs: tuple[Pair, ...]
    index: Mapping[Pair, int]
    first_of_node: IntArray
    last_of_node: IntArray
    stay_pair: IntArray
    installed: IntArray
    removed: IntArray
    installation_row: IntArray

    @classmethod
    def of(cls, inventory: pd.DataFrame) -> Self:
        """Read an inventory; its order does not matter."""
        installations = Installations.of(inventory)
        keys = list(zip(installations.node.tolist(), installations.units[installations.unit].tolist(), strict=True))
        pairs = tuple(sorted(set(keys)))
        index = {pair: number for number, pair in enumerate(pairs)}
        stay_pair = np.array([index[key] for key in keys], dtype=np.int64)
        order = np.lexsort((installations.removed, installations.installed, stay_pair))
        node = pd.factorize(np.array([node for node, _ in pairs], dtype=object))[0].astype(np.int64)
        return cls(
            pairs=pairs,
            index=index,
            first_of_node=np.searchsorted(node, node, side="left"),
            last_of_node=np.searchsorted(node, node, side="right"),
            stay_pair=stay_pair[order],
            installed=installations.installed[order],
            removed=installations.removed[order],
            installation_row=installations.row[order],
        )

    def numbers(self, nodes: Sequence[str], units: Sequence[str]) -> IntArray:
        """Return the number of each (node, unit); -1 for a pair that the inventory does not know."""
        get = self.index.get
        return np.array([get(pair, -1) for pair in zip(nodes, units, strict=True)], dtype=np.int64)

    def stay_at(self, pair: IntArray, time: IntArray) -> IntArray:
        """Return the latest installation of each pair that had started at each time (ms); -1: none."""
        return Timeline(self.stay_pair, self.installed, len(self.pairs)).last(pair, time)

    def in_service(self, times: IntArray) -> npt.NDArray[np.bool_]:
        """Say which pairs were in service at which times.

        ``times``: Milliseconds, ascending; shape (t,).
        Returns: true from an installation's beginning (included) to its end (excluded). Only installations that have
        started and removals that have happened by a time play a part in its row; shape (t, pairs).
        """
        present = np.zeros((times.size, len(self.pairs)), dtype=np.bool_)
        begins = np.searchsorted(times, self.installed, side="left")
        ends = np.searchsorted(times, self.removed, side="left")
        for pair, begin, end in zip(self.stay_pair.tolist(), begins.tolist(), ends.tolist(), strict=True):
            present[begin:end, pair] = True
        return present
