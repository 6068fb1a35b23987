"""Reads the newest risks from a folder of scores, which whoever scores the fleet replaces while it is read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from policy.fleet import UnitView
from policy.risk_record import FORMAT, RiskRecord
from policy.tiers import RAISED, TierThresholds
from scheduler.ports.codec import instant
from scheduler.ports.errors import SourceError
from scheduler.ports.protocols import Clock
from scheduler.ports.risks import Risks, ScoreTiers, risks_of

_NAME = re.compile(r"\d{8}T\d{6}Z")
_LARGEST_POINTER = 64 * 1024
_LARGEST_SUMMARY = 4 * 2**20
_LONGEST_LINE = 1 * 2**20
_MOST_RECORDS = 2_000_000
_TRIES = 3

CLOCK_SKEW: Final = timedelta(minutes=5)
"""How far the clock of whoever scores may be ahead of ours."""


class ScoresReader:
    """Reads a folder of scores.

    ``path``: ``latest.json`` in it names the newest decision; ``decisions/NAME/`` holds ``risks.jsonl`` and
    ``summary.json``.

    A decision's folder never changes, so that its name and inode tell whether it was read before. It may be removed
    while it is read (retention); then the pointer is read anew, a few times. A record that cannot be believed is
    refused by itself, and its unit has no score.
    """

    def __init__(self, path: Path, clock: Clock, max_lifetime: timedelta) -> None:
        self.path = path
        self._clock = clock
        self._max_lifetime = max_lifetime
        self._read: tuple[tuple[str, int, int], Risks] | None = None
        self._again_at: datetime | None = None

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
        if self._read is not None and self._read[0] == key and not self._believed_by_now():
            return self._read[1]
        summary = _object(folder / "summary.json", _LARGEST_SUMMARY)
        listed = _Listed(name, self._clock.now(), self._max_lifetime)
        try:
            listed.read(folder / "risks.jsonl")
            risks = risks_of(
                listed.records.values(), model_fitted_at=_fitted(summary), drift=_drift(summary), tiers=_tiers(summary)
            )
        except ValueError as error:
            raise SourceError(f"the scores in {folder} are damaged: {error}") from None
        found, named = listed.lines, summary.get("units")
        if isinstance(named, int) and found != named:
            raise SourceError(f"the scores in {folder} are cut short: {found} of {named} units")
        if listed.refused and not listed.records:
            raise SourceError(f"none of the scores in {folder} can be used: {next(iter(listed.refused.values()))}")
        risks = replace(risks, nodes=listed.with_refused(risks.nodes), refused=tuple(listed.refused.values()))
        self._again_at = listed.again_at
        self._read = key, risks
        return risks

    def _believed_by_now(self) -> bool:
        """Tell whether a record that was refused for being from the future is from the past by now."""
        return self._again_at is not None and self._clock.now() >= self._again_at

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


@dataclass(slots=True)
class _Listed:
    """The records of one decision: those that can be believed, and why the others cannot."""

    name: str
    now: datetime
    max_lifetime: timedelta
    lines: int = 0
    records: dict[str, RiskRecord] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    again_at: datetime | None = None

    def read(self, file: Path) -> None:
        with file.open("rb") as stream:
            while line := stream.readline(_LONGEST_LINE + 1):
                self.lines += 1
                if len(line) > _LONGEST_LINE or self.lines > _MOST_RECORDS:
                    raise ValueError(f"line {self.lines} is too long, or there are too many lines")
                self._take(line)
        models = Counter(record.model for record in self.records.values())
        for model, _ in models.most_common()[1:]:
            for record in [each for each in self.records.values() if each.model == model]:
                self._refuse(record.unit, record.node, "is of another model than most")

    def _take(self, line: bytes) -> None:
        content: Any = None
        try:
            content = json.loads(line)
            record = RiskRecord.from_json(content)
        except (ValueError, RecursionError) as error:
            unit, node = (content.get(name) if isinstance(content, dict) else None for name in ("unit", "node"))
            if isinstance(unit, str) and isinstance(node, str):
                self._refuse(unit, node, f"is damaged: {error}")
            else:
                self._refuse(f"line {self.lines}", None, f"is damaged: {error}")
            return
        if record.unit in self.records or record.unit in self.units:
            self._refuse(record.unit, record.node, "has two records of its unit")
            return
        why = self._not_believed(record)
        if why is not None:
            self._refuse(record.unit, record.node, why)
            return
        self.records[record.unit] = record

    def _not_believed(self, record: RiskRecord) -> str | None:
        if record.issued_at > self.now + CLOCK_SKEW:
            ready = record.issued_at - CLOCK_SKEW
            self.again_at = ready if self.again_at is None else min(self.again_at, ready)
            return f"is issued in the future, at {record.issued_at:%Y-%m-%d %H:%M} UTC"
        if record.decision_time.strftime("%Y%m%dT%H%M%SZ") != self.name:
            return f"is of another decision: {record.decision_time:%Y-%m-%d %H:%M} UTC"
        if record.decision_time > record.issued_at + CLOCK_SKEW:
            return "is of a decision time after it was issued"
        if record.expires_at - record.decision_time > self.max_lifetime:
            return (
                f"is said to hold until {record.expires_at:%Y-%m-%d %H:%M} UTC, longer than "
                f"controller.max_score_lifetime ({self.max_lifetime})"
            )
        return None

    def _refuse(self, unit: str, node: str | None, why: str) -> None:
        self.records.pop(unit, None)
        self.refused.setdefault(unit, f"{unit} {why}")
        if node is not None:
            self.units.setdefault(unit, node)

    def with_refused(self, nodes: Mapping[str, tuple[UnitView, ...]]) -> dict[str, tuple[UnitView, ...]]:
        """Add the units of refused records without a score, so that they count as missing."""
        every = dict(nodes)
        for unit, node in self.units.items():
            every[node] = tuple(sorted((*every.get(node, ()), UnitView(unit)), key=lambda each: each.name))
        return dict(sorted(every.items()))


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
