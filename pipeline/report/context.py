"""What a report is told besides the evaluation: the dataset, the choices made, the folds, the alerts to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pandas as pd


@dataclass(frozen=True, slots=True)
class Simulated:
    """That the fleet was simulated, and how.

    Attributes
    ----------
    scenario : str
        Name of the scenario.
    seed : int
        Seed of the fleet.
    acceleration : float
        Factor on all failure rates; 1: as calibrated.
    """

    scenario: str
    seed: int
    acceleration: float


@dataclass(frozen=True, slots=True)
class AlertEntry:
    """One alert that the report shows.

    Attributes
    ----------
    decision_time : datetime
        When it was given (UTC).
    node : str
        The node.
    unit : str
        The GPU, or the node where there are no GPUs.
    risk : float
        Calibrated probability; NaN where the model gives none.
    label : int or None
        1: an incident followed, 0: none did, None: not known.
    failure_class : str or None
        Class of the incident that followed.
    incident_start : datetime or None
        Its start (UTC).
    reasons : tuple of str
        Why, in plain words, the weightiest first; empty where no reason was computed.
    method : str
        How the reasons were computed; empty where there are none.
    """

    decision_time: datetime
    node: str
    unit: str
    risk: float
    label: int | None
    failure_class: str | None
    incident_start: datetime | None
    reasons: tuple[str, ...] = ()
    method: str = ""


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Everything a report says that the evaluation does not know.

    Attributes
    ----------
    dataset : str
        Name of the dataset, as a reader knows it.
    dataset_digest, code_revision : str
        What the result was made from.
    span : tuple of datetime
        First and last instant of the dataset (UTC).
    unit : str
        ``gpu`` or ``node``: what is scored.
    simulated : Simulated or None
        How the fleet was simulated; None: it is a real one.
    profile : str
        The model whose alerts are the profile's choice.
    every, gap, horizon : timedelta
        Spacing of decision times, and the label's gap and horizon.
    folds : DataFrame
        ``fold``, ``refit_at``, ``span``, ``train_start``, ``train_end``, ``n_positive``, ``n_negative``, ``variant``.
    skipped : sequence of str
        What was skipped and why, such as spans longer than the history; and baselines with nothing to go by.
    alerts : sequence of AlertEntry
        Alerts to show with their reasons.
    params : mapping of str to str
        Parameters worth showing, by dotted name.
    attributions : DataFrame, optional
        What the profile's scores are made of, see :func:`models.attribution.attribution_frame`.
    extras : mapping of str to DataFrame
        What further sections of the report tell, by the name that their maker gave; each is kept as a file
        ``evaluation/extra_NAME.parquet``.
    """

    dataset: str
    dataset_digest: str
    code_revision: str
    span: tuple[datetime, datetime]
    unit: str
    simulated: Simulated | None
    profile: str
    every: timedelta
    gap: timedelta
    horizon: timedelta
    folds: pd.DataFrame
    skipped: Sequence[str] = ()
    alerts: Sequence[AlertEntry] = ()
    params: Mapping[str, str] = field(default_factory=dict)
    attributions: pd.DataFrame | None = None
    extras: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def unit_word(self) -> str:
        """``GPU`` or ``node``, for sentences."""
        return "GPU" if self.unit == "gpu" else "node"


def select_alerts(predictions: pd.DataFrame, model: str, variant: str, count: int) -> pd.DataFrame:
    """Choose the alerts to show: those of highest risk, each unit once an incident and once for its wrong alerts.

    Parameters
    ----------
    predictions : DataFrame
        As a backtest returns it.
    model, variant : str
        Whose alerts.
    count : int
        How many at most.

    Returns
    -------
    DataFrame
        Rows of ``predictions``, the riskiest first (equal ones by time, then unit).
    """
    chosen = predictions[
        (predictions["model"] == model) & (predictions["variant"] == variant) & predictions["alert"].astype(bool)
    ]
    chosen = chosen.sort_values(
        ["risk", "score", "decision_time", "unit"],
        ascending=[False, False, True, True],
        na_position="last",
        kind="stable",
    )
    incident = chosen["incident"].astype("str").where(chosen["incident"].notna(), "none")
    return chosen[~pd.DataFrame({"unit": chosen["unit"].astype("str"), "what": incident}).duplicated()].head(count)
