"""Reads and validates the scores of ``predrain score``, and groups them by node.

``latest.json`` names the newest decision; ``decisions/NAME/risks.jsonl`` holds one risk record per unit, and
``summary.json`` their common fields; ``fleet.json`` has the locations of units and the outcomes of past alerts. The
service reads all of it without importing pandas.
"""

import contextlib
import json
import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from foundation.errors import InputError
from policy.risk_record import FORMAT, RiskRecord
from policy.tiers import TIERS, UNKNOWN, ChosenThresholds, Tier, node_risk, worst_tier
from telemetry.identity.devices import GpuNames
from telemetry.identity.nodes import NodeNames

_LOG = logging.getLogger(__name__)
LATEST: Final = "latest.json"
FACTS: Final = "fleet.json"
TEXTFILE: Final = "predrain_score.prom"
_MAX_TEXTFILE_BYTES: Final = 1 << 16

STAMP: Final = "%Y%m%dT%H%M%SZ"
NAME: Final = re.compile(r"\d{8}T\d{6}Z")
_DIGITS: Final = re.compile(r"([0-9]{1,18})")
MAX_DECISIONS: Final = 120
"""Maximum number of decisions on a page: a month at one every six hours."""

_DO: Final = "Run `predrain score` again; the previous scores are served until then."


@dataclass(frozen=True, slots=True)
class Scores:
    """The records of one decision.

    ``decision``: its name, e.g. ``20260101T060000Z``.
    ``nodes``: records by node, in slot order.
    ``decided``, ``issued``, ``expires``: decision time, latest issue time, and latest expiry of a known risk, or of any
    record if none is known (aware UTC).
    ``summary``: ``summary.json``; empty if it is missing or damaged.
    """

    decision: str
    units: Mapping[str, RiskRecord]
    nodes: Mapping[str, tuple[RiskRecord, ...]]
    decided: datetime
    issued: datetime
    expires: datetime
    model: Mapping[str, Any]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, records: Iterable[RiskRecord], summary: Mapping[str, Any]) -> Self:
        """Build from the records of one decision time: one per unit, at least one."""
        units = {record.unit: record for record in records}
        nodes: dict[str, list[RiskRecord]] = {}
        for record in units.values():
            nodes.setdefault(record.node, []).append(record)
        model = next(iter(units.values())).model
        decided = max(record.decision_time for record in units.values())
        known = [record.expires_at for record in units.values() if record.status == "ok"]
        return cls(
            decided.strftime(STAMP),
            units,
            {node: tuple(sorted(records, key=_place)) for node, records in nodes.items()},
            decided,
            max(record.issued_at for record in units.values()),
            max(known or [record.expires_at for record in units.values()]),
            {"digest": model.digest, "profile": model.profile, "version": model.version},
            summary,
        )


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Location and model of a unit in the inventory; empty: not given."""

    cluster: str = ""
    group: str = ""
    rack: str = ""
    model: str = ""


NOWHERE: Final = UnitPlace()


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Content of ``fleet.json``; replaced as a whole.

    ``outcomes``: from :func:`serving.scores.alert_outcomes.outcomes_of`; None: not evaluated yet.
    ``courses``: hourly telemetry behind the newest decision's reasons up to ``data_end``, by unit and channel; None: no
    sample.
    """

    places: Mapping[str, UnitPlace] = field(default_factory=dict)
    outcomes: Mapping[str, Any] | None = None
    data_end: datetime | None = None
    courses: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)


def read_facts(scores: Path) -> FleetFacts:
    """Read ``fleet.json`` of a scores folder; empty if it is missing, or damaged (logged)."""
    try:
        content = json.loads((scores / FACTS).read_bytes())
        places = {str(unit): UnitPlace(*map(str, place)) for unit, place in content["places"].items()}
        end = datetime.fromisoformat(content["data_end"])
        return FleetFacts(places, dict(content["outcomes"]), end, dict(content.get("courses", {})))
    except FileNotFoundError:
        return FleetFacts()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _LOG.warning("the facts of the fleet cannot be read: %s: %s", scores / FACTS, error)
        return FleetFacts()


