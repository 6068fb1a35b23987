"""Reads the newest risks from a folder of scores while the scorer updates it."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from foundation.errors import InputError
from foundation.files import refuse_other_writers
from policy.fleet import Score, UnitView
from policy.risk_record import FORMAT, MISSING_CHANNELS, RiskRecord
from policy.tiers import ChosenThresholds
from scheduler.ports.codec import instant, read_json
from scheduler.ports.errors import SourceError
from scheduler.ports.protocols import Clock
from scheduler.ports.risks import Risks

_NAME = re.compile(r"\d{8}T\d{6}Z")
_LARGEST_POINTER = 64 * 1024
_LARGEST_SUMMARY = 4 * 2**20
_MAX_LINE = 1 * 2**20
_MAX_RECORDS = 2_000_000
_TRIES = 3

CLOCK_SKEW: Final = timedelta(minutes=5)
"""Tolerance for a scorer's clock that is ahead of the local one."""


class ScoresReader:
    """Reads a folder of scores.

    ``path``: contains ``latest.json``, which names the newest decision, and ``decisions/NAME/`` with ``risks.jsonl``
    and ``summary.json``.

    The folder of a decision is immutable, so its name and inode identify it. Retention may remove it during a read;
    then the pointer is re-read, up to three attempts. An invalid record is rejected alone, and its unit has no score.
    """

    def __init__(self, path: Path, clock: Clock, max_lifetime: timedelta) -> None:
        self.path = path
        self._clock = clock
        self._max_lifetime = max_lifetime
        self._read: tuple[tuple[str, int, int], Risks] | None = None
        self._again_at: datetime | None = None

    def read(self) -> Risks:
        """Read the newest decision.

        Raises ``SourceError`` if it is missing, corrupt, incomplete, writable by other users or in another format.
        """
        last: OSError | None = None
        for _ in range(_TRIES):
            try:
                return self._read_once()
            except OSError as error:
                last = error
        if not (self.path / "latest.json").exists():
            raise SourceError(f"no scores in {self.path}: run `predrain score` with --out on this folder")
        raise SourceError(f"the scores in {self.path} cannot be read: {last}") from last

    def _read_once(self) -> Risks:
        name = self._newest()
        folder = self.path / "decisions" / name
        status = (folder / "risks.jsonl").stat()
        key = (name, status.st_ino, status.st_mtime_ns)
        if self._read is not None and self._read[0] == key and not self._believed_by_now():
            return self._read[1]
        try:
            decisions = self.path / "decisions"
            files = (folder / "risks.jsonl", folder / "summary.json")
            refuse_other_writers(self.path, (self.path / "latest.json", decisions, folder, *files))
        except InputError as error:
            raise SourceError(f"the scores are rejected: {error}") from None
        summary = _object(folder / "summary.json", _LARGEST_SUMMARY)
        decision = _Decision(name, self._clock.now(), self._max_lifetime)
        try:
            decision.read(folder / "risks.jsonl")
            risks = decision.risks(summary)
        except ValueError as error:
            raise SourceError(f"the scores in {folder} are damaged: {error}") from None
        units = summary.get("units")
        # A file cut between two lines is well-formed.
        if isinstance(units, int) and decision.lines != units:
            raise SourceError(f"the scores in {folder} are incomplete: {decision.lines} of {units} units")
        if risks.refused and not decision.records:
            raise SourceError(f"none of the scores in {folder} can be used: {risks.refused[0]}")
        self._again_at = decision.again_at
        self._read = key, risks
        return risks

    def _believed_by_now(self) -> bool:
        """Whether a record that was rejected because it was issued in the future is valid by now."""
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
        value = read_json(content)
    except ValueError as error:
        raise SourceError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{file} holds {type(value).__name__}: expected an object")
    return value


