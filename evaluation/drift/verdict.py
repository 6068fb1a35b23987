"""What a check for drift reports: separate causes, as text, with the facts behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

Cause = Literal["fleet", "telemetry", "workload", "readings", "failures", "risks"]

CAUSES: Mapping[Cause, str] = {
    "fleet": "the fleet changed",
    "telemetry": "the telemetry changed",
    "workload": "the workload changed",
    "readings": "the readings changed, for no known reason",
    "failures": "the failures changed",
    "risks": "the risks are not right",
}
"""Each cause as text, in the order of reports."""


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """One thing found.

    ``cause``: one of :data:`CAUSES`.
    ``drift``: whether the models may no longer fit; False: worth knowing only, such as a driver upgrade that moved
    nothing else.
    """

    cause: Cause
    drift: bool
    text: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckFindings:
    """What one check found.

    ``start_ms``, ``end_ms``: the recent window: first decision time, and the time of the check (not included).
    ``rows``: recent rows looked at; 0: nothing could be checked.
    ``verdicts``: in the order of :data:`CAUSES`.
    ``groups``: for each feature group ``group``, ``features``, ``moved``, ``psi`` and ``ks`` (the largest), ``worst``
    (the feature of the largest index), ``missing_before`` and ``missing_now`` (means over the features),
    ``missing_moved`` (features).
    ``features``: the features furthest from the reference: ``feature``, ``group``, ``psi``, ``usual_psi``, ``ks``,
    ``moved``, ``missing_before``, ``missing_now``, ``median_before``, ``median_now``.
    ``outcomes``: ``incidents_before``, ``incidents_now``, ``ratio``, ``ratio_low``, ``ratio_high``, ``p``.
    """

    start_ms: int
    end_ms: int
    rows: int
    verdicts: tuple[DriftVerdict, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    features: tuple[dict[str, Any], ...] = ()
    outcomes: dict[str, Any] = field(default_factory=dict)

    @property
    def drift(self) -> bool:
        """Whether anything was found that makes a refit worth while."""
        return any(verdict.drift for verdict in self.verdicts)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Causes of the verdicts with :attr:`Verdict.drift`."""
        return tuple(dict.fromkeys(verdict.cause for verdict in self.verdicts if verdict.drift))

    @property
    def summary(self) -> str:
        """One line: the causes, or that nothing was found."""
        if not self.rows:
            return "nothing to compare"
        return "; ".join(CAUSES[cause] for cause in self.causes) or "no drift found"

    def to_json(self) -> dict[str, Any]:
        """Give the findings as a JSON object."""
        return dict(TypeAdapter(CheckFindings).dump_python(self, mode="json"))
