"""What an import was given: its files by content, and the settings that decide what becomes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.dataset.dataset import Dataset
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True)
class Source:
    """One source file; ``entry`` is what dataset.json keeps of it: no path, and no time of reading."""

    role: str
    path: Path
    entry: dict[str, Any]


def describe_source(role: str, path: Path, settings: Mapping[str, Any]) -> Source:
    """Hash a source file; ``settings``: what decides how its rows are read, JSON types only."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    entry = {"role": role, "name": path.name, "bytes": path.stat().st_size, "sha256": sha256, "settings": settings}
    return Source(role, path, entry)


def text_digest(content: object) -> str:
    """Hash JSON-like content, in 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def new_sources(sources: Sequence[Source], existing: Dataset | None) -> list[Source]:
    """Return the sources that the dataset does not hold yet; a file given twice counts once.

    Raises ``InputError`` if the dataset holds a source that was read with other settings: its rows cannot be taken
    back.
    """
    entries = [] if existing is None else existing.meta.sources
    settings = {(entry["role"], entry["sha256"]): entry["settings"] for entry in entries if "sha256" in entry}
    fresh: list[Source] = []
    for source in sources:
        key, given = (source.role, source.entry["sha256"]), source.entry["settings"]
        if key not in settings:
            settings[key] = given
            fresh.append(source)
        # Older versions kept settings that are none any more.
        changed = sorted(name for name, value in given.items() if settings[key].get(name) != value)
        if changed:
            raise InputError(
                f"this source was imported before with other settings: {', '.join(changed)}",
                str(source.path),
                "Import all sources again into an empty folder, or go back to the settings of the first import.",
            )
    return fresh
