"""What a report needs in addition to the evaluation: the dataset, the choices made, the folds, the alerts to show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated

import pandas as pd
from pydantic import ConfigDict, Field


@dataclass(frozen=True, slots=True)
class Simulated:
    """That the fleet was simulated, and how.

    ``acceleration``: factor on all failure rates; 1: as calibrated.
    """

    scenario: str
    seed: int
    acceleration: float


@dataclass(frozen=True, slots=True)
class AlertEntry:
    """One alert that the report shows.

    ``risk``: calibrated probability; None where the model gives none.
    ``label``: 1: an incident followed, 0: none did, None: not known.
    ``reasons``: Why, in plain words, the weightiest first; empty where no reason was computed.
    ``method``: how the reasons were computed; empty where there are none.
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
    """Everything a report says that the evaluation does not know.

    ``simulated``: how the fleet was simulated; None: it is a real one.
    ``profile``: the model whose alerts are the profile's choice.
    ``folds``: ``fold``, ``refit_at``, ``span``, ``train_start``, ``train_end``, ``n_positive``, ``n_negative``,
    ``variant``.
    ``skipped``: what was skipped and why, such as spans longer than the history; and baselines without data.
    ``params``: parameters that the report shows, by dotted name.
    ``attributions``: what the profile's scores are made of, see ``attribution_frame``.
    ``extras``: what further sections of the report tell, by the name that their maker gave; each is kept as a file
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
    folds: Annotated[pd.DataFrame, Field(exclude=True)]
    skipped: tuple[str, ...] = ()
    alerts: tuple[AlertEntry, ...] = ()
    params: Mapping[str, str] = field(default_factory=dict)
    attributions: Annotated[pd.DataFrame | None, Field(exclude=True)] = None
    extras: Annotated[Mapping[str, pd.DataFrame], Field(exclude=True)] = field(default_factory=dict)

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, ser_json_timedelta="float")

    @property
    def budget_period(self) -> str:
        """What K alerts are given per: ``decision time``, or ``day`` where a cool-down chooses them."""
        return "decision time" if self.params.get("backtest.cooldown", "None") == "None" else "day"

    @property
    def unit_word(self) -> str:
        """``GPU`` or ``node``, for sentences."""
        return "GPU" if self.unit == "gpu" else "node"


def select_alerts(predictions: pd.DataFrame, model: str, variant: str, count: int) -> pd.DataFrame:
    """Choose the alerts to show: those of highest risk, each unit once an incident and once for its wrong alerts.

    Returns: rows of ``predictions``, the riskiest first (equal ones by time, then unit).
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
