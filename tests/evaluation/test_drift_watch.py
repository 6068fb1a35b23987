from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from evaluation.backtest.frames import VARIANTS, Fold
from evaluation.backtest.sliding import DriftWatch
from foundation.instants import from_ms
from models.rows.training_set import TrainingRows
from models.training.reference import LabelledRows
from tests.models.drifting_fleet import COLUMNS, DAY_MS, DriftingFleet

FIRST, WEEKS = 35, 9
CHRONIC = 8


def weekly(fleet, alerted):
    """Folds of a week each, all of them refits; ``alerted`` gives the units with an alert on a day."""
    folds = []
    for week in range(WEEKS):
        begin = FIRST + 7 * week
        rows = np.concatenate(
            [
                np.flatnonzero((fleet.day == day) & np.isin(fleet.unit, alerted(day, last=day == begin + 6)))
                for day in range(begin, begin + 7)
            ]
        )
        table = pa.table(
            {
                "model": np.zeros(len(rows), dtype=np.int8),
                "variant": np.full(len(rows), VARIANTS.index("sliding"), dtype=np.int8),
                "row": rows,
                "alert": np.ones(len(rows), dtype=bool),
            }
        )
        span = {"train_start_ms": fleet.at(begin - 29), "train_end_ms": fleet.at(begin - 1) - 600_000}
        folds.append(Fold(table, {"fold": week, "unfit": None, "sliding": span}))
    return folds


def checked(rival):
    """What a check after nine weeks finds: a unit fails each day, and ``rival`` is alerted beside the chronic ones."""
    fleet = DriftingFleet(seed=3, nodes=120, per_node=1, days=FIRST + 7 * WEEKS + 2)
    fleet.columns = COLUMNS
    fleet.incidents = [(CHRONIC + day, fleet.at(day) + DAY_MS // 4, "memory") for day in range(fleet.days)]
    refits = [fleet.at(FIRST + 7 * week) for week in range(WEEKS + 1)]
    trainer = SimpleNamespace(matrix=fleet, values=fleet.values, rows=TrainingRows.of(fleet.rows), names=("m",), seed=1)
    trainer.labels_at = lambda ms: LabelledRows.join(trainer.rows, fleet.labels(from_ms(ms)))

    def alerted(day, *, last):
        # What becomes of false alerts of the last day is not known at the check.
        return [*([] if last else range(CHRONIC)), rival(day)]

    return DriftWatch(trainer, refits, "m").check(WEEKS, weekly(fleet, alerted), trainer.labels_at(refits[-1]))


def alert_facts(findings):
    return [fact for verdict in findings.verdicts for fact in verdict.facts if "alerted nodes failed" in fact]


def test_units_that_are_alerted_in_vain_all_the_time_do_not_pass_for_alerts_that_are_right_less_often():
    assert alert_facts(checked(lambda day: CHRONIC + day)) == []


def test_alerts_that_are_right_less_often_than_in_weeks_before_are_reported():
    since = FIRST + 7 * (WEEKS - 1)
    findings = checked(lambda day: CHRONIC + day - (30 if day >= since else 0))
    assert alert_facts(findings) == ["0 of 14 alerted nodes failed, 0%; before 56 of 120, 47%"]
