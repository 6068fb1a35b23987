"""Failure domains: event rates of units that share a location, model, batch or age, per unit-day in service.

A domain is the value of an inventory column (``rack``, ``nvlink_domain``), of nested columns (``[cabinet, cage]``), or
a range of a column's trailing number (``serial/1000``). ``fleet`` includes all units, to detect epidemics; ``age``
groups units by time in service. Counts are divided by exposure: a large rack is not a bad rack. On Titan's GPUs, cage,
cabinet and serial batch add a fifth of average precision beyond GPU and node.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.config import DomainScope, FeatureSection
from features.groups.history_kernel import EventVersions, sweep_history
from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from foundation.times import NEVER, Int64Array, duration_ms, text
from telemetry.dataset.installations import Installations, Timeline

HALF_LIFE = timedelta(days=30)
"""Half-life of the recency-weighted rate of a domain."""

AGE_STEP = timedelta(days=91)
"""Width of an age group."""

DOMAIN_EVENT_KINDS = ("incident", "xid_hardware")
"""Event types that are counted per domain."""

_PER = 1000.0 * 86_400_000.0  # rates are per 1,000 unit-days
_SMOOTHING = 1.0  # pseudo-incidents at the fleet's rate that shrink ``relative`` to 1
_RANGE = re.compile(r"(?P<column>.+)/(?P<width>[1-9]\d*)")
_NUMBER = re.compile(r"(\d+)\s*\Z")
_SPECIAL = ("fleet", "age")


def domain_name(scope: DomainScope) -> str:
    """Return the name of a domain in column names: ``rack``, ``cabinet_cage``, ``serial_1000``."""
    return "_".join(scope) if isinstance(scope, tuple) else scope.replace("/", "_")


def domain_columns(scope: DomainScope, windows: Sequence[timedelta]) -> list[FeatureColumn]:
    """List the columns of a domain.

    Returns: ``rate`` of incidents and hardware XIDs per 1,000 unit-days in each window; for incidents also ``relative``
    (ratio to the fleet's rate, shrunk to 1 if few are expected; not of the fleet), ``recency_rate`` (recency-weighted)
    and hours ``since`` the last.
    """
    name = domain_name(scope)
    columns = [
        FeatureColumn.of("history", kind, "rate", window=w, scope=name) for kind in DOMAIN_EVENT_KINDS for w in windows
    ]
    if scope != "fleet":
        columns += [FeatureColumn.of("history", "incident", "relative", window=w, scope=name) for w in windows]
    columns.append(FeatureColumn.of("history", "incident", "recency_rate", scope=name))
    columns.append(FeatureColumn.of("history", "incident", "since", scope=name, unit="h"))
    return columns


def check_scopes(scopes: Sequence[DomainScope], inventory: pd.DataFrame) -> None:
    """Validate scopes against the inventory.

    Raises ``InputError`` if a column does not exist or cannot be shared.
    """
    for scope in scopes:
        if scope in _SPECIAL:
            continue
        for column in scope if isinstance(scope, tuple) else (scope,):
            range_match = _RANGE.fullmatch(column)
            name = range_match["column"] if range_match else column
            if name not in inventory.columns or name in ("installed_at", "removed_at"):
                have = ", ".join(sorted(set(inventory.columns) - {"installed_at", "removed_at"}))
                raise InputError(
                    f"'{name}' is not a column of the inventory that units can share",
                    "parameter features.history_scopes",
                    f"Choose among fleet, age, {have}, or lists of these.",
                )


@dataclass(frozen=True, slots=True)
class Exposure:
    """Time in service of the units of each domain, as starts and ends of installations."""

    begins: "_Moments"
    ends: "_Moments"

    @classmethod
    def of(cls, entity: Int64Array, begin: Int64Array, end: Int64Array, entities: int) -> "Exposure":
        """Sort installations; a negative entity belongs to no domain."""
        is_member = (entity >= 0) & (end > begin)
        entity, begin, end = entity[is_member], begin[is_member], end[is_member]
        has_ended = end < NEVER
        return cls(_Moments.of(entity, begin, entities), _Moments.of(entity[has_ended], end[has_ended], entities))

    def until(self, entity: Int64Array, time: Int64Array) -> Int64Array:
        """Return the unit-milliseconds of each entity from 1970 to each time."""
        return self.begins.elapsed(entity, time) - self.ends.elapsed(entity, time)

    def faded(self, entity: Int64Array, time: Int64Array) -> NDArray[np.float64]:
        """Return each entity's unit-milliseconds up to each time, with weights that halve every :data:`HALF_LIFE`."""
        return (self.begins.aged(entity, time) - self.ends.aged(entity, time)) * duration_ms(HALF_LIFE) / np.log(2)


@dataclass(frozen=True, slots=True)
class _Moments:
    """Instants by entity with running sums, so that each query is one search."""

    timeline: Timeline
    first: Int64Array
    total: Int64Array
    reference: Int64Array
    weight: NDArray[np.float64]

    @classmethod
    def of(cls, entity: Int64Array, time: Int64Array, entities: int) -> "_Moments":
        order = np.lexsort((time, entity))
        entity, time = entity[order], np.maximum(time[order], 0)  # installations without a start count from 1970
        first = np.searchsorted(entity, np.arange(entities)).astype(np.int64)
        dated = pd.Series(np.where(time > 0, time, NEVER)).groupby(entity).min()
        reference = dated.reindex(range(entities), fill_value=NEVER).to_numpy(np.int64)
        halves = (time - reference[entity]) / duration_ms(HALF_LIFE)
        # exp2 overflows beyond 1,023.
        weight = pd.Series(np.where(time > 0, np.exp2(np.minimum(halves, 1000.0)), 0.0)).groupby(entity).cumsum()
        return cls(
            Timeline(entity, time, entities), first, np.r_[0, np.cumsum(time)], reference, weight.to_numpy(np.float64)
        )

    def elapsed(self, entity: Int64Array, time: Int64Array) -> Int64Array:
        """Return the summed ages of all instants at or before each time."""
        end, first = self.timeline.upto(entity, time), self.first[entity]
        return (end - first) * time - (self.total[end] - self.total[first])

    def aged(self, entity: Int64Array, time: Int64Array) -> NDArray[np.float64]:
        """Return the sum of 1 - 0.5 ** (age in half-lives) over all instants at or before each time."""
        end, first = self.timeline.upto(entity, time), self.first[entity]
        since = (time - np.minimum(self.reference[entity], time)) / duration_ms(HALF_LIFE)
        weight = np.append(self.weight, 0.0)[np.where(end > first, end - 1, -1)]
        return (end - first) - weight * np.exp2(-since)


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of domain of a fleet: events and exposure, to compute the rates of any rows.

    ``of_installation``: entity of each installation (-1: none); None for ``age``.
    """

    scope: DomainScope
    of_installation: Int64Array | None
    events: EventVersions
    exposure: Exposure

    @classmethod
    def of(
        cls,
        scope: DomainScope,
        installations: Installations,
        inventory: pd.DataFrame,
        *,
        installation: Int64Array,
        time: Int64Array,
        known: Int64Array,
        until: Int64Array,
        kinds: NDArray[np.uint32],
        count: Int64Array,
    ) -> "Domain":
        """Sort the known events of a fleet.

        ``installation``: installation in which each event happened (-1: none); the other arrays hold its time, when it
        became known, until when it counts, types and number of events.
        """
        if scope == "age":
            of_installation, of_event = None, _ages(installations, installations.unit[installation], time)
            entity_of, begin, end = _installations_by_age(installations)
            entities = int(max(entity_of.max(initial=-1), of_event.max(initial=-1))) + 1
        else:
            of_installation, entities = _entities(scope, installations, inventory)
            entity_of, begin, end = of_installation, installations.installed, installations.removed
            of_event = of_installation[installation]
        usable = (installation >= 0) & (of_event >= 0) & (kinds != 0)
        entity, time, known, until, kinds, count = (
            values[usable] for values in (of_event, time, known, until, kinds, count)
        )
        events = EventVersions.of(entity, entities, time=time, known=known, until=until, kinds=kinds, size=count)
        return cls(scope, of_installation, events, Exposure.of(entity_of, begin, end, entities))

    def entities_at(self, installations: Installations, installation: Int64Array, time: Int64Array) -> Int64Array:
        """Return the entity of each row, from its installation (-1: none) and time."""
        if self.of_installation is not None:
            return np.append(self.of_installation, -1)[installation]
        entity = np.where(installation >= 0, _ages(installations, installations.unit[installation], time), -1)
        return np.where(entity < self.events.entities, entity, -1)

    def rates(self, entity: Int64Array, time: Int64Array, windows: Int64Array, bits: Int64Array) -> "Rates":
        """Compute counts, exposure and recency at pairs of an entity (0 or more) and a time.

        ``windows``: milliseconds.
        ``bits``: bits of :data:`DOMAIN_EVENT_KINDS` in the event types.
        """
        n = len(windows)
        history = np.empty((len(entity), len(bits) * n + 3), dtype=np.float32)
        version = self.events.version_at(entity, time)
        order = np.lexsort((time, version)).astype(np.int64)
        distinct = np.append(windows, windows[-1])  # window of distinct XIDs, unused here
        half_life = float(duration_ms(HALF_LIFE))
        sweep_history(
            order, version, time, self.events.events, distinct, bits, bits[:1], bits[:1], half_life, 0, history
        )
        now = self.exposure.until(entity, time)
        exposure = np.stack([now - self.exposure.until(entity, time - window) for window in windows], axis=1)
        return Rates(
            counts=history[:, : len(bits) * n].reshape(len(entity), len(bits), n).astype(np.float64),
            exposure=exposure.astype(np.float64),
            since=history[:, -3],
            recency=history[:, -2] / np.maximum(self.exposure.faded(entity, time), 1.0),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Known event rates of n pairs of entity and time.

    ``counts``: shape (n, whats, windows).
    ``exposure``: unit-milliseconds in each window; shape (n, windows).
    ``since``: hours since the last incident; NaN: never; shape (n,).
    ``recency``: recency-weighted incidents per unit-millisecond; shape (n,).
    """

    counts: NDArray[np.float64]
    exposure: NDArray[np.float64]
    since: NDArray[np.float32]
    recency: NDArray[np.float64]

    def columns(self, fleet: "Rates | None") -> NDArray[np.float64]:
        """Return the values of :func:`domain_columns`; ``fleet``: rates of the whole fleet at the same times."""
        lived = self.exposure > 0
        safe = np.where(lived, self.exposure, 1.0)
        rate = np.where(lived[:, None, :], self.counts / safe[:, None, :], np.nan) * _PER
        parts = [rate.reshape(len(rate), rate.shape[1] * rate.shape[2])]
        if fleet is not None:
            fleet_rate = fleet.counts[:, 0] / np.maximum(fleet.exposure, 1.0)
            parts.append((self.counts[:, 0] + _SMOOTHING) / (fleet_rate * self.exposure + _SMOOTHING))
        parts += [(self.recency * _PER)[:, None], self.since[:, None].astype(np.float64)]
        return np.concatenate(parts, axis=1)


def domain_values(
    domains: Sequence[Domain],
    fleet: Domain,
    installations: Installations,
    installation: Int64Array,
    time: Int64Array,
    features: FeatureSection,
    bits: Int64Array,
) -> NDArray[np.float32]:
    """Return the values of all domains for rows, by each row's installation (-1: none) and time.

    Rows of one domain at one time share their values, so each is computed once.
    """
    windows = np.asarray([duration_ms(window) for window in features.history_windows], dtype=np.int64)
    times, time_code = np.unique(time, return_inverse=True)
    of_fleet = fleet.rates(np.zeros(len(times), dtype=np.int64), times, windows, bits)
    blocks = []
    for domain in domains:
        entity = domain.entities_at(installations, installation, time)
        out = np.full((len(time), len(domain_columns(domain.scope, features.history_windows))), np.nan, np.float32)
        known = np.flatnonzero(entity >= 0)
        pairs, row = np.unique(entity[known] * len(times) + time_code[known], return_inverse=True)
        moment = pairs % len(times)
        rates = domain.rates(pairs // len(times), times[moment], windows, bits)
        fleet_rates = (
            None if domain.scope == "fleet" else Rates(*(getattr(of_fleet, name)[moment] for name in Rates.__slots__))
        )
        out[known] = rates.columns(fleet_rates)[row]
        blocks.append(out)
    return np.concatenate(blocks, axis=1)


def _entities(scope: DomainScope, installations: Installations, inventory: pd.DataFrame) -> tuple[Int64Array, int]:
    """Return the domain number of each installation; -1 if one of its columns is null."""
    if scope == "fleet":
        return np.zeros(len(installations.unit), dtype=np.int64), 1
    code = np.zeros(len(installations.unit), dtype=np.int64)
    has_domain = np.ones(len(installations.unit), dtype=bool)
    for column in scope if isinstance(scope, tuple) else (scope,):
        part = pd.factorize(_values(column, inventory)[installations.row], sort=True)[0]
        has_domain &= part >= 0
        # Plus 2, because a null part is -1 and must not share a number with another pair.
        code = pd.factorize(code * (part.max(initial=0) + 2) + part, sort=True)[0].astype(np.int64)
    return np.where(has_domain, code, -1), int(code.max(initial=-1)) + 1


def _values(column: str, inventory: pd.DataFrame) -> NDArray[np.object_]:
    """Return a column as text, or the range that contains the trailing number of each value."""
    range_match = _RANGE.fullmatch(column)
    if range_match is None:
        return np.asarray([None if value is None else str(value) for value in text(inventory[column])], dtype=object)
    width = int(range_match["width"])

    def block(value: object) -> str | None:
        number = None if value is None else _NUMBER.search(str(value))
        return None if number is None else f"{str(value)[: number.start()]}{int(number[1]) // width}"

    return np.asarray([block(value) for value in text(inventory[range_match["column"]])], dtype=object)


def _first_installed(installations: Installations) -> Int64Array:
    """Return when each unit was first installed (ms); -NEVER if unknown."""
    first = np.full(len(installations.units), NEVER, dtype=np.int64)
    np.minimum.at(first, installations.unit, installations.installed)
    return first


def _ages(installations: Installations, unit: Int64Array, time: Int64Array) -> Int64Array:
    """Return the age group of units at times; -1 if unknown."""
    first = _first_installed(installations)[unit]
    dated = (first > -NEVER) & (first <= time)
    return np.where(dated, (time - np.where(dated, first, 0)) // duration_ms(AGE_STEP), -1)


def _installations_by_age(installations: Installations) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Split installations where their unit enters another age group: age group, start and end of each piece.

    Open installations are split for ten years beyond the latest date; pieces that have not started contribute nothing.
    """
    step = duration_ms(AGE_STEP)
    first = _first_installed(installations)[installations.unit]
    dated = np.flatnonzero(first > -NEVER)
    begin, end, first = installations.installed[dated], installations.removed[dated], first[dated]
    latest = max(int(begin.max(initial=0)), int(end[end < NEVER].max(initial=0))) + duration_ms(timedelta(days=3650))
    low = (begin - first) // step
    high = (np.minimum(end, latest) - first) // step
    pieces = high - low + 1
    installation = np.repeat(np.arange(len(dated)), pieces)
    age = low[installation] + np.arange(len(installation)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.maximum(begin[installation], first[installation] + age * step)
    return age, starts, np.minimum(end[installation], first[installation] + (age + 1) * step)
