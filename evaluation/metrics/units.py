"""Detail by unit: precision, recall and the calibration of risks, which are predicted for units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evaluation.metrics.metrics import Bools, Calibration, Floats, Ints, calibration, ratio


@dataclass(frozen=True, slots=True)
class UnitFigures:
    """What a model's predictions of units were worth.

    Rows without a label count nowhere.

    ``known``, ``positive``, ``risk``, ``error``: labelled rows of each cluster, positive ones, and the sums of their
    risks and of the squared distances between risk and label; shape (clusters,).
    ``alerts``, ``hits``: labelled rows that were alerted, and positive ones among them.
    ``incidents``, ``caught``: incidents of units that a row could have caught, and those that an alert did.
    ``calibration``: bins and errors of the risk.
    """

    known: Floats
    positive: Floats
    risk: Floats
    error: Floats
    alerts: int
    hits: int
    incidents: int
    caught: int
    calibration: Calibration

    @classmethod
    def of(
        cls, label: np.ndarray, risk: Floats, alert: Bools, incident: Ints, cluster: Ints, clusters: int
    ) -> UnitFigures:
        """Count rows of units; ``label`` is 1, 0 or -1, ``cluster`` that of the unit's node; shape (rows,)."""
        known, positive = np.flatnonzero(label >= 0), label == 1
        group, right = cluster[known], positive[known]
        return cls(
            known=np.bincount(group, minlength=clusters).astype(np.float64),
            positive=np.bincount(group, right, clusters).astype(np.float64),
            risk=np.bincount(group, risk[known], clusters).astype(np.float64),
            error=np.bincount(group, (risk[known] - right) ** 2, clusters).astype(np.float64),
            alerts=int(alert[known].sum()),
            hits=int((alert & positive).sum()),
            incidents=len(np.unique(incident[positive])),
            caught=len(np.unique(incident[positive & alert])),
            calibration=calibration(risk[known], right),
        )

    def columns(self) -> dict[str, object]:
        """Give precision and recall by unit, with what they are made of."""
        return {
            "unit_labelled": int(self.known.sum()),
            "unit_positives": int(self.positive.sum()),
            "unit_alerts_labelled": self.alerts,
            "unit_hits": self.hits,
            "unit_precision": float(ratio(self.hits, self.alerts)),
            "unit_incidents": self.incidents,
            "unit_caught": self.caught,
            "unit_recall": float(ratio(self.caught, self.incidents)),
        }
