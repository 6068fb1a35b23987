"""The table of results: condensed fleets measure as the predictions do, and claims are worded by their intervals."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from benchmarks.results import make_page
from benchmarks.scoreboard import claims, page, store
from benchmarks.scoreboard.claims import SHORT, SHOWN, UNPROVEN, WORSE, gain
from benchmarks.scoreboard.fleets import Ran
from benchmarks.scoreboard.plan import (
    PAPER,
    PROMISED,
    RECOMMENDED,
    Part,
    Plan,
    Size,
    make_plan,
)
from benchmarks.scoreboard.pooled import Hits, Pool, at_alerts_of, lead_bounds, measure
from benchmarks.scoreboard.promised import keep_labels, promise_lines, promise_table, promises_of
from evaluation.backtest.promises import walk_promises
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.lead_time import incident_table
from evaluation.metrics.oracle import read_truth
from features.matrix.matrix import FeatureMatrix
from models.config import PromisesSection
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
    theirs = evaluate(frame, k=2, bootstrap=40, seed=1, truth=truth_of(frame))
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


def test_lead_times_have_intervals_of_resampled_gpus(two):
    pool = Pool([part for _, part in two], 200)
    scored = pool.scored("mean_rank", "sliding")
    incidents = incident_table(scored)
    medians = []
    for weights in pool.weights:
        of_unit = dict(zip(pool.shared.units, weights, strict=True))
        lead = [hours for unit, hours in zip(incidents["unit"], incidents["lead_time_hours"], strict=True)
                for _ in range(int(of_unit[unit])) if not math.isnan(hours)]  # fmt: skip
        medians.append(np.median(lead))
    found = lead_bounds(incidents, pool.shared.units, pool.weights)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(medians, [0.025, 0.975])))


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


def test_models_scored_on_other_rows_are_refused(tmp_path):
    frame = fleet(4, MODELS[:2], units=6, times=10)
    odd = frame.drop(index=frame.index[-1])
    tmp_path.joinpath("a").mkdir()
    with pytest.raises(ValueError, match="mean_rank \\(train_once\\) was scored on other rows"):
        store.keep(tmp_path / "a", odd, truth_of(frame), PART_FACTS)
    with pytest.raises(ValueError, match=r"must hold no dot: auto 0\.2"):
        store.keep(tmp_path / "a", fleet(4, [("xgboost", "auto 0.2", 1.0)]), truth_of(frame), PART_FACTS)


def test_the_plan_names_every_seed_once_and_the_page_their_sizes():
    plan = make_plan(quick=False)
    assert len(set(plan.parts)) == len(plan.parts)
    assert {name: len(parts) for name, parts in plan.pools().items()} == {
        "base": 5, "drift": 5, "announced": 2, "epidemic": 2, "noprecursor": 2,
    }  # fmt: skip
    assert {name: len({part.seed for part in parts}) for name, parts in plan.promising().items()} == {
        "base": 5, "drift": 5, "announced": 5, "epidemic": 2, "noprecursor": 2,
    }  # fmt: skip
    assert [part.seed for part in plan.of("announced", PROMISED)] == [3, 4, 5]
    assert [part.scenario for part in plan.parts if part.profile == PAPER] == ["base", "drift"]
    assert {part.size.acceleration for part in plan.parts} == {5}
    sizes = {"base": 2000, "drift": 2000, "announced": 4000, "epidemic": 2000, "noprecursor": 2000}
    assert {(part.scenario, part.size.gpus) for part in plan.parts} == set(sizes.items())
    assert plan.usual.gpus == 2000
    told = page.opening(plan, "make results", 21, 21, dict.fromkeys(("wall", "cpu", "peak_mb"), 0.0), "0" * 40)[2]
    assert "2,000 GPUs (4,000 on `announced`) over 120 days" in told
    quick = make_plan(quick=True, first_seed=101)
    assert min(part.seed for part in quick.parts) == 101
    assert max(part.size.gpus for part in quick.parts) < 2000


def test_fleets_at_their_own_rates_make_a_plan_and_a_page_of_their_own(two):
    plan = make_plan(quick=False, own_rates=True)
    assert {name: len(parts) for name, parts in plan.pools().items()} == {"base": 5, "drift": 5}
    assert {part.profile for part in plan.parts} == {RECOMMENDED}
    assert {part.size for part in plan.parts} == {Size(2000, 120, 1.0)}
    assert not {part.name for part in plan.parts} & {part.name for part in make_plan(quick=False).parts}
    parts = {part: stored for part, (_, stored) in zip(plan.of("drift", RECOMMENDED), two, strict=False)}
    few = Plan(tuple(parts), replicates=20, quick=False)
    text = make_page(few, Ran(parts, (), 2), "make results-own-rates", PromisesSection())
    assert text.startswith("# Results at the fleets' own failure rates")
    assert "accelerated" not in text
    assert "accelerated" in make_page(*_usual(two))


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
    for verdict, each in cases.items():
        assert each.verdict == verdict
        assert f"**{verdict}**" in each.sentence
        assert ("The oracle, which knows the true risk, reaches 50.0 %" in each.sentence) == (verdict != SHOWN)
    assert cases[SHOWN].gain == pytest.approx(0.5)
    assert cases[SHOWN].low < 0.5 < cases[SHOWN].high


def test_a_gain_over_nothing_is_unbounded_and_still_judged_by_the_difference():
    each = gain("x", "y", hits(0.30, spread=0.01), hits(0.0), hits(0.5), 0.2)
    assert math.isinf(each.gain)
    assert each.verdict == SHOWN
    assert "without bound [without bound, without bound %]" in each.sentence


def test_profiles_of_the_same_fleets_compare_at_equal_alerts_and_of_others_not_at_all(two, tmp_path):
    frame, part = two[0]
    tmp_path.joinpath("p").mkdir()
    paper = store.keep(tmp_path / "p", frame, truth_of(frame), {**PART_FACTS, "profile": "parallel"})
    ours, theirs = Pool([part], 20), Pool([paper], 20)
    mine, other, best = at_alerts_of(ours, theirs, "parallel", sparing=True)
    alerts = frame[(frame["model"] == "parallel") & frame["alert"]]
    assert other.hits[0] == alerts["label"].fillna(0).sum()
    assert mine.alerts[0] == pytest.approx(best.alerts[0], rel=0.1)
    full = at_alerts_of(ours, theirs, "parallel", sparing=False)
    assert full[0].hits[0] == measure(ours).at_profile["mean_rank", "sliding"].hits[0]
    with pytest.raises(ValueError, match="not replayed on the same units"):
        at_alerts_of(
            ours,
            Pool(
                [
                    kept(
                        tmp_path / "q",
                        9,
                    )[1],
                    part,
                ],
                20,
            ),
            "parallel",
            sparing=True,
        )


def _usual(two):
    size = Size(30, 18, 5.0)
    parts = {
        Part("drift", 101, RECOMMENDED, size): two[0][1],
        Part("drift", 102, RECOMMENDED, size): two[1][1],
    }
    plan = Plan(tuple(parts), replicates=40, quick=True)
    return plan, Ran(parts, ("drift-101-paper: no file",), 2), "make results", PromisesSection()


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


def test_the_papers_sections_say_which_baselines_have_nothing_to_go_by(measured):
    assert page.NOTHING_TO_GO_BY in page.scenario("drift, the paper's profile", measured, 5)
    assert page.NOTHING_TO_GO_BY not in page.scenario("drift", measured, 5)


def test_promises_are_counted_and_what_was_asked_is_judged():
    rows = [
        {"scenario": "announced", "fleet": f"f{seed}", "target": 0.85, "promised": 2, "known_drains": 10, "hits": 9,
         "kept": seed != 5, "recall": 0.3, "best": 0.9}
        for seed in range(1, 6)
    ]  # fmt: skip
    rows.append({**rows[0], "scenario": "base", "promised": 0, "known_drains": 0, "hits": 0, "kept": None, "best": 0.1})
    rows.append({**rows[-1], "promised": 1, "fleet": "f9"})
    lines = promise_lines(pd.DataFrame(rows), PromisesSection())
    assert "alerts within 72 hours (or the labels' horizon where that is longer) belong to it" in lines[0]
    counted = next(line for line in lines if "(fleets: 5 of `announced`; " in line)
    assert counted.endswith(" 1 more brought no drain whose outcome is known.")
    assert any("4 of 5 promises that brought drains were kept" in line for line in lines)
    assert any("on 4 of 5 fleets: **met**" in line for line in lines)
    assert promise_lines(pd.DataFrame(), PromisesSection()) == ["No fleet left any promise."]


def test_calibration_is_told_from_the_measurements(measured):
    rows = claims.calibration_rows({"drift": measured})
    assert list(rows.columns) == ["scenario", "risk_ratio", "brier_skill", "calibration_error", "holds"]


def test_the_oracle_is_kept_in_the_order_of_the_rows(tmp_path):
    frame = fleet(6, MODELS[:1], units=12, times=12)
    tmp_path.joinpath("a").mkdir()
    part = store.keep(tmp_path / "a", frame, truth_of(frame), PART_FACTS)
    rows, scores = part.rows(), part.scores("oracle", "oracle")
    assert (np.diff(rows["time_ms"]) >= 0).all()
    best = scores["rank"] == 1
    positive = rows["label"] == 1
    times_with = np.unique(rows["time_ms"][positive])
    assert all(positive[best & (rows["time_ms"] == time)].all() for time in times_with)
    assert part.facts["oracle_coverage"] == 1
    assert timedelta(milliseconds=int(rows["time_ms"][-1] - rows["time_ms"][0])) == timedelta(hours=66)


@pytest.mark.system
def test_what_was_promised_on_a_part_is_told_from_what_it_kept(small_backtest, small_fleet, tmp_path, monkeypatch):
    predictions = pd.read_parquet(small_backtest / "predictions_all.parquet")
    truth = read_truth(small_fleet.with_name("fleet-truth"))
    section = PromisesSection(targets=(0.05, 0.3))
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    folds = pd.DataFrame({"variant": "sliding", "fold": sorted(predictions["fold"].unique())})
    direct = walk_promises(predictions, folds, matrix, section, k=3).pooled
    direct = direct[direct["model"] == "lightgbm"].reset_index(drop=True)

    keep_labels(matrix, tmp_path)
    part = store.keep(tmp_path, predictions, truth, {**PART_FACTS, "profile": "lightgbm", "k": 3})
    found = promises_of(part, section)
    assert found["best"].min() > 0  # too few outcomes for a promise, enough for what could be promised
    pd.testing.assert_frame_equal(found, direct)
    table = promise_table({"base": [part]}, section)
    assert table["scenario"].unique().tolist() == ["base"]

    monkeypatch.setattr("benchmarks.scoreboard.promised.walk_promises", None)
    pd.testing.assert_frame_equal(promises_of(part, section), found)  # taken, not walked again
    with pytest.raises(TypeError):  # other rules walk anew
        promises_of(part, section.model_copy(update={"confidence": 0.5}))
