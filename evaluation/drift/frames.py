"""The findings of a backtest's checks, laid out as tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import pandas as pd

from evaluation.drift.outcomes import outcomes_over_time
from evaluation.drift.verdict import CheckFindings
from features.times import instants


def drift_frames(
    findings: Sequence[CheckFindings | None],
    folds: pd.DataFrame,
    predictions: pd.DataFrame,
    *,
    profile: str,
    every: timedelta,
) -> dict[str, pd.DataFrame]:
    """Lay out what the checks of a backtest found.

    ``findings``: one for each fold.
    Returns: ``drift_checks`` (a row a fold), ``drift_verdicts`` (a row a verdict), ``drift_outcomes`` (rolling
    precision and calibration, see :func:`evaluation.drift.outcomes.outcomes_over_time`).
    """
    used = folds[folds["variant"] == "sliding"].set_index("fold")
    checks, verdicts = [], []
    for fold, check in enumerate(findings):
        if check is None:
            continue
        key = {"fold": fold, "check_at": check.end_ms}
        outcomes = check.outcomes
        checks.append(
            key
            | {
                "window_start": check.start_ms,
                "rows": check.rows,
                "drift": check.drift,
                "summary": check.summary,
                "refit_fold": int(used.at[fold, "refit_fold"]),
                "incidents_before": int(outcomes.get("incidents_before", 0)),
                "incidents_now": int(outcomes.get("incidents_now", 0)),
                **{name: _number(outcomes.get(name)) for name in ("ratio", "ratio_low", "ratio_high", "p")},
            }
        )
        verdicts += [
            key | {"cause": v.cause, "drift": v.drift, "text": v.text, "facts": "\n".join(v.facts)}
            for v in check.verdicts
        ]
    if not checks:
        return {}
    out = {
        "drift_checks": pd.DataFrame(checks),
        "drift_verdicts": pd.DataFrame(
            verdicts, columns=["fold", "check_at", "cause", "drift", "text", "facts"]
        ).astype({"fold": "int64", "check_at": "int64", "drift": "bool"}),
    }
    for frame in out.values():
        for name in ("check_at", "window_start"):
            if name in frame:
                frame[name] = instants(frame.pop(name).to_numpy(dtype=np.int64))
    out["drift_outcomes"] = outcomes_over_time(predictions, profile, every=every)
    return out


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
