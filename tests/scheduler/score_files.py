"""Folders of scores, as `predrain score` writes them."""

from datetime import timedelta

from foundation.files import FolderSwap
from policy.risk_record import ModelName, RiskReason, RiskRecord
from scheduler.controller.scores_reader import ScoresReader
from scheduler.ports.clock import ManualClock
from serving.scores.writing import ScoresFolder, write_decision
from tests.policy.decide_world import HOUR, STEP, T0


def record(unit, node, risk, at=T0):
    known = risk is not None
    return RiskRecord(
        unit, unit, node, None, "ok" if known else "unknown", None if known else "no sample", risk, {}, risk,
        1 if known else None, False, "clear" if known else "unknown", at, at, at + 2 * STEP, 24 * HOUR,
        ModelName("a" * 64, "stacked", 4), None, 1.0, (RiskReason("errors rise", "history", 1.0),) if known else (),
    )  # fmt: skip


def write(path, *records, at=T0, **summary):
    scores = ScoresFolder(path)
    content = {"format": 2, "units": len(records), "model": {"fitted_at": "2026-02-20T00:00:00Z"}, **summary}
    with FolderSwap(scores.folder_of(at)) as swap:
        write_decision(swap.path, records, content)
        swap.commit()
    scores.point_to_newest()


def reading(path, now=T0 + 2 * STEP):
    return ScoresReader(path, ManualClock(now), timedelta(days=7))
