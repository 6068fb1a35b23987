"""One check for drift: recent rows and outcomes against what the models in use were fitted on."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from evaluation.drift.causes import (
    Recent,
    failure_verdicts,
    fleet_verdicts,
    reading_verdicts,
    risk_verdicts,
)
from evaluation.drift.movement import MISSING_LIMIT, by_group, movements, worst
from evaluation.drift.outcomes import AlertCounts, RateChange, RiskCounts, precision_fell, rate_changes
from evaluation.drift.verdict import CheckFindings
from features.wording import percent
from models.rows.row_reader import RowReader
from models.training.reference import (
    SAMPLE,
    LabelledRows,
    Reference,
    dated,
    sample_rows,
    warm_from,
)

RECENT = SAMPLE // 2
"""Rows of the recent window that features are compared on, at most."""

MAKE = "static__model__code"
"""Column of the make of a unit: makes differ in what they report and how they read."""

LEAST_OF_A_MAKE = 200
"""Rows of the reference's time from which a make counts as one that was there."""


def examine(
    reference: Reference,
    labelled: LabelledRows,
    read: RowReader,
    nodes: pd.Series,
    *,
    start_ms: int,
    end_ms: int,
    seed: int,
    alerts: tuple[AlertCounts, AlertCounts] | None = None,
    risks: RiskCounts | None = None,
    failures_from_ms: int | None = None,
) -> CheckFindings:
    """Check the rows since a fit.

    ``labelled``: rows and labels as of ``end_ms``.
    ``start_ms``, ``end_ms``: recent decision times: from ``start_ms`` to before ``end_ms``, the time of the check.
    Nothing that was not known then is looked at.
    ``failures_from_ms``: failures are compared from this decision time on; default: right after the reference.
    Returns: without verdicts where there are no rows to compare.
    """
    rows = labelled.rows
    recent = sample_rows(rows, start_ms, end_ms - 1, most=RECENT, seed=seed)
    if not len(recent) or not any(feature.present + feature.missing for feature in reference.features):
        return CheckFindings(start_ms, end_ms, 0)
    # Rows of the reference join them where the matrix has any, so that before and after can be compared.
    earlier = sample_rows(rows, reference.start_ms, min(reference.end_ms, start_ms - 1), most=RECENT, seed=seed)
    both = np.concatenate([earlier, recent])
    begin = warm_from(rows, reference.columns, reference.start_ms, reference.end_ms)
    inside = rows.time[(rows.time >= start_ms) & (rows.time < end_ms) & ~rows.augmented]
    pool = Recent(
        values=dated(read(both), rows.time[both], reference.columns),
        time=rows.time[both],
        unit=np.unique(rows.tie[both], return_inverse=True)[1].astype(np.int64),
        node=pd.factorize(nodes.iloc[both])[0].astype(np.int64),
        now=np.repeat([False, True], [len(earlier), len(recent)]),
        rows_per_time=len(inside) / max(len(np.unique(inside)), 1),
    )
    same_makes = _same_makes(reference, pool, begin)
    moves = movements(reference.columns, reference.features, pool.values[pool.now], same_makes)
    verdicts = [*fleet_verdicts(reference, pool), *reading_verdicts(reference, pool, moves)]
    since = reference.end_ms + 1 if failures_from_ms is None else failures_from_ms
    changes = rate_changes(reference.outcomes, labelled.outcomes(since, end_ms - 1, known_by_ms=end_ms))
    moved = any(verdict.drift for verdict in verdicts)
    verdicts += failure_verdicts(changes, _fell(alerts), anything_moved=moved)
    verdicts += risk_verdicts(risks)
    return CheckFindings(
        start_ms=start_ms,
        end_ms=end_ms,
        rows=len(recent),
        verdicts=tuple(verdicts),
        groups=tuple(by_group(moves)),
        features=tuple(worst(moves)),
        outcomes=_outcomes(changes),
    )


def _same_makes(reference: Reference, pool: Recent, begin_ms: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Give rows of the reference's time in the mix of makes that the recent rows have, and those; new makes left out.

    None where makes are not known, where the reference's rows are not there, or where the mix is nearly what it was:
    then it cannot have moved a share by what counts, and the fleet is compared as a whole.
    """
    make = next((at for at, column in enumerate(reference.columns) if column.name == MAKE), None)
    if make is None:
        return None
    codes = pool.values[:, make]
    earlier = np.flatnonzero(~pool.now & (pool.time >= begin_ms) & np.isfinite(codes))
    recent = np.flatnonzero(pool.now & np.isfinite(codes))
    if not (len(earlier) and len(recent)):
        return None
    makes = np.unique(codes[recent])
    shares = [(codes[rows][:, None] == makes).mean(axis=0) for rows in (earlier, recent)]
    if np.abs(shares[1] - shares[0]).sum() < MISSING_LIMIT:
        return None
    before, now = [], []
    for code in makes:
        had, has = (rows[codes[rows] == code] for rows in (earlier, recent))
        if len(had) >= LEAST_OF_A_MAKE:
            before.append(had[np.linspace(0, len(had) - 1, len(has)).round().astype(np.int64)])
            now.append(has)
    if not now:
        return None
    return pool.values[np.concatenate(before)], pool.values[np.concatenate(now)]


def _fell(alerts: tuple[AlertCounts, AlertCounts] | None) -> tuple[float, str] | None:
    if alerts is None:
        return None
    before, now = alerts
    counts = (
        f"{now.right} of {now.right + now.wrong} alerted nodes failed, {percent(now.precision)}; before "
        f"{before.right} of {before.right + before.wrong}, {percent(before.precision)}"
    )
    return precision_fell(before, now), counts


def _outcomes(changes: Sequence[RateChange]) -> dict[str, float | int | None]:
    if not changes:
        return {}
    whole = changes[0]
    rates = {"ratio": whole.ratio, "ratio_low": whole.low, "ratio_high": whole.high, "p": whole.p}
    known = {name: round(value, 6) if np.isfinite(value) else None for name, value in rates.items()}
    return {"incidents_before": whole.before, "incidents_now": whole.now, **known}
