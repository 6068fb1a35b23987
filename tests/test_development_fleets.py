"""Fleets that benchmarks replay: what is finished is not done again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks import development_fleets
from benchmarks.development_fleets import DevelopmentFleets, Kept, only
from pipeline.params import Params


def test_a_value_is_made_once(tmp_path):
    made = []

    def make() -> list[int]:
        made.append(1)
        return [3, 4]

    assert [Kept(tmp_path / "kept").value("a, 20 %", make) for _ in range(2)] == [[3, 4], [3, 4]]
    assert made == [1]


def test_a_replay_that_was_killed_goes_on_with_its_fleet_and_a_finished_one_is_kept(tmp_path, monkeypatch):
    params, simulated, seen = Params(), [], []
    models = only(["lightgbm"], params)
    fleets = DevelopmentFleets(tmp_path, 16, 20, 20.0, params, models, tmp_path / "benchmark.py")
    (tmp_path / "benchmark.py").write_text("", encoding="utf-8")
    simulate = development_fleets.simulate

    def counted(out, *, seed, **given):
        simulated.append(seed)
        return simulate(out, seed=seed, **given)

    monkeypatch.setattr(development_fleets, "simulate", counted)

    def replay(matrix, work):
        seen.append(Kept(work).value("first half", lambda: len(seen)))
        if len(seen) == 1:
            raise KeyboardInterrupt
        grid = ~matrix.rows["augmented"]
        rows, labels = (frame[grid].reset_index(drop=True) for frame in (matrix.rows, matrix.labels(None)))
        order = rows.groupby("decision_time").cumcount()
        given = {"model": "lightgbm", "variant": "sliding", "fold": 0, "rank": order + 1, "alert": order == 0}
        told = {"risk": 1.0 / (order + 2), "failure_class": None, "label": labels["label"].astype("Float64")}
        frame = pd.concat([rows[["decision_time", "unit"]], labels[["incident", "incident_start"]]], axis=1)
        return frame.assign(**given, **told), 1, {"half": seen[-1]}

    with pytest.raises(KeyboardInterrupt):
        fleets.of("base", 100, replay)
    part = fleets.of("base", 100, replay)
    assert (simulated, seen, part.facts["fleet"]) == ([100], [0, 0], {"half": 0})
    assert fleets.of("base", 100, replay).facts == part.facts
    assert len(seen) == 2
    assert sorted(path.name for path in (tmp_path / "base-100").iterdir()) == ["begun", "dataset-truth", "part"]
    assert np.isfinite(part.scores("lightgbm", "sliding")["risk"]).all()
    with pytest.raises(SystemExit, match="seed 7 is one that results are reported on"):
        fleets.of("base", 7, replay)
