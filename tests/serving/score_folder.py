"""Folders of scores, as `predrain score` writes them."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from policy.risk_record import RiskRecord
from serving.scores.writing import stamp
from tests.scheduler.score_files import write
from tests.serving.http.world import DECIDED


def write_scores(folder: Path, records: list[RiskRecord], decided: datetime = DECIDED, **model: Any) -> str:
    """Write a decision as `predrain score` does, and point to the newest; return the decision's name."""
    thresholds = {"watch": 0.02, "elevated": 0.1, "high": 0.5}
    fitted = (DECIDED - timedelta(days=2)).isoformat()
    write(folder, *records, at=decided, thresholds=thresholds, model={"fitted_at": fitted, **model})
    return stamp(decided)
