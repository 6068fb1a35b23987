"""The fleet as (node, unit) pairs, to which rows, samples and installations belong."""

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
    """All (node, unit) pairs of an inventory, sorted, with their installations.

    ``pairs``: the pairs; a pair's number is its position.
    ``first_of_node``, ``last_of_node``: range of the pairs on the same node, end excluded.
    ``installation_pair``, ``installed``, ``removed``: pair, start and end of each installation (ms; ``NEVER``: still
    installed), sorted by (pair, start).
    ``installation_row``: inventory row of each installation.
    """

    pairs: tuple[Pair, ...]
    index: Mapping[Pair, int]
    first_of_node: IntArray
    last_of_node: IntArray
    installation_pair: IntArray
    installed: IntArray
    removed: IntArray
    installation_row: IntArray

    @classmethod
    def of(cls, inventory: pd.DataFrame) -> Self:
        """Read an inventory in any row order."""
        installations = Installations.of(inventory)
        keys = list(zip(installations.node.tolist(), installations.units[installations.unit].tolist(), strict=True))
        pairs = tuple(sorted(set(keys)))
        index = {pair: number for number, pair in enumerate(pairs)}
        installation_pair = np.array([index[key] for key in keys], dtype=np.int64)
        order = np.lexsort((installations.removed, installations.installed, installation_pair))
        node = pd.factorize(np.array([node for node, _ in pairs], dtype=object))[0].astype(np.int64)
        return cls(
            pairs=pairs,
            index=index,
            first_of_node=np.searchsorted(node, node, side="left"),
            last_of_node=np.searchsorted(node, node, side="right"),
            installation_pair=installation_pair[order],
            installed=installations.installed[order],
            removed=installations.removed[order],
            installation_row=installations.row[order],
        )

    def numbers(self, nodes: Sequence[str], units: Sequence[str]) -> IntArray:
        """Return the number of each (node, unit) pair; -1 if it is not in the inventory."""
        get = self.index.get
        return np.array([get(pair, -1) for pair in zip(nodes, units, strict=True)], dtype=np.int64)

    def installation_at(self, pair: IntArray, time: IntArray) -> IntArray:
        """Return each pair's latest installation that started at or before each time (ms); -1: none."""
        return Timeline(self.installation_pair, self.installed, len(self.pairs)).last(pair, time)

    def in_service(self, times: IntArray) -> npt.NDArray[np.bool_]:
        """Return which pairs are in service at each time.

        ``times``: milliseconds, ascending; shape (t,).
        Returns: true from an installation's start (included) to its end (excluded); shape (t, pairs). A row depends
        only on installations and removals up to its time.
        """
        present = np.zeros((times.size, len(self.pairs)), dtype=np.bool_)
        begins = np.searchsorted(times, self.installed, side="left")
        ends = np.searchsorted(times, self.removed, side="left")
        for pair, begin, end in zip(self.installation_pair.tolist(), begins.tolist(), ends.tolist(), strict=True):
            present[begin:end, pair] = True
        return present
