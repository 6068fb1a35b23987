"""What the benchmarks share that walk over development fleets."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.walking import Held, earlier, report
from features.config import DecisionSection, LabelSection
from features.matrix.building import build_matrix
from models.assessment import assess
from models.bootstrap import resample_units
from models.scored import split_predictions
from tests.features.small_fleet import HOUR, SMALL, Training, gpus, inventory_of, samples_of, write_dataset
from tests.models.fleet_predictions import fleet

KNOWING, GUESSING = ("xgboost", "sliding", 0.4), ("logistic", "sliding", 1.6)


def walked(*frames):
    parts = {name: split_predictions(frame, 2)[0] for name, frame in frames}
    weights = resample_units(next(iter(parts.values())).n_units, 200, 1)
    return {name: assess(scored, weights) for name, scored in parts.items()}, weights


def test_matrices_in_folders_of_the_same_name_are_held_apart(tmp_path):
    matrices = []
    for number, units in enumerate((3, 4)):
        inventory = inventory_of(gpus(units))
        dataset = write_dataset(
            tmp_path / f"{number}" / "fleet", inventory, hours=24, samples=samples_of(inventory, 24)
        )
        matrix = build_matrix(
            dataset,
            tmp_path / f"{number}" / "matrix",
            decision=DecisionSection(every=HOUR),
            labels=LabelSection(horizon=6 * HOUR),
            features=SMALL,
            training=Training(),
            seed=5,
        )
        matrices.append(matrix)
    for _ in range(2):  # made, then found
        for matrix in matrices:
            held = Held(matrix, tmp_path)
            np.testing.assert_array_equal(held.read(np.arange(len(matrix.rows))), matrix.values())


def test_lead_times_and_the_share_of_positives_stand_in_the_table(capsys):
    knowing, guessing = (fleet(3, [model], units=30, times=70, incidents=50) for model in (KNOWING, GUESSING))
    never = knowing.assign(alert=False)
    assessed, weights = walked(("knowing", knowing), ("guessing", guessing), ("never", never))
    report(assessed, dict.fromkeys(assessed, 1.0), 2, weights, name="tried", reference="knowing")
    first, header, *rows, line = capsys.readouterr().out.splitlines()
    known = guessing["label"].notna().sum()
    assert f"{int(guessing['label'].sum()):,} of {known:,} rows positive" in first
    assert "lead h" in header
    assert "earlier h" in header
    lead = {name: assessed[name].incidents["lead_time_hours"].median() for name in assessed}
    for name, row in zip(("knowing", "guessing"), rows, strict=False):
        assert f" {lead[name]:.1f} [" in row
    assert "nan [nan, nan]" in rows[2]  # nothing caught, no lead time
    others = json.loads(line)["others"]
    assert others["guessing"]["lead_hours"] == pytest.approx(lead["guessing"], abs=1e-3)
    assert "lead_hours" not in others["never"]


def test_earlier_counts_the_incidents_that_both_caught():
    frames = [(name, fleet(3, [model], units=30, times=70, incidents=50)) for name, model in
              (("knowing", KNOWING), ("guessing", GUESSING))]  # fmt: skip
    assessed, weights = walked(*frames)
    mine, other = (assessed[name].incidents.set_index("incident") for name in ("guessing", "knowing"))
    both = mine.index[mine["caught"]].intersection(other.index[other["caught"]])
    assert 3 < len(both) < len(mine)
    hours = (mine["lead_time_hours"] - other["lead_time_hours"])[both]
    mean, bounds = earlier(assessed["guessing"], assessed["knowing"], weights)
    assert mean == pytest.approx(hours.mean())
    drawn = []
    for weight in weights:
        of_unit = dict(zip(assessed["knowing"].scored.shared.units, weight, strict=True))
        counted = np.array([of_unit[unit] for unit in mine["unit"][both]])
        drawn.append((counted * hours).sum() / counted.sum())
    assert (bounds.low, bounds.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))
    assert earlier(assessed["knowing"], assessed["knowing"], weights)[0] == 0.0
