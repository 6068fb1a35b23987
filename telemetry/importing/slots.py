"""Which GPU was in which slot of a node, and at which PCI address, according to samples.

A slot or index identifies a GPU only at the time of an observation: devices are renumbered after one of them is lost.
Between observations, a slot's GPU is known if the observations before and after agree.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from telemetry.dataset.schema import ms_of

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


CLEARLY_MS: Final = 3_600_000
# Sources lag: simultaneous changes may be observed this far apart.
_MAX_GPUS: Final = 64
# An address of more GPUs names no place, such as a default that an exporter reports for all of them.


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as dicts, with None for missing values."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def stays_in_places(observed: pd.DataFrame, declared: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each stay of a GPU in a place, by (gpu, first_ms): ``observed`` with a column ``place``.

    A place is a PCI address, or a slot where no GPU of the node ever changed it; an observation without either takes
    the one of the inventory.
    ``observed``: ``gpu``, ``node``, ``pci_bus_id``, ``slot``, ``first_ms``, ``last_ms``. ``declared``: installations.
    """
    named = declared[["gpu", "node", "pci_bus_id", "slot"]]
    slots = pd.concat([observed[named.columns], named], ignore_index=True).dropna(subset=["gpu", "slot"])
    numbers = slots["slot"].map(lambda slot: slot_key(str(slot))).groupby([slots["node"], slots["gpu"]]).nunique()
    renumbered = set(numbers.index[numbers > 1].get_level_values("node"))

    def places(frame: pd.DataFrame) -> pd.Series:
        in_slot = frame["slot"].map(lambda slot: f"slot {slot_key(str(slot))}", na_action="ignore")
        in_slot = in_slot.astype(object).mask(frame["node"].isin(renumbered))
        return frame["pci_bus_id"].astype(object).where(frame["pci_bus_id"].notna(), in_slot)

    stays = observed.assign(place=places(observed)).sort_values(["gpu", "first_ms"], kind="stable", ignore_index=True)
    has_moved = (stays["gpu"] != stays["gpu"].shift()) | (stays["node"] != stays["node"].shift())
    of_stay = stays["place"].groupby(has_moved.cumsum())
    stays["place"] = of_stay.ffill().fillna(of_stay.bfill())
    of_gpu = places(named).groupby([named["gpu"], named["node"]])
    inventory_place = of_gpu.first().where(of_gpu.nunique() == 1)
    if len(inventory_place):
        keys = pd.MultiIndex.from_frame(stays[["gpu", "node"]])
        stays["place"] = stays["place"].fillna(inventory_place.reindex(keys).set_axis(stays.index))
    stays["place"] = stays["place"].astype(object).where(stays["place"].notna(), None)
    is_new = has_moved | ((stays["place"] != stays["place"].shift()) & stays["place"].notna())
    condensed = stays.groupby(is_new.cumsum(), sort=False)
    return condensed.last().assign(first_ms=condensed["first_ms"].min(), last_ms=condensed["last_ms"].max())


class Replacements:
    """Which GPU took the place of another one, according to stays (see :func:`stays_in_places`).

    ``contested``: GPUs in a place that another GPU had before or after them, or in several places of a node.
    """

    def __init__(self, stays: pd.DataFrame, declared: pd.DataFrame) -> None:
        starts = declared[declared["installed_at"].notna()]
        of_unit = starts.assign(ms=ms_of(starts["installed_at"])).groupby(["gpu", "node"])["ms"].agg(list)
        self._starts: dict[tuple[str, str], list[int]] = of_unit.to_dict()
        self._in_place: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._of_gpu: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for stay in records(stays):
            self._of_gpu[stay["gpu"], stay["node"]].append(stay)
            if stay["place"] is not None:
                self._in_place[stay["node"], stay["place"]].append(stay)
        self._vacated: dict[tuple[str, str, int], int] = {}
        self.contested: set[str] = {
            gpu for (gpu, _), of_node in self._of_gpu.items() if len({stay["place"] for stay in of_node}) > 1
        }
        for in_place in self._in_place.values():
            gpus = {stay["gpu"] for stay in in_place}
            if not 1 < len(gpus) <= _MAX_GPUS:
                continue
            self.contested |= gpus
            for earlier, later in permutations(in_place, 2):
                if earlier["last_ms"] < later["first_ms"] and self._is_another(earlier, later):
                    key = later["gpu"], later["node"], later["first_ms"]
                    self._vacated[key] = max(earlier["last_ms"], self._vacated.get(key, earlier["last_ms"]))

    def vacated_ms(self, stay: dict[str, Any]) -> int | None:
        """Return when another GPU was last seen in the place of a stay before it; None if there was none."""
        return self._vacated.get((stay["gpu"], stay["node"], stay["first_ms"]))

    def begin_ms(self, stay: dict[str, Any]) -> int:
        """Return when a stay began: at the inventory's date if the place was vacant then, or at its first sample."""
        vacated = self.vacated_ms(stay)
        starts = self._starts.get((stay["gpu"], stay["node"]), [])
        fitting = [ms for ms in starts if vacated is not None and vacated < ms <= stay["first_ms"]]
        return int(max(fitting, default=stay["first_ms"]))

    def last_stay(self, installation: dict[str, Any]) -> dict[str, Any] | None:
        """Return the last stay within an installation (with its ``start`` and ``end`` in ms); None if unobserved."""
        stays = [
            stay
            for stay in self._of_gpu.get((installation["gpu"], installation["node"]), ())
            if installation["start"] <= stay["last_ms"] and stay["first_ms"] < installation["end"]
        ]
        return stays[-1] if stays else None

    def end_ms(self, installation: dict[str, Any]) -> int | None:
        """Return when another GPU took the place of an installation; None if none did."""
        observed, start = self.last_stay(installation), installation["start"]
        stay = observed or installation | {"place": installation["pci_bus_id"], "first_ms": start, "last_ms": start}
        others = [
            other for other in self._in_place.get((stay["node"], stay["place"]), ()) if self._is_another(stay, other)
        ]
        if len({other["gpu"] for other in others}) >= _MAX_GPUS:
            return None
        ends = [self.begin_ms(other) for other in others if other["first_ms"] > stay["last_ms"]]
        ends += [other["last_ms"] for other in others if observed is not None and _outlasts(other, stay)]
        return min(ends, default=None)

    def _is_another(self, stay: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether another stay in a place is no neighbor's, whose address changed when the node renumbered its bus."""
        return stay["gpu"] != other["gpu"] and not any(
            elsewhere["place"] != stay["place"]
            and elsewhere["first_ms"] <= stay["last_ms"]
            and stay["first_ms"] <= elsewhere["last_ms"]
            for elsewhere in self._of_gpu[other["gpu"], other["node"]]
        )


def _outlasts(stay: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a GPU was seen in a place clearly later than another one, and first seen there at another time.

    GPUs first seen together are neighbors: one of them that falls silent was not replaced.
    """
    seen_together = abs(stay["first_ms"] - other["first_ms"]) <= CLEARLY_MS
    return (
        stay["first_ms"] <= other["last_ms"] and not seen_together and stay["last_ms"] - other["last_ms"] > CLEARLY_MS
    )
