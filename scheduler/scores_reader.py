"""Reads the newest risks from a folder of scores, which whoever scores the fleet replaces while it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from policy.risk_record import FORMAT, RiskRecord
from policy.tiers import RAISED, TierThresholds
from scheduler.failures import SourceError
from scheduler.plain import instant
from scheduler.risks import Risks, ScoreTiers, risks_of

_NAME = re.compile(r"\d{8}T\d{6}Z")
_LARGEST_POINTER = 64 * 1024
_LARGEST_SUMMARY = 4 * 2**20
_LONGEST_LINE = 1 * 2**20
_MOST_RECORDS = 2_000_000
_TRIES = 3


class ScoresReader:
    """Reads a folder of scores.

    ``path``: ``latest.json`` in it names the newest decision; ``decisions/NAME/`` holds ``risks.jsonl`` and
    ``summary.json``.

    A decision's folder never changes, so that its name and inode tell whether it was read before. It may be removed
    while it is read (retention); then the pointer is read anew, a few times.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[tuple[str, int, int], Risks] | None = None

    def read(self) -> Risks:
        """Read the newest decision.

        Raises ``SourceError`` if there is none, or it is damaged or of another format.
        """
        last: OSError | None = None
        for _ in range(_TRIES):
            try:
                return self._once()
            except OSError as error:
                last = error
        raise SourceError(f"the scores in {self.path} cannot be read: {last}") from last

    def _once(self) -> Risks:
        name = self._newest()
        folder = self.path / "decisions" / name
        status = (folder / "risks.jsonl").stat()
        key = (name, status.st_ino, status.st_mtime_ns)
        if self._read is not None and self._read[0] == key:
            return self._read[1]
        summary = _object(folder / "summary.json", _LARGEST_SUMMARY)
        try:
            risks = risks_of(
                _records(folder / "risks.jsonl"), model_fitted_at=_fitted(summary), drift=_drift(summary),
                tiers=_tiers(summary),
            )  # fmt: skip
        except ValueError as error:
            raise SourceError(f"the scores in {folder} are damaged: {error}") from None
        units, named = sum(map(len, risks.nodes.values())), summary.get("units")
        if isinstance(named, int) and units != named:
            raise SourceError(f"the scores in {folder} are cut short: {units} of {named} units")
        if risks.decided_at is not None and risks.decided_at.strftime("%Y%m%dT%H%M%SZ") != name:
            raise SourceError(f"the scores in {folder} are of another decision: {risks.decided_at:%Y-%m-%d %H:%M} UTC")
        self._read = key, risks
        return risks

    def _newest(self) -> str:
        pointer = _object(self.path / "latest.json", _LARGEST_POINTER)
        name = pointer.get("decision")
        if pointer.get("format") != FORMAT or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SourceError(
                f"{self.path / 'latest.json'} names decision {name!r} in format {pointer.get('format')!r}: expected "
                f"a decision time in format {FORMAT}"
            )
        return name


def _object(file: Path, largest: int) -> dict[str, Any]:
    with file.open("rb") as stream:
        content = stream.read(largest + 1)
    if len(content) > largest:
        raise SourceError(f"{file} is larger than {largest} bytes")
    try:
        value = json.loads(content)
    except ValueError as error:
        raise SourceError(f"{file} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{file} holds {type(value).__name__}: expected an object")
    return value


def _records(file: Path) -> Iterator[RiskRecord]:
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE or number > _MOST_RECORDS:
                raise ValueError(f"line {number} is too long, or there are too many lines")
            try:
                yield RiskRecord.from_json(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def _fitted(summary: dict[str, Any]) -> datetime | None:
    model = summary.get("model")
    # an age that is not known opens the breaker, which is what an unreadable one should do as well
    return instant(model.get("fitted_at")) if isinstance(model, dict) else None


def _drift(summary: dict[str, Any]) -> tuple[str, ...]:
    alarms = summary.get("drift", [])
    return tuple(each for each in alarms if isinstance(each, str)) if isinstance(alarms, list) else ()


def _tiers(summary: dict[str, Any]) -> ScoreTiers | None:
    given, sources = summary.get("thresholds"), summary.get("threshold_sources")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"thresholds is {given!r}: expected an object")
    values = {name: given.get(name) for name in RAISED}
    for name, value in values.items():
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ValueError(f"thresholds.{name} is {value!r}: expected a number")
    words = {name: str(why) for name, why in sources.items()} if isinstance(sources, dict) else {}
    return ScoreTiers(TierThresholds(**values), words)
