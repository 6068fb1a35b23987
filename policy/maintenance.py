"""Maintenance: blocks new actions except publish on its nodes, and voids scores and facts from within it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from pydantic import AwareDatetime
from pydantic.dataclasses import dataclass as checked

from policy.fleet import NodeView
from policy.risk_record import parse_utc

_SETTLE = timedelta(minutes=10)
# Resolution of the remembered end of a maintenance that only the scheduler reports.

_GAP = timedelta(hours=1)
_RETENTION = timedelta(days=7)
# The longest validity of any evidence.

MAX_LENGTH = timedelta(days=31)
"""Assumed length of a maintenance without a reported end; labelling assumes the same."""


@checked(frozen=True, slots=True)
class MaintenanceWindow:
    """A planned maintenance.

    ``nodes``: node names, with shell wildcards. ``domains``: racks and NVLink domains. Both empty: every node.
    """

    start: AwareDatetime
    end: AwareDatetime
    nodes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ValueError(f"end is {self.end}: give a time after start ({self.start})")

    def concerns(self, node: NodeView) -> bool:
        """Return whether the window applies to a node."""
        named = any(fnmatchcase(node.name, pattern) for pattern in self.nodes)
        return named or bool({node.rack, node.domain} & {*self.domains}) or not (self.nodes or self.domains)


@dataclass(frozen=True, slots=True)
class Period:
    """An observed maintenance: times of the first and last observation."""

    start: datetime
    end: datetime


def maintained(
    node: NodeView, calendar: Sequence[MaintenanceWindow], observed_period: Period | None, now: datetime
) -> NodeView:
    """Return the node with its current maintenance, and without scores and facts from within any."""
    if not calendar and not node.planned and observed_period is None and node.maintenance is None:
        return node
    periods = [*node.planned, *((window.start, window.end) for window in calendar if window.concerns(node))]
    current = next((end for start, end in periods if start <= now < end), None)
    if node.maintenance is None and current is not None:
        node = replace(node, maintenance=f"maintenance until {current:%Y-%m-%d %H:%M} UTC")
    known = observed(node, observed_period, now)
    if known is not None:
        periods.append((known.start, known.end + _SETTLE))
    if not periods:
        return node

    def within(instant: datetime) -> bool:
        return any(start <= instant < end for start, end in periods)

    units = tuple(
        replace(
            unit,
            score=None if unit.score is not None and within(unit.score.decided_at) else unit.score,
            facts=tuple(fact for fact in unit.facts if not within(fact.seen_at)),
        )
        for unit in node.units
    )
    return replace(node, units=units)


def observed(node: NodeView, period: Period | None, now: datetime) -> Period | None:
    """Update the remembered maintenance of a node after it was read."""
    if period is not None and period.end > now:  # the clock went backwards
        period = None if period.start > now else replace(period, end=now)
    if node.maintenance is None:
        return period if period is not None and now - period.end < _RETENTION else None
    if period is None or now - period.end > _GAP:
        return Period(now, now)
    return replace(period, end=now) if now - period.end >= _SETTLE else period


def planned(rows: Iterable[Mapping[str, Any]], now: datetime) -> dict[str, tuple[tuple[datetime, datetime], ...]]:
    """Return start and end of each node's maintenances known by ``now``, except those that ended long ago.

    ``rows``: events. The code of a ``maintenance`` is its planned end, or ``begin``, or ``end`` (of the one that began
    on the same GPU or node). Maintenance of a GPU applies to its node.
    """
    known = [row for row in rows if row["type"] == "maintenance" and row["known_at"] <= now]
    known.sort(key=lambda row: row["timestamp"])
    coded = [(row, row["timestamp"], (row["code"] or "").strip().lower()) for row in known]
    ends: defaultdict[Any, list[datetime]] = defaultdict(list)
    for row, time_ms, code in coded:
        if code == "end":
            ends[row["node"], row["gpu"]].append(time_ms)
    windows: defaultdict[str, set[tuple[datetime, datetime]]] = defaultdict(set)
    for row, start, code in coded:
        last = start + MAX_LENGTH
        if code == "begin":
            end = next((end for end in ends[row["node"], row["gpu"]] if start <= end < last), last)
        else:
            try:
                end = parse_utc(code.upper())
            except ValueError:
                end = start
        if end > max(start, now - _RETENTION):
            windows[row["node"]].add((start, end))
    return {node: tuple(sorted(periods)) for node, periods in windows.items()}
