"""What an import was given: its files by content, and the settings that decide what becomes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.dataset.channel import Channel
from telemetry.dataset.dataset import Dataset
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True)
class Source:
    """One source file.

    ``sha256``: of its bytes.
    ``settings``: what decides how its rows are read, JSON types only.
    """

    role: str
    path: Path
    sha256: str
    settings: dict[str, Any]

    def entry(self) -> dict[str, Any]:
        """Return what dataset.json keeps of the source: no path, and no time of reading."""
        size = self.path.stat().st_size
        return {
            "role": self.role,
            "name": self.path.name,
            "bytes": size,
            "sha256": self.sha256,
            "settings": self.settings,
        }


def fingerprint(role: str, path: Path, settings: Mapping[str, Any]) -> Source:
    """Hash a source file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Source(role, path, digest, dict(settings))


def channels_digest(channels: Mapping[str, Channel]) -> str:
    """Hash what decides the fate of values: each channel's kind and range."""
    content = [[channel.name, channel.kind, channel.low, channel.high] for channel in channels.values()]
    return text_digest(content)


def text_digest(content: object) -> str:
    """Hash JSON-like content, in 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def new_sources(sources: Sequence[Source], existing: Dataset | None) -> list[Source]:
    """Return the sources that the dataset does not hold yet; a file given twice counts once.

    Raises ``InputError`` if the dataset holds a source that was read with other settings: its rows cannot be taken
    back.
    """
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if existing is not None:
        known = {(each["role"], each["sha256"]): each for each in existing.meta.sources if "sha256" in each}
    fresh: list[Source] = []
    for source in sources:
        key = (source.role, source.sha256)
        if key not in known:
            known[key] = {"settings": source.settings}
            fresh.append(source)
            continue
        before = known[key]["settings"]  # with what older versions knew of, too
        changed = sorted(name for name, value in source.settings.items() if before.get(name) != value)
        if changed:
            raise InputError(
                f"this source was imported before with other settings: {', '.join(changed)}",
                str(source.path),
                "Import all sources again into an empty folder, or go back to the settings of the first import.",
            )
    return fresh
