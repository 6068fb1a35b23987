"""Who was where at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.dataset.schema import Unit, ms_of

# A key is code * 2**43 + milliseconds: 2**43 ms reach the year 2248, and codes up to a million stay below 2**63.
_KEY_SHIFT = 43


class Stays:
    """Answers where a unit was at a time."""

    def __init__(self, frame: pd.DataFrame, unit: Unit, parents: Mapping[str, str] | None = None) -> None:
        name = "gpu" if unit == "gpu" else "node"
        self.unit = unit
        self.parents = dict(parents or {})
        ordered = frame.sort_values([name, "installed_at"], kind="stable").reset_index(drop=True)
        self.frame = ordered
        self.units = list(dict.fromkeys(ordered[name]))
        self._code = {unit_name: code for code, unit_name in enumerate(self.units)}
        codes = ordered[name].map(self._code).to_numpy(np.int64)
        self._start = ms_of(ordered["installed_at"])
        self._end = ms_of(ordered["removed_at"], unknown=(1 << _KEY_SHIFT) - 1)
        self._key = (codes << _KEY_SHIFT) + self._start
        self._row_code = codes
        self.nodes = ordered["node"].to_numpy(dtype=object)
        first: dict[str, int] = {}
        for node, start in zip(self.nodes, self._start, strict=True):
            first[node] = min(start, first.get(node, start))
        self.node_since = first

    def codes(self, names: Sequence[str | None] | npt.NDArray[np.object_]) -> npt.NDArray[np.int64]:
        """Return the code of each unit, -1 where it is unknown."""
        known = self._code
        parents = self.parents
        return np.fromiter(
            (-1 if name is None else known.get(parents.get(name, name), -1) for name in names), np.int64, len(names)
        )

    def find(self, codes: npt.NDArray[np.int64], ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Find the stay of each unit at each time.

        ``codes``: from :meth:`codes`; negative is unknown; shape (n,).
        ``ms``: milliseconds since the epoch; shape (n,).
        Returns: row of :attr:`frame`; -1 unknown unit, -2 before its first installation, -3 after a removal. The
        instant of the removal belongs to the stay; shape (n,).
        """
        if len(self._key) == 0:
            return np.full(len(codes), -1, np.int64)
        place = np.searchsorted(self._key, (codes << _KEY_SHIFT) + ms, side="right") - 1
        safe = np.clip(place, 0, None)
        owned = (place >= 0) & (self._row_code[safe] == codes)
        result = np.where(owned, place, -2)
        result = np.where(owned & (ms > self._end[safe]), -3, result)
        # A sample at the very instant of a swap within one slot belongs to the later stay: searchsorted took it.
        return np.where(codes < 0, -1, result)

    def last_node(self, name: str, ms: int) -> str:
        """Return the node that a unit was last installed in at a time; the unit must be known by then."""
        code = self._code[self.parents.get(name, name)]
        place = int(np.searchsorted(self._key, (code << _KEY_SHIFT) + ms, side="right")) - 1
        return str(self.nodes[place])
