"""Result of a drift check: a verdict per cause, with text and evidence; tables of all checks of a backtest."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from foundation.times import instants

Cause = Literal["fleet", "telemetry", "workload", "readings", "failures", "risks"]

CAUSES: Mapping[Cause, str] = {
    "fleet": "the fleet changed",
    "telemetry": "the telemetry changed",
    "workload": "the workload changed",
    "readings": "the readings changed without a known cause",
    "failures": "the failures changed",
    "risks": "the risks are miscalibrated",
}
"""Text of each cause, in display order."""

_RATES = ("ratio", "ratio_low", "ratio_high", "p")


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """One finding of a drift check.

    ``drift``: whether the finding is a reason to refit; False: a note, such as a driver upgrade without feature drift.
    """

    cause: Cause
    drift: bool
    text: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckFindings:
    """All findings of one drift check.

    ``start_ms``, ``end_ms``: recent window: first decision time, and the time of the check (exclusive).
    ``rows``: recent rows compared; 0: nothing to compare.
    ``features``: features that drifted most, see :meth:`evaluation.drift.movement.Movement.to_json`.
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
        """Whether any finding is a reason to refit."""
        return any(verdict.drift for verdict in self.verdicts)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Causes of the verdicts with :attr:`DriftVerdict.drift`."""
        return tuple(dict.fromkeys(verdict.cause for verdict in self.verdicts if verdict.drift))

    @property
    def summary(self) -> str:
        """One line: the causes, or that there are none."""
        if not self.rows:
            return "nothing to compare"
        return "; ".join(CAUSES[cause] for cause in self.causes) or "no drift found"

    def to_json(self) -> dict[str, Any]:
        """Return the findings as a JSON object."""
        return dict(TypeAdapter(CheckFindings).dump_python(self, mode="json"))


def drift_frames(findings: Sequence[CheckFindings | None], folds: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tabulate the drift checks of a backtest, one check per fold.

    Returns: ``drift_checks`` (one row per fold) and ``drift_verdicts`` (one row per verdict); empty without checks.
    """
    refit_fold = folds[folds["variant"] == "sliding"].set_index("fold")["refit_fold"]
    checks, verdicts = [], []
    for fold, check in enumerate(findings):
        if check is None:
            continue
        key = {"fold": fold, "check_at": check.end_ms}
        compared = {"window_start": check.start_ms, "rows": check.rows, "refit_fold": int(refit_fold[fold])}
        rates = {"incidents_before": 0, "incidents_now": 0, **dict.fromkeys(_RATES)} | check.outcomes
        checks.append(key | compared | {"drift": check.drift, "summary": check.summary} | rates)
        verdicts += [key | asdict(verdict) | {"facts": "\n".join(verdict.facts)} for verdict in check.verdicts]
    if not checks:
        return {}
    names = ["fold", "check_at", "cause", "drift", "text", "facts"]
    out = {
        "drift_checks": pd.DataFrame(checks).astype(dict.fromkeys(_RATES, "float64")),
        "drift_verdicts": pd.DataFrame(verdicts, columns=names).astype({"fold": "int64", "drift": "bool"}),
    }
    for frame in out.values():
        for name in frame.columns.intersection(["check_at", "window_start"]):
            frame[name] = instants(frame[name].to_numpy(dtype=np.int64))
    return out
