"""Where each unit stands: its rack, group, cluster and model, as an inventory says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where a unit stands; empty text: not said."""

    cluster: str = ""
    group: str = ""
    rack: str = ""
    model: str = ""


NOWHERE = Place()
"""Nothing is said."""

FIELDS = ("cluster", "group", "rack", "model")
"""In the order of :class:`Place`."""


def places_of(content: Mapping[str, Sequence[Any]]) -> dict[str, Place]:
    """Read places as the reader process writes them, by unit.

    Raises ``ValueError`` if an entry is not of four texts.
    """
    seen: dict[tuple[str, ...], Place] = {}  # ten thousand units stand in some hundred places
    places = {}
    for unit, fields in content.items():
        key = tuple(str(field) for field in fields)
        if len(key) != len(FIELDS):
            raise ValueError(f"{unit} has a place of {len(key)} fields")
        place = seen.get(key)
        if place is None:
            place = seen[key] = Place(*key)
        places[unit] = place
    return places
