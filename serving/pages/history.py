"""Earlier scores of a unit, from the decisions that the scores' folder still holds."""

from __future__ import annotations

import logging
import math
import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from serving.scores.fleet import ALL_TIERS
from serving.scores.reading import STAMP

_LOG = logging.getLogger(__name__)
_NAN: Final = float("nan")
_NO_TIER: Final = 255
MOST_DECISIONS: Final = 400
"""Decisions kept in memory at most: of ten thousand units they take 20 MB."""


@dataclass(frozen=True, slots=True)
class PastScore:
    """A unit at one decision time.

    ``risk``: None: not known then.
    """

    decided: datetime
    risk: float | None
    tier: str


@dataclass(frozen=True, slots=True)
class _Decision:
    decided: datetime
    stamp: tuple[int, int]
    risks: array[float]  # by the unit's number; NaN: not known, or not there
    tiers: array[int]


class ScoreHistory:
    """Reads each stored decision once.

    ``folder``: what ``predrain score --out`` writes.

    May be called from any thread; calls wait for each other.
    """

    def __init__(self, folder: Path, reach: timedelta = timedelta(days=30)) -> None:
        self._folder = folder / "decisions"
        self._reach = reach
        self._numbers: dict[str, int] = {}
        self._kept: dict[str, _Decision] = {}
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def of(self, unit: str) -> list[PastScore]:
        """Return a unit's scores, oldest first; a decision that cannot be read is left out and logged."""
        return self.of_all([unit])[unit]

    def of_all(self, units: Iterable[str]) -> dict[str, list[PastScore]]:
        """Return the scores of some units."""
        with self._lock:
            self._look()
            kept = sorted(self._kept.values(), key=lambda decision: decision.decided)
            return {unit: self._scores(unit, kept) for unit in units}

    def _scores(self, unit: str, kept: list[_Decision]) -> list[PastScore]:
        number = self._numbers.get(unit)
        scores = []
        for decision in kept:
            if number is not None and number < len(decision.tiers) and decision.tiers[number] != _NO_TIER:
                risk = decision.risks[number]
                scores.append(
                    PastScore(decision.decided, None if math.isnan(risk) else risk, ALL_TIERS[decision.tiers[number]])
                )
        return scores

    def _look(self) -> None:
        times = {}
        try:
            for path in self._folder.iterdir():
                try:
                    times[path.name] = datetime.strptime(path.name, STAMP).replace(tzinfo=UTC)
                except ValueError:
                    continue
        except OSError:
            return
        newest = max(times.values(), default=None)
        wanted = sorted(name for name, when in times.items() if newest is not None and when >= newest - self._reach)
        wanted = wanted[-MOST_DECISIONS:]
        for name in self._kept.keys() - set(wanted):
            del self._kept[name]
        for name in wanted:
            path = self._folder / name / "risks.parquet"
            try:
                stat = path.stat()
                stamp = (stat.st_mtime_ns, stat.st_ino)
                if name not in self._kept or self._kept[name].stamp != stamp:
                    self._kept[name] = self._read(path, times[name], stamp)
            except FileNotFoundError:  # being replaced or pruned
                self._kept.pop(name, None)
            except (OSError, ValueError, KeyError) as error:
                self._kept.pop(name, None)
                if name not in self._reported:
                    self._reported.add(name)
                    _LOG.warning("an earlier decision is left out of the pages: %s: %s", path, error)

    def _read(self, path: Path, decided: datetime, stamp: tuple[int, int]) -> _Decision:
        import pyarrow.parquet as pq  # noqa: PLC0415 - for these pages only

        with pq.ParquetFile(path) as file:  # `read_table` would import pandas
            table = file.read(columns=["unit", "risk", "tier"])
        numbers = self._numbers
        names = table.column("unit").to_pylist()
        at = [numbers.setdefault(name, len(numbers)) for name in names]
        risks = array("f", [_NAN]) * len(numbers)
        tiers = array("B", [_NO_TIER]) * len(numbers)
        codes = {tier: code for code, tier in enumerate(ALL_TIERS)}
        for place, risk, tier in zip(
            at, table.column("risk").to_pylist(), table.column("tier").to_pylist(), strict=True
        ):
            risks[place] = _NAN if risk is None else risk
            tiers[place] = codes[tier]
        return _Decision(decided, stamp, risks, tiers)
