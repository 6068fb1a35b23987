"""What became of earlier alerts, from everything that is known to have happened: so that stages can move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from policy.alert_outcomes import Alert, Happening, Outcome, judge
from scheduler.controller.facts import Results
from scheduler.ports.errors import LedgerError, SourceError
from scheduler.ports.protocols import FactSource
from scheduler.ports.risks import Facts

OUTCOME_TIMEOUT = timedelta(days=7)
"""How long after the horizon a diagnostic of a drained GPU is waited for before its alert is inconclusive."""

Service = Callable[[datetime], tuple[tuple[datetime, str, bool], ...]]
"""Gives each time since a time at which we took a node out of service (true) or gave it back, oldest first."""

Homes = Callable[[], Mapping[str, str]]
"""Gives the node of each unit."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known to have happened.

    ``homes``: the node of each GPU, where that is known.
    ``until``: up to when it is complete; aware. After it, silence says nothing.
    """

    units: Mapping[str, Sequence[Happening]]
    nodes: Mapping[str, Sequence[Happening]] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)
    until: datetime | None = None


class HistorySource(Protocol):
    """Where it comes from."""

    def read(self, now: datetime) -> History:
        """Give what was known at ``now``.

        Raises ``SourceError`` if it cannot be read.
        """
        ...


class JudgedFacts:
    """Judges alerts, beside the facts of another source.

    ``service``: our own hard marks, from the ledger: a GPU that took no work did not serve on.
    ``homes``: the newest node of each unit.

    An alert is judged as of the time up to which the history is complete, never later: that nothing is heard of a GPU
    whose events do not arrive is no sign of health. What we do not know the node of is judged by its own events alone.
    """

    def __init__(
        self,
        inner: FactSource,
        history: HistorySource,
        results: Results,
        service: Service,
        homes: Homes,
        timeout: timedelta = OUTCOME_TIMEOUT,
    ) -> None:
        self._inner = inner
        self._history = history
        self._results = results
        self._service = service
        self._homes = homes
        self._timeout = timeout

    def read(self, now: datetime) -> Mapping[str, Facts]:
        """Give the facts of the other source."""
        return self._inner.read(now)

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[Outcome]:
        """Judge alerts.

        Raises ``SourceError`` if what happened cannot be read: then nothing is judged.
        """
        if not alerts:
            return ()
        history = self._history.read(now)
        until = now if history.until is None else min(now, history.until)
        results = self._results()
        if results is None:
            raise SourceError("the results of diagnostics were never read")
        try:
            # a node that was taken out before its alert, and is still out, counts too
            marks = self._service(min(alert.at for alert in alerts) - self._timeout)
        except LedgerError as error:
            raise SourceError(str(error)) from error
        homes = {**history.homes, **self._homes()}
        units = {name: list(each) for name, each in history.units.items()}
        nodes = {name: list(each) for name, each in history.nodes.items()}
        for at, node, out in marks:
            nodes.setdefault(node, []).append(Happening("drained" if out else "returned", at))
        for result in results:
            for unit in result.units:
                homes.setdefault(unit, result.node)
                if result.kind == "passed":
                    units.setdefault(unit, []).append(Happening("diagnostic_passed", result.at))
                elif result.kind == "failed" and unit in (result.failed_units or result.units):
                    units.setdefault(unit, []).append(Happening("diagnostic_failed", result.at))
        return tuple(
            judge(
                alert,
                [*units.get(alert.unit, ()), *nodes.get(homes.get(alert.unit, ""), ())],
                until,
                timeout=self._timeout,
            )
            for alert in alerts
            if alert.at <= until
        )