def decision_folders(scores: Path) -> list[tuple[datetime, Path]]:
    """List the stored decisions of a scores folder, oldest first: decision time and folder."""
    folders = []
    for folder in (scores / "decisions").glob("*Z"):
        if NAME.fullmatch(folder.name):
            with contextlib.suppress(ValueError):  # such as month 13
                folders.append((datetime.strptime(folder.name, STAMP).replace(tzinfo=UTC), folder))
    return sorted(folders)


@dataclass(frozen=True, slots=True)
class PastScore:
    """A unit's score at one decision time; ``risk``: None: unknown."""

    decided: datetime
    risk: float | None
    tier: Tier


def past_scores(folder: Path, units: Collection[str]) -> dict[str, list[PastScore]]:
    """Return the stored scores of units, oldest first; an unreadable decision is skipped and logged."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    scores: dict[str, list[PastScore]] = {unit: [] for unit in units}
    unit_names = pa.array(scores, pa.string())
    for decided, decision in decision_folders(folder)[-MAX_DECISIONS:]:
        path = decision / "risks.parquet"
        try:
            with pq.ParquetFile(path) as file:  # `read_table` would import pandas
                table = file.read(columns=["unit", "risk", "tier"])
        except FileNotFoundError:  # being replaced or pruned
            continue
        except (OSError, ValueError) as error:
            _LOG.warning("an earlier decision is left out of the pages: %s: %s", path, error)
            continue
        for row in table.filter(pc.is_in(table["unit"], value_set=unit_names)).to_pylist():
            scores[row["unit"]].append(PastScore(decided, row["risk"], row["tier"]))
    return scores


def read_pointer(folder: Path) -> str:
    """Return the name of the newest decision.

    Raises ``InputError`` if ``latest.json`` is missing or invalid.
    """
    path = folder / LATEST
    try:
        pointer = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            "there are no scores yet", str(path), "Run `predrain score` with --out on this folder."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the pointer to the newest scores cannot be read: {error}", str(path), _DO) from error
    if not isinstance(pointer, dict) or pointer.get("format") != FORMAT:
        written_format = pointer.get("format") if isinstance(pointer, dict) else None
        raise InputError(
            f"the scores are of format {written_format!r}, but this version reads {FORMAT}",
            str(path),
            "Score again: `predrain score` and `predrain serve` must have the same version.",
        )
    name = pointer.get("decision")
    if not isinstance(name, str) or not NAME.fullmatch(name):  # it becomes part of a path
        raise InputError(f"{name!r} is not the name of a decision", str(path), _DO)
    return name


def read_scores(folder: Path) -> Scores:
    """Read the newest decision.

    Raises ``InputError`` if there is none or it is damaged; one invalid record rejects the decision, because a partial
    fleet would look safer than it is.
    """
    import orjson

    name = read_pointer(folder)
    path = folder / "decisions" / name / "risks.jsonl"
    units: dict[str, RiskRecord] = {}
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    record = RiskRecord.from_json(orjson.loads(line))
                except (ValueError, OverflowError) as error:
                    raise InputError(f"a record is damaged: {error}", f"{path}, line {number}", _DO) from error
                if record.unit in units:
                    raise InputError(f"unit {record.unit!r} is listed twice", f"{path}, line {number}", _DO)
                units[record.unit] = record
    except OSError as error:
        raise InputError(f"the scores cannot be read: {error.strerror}", str(path), _DO) from error
    if not units:
        raise InputError("the decision contains no records", str(path), _DO)
    return Scores.of(units.values(), read_json(path.with_name("summary.json")) or {})


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; None if it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def last_run_metrics(scores: Path) -> str:
    """Read the textfile of the last scoring run; empty if there is none."""
    try:
        with (scores / TEXTFILE).open("rb") as stream:
            return stream.read(_MAX_TEXTFILE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def span(seconds: float | None) -> str:
    """Format a duration in its two largest units: ``40 s``, ``12 min``, ``5 h 10 min``, ``3 d 4 h``."""
    if seconds is None:
        return "not known"
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a natural sort key, by which 10 comes after 9."""
    parts = _DIGITS.split(name)
    return tuple((int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts) if part)


def _place(record: RiskRecord) -> tuple[Any, ...]:
    return natural(record.slot or ""), record.unit


ALL_TIERS: Final[tuple[str, ...]] = (*TIERS, UNKNOWN)
"""All tiers, including ``unknown``."""

