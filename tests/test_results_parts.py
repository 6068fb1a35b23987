"""The parts of the table of results: which are run, in which order, which are taken, and what they took."""

from __future__ import annotations

import pandas as pd

from benchmarks.results import make_page
from benchmarks.scoreboard import fleets, store
from benchmarks.scoreboard.plan import (
    PROMISED,
    RECOMMENDED,
    Part,
    Size,
    code_digest,
    key_of,
    make_plan,
    params_of,
)
from evaluation.backtest.run import run_backtest
from models.config import PromisesSection
from pipeline.params import Params
from tests.models.fake_matrix import FakeMatrix
from tests.models.fleet_predictions import MODELS, PART_FACTS, fleet, truth_of


def fleets_params(folder, text):
    path = folder / "params.yaml"
    path.write_text(text)
    return path


def test_the_key_knows_code_parameters_and_fleet_but_not_the_evaluation():
    size = Size(100, 50, 5.0)
    part, params = Part("base", 1, RECOMMENDED, size), Params()
    key = key_of(part, params, "code")
    assert key != key_of(part, params, "other code")
    assert key != key_of(Part("base", 2, RECOMMENDED, size), params, "code")
    changed = params.training.model_copy(update={"hysteresis": 0.5})
    assert key != key_of(part, params.model_copy(update={"training": changed}), "code")
    more = params.model_copy(update={"backtest": params.backtest.model_copy(update={"bootstrap": 7})})
    assert key == key_of(part, more, "code")
    assert len(code_digest()) == 64


def test_a_profile_replayed_alone_has_the_risks_that_it_has_beside_others(tmp_path):
    given = fleets_params(
        tmp_path,
        "models: {learners: [lightgbm, random_forest, logistic], parallel: {members: [lightgbm, random_forest]}, "
        "cascade: {stages: [random_forest, lightgbm]}, settings: {lightgbm: {n_estimators: 10}}}\n"
        "training: {span: 15d, refit_every: 14d}",
    )
    matrix = FakeMatrix(units=24, days=40, incidents=50, companions=8, seed=3)
    risks, models = {}, {}
    for profile in (RECOMMENDED, PROMISED):
        params = params_of(profile, [given])
        assert params is not None
        done = run_backtest(matrix, training=params.training, models=params.models, backtest=params.backtest, seed=7)
        mine = done.predictions[(done.predictions["model"] == params.models.profile).to_numpy()]
        risks[profile], models[profile] = mine.astype({"model": str}).reset_index(drop=True), set(done.models)
    assert {"logistic", "cascade"} <= models[RECOMMENDED] - models[PROMISED]
    assert len(risks[PROMISED]) > 0
    pd.testing.assert_frame_equal(risks[PROMISED], risks[RECOMMENDED])


def test_a_second_call_takes_what_is_finished_and_runs_what_changed(tmp_path, monkeypatch):
    ran = []

    def run(part, _params, _work, target, key):
        ran.append(part.name)
        target.mkdir(parents=True)
        frame = fleet(part.seed, MODELS, units=30, times=70, incidents=50, k=2)
        return store.keep(target, frame, truth_of(frame), {**PART_FACTS, "key": key})

    monkeypatch.setattr(fleets, "_run", run)
    monkeypatch.setattr(fleets, "code_digest", lambda: "code")
    plan = make_plan(quick=True, first_seed=101, scenarios=["drift"], with_paper=False)
    files = [fleets_params(tmp_path, "seed: 1")]
    assert fleets.run_plan(plan, files, tmp_path / "work", jobs=1).fresh == 2
    assert not fleets.run_plan(plan, files, tmp_path / "work", jobs=1, finished=True).left_out
    (tmp_path / "work" / "parts" / plan.parts[1].name / store.FACTS).unlink()  # as a kill leaves it
    so_far = fleets.run_plan(plan, files, tmp_path / "work", jobs=1, finished=True)
    assert list(so_far.parts) == [plan.parts[0]]
    assert so_far.left_out == (f"{plan.parts[1].name}: not run yet",)
    text = make_page(plan, so_far, "make results", PromisesSection())
    assert "**Not all of it yet**: 1 of 2 parts" in text
    assert f"- {plan.parts[1].name}: not run yet" in text
    again = fleets.run_plan(plan, files, tmp_path / "work", jobs=1)
    assert again.fresh == 1
    assert set(again.parts) == set(plan.parts)
    assert fleets.run_plan(plan, files, tmp_path / "work", jobs=1).fresh == 0
    assert fleets.run_plan(plan, [fleets_params(tmp_path, "seed: 2")], tmp_path / "work", jobs=1).fresh == 2
    assert len(ran) == 5


