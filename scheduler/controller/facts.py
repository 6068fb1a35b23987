"""Facts about GPUs from events, diagnostics and a history: inputs of the rules, and outcomes of earlier alerts."""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.files import stamp_of
from policy.episodes import OUTCOME_TIMEOUT, Alert, AlertOutcome, OutcomeEvent, evaluate_alert
from policy.fleet import Fact
from policy.maintenance import planned
from policy.node_tier.hard_rules import (
    BOOT,
    DEFAULT_RULES,
    KINDS,
    REMEDIED,
    REPAIRS,
    REPORTED,
    HardRulesConfig,
    reported,
)
from scheduler.evacuation.progress import Result
from scheduler.ports.errors import LedgerError, SourceError
from scheduler.ports.protocols import FactReader
from scheduler.ports.risks import ReportedFacts
from telemetry.identity.nodes import NodeNames

if TYPE_CHECKING:
    import pyarrow as pa

Results = Callable[[], tuple[Result, ...] | None]
"""Returns the results of diagnostics stored in the scheduler; None if not read since the process started."""


@dataclass(frozen=True, slots=True)
class NodeHistories:
    """History of each unit.

    ``until``: aware time up to which the history is complete; later silence is not evidence of health.
    """

    units: Mapping[str, Sequence[OutcomeEvent]]
    homes: Mapping[str, str] = field(default_factory=dict)
    until: datetime | None = None


def facts_at(
    rows: Sequence[Mapping[str, Any]], now: datetime, rules: HardRulesConfig = DEFAULT_RULES
) -> dict[str, ReportedFacts]:
    """Return the facts known at ``now`` by unit, and by node for planned maintenance.

    ``rows``: as in :func:`policy.node_tier.hard_rules.reported`, plus maintenance events.
    """
    facts = {unit: ReportedFacts(*known) for unit, known in reported(rows, now, rules).items()}
    for node, periods in planned(rows, now).items():
        facts[node] = replace(facts.get(node, ReportedFacts()), planned=periods)
    return facts


class EventFacts:
    """Reads ``events.parquet``, which each import replaces atomically.

    ``unreadable_events``: number of rows ignored for a time outside 1970 to 9999.
    """

    def __init__(self, file: Path, rules: HardRulesConfig = DEFAULT_RULES) -> None:
        self.file = file
        self._rules = rules
        self.unreadable_events = 0
        self._stamp: tuple[int, ...] | None = None
        self._rows: list[dict[str, Any]] = []

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return the facts known at ``now``, by unit, and by node for planned maintenance.

        Raises ``SourceError`` if the file is missing or cannot be read.
        """
        self._load()
        return facts_at(self._rows, now, self._rules)

    def _load(self) -> None:
        import pyarrow as pa  # needed for events only
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
        from pyarrow.lib import ArrowException

        from telemetry.dataset.schema import EVENT_RUNS

        try:
            stamp = stamp_of(self.file)
            if stamp == self._stamp:
                return
            columns = list(REPORTED)
            with self.file.open("rb") as source:
                if "last_at" in pq.read_schema(source).names:
                    columns.append("last_at")
                table = pq.read_table(source, columns=columns)
            # timestamps without a time zone would fail every round
            table = table.cast(pa.schema([EVENT_RUNS.field(name) for name in columns]), safe=False)
            readable = table.filter(_in_range(columns))
            self.unreadable_events, table = len(table) - len(readable), readable
            code = pc.utf8_lower(pc.utf8_trim_whitespace(pc.field("code")))
            of_units = pc.field("type").isin(KINDS) & pc.field("gpu").is_valid() | pc.field("type").isin(REPAIRS)
            boots = (pc.field("type") == BOOT[0]) & (pc.field("code") == BOOT[1])
            xids = of_units & (pc.field("type") == "xid") & code.isin(sorted(self._rules.xids))
            # A failing GPU can log millions of equal XIDs. Rules count one a minute, so two rows a minute lose nothing.
            # XID 154 differs: its detail names the recovery action.
            floods = table.filter(xids & (code != "154"))
            maintenance = pc.field("type") == "maintenance"
            recent = table.filter(
                (of_units & (pc.field("type") != "xid")) | boots | maintenance | (xids & (code == "154"))
            )
            self._rows = [*_ends_of_minutes(floods).to_pylist(), *recent.to_pylist()]
        except (OSError, ArrowException, KeyError, ValueError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise SourceError(
                f"the events in {self.file} cannot be read: {reason}: expected a dataset's events.parquet"
            ) from error
        self._stamp = stamp


def _in_range(columns: Sequence[str]) -> Any:
    """Return a filter for times that ``datetime`` can represent: one row out of range would fail the whole read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    first, last = (pa.scalar(datetime(year, 1, 1, tzinfo=UTC), pa.timestamp("ms", "UTC")) for year in (1970, 9999))
    times = [pc.field(name) for name in ("timestamp", "known_at", "last_at") if name in columns]
    in_range = [(time >= first) & (time < last) for time in times]
    for place, time in enumerate(times[2:], 2):  # ``last_at`` is null unless the row is a run of events
        in_range[place] |= time.is_null()
    return functools.reduce(operator.and_, in_range)


