"""The table of results: condensed fleets measure as the predictions do, and claims are worded by their intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.results import make_page
from benchmarks.scoreboard import store
from benchmarks.scoreboard.claims import SHORT, SHOWN, UNPROVEN, WORSE, gain
from benchmarks.scoreboard.fleets import Ran
from benchmarks.scoreboard.plan import (
    RECOMMENDED,
    Part,
    Plan,
    Size,
)
from benchmarks.scoreboard.pooled import Hits, Pool, measure
from benchmarks.scoreboard.promised import promise_lines
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.oracle import oracle_predictions
from models.config import PrecisionTargetsSection
from tests.models.fleet_predictions import MODELS, PART_FACTS, fleet, truth_of


def kept(folder, seed, **settings):
    frame = fleet(seed, MODELS, units=30, times=70, incidents=50, k=2, **settings)
    folder.mkdir(parents=True)
    return frame, store.keep(folder, frame, truth_of(frame), PART_FACTS)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return [kept(folder / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def measured(two):
    return measure(Pool([part for _, part in two], 60))


def test_one_fleet_measures_as_its_predictions_do(two):
    frame, part = two[0]
    ours = measure(Pool([part], 40))
    theirs = evaluate(frame, k=2, bootstrap=40, seed=1, oracle=oracle_predictions(frame, truth_of(frame), 2))
    columns = [name for name in theirs.table.columns if name not in ("model", "variant", "kind")]
    for _, row in theirs.table.iterrows():
        mine = ours.row(row["model"], row["variant"])
        # risks are kept as float32: what pools by them may differ in the last digits
        np.testing.assert_allclose(
            mine[columns].to_numpy(dtype=float), row[columns].to_numpy(dtype=float), rtol=1e-5, equal_nan=True
        )
    key = ["model", "other_model"]
    same = theirs.equal_alerts[theirs.equal_alerts["variant"] == "sliding"].merge(ours.equal, on=key)
    assert len(same)
    assert same["difference_x"].to_numpy() == pytest.approx(same["difference_y"].to_numpy())
    assert same["low_x"].to_numpy() == pytest.approx(same["low_y"].to_numpy(), nan_ok=True)


def test_fleets_that_are_pooled_add_up(two, measured):
    hits = sum(evaluate(frame, k=2, bootstrap=0, seed=1).row("mean_rank", "sliding")["hits"] for frame, _ in two)
    row = measured.row("mean_rank", "sliding")
    assert row["hits"] == hits
    assert measured.units == 60
    assert measured.k == (2, 2)
    own = measured.at_profile["mean_rank", "sliding"]
    assert own.hits[0] == hits
    assert own.alerts[0] == row["alerts_labelled"]


def test_everything_is_compared_at_the_profiles_number_of_alerts(measured):
    own = measured.at_profile["mean_rank", "sliding"].alerts[0]
    for name, hits in measured.at_profile.items():  # a few alerts on either side have no known outcome
        assert hits.alerts[0] == pytest.approx(own, rel=0.1), name
    beside = measured.equal[measured.equal["model"] == "mean_rank"]
    assert set(beside["other_model"]) == {"xgboost", "logistic"}
    assert list(beside.loc[beside["best"], "other_model"]) == ["xgboost"]


def test_a_part_is_taken_only_if_it_is_finished_and_made_from_the_same(tmp_path):
    _, part = kept(tmp_path / "a", 3)
    assert store.load(tmp_path / "a", "k") is not None
    assert store.load(tmp_path / "a", "other") is None
    (part.path / store.FACTS).unlink()
    assert store.load(tmp_path / "a") is None
    assert store.load(tmp_path / "nowhere") is None


def hits(rate, replicates=200, spread=0.0, seed=0):
    drawn = np.random.default_rng(seed).normal(rate, spread, replicates)
    return Hits(np.concatenate([[rate], drawn]) * 1000, np.full(replicates + 1, 1000.0))


def test_a_claim_is_worded_by_its_interval_and_by_what_was_asked():
    oracle = hits(0.5)
    cases = {
        SHOWN: gain("x", "y", hits(0.30, spread=0.01), hits(0.20, spread=0.01, seed=1), oracle, 0.15),
        SHORT: gain("x", "y", hits(0.22, spread=0.001), hits(0.20, spread=0.001, seed=1), oracle, 0.15),
        UNPROVEN: gain("x", "y", hits(0.30, spread=0.1), hits(0.20, spread=0.1, seed=1), oracle, 0.15),
        WORSE: gain("x", "y", hits(0.10, spread=0.01), hits(0.20, spread=0.01, seed=1), oracle, None),
    }
    for verdict, case in cases.items():
        assert case.verdict == verdict
        assert f"**{verdict}**" in case.sentence
        assert ("The oracle, which knows the true risk, reaches 50.0 %" in case.sentence) == (verdict != SHOWN)
    assert cases[SHOWN].gain == pytest.approx(0.5)
    assert cases[SHOWN].low < 0.5 < cases[SHOWN].high


def _usual(two):
    size = Size(30, 18, 5.0)
    parts = {
        Part("drift", 101, RECOMMENDED, size): two[0][1],
        Part("drift", 102, RECOMMENDED, size): two[1][1],
    }
    plan = Plan(tuple(parts), replicates=40, quick=True)
    return plan, Ran(parts, ("drift-101-paper: no file",), 2), "make results", PrecisionTargetsSection()


def test_the_page_says_simulated_first_and_judges_only_by_what_was_measured(two):
    text = make_page(*_usual(two))
    assert text.index("simulated") < text.index("## What may be claimed")
    assert "The quick table" in text
    assert "nothing here may be quoted" in text
    assert "at its own pace" not in text
    assert "The paper's profile was not run" in text
    assert "drift-101-paper: no file" in text
    assert "No fleet left any promise." in text
    assert "nan" not in text.lower().replace("nancy", "")
    assert all(f"\n| {model} |" in text for model in ("xgboost", "oracle", "vendor_rules"))
    assert all(line.count("|") == text.splitlines()[at - 1].count("|")
               for at, line in enumerate(text.splitlines()) if line.startswith("|--"))  # fmt: skip


def test_promises_are_counted_and_what_was_asked_is_judged():
    rows = [
        {"scenario": "announced", "fleet": f"f{seed}", "target": 0.85, "promised": 2, "known_drains": 10, "hits": 9,
         "kept": seed != 5, "recall": 0.3, "best": 0.9}
        for seed in range(1, 6)
    ]  # fmt: skip
    rows.append({**rows[0], "scenario": "base", "promised": 0, "known_drains": 0, "hits": 0, "kept": None, "best": 0.1})
    rows.append({**rows[-1], "promised": 1, "fleet": "f9"})
    lines = promise_lines(pd.DataFrame(rows), PrecisionTargetsSection())
    assert "alerts within 72 hours (or the labels' horizon where that is longer) belong to it" in lines[0]
    counted = next(line for line in lines if "(fleets: 5 of `announced`; " in line)
    assert counted.endswith(" 1 more brought no drain whose outcome is known.")
    assert any("4 of 5 promises that brought drains were kept" in line for line in lines)
    assert any("on 4 of 5 fleets: **met**" in line for line in lines)
    assert promise_lines(pd.DataFrame(), PrecisionTargetsSection()) == ["No fleet left any promise."]
