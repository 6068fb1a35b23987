"""Meaning of column and metric names in sources: a channel, a key, an inventory attribute, or unused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from telemetry.values.tables import read_table

INVENTORY: Final = "inventory"
"""Target of names that only duplicate the inventory."""


@dataclass(frozen=True, slots=True)
class SourceName:
    """A row of the catalogue; ``target`` is empty for known but unused names."""

    name: str
    target: str
    unit: str | None


_CATALOGUE: Final = [SourceName(row["name"], row["target"], row["unit"] or None) for row in read_table("names.csv")]
_NAMES: Final = _CATALOGUE + [  # Telegraf and nvidia_gpu_exporter make metrics of nvidia-smi's query fields
    SourceName(f"nvidia_smi_{row.name.lower().replace('.', '_')}", row.target, None)
    for row in _CATALOGUE
    if row.target and "." in row.name
]
EXACT_NAMES: Final[Mapping[str, SourceName]] = {row.name: row for row in _NAMES if row.target and "*" not in row.name}


_UNUSED: Final = re.compile("|".join(translate(row.name) for row in _NAMES if not row.target))
_DCGM: Final = frozenset(row["name"] for row in read_table("dcgm_fields.csv"))


def matches_unused(name: str) -> bool:
    """Whether the catalogue lists a name as unused; names of channels may match its patterns too."""
    return bool(name in _DCGM or _UNUSED.match(name) or _UNUSED.match(name.lower()))


def spellings(name: str) -> tuple[str, ...]:
    """Return spellings of a header to look up: as written, lower case, with dots, and with underscores."""
    lowered = name.lower()
    return tuple(dict.fromkeys((name, lowered, lowered.replace("_", "."), lowered.replace(" ", "_"))))
