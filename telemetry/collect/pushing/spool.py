"""A landing folder as a spool: what one collector has landed and nobody has taken yet, bounded."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """Read a size such as ``1GiB`` or ``500 MB``; a number alone is bytes.

    Raises ``ValueError`` if the text is no size, or is no more than 0.
    """
    match = _SIZE.match(text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write a number and a unit (KiB, MiB, GiB, TiB), such as '1GiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


_LOG = logging.getLogger(__name__)
_NAMED: Final = "named-"
_DROP_ORDER: Final[tuple[Kind, ...]] = ("samples", "inventory", "jobs", "events")
REFUSED_BYTES: Final = 64 * 2**20
"""Refused files are kept for a look up to this size; beyond it the oldest go."""

REFUSED_FILES: Final = 1000
"""… and up to this number."""


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """A landed file."""

    kind: Kind
    path: Path
    name: str


class Spool:
    """The files of one writer in a landing folder.

    ``landing``: where the collector lands; files of other writers in it are left alone.
    ``limit_bytes``: size beyond which the oldest samples are dropped, and only when there are none left anything else;
    None: never.
    """

    def __init__(self, landing: Landing, writer: str, limit_bytes: int | None) -> None:
        self._landing = landing
        self._limit_bytes = limit_bytes
        own = re.escape(writer)
        self._own = re.compile(rf"(?:\d{{13}}-{own}-\d+-\d{{6,}}-[0-9a-f]{{8}}|{_NAMED}{own}\..*)\Z")
        self._over = False
        self.dropped: int = 0
        self.refused: int = 0

    @property
    def root(self) -> Path:
        """The landing folder."""
        return self._landing.root

    def files(self) -> list[SpoolFile]:
        """Return the files that wait, oldest first."""
        return [
            # The kind is the folder's name, as Landing lays it out.
            SpoolFile(_kind(path), path, path.stem.removeprefix(_NAMED))
            for path in self._landing.waiting()
            if self._own.match(path.stem)
        ]

    def trim(self) -> int:
        """Drop the oldest files while the spool is over its limit; return how many went."""
        if self._limit_bytes is None:
            return 0
        sized = [(each, size) for each in self.files() if (size := _size(each.path)) is not None]
        over_bytes = sum(size for _, size in sized) - self._limit_bytes
        if over_bytes <= 0:
            self._over = False
            return 0
        went = 0
        for kind in _DROP_ORDER:
            for each, size in sized:
                if over_bytes <= 0:
                    break
                if each.kind == kind:
                    each.path.unlink(missing_ok=True)
                    over_bytes -= size
                    went += 1
        self.dropped += went
        if not self._over:
            self._over = True
            _LOG.error(
                "the spool %s is over its limit of %d bytes: the oldest samples go (said once; %d so far)",
                self.root,
                self._limit_bytes,
                self.dropped,
            )
        return went

    def refuse(self, file: SpoolFile, why: str) -> None:
        """Put a file aside that the other side will never take, with the reason beside it."""
        folder = self.root / "refused"
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{file.kind}-{file.path.name}"
        # The reason first: killed between the two, the file is sent again and refused again.
        aside.with_suffix(".json").write_text(json.dumps({"kind": file.kind, "name": file.name, "why": why}) + "\n")
        file.path.replace(aside)
        self.refused += 1
        _LOG.error("refused for good, put aside as %s: %s", aside, why)
        self._bound_refused(folder)

    def _bound_refused(self, folder: Path) -> None:
        kept = sorted(
            ((stat.st_mtime_ns, path, stat.st_size) for path in folder.glob("*.parquet") if (stat := path.stat())),
            reverse=True,
        )
        total = 0
        for place, (_, path, size) in enumerate(kept):
            total += size
            if total > REFUSED_BYTES or place >= REFUSED_FILES:
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)


def _kind(path: Path) -> Kind:
    kind: Kind = next(each for each in _DROP_ORDER if each == path.parent.name)
    return kind


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # sent just now
        return None
