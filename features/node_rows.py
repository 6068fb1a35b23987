"""Which rows belong to which nodes: looked up once, so that no pass over nodes compares every row's name again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from features.blocks import IntArray


class NodeRows:
    """Positions of rows by the name of their node.

    ``nodes``: node of each row.

    ``numpy.isin`` on names sorts all of them in one go, for each block of nodes anew, and holds the interpreter for
    some 15 ms at 10,000 rows: as long as that, a service that decides answers nobody.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._rows: dict[str, list[int]] = {}
        for at, name in enumerate(nodes):
            self._rows.setdefault(name, []).append(at)

    def of(self, names: Iterable[str]) -> IntArray:
        """Give the rows of some nodes, ascending; names without a row are passed over."""
        none: tuple[int, ...] = ()
        found = np.fromiter((at for name in set(names) for at in self._rows.get(name, none)), dtype=np.int64)
        found.sort()
        return found
