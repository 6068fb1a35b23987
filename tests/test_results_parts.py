"""The parts of the table of results: which are run, in which order, which are taken, and what they took."""

from __future__ import annotations

from benchmarks.results import make_page
from benchmarks.scoreboard import fleets, store
from benchmarks.scoreboard.plan import (
    make_plan,
)
from models.config import PrecisionTargetsSection
from tests.models.fleet_predictions import MODELS, PART_FACTS, fleet, truth_of


def fleets_params(folder, text):
    path = folder / "params.yaml"
    path.write_text(text)
    return path


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
    text = make_page(plan, so_far, "make results", PrecisionTargetsSection())
    assert "**Not all of it yet**: 1 of 2 parts" in text
    assert f"- {plan.parts[1].name}: not run yet" in text
    again = fleets.run_plan(plan, files, tmp_path / "work", jobs=1)
    assert again.fresh == 1
    assert set(again.parts) == set(plan.parts)
    assert fleets.run_plan(plan, files, tmp_path / "work", jobs=1).fresh == 0
    assert fleets.run_plan(plan, [fleets_params(tmp_path, "seed: 2")], tmp_path / "work", jobs=1).fresh == 2
    assert len(ran) == 5