def _ends_of_minutes(events: "pa.Table") -> "pa.Table":
    """Keep the first and last event per unit, code, minute seen and minute known."""
    import pyarrow as pa
    import pyarrow.compute as pc

    last_times = events["timestamp"]
    if "last_at" in events.column_names:
        last_times = pc.coalesce(events["last_at"], last_times)
    events = events.append_column("seen", last_times).sort_by("seen")
    minutes = pa.table(
        {
            "gpu": events["gpu"], "code": events["code"], "minute": pc.floor_temporal(events["seen"], unit="minute"),
            "known": pc.floor_temporal(events["known_at"], unit="minute"),
            "row": pa.array(range(len(events))),
        }
    )  # fmt: skip
    ends = minutes.group_by(["gpu", "code", "minute", "known"]).aggregate([("row", "min"), ("row", "max")])
    rows = pc.unique(pa.chunked_array([*ends["row_min"].chunks, *ends["row_max"].chunks], pa.int64()))
    return events.take(pc.array_take(rows, pc.array_sort_indices(rows))).drop_columns(["seen"])


@dataclass(frozen=True, slots=True)
class VerifiedFacts:
    """Adds the results of diagnostics to the facts of another source.

    A failed diagnostic adds the fact ``diagnostic_failed`` to the GPUs that it names, or to all GPUs of the node if it
    names none. A passed diagnostic voids earlier evidence on each GPU of the node. An inconclusive one has no effect. A
    passed probe voids nothing, and lowers the risk for a while.

    ``history``: returns the history known at a time, for evaluating alerts; raises ``SourceError`` if it cannot be
    read. None: no alerts are evaluated.
    ``service``: returns when predrain took nodes out of service (True) or returned them since a time, oldest first: a
    GPU out of service takes no work, so its silence is not evidence of health.

    Alerts are evaluated as of the time up to which the history is complete: missing events are not evidence of health.
    """

    inner: FactReader
    results: Results
    history: Callable[[datetime], NodeHistories] | None = None
    service: Callable[[datetime], tuple[tuple[datetime, str, bool], ...]] = lambda _: ()

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return the facts known at ``now``, by unit.

        Raises ``SourceError`` if the inner source fails, or the results were never read.
        """
        results = self._known()
        facts = dict(self.inner.read(now))
        for result in results:
            # The clock was set back since: what lies ahead is not known yet.
            if result.at > now:
                continue
            named = result.failed_units or result.units
            for unit in named if result.kind == "failed" else result.units:
                known = facts.get(unit, ReportedFacts())
                if result.kind == "failed":
                    facts[unit] = replace(known, facts=(*known.facts, Fact("diagnostic_failed", result.at)))
                elif result.rung == "probe" and result.kind == "passed":
                    facts[unit] = replace(known, probed_at=result.at)
                elif result.kind == "passed":
                    since = result.at if known.valid_from is None else max(known.valid_from, result.at)
                    remedy = f"remedied {result.remedy}"
                    remedied = (Fact(remedy, result.at),) if remedy in REMEDIED else ()
                    facts[unit] = replace(known, facts=(*known.facts, *remedied), valid_from=since)
        return facts

    @property
    def unreadable_events(self) -> int:
        """Number of events ignored by the inner source."""
        return self.inner.unreadable_events

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[AlertOutcome]:
        """Evaluate alerts; raises ``SourceError`` if the history cannot be read."""
        if self.history is None or not alerts:
            return ()
        history = self.history(now)
        until = now if history.until is None else min(now, history.until)
        results = self._known()
        try:
            # include nodes that were drained before their alert and are still out of service
            marks = self.service(min(alert.at for alert in alerts) - OUTCOME_TIMEOUT)
        except LedgerError as error:
            raise SourceError(str(error)) from error
        homes = dict(history.homes)
        units = defaultdict(list, {name: list(events) for name, events in history.units.items()})
        nodes: defaultdict[str, list[OutcomeEvent]] = defaultdict(list)
        for time, node, out in marks:
            nodes[node].append(OutcomeEvent("drained" if out else "returned", time))
        for result in results:
            for unit in result.units:
                homes.setdefault(unit, result.node)
                if (result.kind, result.rung) == ("passed", "drain"):
                    units[unit].append(OutcomeEvent("diagnostic_passed", result.at))
                elif result.kind == "failed" and unit in (result.failed_units or result.units):
                    units[unit].append(OutcomeEvent("diagnostic_failed", result.at))

        names = NodeNames({*nodes, *homes.values()})
        installed: defaultdict[str, set[str]] = defaultdict(set)
        for unit, home in homes.items():
            installed[names.written(home)].add(unit)

        def outcome(alert: Alert) -> AlertOutcome:
            node = names.written(alert.node)
            # a drain affects the whole node, so a failure of any of its units makes the alert correct
            members = {alert.unit, *installed[node]}
            events = [event for unit in sorted(members) for event in units[unit]]
            return evaluate_alert(alert, [*events, *nodes[node]], until)

        return tuple(outcome(alert) for alert in alerts if alert.at <= until)

    def _known(self) -> tuple[Result, ...]:
        known = self.results()
        if known is None:
            raise SourceError("the results of diagnostics are not available yet")
        return known