_BEFORE_ALL: Final = datetime.min.replace(tzinfo=UTC)  # before any score expires


@dataclass(frozen=True, slots=True)
class ScoredNode:
    """State of a node at one time.

    ``tier``: from unexpired scores, as in the controller before hysteresis; ``unknown`` if there are none.
    ``risk``: probability that any unit with an unexpired score has an incident; None if there are none.
    ``known``, ``unknown``, ``expired``: number of units by the state of their score.
    """

    node: str
    tier: str
    risk: float | None
    known: int
    unknown: int
    expired: int


def state_of(
    node: str, records: Iterable[RiskRecord], thresholds: ChosenThresholds | None, now: datetime
) -> ScoredNode:
    """Return a node's state; unknown and expired records affect neither tier nor risk."""
    all_records = list(records)
    known = [record for record in all_records if record.status == "ok"]
    holding = [record for record in known if not record.expired(now)]
    return ScoredNode(
        node,
        tier_of(holding, thresholds),
        node_risk(record.risk for record in holding),
        len(holding),
        len(all_records) - len(known),
        len(known) - len(holding),
    )


def tier_of(scores: Sequence[RiskRecord | PastScore], thresholds: ChosenThresholds | None) -> Tier:
    """Return a node's tier: the worst of its units', or that of the node's own risk if higher."""
    risks = [score.risk for score in scores if score.risk is not None]
    return worst_tier((*(score.tier for score in scores), UNKNOWN if thresholds is None else thresholds.tier(risks)))


class ScoredFleet:
    """Scores with cached node states, recomputed whenever scores expire.

    ``tiers``, ``node_tiers``: number of units and nodes by tier, as scored.
    ``known``: number of units with a known risk, expired or not.
    ``thresholds``: thresholds of the tiers; None: missing or damaged.
    ``names``: resolves the names that clients use, e.g. a host name of the operating system.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.names = NodeNames(scores.nodes)
        self._gpus = GpuNames(scores.units)
        try:
            self.thresholds = ChosenThresholds.of_summary(scores.summary)
        except ValueError:
            self.thresholds = None
        self._expiries = sorted({record.expires_at for record in scores.units.values() if record.status == "ok"})
        self._computed = 0, self._compute(_BEFORE_ALL)
        self.tiers = dict.fromkeys(ALL_TIERS, 0) | Counter(record.tier for record in scores.units.values())
        self.node_tiers = dict.fromkeys(ALL_TIERS, 0) | Counter(state.tier for state in self._computed[1].values())
        self.known = sum(record.status == "ok" for record in scores.units.values())

    def state(self, node: str, now: datetime) -> ScoredNode | None:
        """Return a node's state; None if it has no score."""
        return self._states_at(now).get(self.names.written(node))

    def unit(self, name: str) -> RiskRecord | None:
        """Return the record of a GPU (or of a node, if nodes are scored); None if it has no score."""
        return self.scores.units.get(self._gpus.find(name) or self.names.written(name))

    def states(self, now: datetime) -> list[ScoredNode]:
        """Return all nodes, the riskiest first, then by name."""
        return list(self._states_at(now).values())

    def expired(self, now: datetime) -> bool:
        """Return whether all scores have expired."""
        return now >= self.scores.expires

    def holds(self, now: datetime) -> bool:
        """Return whether any unit has a known and unexpired risk."""
        return self.known > 0 and not self.expired(now)

    def stale(self, now: datetime, after_s: float | None) -> bool:
        """Return whether the decision is older than ``after_s`` seconds; None: never."""
        return after_s is not None and (now - self.scores.decided).total_seconds() > after_s

    def _states_at(self, now: datetime) -> dict[str, ScoredNode]:
        """Return all nodes by name, the riskiest first; recomputed if scores have expired since the last call."""
        epoch, states = self._computed
        if (present := bisect_right(self._expiries, now)) != epoch:
            states = self._compute(now)
            self._computed = present, states
        return states

    def _compute(self, now: datetime) -> dict[str, ScoredNode]:
        states = [state_of(node, records, self.thresholds, now) for node, records in self.scores.nodes.items()]
        states.sort(key=lambda state: (state.risk is None, -(state.risk or 0.0), state.node))
        return {state.node: state for state in states}
