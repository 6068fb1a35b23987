"""Scores as ``predrain score`` writes them, read and checked: a folder's newest decision as one immutable value.

``latest.json`` names a decision; ``decisions/NAME/risks.jsonl`` holds one risk record a unit and ``summary.json`` what
is true of all of them; ``fleet.json`` has the places of units and the outcomes of earlier alerts. The service reads
all of it, and never loads pandas.
"""

import contextlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from foundation.errors import InputError
from policy.risk_record import FORMAT, RiskRecord
from policy.tiers import Tier

_LOG = logging.getLogger(__name__)
LATEST: Final = "latest.json"
FACTS: Final = "fleet.json"
TEXTFILE: Final = "predrain_score.prom"
_MOST_TEXTFILE_BYTES: Final = 1 << 16

STAMP: Final = "%Y%m%dT%H%M%SZ"
NAME: Final = re.compile(r"\d{8}T\d{6}Z")
_DIGITS: Final = re.compile(r"([0-9]{1,18})")
MOST_DECISIONS: Final = 120
"""Newest decisions that a page shows: a month of one every six hours."""

_DO: Final = "Run `predrain score` again; the scores of before are served meanwhile."


@dataclass(frozen=True, slots=True)
class Scores:
    """One decision's records.

    ``decision``: its name, such as ``20260101T060000Z``.
    ``nodes``: by node, in the order of slots.
    ``decided``, ``issued``, ``expires``: decision time, when the last was written, and when the last known risk expires
    (aware UTC; where none is known, when the last record does).
    ``summary``: ``summary.json``; empty if there is none, or it is damaged.
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
    def of(cls, records: Iterable[RiskRecord], summary: Mapping[str, Any], decision: str | None = None) -> Self:
        """Join records of one decision time.

        ``records``: one a unit, one at least.
        ``decision``: its name; default: made of the decision time.
        """
        units = {record.unit: record for record in records}
        nodes: dict[str, list[RiskRecord]] = {}
        for record in units.values():
            nodes.setdefault(record.node, []).append(record)
        model = next(iter(units.values())).model
        decided = max(record.decision_time for record in units.values())
        known = [record.expires_at for record in units.values() if record.status == "ok"]
        return cls(
            decided.strftime(STAMP) if decision is None else decision,
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
    """Where a unit is, by the inventory; empty text: not given."""

    cluster: str = ""
    group: str = ""
    rack: str = ""
    model: str = ""


NOWHERE: Final = UnitPlace()


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What is known of the fleet; replaced as a whole.

    ``outcomes``: as :func:`serving.scores.alert_outcomes.outcomes_of` gives them; None: not evaluated yet.
    ``courses``: by unit and channel, what the reasons of the newest decision were read from, hour by hour until
    ``data_end``; null: no sample.
    """

    places: Mapping[str, UnitPlace] = field(default_factory=dict)
    outcomes: Mapping[str, Any] | None = None
    data_end: datetime | None = None
    courses: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)


def read_facts(scores: Path) -> FleetFacts:
    """Read the facts of a folder of scores; without any where there are none, or they are damaged (logged)."""
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
    """List the stored decisions of a folder of scores, oldest first: decision time and folder."""
    folders = []
    for folder in (scores / "decisions").glob("[0-9]*Z"):
        with contextlib.suppress(ValueError):
            folders.append((datetime.strptime(folder.name, STAMP).replace(tzinfo=UTC), folder))
    return sorted(folders)


@dataclass(frozen=True, slots=True)
class PastScore:
    """A unit at one decision time.

    ``risk``: None: not known then.
    """

    decided: datetime
    risk: float | None
    tier: Tier


def past_scores(folder: Path, units: Collection[str]) -> dict[str, list[PastScore]]:
    """Return the earlier scores of some units, oldest first; a decision that cannot be read is left out and logged."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    scores: dict[str, list[PastScore]] = {unit: [] for unit in units}
    wanted = pa.array(scores, pa.string())
    for decided, decision in decision_folders(folder)[-MOST_DECISIONS:]:
        path = decision / "risks.parquet"
        try:
            with pq.ParquetFile(path) as file:  # `read_table` would import pandas
                table = file.read(columns=["unit", "risk", "tier"])
        except FileNotFoundError:  # being replaced or pruned
            continue
        except (OSError, ValueError) as error:
            _LOG.warning("an earlier decision is left out of the pages: %s: %s", path, error)
            continue
        for row in table.filter(pc.is_in(table["unit"], value_set=wanted)).to_pylist():
            scores[row["unit"]].append(PastScore(decided, row["risk"], row["tier"]))
    return scores


def read_pointer(folder: Path) -> str:
    """Return the name of the newest decision.

    Raises ``InputError`` if ``latest.json`` is not there or not understood.
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
            f"the scores are of format {written_format!r}, this version reads {FORMAT}",
            str(path),
            "Score again: `predrain score` and the service must be of one version.",
        )
    name = pointer.get("decision")
    if not isinstance(name, str) or not NAME.fullmatch(name):  # it becomes part of a path
        raise InputError(f"{name!r} is no decision's name", str(path), _DO)
    return name


def read_scores(folder: Path) -> Scores:
    """Read the newest decision.

    Raises ``InputError`` if there is none or it is damaged; a single wrong record refuses all, because a half-read
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
                    raise InputError(f"unit {record.unit!r} comes twice", f"{path}, line {number}", _DO)
                units[record.unit] = record
    except OSError as error:
        raise InputError(f"the scores cannot be read: {error.strerror}", str(path), _DO) from error
    if not units:
        raise InputError("the decision holds no record", str(path), _DO)
    return Scores.of(units.values(), read_json(path.with_name("summary.json")) or {}, name)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; None where there is none or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def last_run_metrics(scores: Path) -> str:
    """Read the textfile of the last scoring run, for a service that shows it; "" where there is none."""
    try:
        with (scores / TEXTFILE).open("rb") as stream:
            return stream.read(_MOST_TEXTFILE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def span(seconds: float | None) -> str:
    """Write a length of time in its two largest units: ``40 s``, ``12 min``, ``5 h 10 min``, ``3 d 4 h``."""
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
    """Return a sort key by which 10 comes after 9."""
    parts = _DIGITS.split(name)
    return tuple((int(part), "") if at % 2 else (-1, part) for at, part in enumerate(parts) if part)


def _place(record: RiskRecord) -> tuple[Any, ...]:
    return natural(record.slot or ""), record.unit
