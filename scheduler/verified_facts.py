"""Results of our own diagnostics as facts: one that passed voids what was scored before, one that failed holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from policy.fleet import Fact
from policy.outcomes import Alert, Outcome
from scheduler.evacuation.progress import Result
from scheduler.failures import SourceError
from scheduler.ports import FactSource
from scheduler.risks import Facts

Results = Callable[[], tuple[Result, ...] | None]
"""Gives the results kept in the scheduler; None: they could not be read since the process began."""


class VerifiedFacts:
    """Adds the results to the facts of another source.

    ``results``: see :data:`Results`.

    A failed diagnostic is the fact ``diagnostic_failed`` of the GPUs that it names, and of all GPUs of the node where
    it names none. One that passed says of each GPU that was in the node that what was before it is void. One that came
    to neither says nothing.
    """

    def __init__(self, inner: FactSource, results: Results) -> None:
        self._inner = inner
        self._results = results

    def read(self, now: datetime) -> Mapping[str, Facts]:
        """Give the facts known at ``now``, by unit.

        Raises ``SourceError`` if the other source fails, or no result could ever be read.
        """
        results = self._results()
        if results is None:
            raise SourceError("the results of diagnostics were never read")
        facts = dict(self._inner.read(now))
        for each in results:
            if each.at > now:
                continue
            named = each.failed_units or each.units
            for unit in named if each.kind == "failed" else each.units:
                known = facts.get(unit, Facts())
                if each.kind == "failed":
                    facts[unit] = Facts((*known.facts, Fact("diagnostic_failed", each.at)), known.valid_from)
                elif each.kind == "passed":
                    since = each.at if known.valid_from is None else max(known.valid_from, each.at)
                    facts[unit] = Facts(known.facts, since)
        return facts

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[Outcome]:
        """Judge as the other source does."""
        return self._inner.outcomes(alerts, now)
