"""Which GPU was in which slot of a node, and at which PCI address, according to samples.

A slot or index identifies a GPU only at the time of an observation: devices are renumbered after one of them is lost.
Between observations, a slot's GPU is known if the observations before and after agree.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

_INDEX: Final = re.compile(
    r"\s*(?:(?:gpu|slot|index|device|card|sxm|accelerator|nvidia|cuda|/dev/)[\s#:_.-]*)*(\d{1,2})(?:\.0)?\s*\Z",
    re.IGNORECASE,
)
_EDGE_MS: Final = 86_400_000
# A node is rebooted within hours or days of a GPU failure, and may then renumber its GPUs.

_PLACE: Final = ["node", "pci_bus_id", "slot"]

Names = tuple[npt.NDArray[np.int64], Sequence[str]]
"""A column as indices into a list of distinct texts, -1 for none."""


def slot_key(text: str) -> str:
    """Return a slot name in normalised form for comparison; an index becomes its number."""
    index = _INDEX.match(text)
    return str(int(index[1])) if index else text.strip().casefold()


def is_index(text: str) -> bool:
    """Whether a text is an index (``3``, ``gpu-3``, ``slot 3``)."""
    return _INDEX.match(text) is not None


class PlaceRuns:
    """Collects the places of units from batches of samples."""

    def __init__(self) -> None:
        self._codes: dict[tuple[int, str | None, str | None], int] = {}
        self._parts: list[pd.DataFrame] = []

    def add(
        self,
        unit: npt.NDArray[np.int64],
        node: npt.NDArray[np.int64],
        ms: npt.NDArray[np.int64],
        address: Names,
        slot: Names,
    ) -> None:
        """Add a batch of rows; ``unit`` and ``node`` are codes, shape (n,)."""
        (address_of, addresses), (slot_of, slots) = address, slot
        packed = (node * (len(addresses) + 1) + address_of + 1) * (len(slots) + 1) + slot_of + 1
        distinct, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
        codes = np.empty(len(distinct), np.int64)
        for number, row in enumerate(first.tolist()):
            place = (int(node[row]), [*addresses, None][address_of[row]], [*slots, None][slot_of[row]])
            codes[number] = self._codes.setdefault(place, len(self._codes))
        rows = pd.DataFrame({"unit": unit, "place": codes[inverse], "first_ms": ms, "last_ms": ms})
        self._parts.append(_runs(rows))

    def frame(self) -> pd.DataFrame:
        """Return a row for each stay of a unit in a place, ordered by (unit, first_ms).

        Columns: ``unit`` and ``node`` (codes), ``pci_bus_id``, ``slot``, ``first_ms``, ``last_ms``.
        """
        empty = pd.DataFrame(columns=["unit", "place", "first_ms", "last_ms"], dtype=np.int64)
        runs = _runs(pd.concat([empty, *self._parts], ignore_index=True))
        places = pd.DataFrame(list(self._codes), columns=_PLACE, dtype=object)
        return runs.join(places, on="place").drop(columns="place")


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.sort_values(["unit", "first_ms"], kind="stable")
    begins = (rows["unit"] != rows["unit"].shift()) | (rows["place"] != rows["place"].shift())
    runs = rows.groupby(begins.cumsum().to_numpy(), sort=False)
    return runs.agg({"unit": "first", "place": "first", "first_ms": "min", "last_ms": "max"}).reset_index(drop=True)


class ObservedSlots:
    """Looks up which GPU was in a slot at a time.

    ``runs``: ``gpu``, ``node``, ``slot``, ``first_ms``, ``last_ms``; rows without a slot are ignored.
    """

    def __init__(self, runs: pd.DataFrame | None = None) -> None:
        self._in_slot: defaultdict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
        self._of_gpu: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        columns = ["gpu", "node", "slot", "first_ms", "last_ms"]
        in_slots = pd.DataFrame(columns=columns) if runs is None else runs[runs["slot"].notna()][columns]
        for gpu, node, slot, first, last in in_slots.itertuples(index=False, name=None):
            self._in_slot[node, slot_key(slot)].append((first, last, gpu))
            self._of_gpu[node, gpu].append((first, slot_key(slot)))
        self.nodes = frozenset(node for node, _ in self._in_slot)
        renumbered = {node for (node, _), runs in self._of_gpu.items() if len({slot for _, slot in runs}) > 1}
        with_several = {node for (node, _), runs in self._in_slot.items() if len({gpu for *_, gpu in runs}) > 1}
        self.renumbered = frozenset(renumbered | with_several)

    def has_slot(self, node: str, slot: str) -> bool:
        """Return whether a GPU was ever in a slot."""
        return (node, slot) in self._in_slot

    def find(self, node: str, slot: str, ms: int) -> str | None:
        """Return the GPU in a slot (a :func:`slot_key`) at a time; None if unknown."""
        runs = self._in_slot.get((node, slot), [])
        current = {gpu for first, last, gpu in runs if first <= ms <= last}
        if current:
            return current.pop() if len(current) == 1 else None
        latest = max(((last, gpu) for _, last, gpu in runs if last < ms), default=None)
        after = min(((first, gpu) for first, _, gpu in runs if first > ms), default=None)
        ends = [end for end in (latest, after) if end is not None]
        if len({gpu for _, gpu in ends}) != 1 or (len(ends) == 1 and abs(ends[0][0] - ms) > _EDGE_MS):
            return None
        gpu, times = ends[0][1], [ms, *(end_ms for end_ms, _ in ends)]
        other_slots = (first for first, key in self._of_gpu[node, gpu] if key != slot)
        return None if any(min(times) <= first <= max(times) for first in other_slots) else gpu
