"""Input of a report besides the evaluation: dataset, parameters, folds, alerts to show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated

import pandas as pd
from pydantic import ConfigDict, Field


@dataclass(frozen=True, slots=True)
class Simulated:
    """Parameters of a simulated fleet.

    ``acceleration``: factor on all failure rates; 1: as calibrated.
    """

    scenario: str
    seed: int
    acceleration: float


@dataclass(frozen=True, slots=True)
class AlertEntry:
    """An alert in the report.

    ``risk``: calibrated probability; None if the model has none.
    ``label``: 1: an incident followed; 0: none did; None: unknown.
    ``reasons``: as text, the largest contribution first; empty if not computed.
    ``method``: how the reasons were computed; empty if there are none.
    """

    decision_time: datetime
    node: str
    unit: str
    risk: float | None
    label: int | None
    failure_class: str | None
    incident_start: datetime | None
    reasons: tuple[str, ...] = ()
    method: str = ""


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Content of a report that is not in the evaluation.

    ``simulated``: None: a real fleet.
    ``profile``: the model that the profile selects.
    ``folds``: ``fold``, ``refit_at``, ``span``, ``train_start``, ``train_end``, ``n_positive``, ``n_negative``,
    ``variant``.
    ``skipped``: what was skipped and why, e.g. spans longer than the history, or baselines without data.
    ``params``: parameters in the report, by dotted name.
    ``attributions``: feature contributions to the profile's scores, see ``attribution_frame``.
    ``extras``: data of further sections by name, stored as ``evaluation/extra_NAME.parquet``.
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
    folds: Annotated[pd.DataFrame, Field(exclude=True)]
    skipped: tuple[str, ...] = ()
    alerts: tuple[AlertEntry, ...] = ()
    params: Mapping[str, str] = field(default_factory=dict)
    attributions: Annotated[pd.DataFrame | None, Field(exclude=True)] = None
    extras: Annotated[Mapping[str, pd.DataFrame], Field(exclude=True)] = field(default_factory=dict)

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, ser_json_timedelta="float")

    @property
    def budget_period(self) -> str:
        """Period of the alert budget K: ``decision time``, or ``day`` with a cool-down."""
        return "decision time" if self.params.get("backtest.cooldown", "None") == "None" else "day"

    @property
    def unit_word(self) -> str:
        """``GPU`` or ``node``, for sentences."""
        return "GPU" if self.unit == "gpu" else "node"


def select_alerts(predictions: pd.DataFrame, model: str, variant: str, count: int) -> pd.DataFrame:
    """Select the riskiest alerts: for each unit, one per incident and one of its wrong alerts.

    Returns: rows of ``predictions``, the riskiest first (ties by score, time and unit).
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