@dataclass(slots=True)
class _Decision:
    """Records of one decision: ``records`` are valid; ``refused`` has reasons and ``units`` the nodes of the others."""

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
            while line := stream.readline(_MAX_LINE + 1):
                self.lines += 1
                if len(line) > _MAX_LINE or self.lines > _MAX_RECORDS:
                    raise ValueError(f"line {self.lines} is too long, or there are too many lines")
                self._take(line)
        models = Counter(record.model for record in self.records.values())
        # Risks of two models do not compare; those of the smaller part are rejected.
        for model, _ in models.most_common()[1:]:
            for record in [record for record in self.records.values() if record.model == model]:
                self._refuse(record.unit, record.node, "has a different model than the other records")

    def _take(self, line: bytes) -> None:
        content: Any = None
        try:
            content = read_json(line)
            record = RiskRecord.from_json(content)
        except ValueError as error:
            unit, node = (content.get(name) if isinstance(content, dict) else None for name in ("unit", "node"))
            if isinstance(unit, str) and isinstance(node, str):
                self._refuse(unit, node, f"is damaged: {error}")
            else:
                self._refuse(f"line {self.lines}", None, f"is damaged: {error}")
            return
        # Which of two records is right is unknown, so neither counts.
        if record.unit in self.records or record.unit in self.units:
            self._refuse(record.unit, record.node, "has more than one record of its unit")
        elif (reason := self._not_believed(record)) is not None:
            self._refuse(record.unit, record.node, reason)
        else:
            self.records[record.unit] = record

    def _not_believed(self, record: RiskRecord) -> str | None:
        if record.issued_at > self.now + CLOCK_SKEW:
            ready = record.issued_at - CLOCK_SKEW
            self.again_at = ready if self.again_at is None else min(self.again_at, ready)
            return f"is issued in the future, at {record.issued_at:%Y-%m-%d %H:%M} UTC"
        if record.decision_time.strftime("%Y%m%dT%H%M%SZ") != self.name:
            return f"belongs to another decision: {record.decision_time:%Y-%m-%d %H:%M} UTC"
        if record.decision_time > record.issued_at + CLOCK_SKEW:
            return "was issued before its decision time"
        if record.expires_at - record.decision_time > self.max_lifetime:
            return (
                f"is valid until {record.expires_at:%Y-%m-%d %H:%M} UTC, longer than "
                f"controller.max_score_lifetime ({self.max_lifetime})"
            )
        return None

    def _refuse(self, unit: str, node: str | None, reason: str) -> None:
        self.records.pop(unit, None)
        self.refused.setdefault(unit, f"{unit} {reason}")
        if node is not None:
            self.units.setdefault(unit, node)

    def risks(self, summary: dict[str, Any]) -> Risks:
        """Group the units by node; units of rejected records have no score, and count as missing."""
        nodes: dict[str, list[UnitView]] = defaultdict(list)
        for record in self.records.values():
            reasons = tuple(reason.text for reason in record.reasons)
            score = Score(record.risk, record.decision_time, record.expires_at, reasons)
            nodes[record.node].append(UnitView(record.unit, score))
        for unit, node in self.units.items():
            nodes[node].append(UnitView(unit))
        first = next(iter(self.records.values()), None)
        return Risks(
            {name: tuple(sorted(units, key=lambda unit: unit.name)) for name, units in sorted(nodes.items())},
            None if first is None else first.decision_time, None if first is None else first.model, _fitted(summary),
            _missing_channels(summary), ChosenThresholds.of_summary(summary), None if first is None else first.horizon,
            tuple(self.refused.values()),
        )  # fmt: skip


def _fitted(summary: dict[str, Any]) -> datetime | None:
    model = summary.get("model")
    # an unknown model age opens the breaker, as an unreadable one should
    return instant(model.get("fitted_at")) if isinstance(model, dict) else None


def _missing_channels(summary: dict[str, Any]) -> tuple[str, ...]:
    names = summary.get(MISSING_CHANNELS, [])
    # an invalid list opens the breaker, like a missing channel
    return tuple(str(name) for name in names) if isinstance(names, list) else (str(names),)