def test_the_first_seed_of_every_scenario_runs_before_the_second_of_any(tmp_path, monkeypatch):
    ran = []

    def run(part, _params, _work, target, key):
        ran.append((part.scenario, part.seed))
        target.mkdir(parents=True)
        frame = fleet(part.seed, MODELS[:1], units=6, times=10)
        return store.keep(target, frame, truth_of(frame), {**PART_FACTS, "key": key})

    monkeypatch.setattr(fleets, "_run", run)
    monkeypatch.setattr(fleets, "code_digest", lambda: "code")
    plan = make_plan(quick=False, scenarios=["base", "announced"], seeds=2, with_paper=False)
    fleets.run_plan(plan, [fleets_params(tmp_path, "seed: 1")], tmp_path / "work", jobs=1)
    assert ran == [("announced", 1), ("base", 1), ("announced", 2), ("base", 2)], "the large one of each seed first"


def test_large_fleets_run_one_at_a_time_beside_the_others():
    small, large = (Size(gpus, 120, 5.0) for gpus in (2000, 4000))
    tasks = {
        name: [(Part(name, 1, RECOMMENDED, size), "key")] for name, size in
        (("base", small), ("announced", large), ("more", large), ("drift", small))
    }  # fmt: skip
    begun = fleets._next_of(list(tasks.values()), [], 2000)
    assert begun == tasks["base"]
    assert fleets._next_of([tasks["announced"], tasks["drift"]], [begun], 2000) == tasks["announced"]
    assert fleets._next_of([tasks["more"], tasks["drift"]], [tasks["announced"]], 2000) == tasks["drift"]
    assert fleets._next_of([tasks["more"]], [tasks["announced"]], 2000) is None
    assert fleets._next_of([], [], 2000) is None


def test_sequence_learners_without_their_library_are_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(fleets.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(fleets, "code_digest", lambda: "code")
    plan = make_plan(quick=True, first_seed=101, scenarios=["drift"], seeds=1, with_paper=False)
    files = [fleets_params(tmp_path, "models: {learners: [lightgbm, lstm]}")]
    told = fleets.run_plan(plan, files, tmp_path / "work", jobs=1)
    assert told.parts == {}
    assert told.left_out == (
        "drift-101-384x80-x10-recommended: its sequence learners need PyTorch (the extra `sequence`), which is not "
        "installed",
    )


def test_a_part_that_was_cut_off_tells_the_time_of_all_calls(tmp_path, monkeypatch):
    now = iter([100.0, 107.0, 109.0, 500.0, 530.0])
    monkeypatch.setattr(fleets.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(fleets, "_cpu_seconds", lambda: 0.0)
    first = fleets._Clock(tmp_path / "unfinished" / "spent.json")
    first.lap("features")
    first.lap("backtest")
    # cut off here; what it did after its last lap is done again
    second = fleets._Clock(tmp_path / "unfinished" / "spent.json")
    second.lap("backtest")
    told = second.spent()
    assert told["seconds"] == {"features": 7.0, "backtest": 32.0}
    assert told["cpu_seconds"] == {"features": 0.0, "backtest": 0.0}
    assert told["peak_mb"] > 0
