"""The fleet as a table of nodes or GPUs, filtered, sorted and paginated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from policy.risk_record import RiskRecord
from policy.tiers import TIERS, UNKNOWN
from serving.http.schemas import Tier
from serving.scores.reading import NOWHERE, ScoredFleet, UnitPlace, natural

MAX_TEXT_LENGTH: Final = 200
"""Maximum length of a text parameter."""
PAGE_SIZES: Final = (50, 100, 250, 1000)

Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]
PageSort = Literal["-risk", "risk", "-name", "name", "-tier", "tier", "-rack", "rack", "-group", "group", "-age", "age"]


def _split(value: object) -> object:
    texts = [part for text in value for part in str(text).split(",")] if isinstance(value, list) else value
    return list(dict.fromkeys(part for part in texts if part)) if isinstance(texts, list) else texts


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


class FleetQuery(BaseModel):
    """A view of the fleet; empty parameters, as forms send them, count as absent.

    ``search``: words that must all match.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    show: Literal["nodes", "gpus"] = "nodes"
    search: Text = Field("", alias="q")
    tiers: Annotated[list[Tier], BeforeValidator(_split)] = Field(default_factory=list, alias="tier")
    rack: Text = ""
    group: Text = ""
    sort: PageSort = "-risk"
    offset: int = Field(0, ge=0, le=10**7)
    limit: Annotated[Literal[50, 100, 250, 1000], BeforeValidator(_number)] = 100

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value != ""} if isinstance(fields, dict) else fields

    def address(self, **changed: Any) -> str:
        """Return the URL of this view with changed parameters; the first page unless ``offset`` is given."""
        view = self.model_copy(update={"offset": 0, **changed})
        query = urlencode(view.model_dump(by_alias=True, exclude_defaults=True, warnings=False), doseq=True)
        return f"/?{query}" if query else "/"

    @property
    def narrowed(self) -> bool:
        """Whether any filter is set."""
        return bool(self.search or self.tiers or self.rack or self.group)


_QUIET: Final = ("clear", "watch")
_WEIGHT: Final[dict[str, int]] = {tier: i for i, tier in enumerate((UNKNOWN, *TIERS))}


@dataclass(frozen=True, slots=True)
class FleetRow:
    """A node or GPU.

    ``slot``: of a GPU; empty: not given.
    ``units``, ``unknown``: number of its GPUs, and of those whose risk is unknown or expired.
    ``worst``: the riskiest unit's record.
    ``selected``: the model alerts on one of its units, although its tier is clear or watch.
    ``searched``: the text that searches match, in lower case.
    ``order``: natural sort key of the name.
    """

    name: str
    node: str
    slot: str
    tier: str
    risk: float | None
    units: int
    unknown: int
    worst: RiskRecord
    selected: bool
    place: UnitPlace
    searched: str
    order: tuple[Any, ...]


def select(rows: Sequence[FleetRow], query: FleetQuery) -> list[FleetRow]:
    """Return the rows that match a query, in its order; unknown values are last in both directions."""
    terms = query.search.lower().split()
    matching = [
        row
        for row in rows
        if (not query.tiers or row.tier in query.tiers)
        and (not query.rack or row.place.rack == query.rack)
        and (not query.group or row.place.group == query.group)
        and all(term in row.searched for term in terms)
    ]
    if query.sort == "-risk":  # already in this order
        return matching
    key = _KEYS[query.sort.removeprefix("-")]
    known = [row for row in matching if key(row) is not None]
    known.sort(key=lambda row: (key(row), row.order), reverse=query.sort.startswith("-"))
    return known + [row for row in matching if key(row) is None]


_KEYS: Final[dict[str, Callable[[FleetRow], Any]]] = {
    "risk": lambda row: row.risk,
    "name": lambda row: row.order,
    "tier": lambda row: _WEIGHT[row.tier],
    "rack": lambda row: natural(row.place.rack) if row.place.rack else None,
    "group": lambda row: natural(row.place.group) if row.place.group else None,
    "age": lambda row: row.worst.sample_age_seconds,
}


def table_rows(
    fleet: ScoredFleet, places: Mapping[str, UnitPlace], now: datetime
) -> tuple[list[FleetRow], list[FleetRow]]:
    """Return all nodes and all GPUs, the riskiest first."""
    nodes, gpus = [], []
    for state in fleet.states(now):
        records = fleet.scores.nodes[state.node]
        nodes.append(_row(state.node, records, state.tier, state.risk, places, now))
        for record in records:
            tier, risk = (record.tier, record.risk) if _is_valid(record, now) else (UNKNOWN, None)
            gpus.append(_row(record.unit, [record], tier, risk, places, now, slot=record.slot or ""))
    for rows in (nodes, gpus):
        rows.sort(key=lambda row: (row.risk is None, -(row.risk or 0.0), row.order))
    return nodes, gpus


def _is_valid(record: RiskRecord, now: datetime) -> bool:
    return record.status == "ok" and not record.expired(now)


def _row(
    name: str,
    records: Sequence[RiskRecord],
    tier: str,
    risk: float | None,
    places: Mapping[str, UnitPlace],
    now: datetime,
    slot: str = "",
) -> FleetRow:
    valid = [record for record in records if _is_valid(record, now)]
    worst = max(valid or records, key=lambda record: -1.0 if record.risk is None else record.risk)
    place = places.get(worst.unit, NOWHERE)
    units = (record.unit for record in records)
    return FleetRow(
        name=name,
        node=worst.node,
        slot=slot,
        tier=tier,
        risk=risk,
        units=len(records),
        unknown=len(records) - len(valid),
        worst=worst,
        selected=tier in _QUIET and any(record.alert for record in valid),
        place=place,
        searched="\n".join((name, worst.node, place.rack, place.group, place.cluster, place.model, *units)).lower(),
        order=natural(name),
    )
