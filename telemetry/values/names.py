"""What a column or metric of a source is called: a channel, a key of the row, a fact of the inventory, or not used."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from telemetry.values.tables import read_table

INVENTORY: Final = "inventory"
"""Target of names that only repeat the inventory."""


@dataclass(frozen=True, slots=True)
class SourceName:
    """A row of the catalogue; ``target`` is empty where the name is known, and not used."""

    name: str
    target: str
    unit: str | None


_WRITTEN: Final = [SourceName(row["name"], row["target"], row["unit"] or None) for row in read_table("names.csv")]
_ROWS: Final = _WRITTEN + [  # Telegraf and nvidia_gpu_exporter make metrics of nvidia-smi's query fields
    SourceName(f"nvidia_smi_{row.name.lower().replace('.', '_')}", row.target, None)
    for row in _WRITTEN
    if row.target and "." in row.name
]
EXACT_NAMES: Final[Mapping[str, SourceName]] = {row.name: row for row in _ROWS if row.target and "*" not in row.name}


_UNUSED: Final = re.compile("|".join(translate(row.name) for row in _ROWS if not row.target))
_DCGM: Final = frozenset(row["name"] for row in read_table("dcgm_fields.csv"))
_REPEATS: Final = frozenset(row.name for row in _ROWS if row.target == INVENTORY)


def matches_unused(name: str) -> bool:
    """Whether a name is in the catalogue as known, and not used; a channel's own name may match such a pattern too."""
    return bool(name in _DCGM or _UNUSED.match(name) or _UNUSED.match(name.lower()))


def repeats_inventory(name: str) -> bool:
    """Whether a column of samples only repeats the inventory, or names what ran."""
    return name in _REPEATS


def spellings(name: str) -> tuple[str, ...]:
    """Return the names under which the catalogue may know a header: as written, and nvidia-smi's with underscores."""
    lowered = name.lower()
    return tuple(dict.fromkeys((name, lowered, lowered.replace("_", "."), lowered.replace(" ", "_"))))
