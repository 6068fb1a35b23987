"""Health check of a bundle: compares recent rows of a feature matrix with its training data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.backtest.sliding import RECENT_SPAN
from evaluation.drift.check import examine
from evaluation.drift.outcomes import AlertCounts, RiskCounts, count_alerts, exact_interval
from evaluation.drift.verdict import CAUSES, CheckFindings
from features.matrix.matrix import FeatureMatrix
from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from foundation.instants import from_ms
from foundation.text import quantity
from foundation.times import duration_ms, instant_ms
from models.bundle.store import load_bundle
from models.rows.training_set import IncidentGroups, TrainingRows
from models.sequence.layout import with_windows
from models.training.reference import LabelledRows
from models.training.schedule import format_days, format_instant
from pipeline.held_out import in_codes_of


@dataclass(frozen=True, slots=True)
class Health:
    """Result of a health check.

    ``profile``: the model that the bundle's risks come from.
    ``alerts``: outcomes of the nodes that it would have alerted on, each counted once.
    """

    bundle: str
    profile: str
    fitted_at: datetime
    checked_at: datetime
    findings: CheckFindings
    alerts: AlertCounts
    risks: RiskCounts

    @property
    def healthy(self) -> bool:
        """Whether no finding requires a refit."""
        return not self.findings.drift

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        low, high = exact_interval(self.alerts.right, self.alerts.right + self.alerts.wrong)
        decided = self.alerts.right + self.alerts.wrong
        return {
            "healthy": self.healthy,
            "summary": self.findings.summary,
            "bundle": self.bundle,
            "profile": self.profile,
            "fitted_at": self.fitted_at.isoformat(),
            "checked_at": self.checked_at.isoformat(),
            "alerts": {
                "right": self.alerts.right,
                "wrong": self.alerts.wrong,
                "open": self.alerts.open,
                "precision": self.alerts.precision if decided else None,
                "precision_low": low if decided else None,
                "precision_high": high if decided else None,
            },
            "calibration": asdict(self.risks),
            "findings": self.findings.to_json(),
        }

    def to_text(self) -> str:
        """Format the result for a terminal."""
        findings = self.findings
        age = self.checked_at - self.fitted_at
        lines = [
            f"model {self.bundle[:12]}, {self.profile}: fitted {format_instant(instant_ms(self.fitted_at))}, "
            f"{format_days(age)} before the check at {format_instant(findings.end_ms)}",
            f"compared: {quantity(findings.rows, 'row')} from {format_instant(findings.start_ms)} on",
        ]
        lines.append("")
        for verdict in findings.verdicts:
            label = "DRIFT" if verdict.drift else "note"
            lines.append(f"{label}: {CAUSES[verdict.cause]}. {verdict.text}")
            lines += [f"    {fact}" for fact in verdict.facts]
        if not findings.verdicts:
            lines.append("no drift detected")
        lines += ["", f"{'group':<12}{'drifted':>14}{'largest PSI':>16}{'largest KS':>11}  feature"]
        lines += [
            f"{group['group']:<12}{group['moved']:>7} of {group['features']:<4}{group['psi']:>15.2f}"
            f"{group['ks']:>11.2f}  {group['worst']}"
            for group in findings.groups
        ]
        lines += ["", self._outcomes_text(), f"verdict: {findings.summary}", ""]
        return "\n".join(lines)

    def _outcomes_text(self) -> str:
        decided = self.alerts.right + self.alerts.wrong
        low, high = exact_interval(self.alerts.right, decided)
        alerted = (
            f"{self.alerts.right} of {decided} alerted nodes failed ({low:.0%} to {high:.0%}), {self.alerts.open} open"
            if decided
            else f"no alert has an outcome yet, {self.alerts.open} open"
        )
        if self.risks.expected <= 0:
            return f"outcomes since the fit: {alerted}"
        few, many = self.risks.interval()
        return f"outcomes since the fit: {alerted}; positives over risk {self.risks.ratio:.2f} [{few:.2f}, {many:.2f}]"


def check_health(bundle: Path, matrix: Path, *, until: datetime | None = None) -> Health:
    """Compare the rows of a matrix since a bundle's fit with the bundle's training data.

    ``until``: time of the check (aware); later information is ignored. Default: the end of the data.
    Features are compared on the rows of the :data:`RECENT_SPAN` before it.
    Raises ``InputError`` if bundle or matrix cannot be read, the bundle has no reference, the columns differ, or there
    is no decision between the fit and the check.
    """
    matrix_data = FeatureMatrix.open(matrix)
    loaded = load_bundle(bundle)
    reference = loaded.fitted.reference
    if reference is None:
        raise InputError(
            "the bundle has no reference of its training data",
            str(bundle),
            "Train it again with this version of predrain.",
        )
    fitted = loaded.fitted
    windowed = with_windows(matrix_data, fitted.learner_names)
    if [column.name for column in windowed.columns] != [column.name for column in fitted.columns]:
        raise InputError(
            "the features of the matrix and the bundle differ",
            str(matrix),
            "Compute the matrix with the parameters of the bundle, or train the bundle again.",
        )
    rows = TrainingRows.of(matrix_data.rows)
    fit_ms = instant_ms(fitted.refit_at)
    end_ms = min(instant_ms(until), instant_ms(matrix_data.span[1])) + 1
    scored = np.flatnonzero((rows.time >= fit_ms) & (rows.time < end_ms) & ~rows.augmented)
    if not len(scored):
        raise InputError(
            f"no decision between the fit at {format_instant(fit_ms)} and the check at {format_instant(end_ms - 1)}",
            str(matrix),
            "Update the matrix with `predrain features`, or give a later --until.",
        )
    frame = matrix_data.labels(from_ms(end_ms))
    labelled = LabelledRows.join(rows, frame)
    served = in_codes_of(fitted.columns, windowed.columns, windowed.values)
    scores = fitted.score_rows(served, scored, rows)
    profile = scores[loaded.profile]
    known_columns = _with_new_categories(reference.columns, matrix_data.columns)
    risk = fitted.risk(loaded.profile, profile.score)
    label = labelled.label[scored]
    known = (label >= 0) & (labelled.complete[scored] <= end_ms)
    positive = scored[known & (label == 1)]
    groups = IncidentGroups.of(matrix_data.incidents(from_ms(end_ms)))
    reach = timedelta(milliseconds=int((labelled.complete[scored] - rows.time[scored]).max()))
    risks = RiskCounts(
        positives=len(positive),
        incidents=len(np.unique(groups.common_cause[labelled.incident[positive]])),
        expected=float(risk[known].sum(dtype=np.float64)),
        rows_each=reach / timedelta(days=1) * reference.times_per_day,
    )
    findings = examine(
        replace(reference, columns=known_columns),
        labelled,
        in_codes_of(known_columns, matrix_data.columns, matrix_data.values),
        matrix_data.rows["node"],
        start_ms=max(fit_ms, end_ms - 1 - duration_ms(RECENT_SPAN)),
        end_ms=end_ms,
        seed=int((loaded.manifest.get("params") or {}).get("seed", 0)),
        risks=risks,
    )
    return Health(
        bundle=loaded.digest,
        profile=loaded.profile,
        fitted_at=fitted.refit_at,
        checked_at=from_ms(end_ms - 1),
        findings=findings,
        alerts=count_alerts(rows.node[scored][profile.alert], np.where(known, label, -1)[profile.alert]),
        risks=risks,
    )


def _with_new_categories(columns: Sequence[FeatureColumn], now: Sequence[FeatureColumn]) -> tuple[FeatureColumn, ...]:
    """Append categories that only the matrix has to those of the bundle, so that they count as drift."""
    return tuple(
        replace(column, categories=tuple(dict.fromkeys([*column.categories, *current.categories])))
        for column, current in zip(columns, now, strict=True)
    )
