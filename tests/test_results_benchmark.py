"""The page of results: counts of alerts are right and add up over fleets, and claims are judged by their intervals."""

import json
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.scoreboard import fleets
from benchmarks.scoreboard.fleets import FACTS, Fleet, plan, run_fleet
from benchmarks.scoreboard.measure import added, counts, measure, share
from benchmarks.scoreboard.page import Claim, make_page
from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.metrics import Interval, interval, resample
from tests.models.fleet_predictions import MODELS, fleet, truth_of

REACH = timedelta(hours=73)
FACTS_KEPT = {
    "k": 2, "young_k": 2, "profile": "mean_rank", "members": ["xgboost"], "reach_s": REACH.total_seconds(),
    "promises": {"0.5": {"1": 0.2, "3": 0.25}},
}  # fmt: skip
KEPT = (*MODELS, ("history_count", "sliding", 5.0), ("random_forest", "sliding", 0.6))


def predictions(seed):
    frame = fleet(seed, KEPT, units=30, times=70, incidents=50, k=2)
    return frame[frame["variant"] == "sliding"]


def kept(folder, seed, acceleration=5.0, scenario="base"):
    """A finished fleet as it is kept, replayed with the paper's profile too, whose risks are those of the others."""
    frame = predictions(seed)
    folder.mkdir(parents=True)
    for name in ("profile", "alone", "once", "young", "young-alone", "paper"):
        models = {"profile": list(frame["model"].unique()), "paper": ["parallel"]}.get(name, ["mean_rank"])
        frame[frame["model"].isin(models)].to_parquet(folder / f"{name}.parquet")
    truth_of(frame).to_parquet(folder / "truth.parquet")
    (folder / FACTS).write_text(json.dumps(FACTS_KEPT))
    return measure(Fleet(scenario, seed, 30, 18, acceleration, paper=scenario == "base"), folder, 40)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    groups = [("base", 5.0), ("announced", 5.0), ("noprecursor", 5.0), ("base", 1.0)]
    return [
        kept(folder / f"{scenario}-{rate}-{seed}", seed, rate, scenario)
        for scenario, rate in groups
        for seed in (101, 102)
    ]


def test_counts_give_what_the_evaluation_measures_intervals_among_it():
    frame = predictions(3)
    theirs = evaluate(frame, k=2, bootstrap=40, seed=5, drain_reach=REACH)
    for scored in split_predictions(frame, 2, REACH):
        row, units = theirs.row(scored.model, "sliding"), scored.shared.n_clusters
        weights = np.vstack([np.ones(units), resample(units, 40, 5)])
        sums = counts(scored, weights, {}, ranked=True)
        for name, mine in {
            "precision_at_k": share(sums, "hits", "alerts"),
            "episode_precision": share(sums, "right", "drains"),
            "average_precision": sums["ap"],
            "roc_auc": sums["auc"],
        }.items():
            bounds = interval(mine[1:])
            np.testing.assert_allclose(mine[0], row[name], err_msg=name)
            if 0 < mine[0] < 1:
                np.testing.assert_allclose([bounds.low, bounds.high], [row[f"{name}_low"], row[f"{name}_high"]])
        assert share(sums, "risk", "positives")[0] == pytest.approx(row["risk_ratio"])
        by_class = theirs.by_class[theirs.by_class["model"] == scored.model].set_index("failure_class")
        for kind, of_class in by_class.iterrows():
            assert sums[f"incidents:{kind}"][0] == of_class["incidents"]
            assert sums[f"caught:{kind}"][0] == of_class["caught"]


def test_drains_under_a_promise_are_those_of_a_plain_reading():
    frame = predictions(4)
    scored = next(one for one in split_predictions(frame, 2, REACH) if one.model == "mean_rank")
    sums = counts(scored, np.ones((1, scored.shared.n_clusters)), FACTS_KEPT["promises"], ranked=False)
    asked, right, drains = {1: 0.2, 3: 0.25}, 0, 0
    rows = frame[frame["model"] == "mean_rank"].sort_values("decision_time")
    for _, own in rows.groupby("unit"):
        until = None
        for row in own.itertuples():
            if row.risk < asked.get(row.fold, np.inf) or (until is not None and row.decision_time <= until):
                continue
            until = row.decision_time + REACH
            drains += not pd.isna(row.label)
            right += not pd.isna(row.label) and row.label == 1
    assert drains > 20
    assert (sums["right@0.5"][0], sums["drains@0.5"][0]) == (right, drains)


def test_fleets_add_up_and_average_precision_is_their_mean(measured):
    two = measured[:2]
    together = added(two, "profile")
    for name in ("hits", "alerts", "drains@0.5"):
        assert together[name] == pytest.approx(sum(one.models["profile"][name] for one in two))
    mean = np.mean([one.models["oracle"]["ap"] for one in two], axis=0)
    assert share(added(two, "oracle"), "ap", "fleets") == pytest.approx(mean)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.2, "significant"), (-0.1, 0.2, "not significant"), (-0.2, -0.1, "refuted"), (0.9, 1.2, "not significant"),
     (1.1, 1.2, "refuted"), (np.nan, np.nan, "not significant")],
)  # fmt: skip
def test_a_claim_is_judged_by_its_whole_interval(low, high, verdict):
    assert Claim("", "", "", "", "", Interval(low, high), least=0.0, most=1.0).verdict == verdict


def test_the_page_fits_three_screens_and_says_simulated_first(measured):
    lines = make_page(measured, "make results", "revision", 40).splitlines()
    assert "simulated" in lines[2]
    assert "do not quote" in lines[2]
    assert len(lines) < 120
    assert "nan" not in "\n".join(lines).lower()
    table = [line for line in lines if line.startswith("|")]
    claimed = [line.split("|")[1].strip() for line in table if line.endswith(("significant |", "refuted |"))]
    assert len(set(claimed)) == 15
    assert len([what for what in claimed if what == "At least half of the oracle's precision"]) == 3
    columns = 0
    for at, line in enumerate(lines):
        columns = line.count("|") if not lines[at - 1].startswith("|") else columns
        assert not line.startswith("|") or line.count("|") == columns


def test_a_second_call_takes_what_is_finished_and_replays_what_changed(tmp_path, monkeypatch):
    frame, replayed = predictions(101).assign(drain_label=pd.NA), []

    def simulate(dataset, **_):
        truth = dataset.with_name("dataset-truth")
        truth.mkdir(parents=True)
        truth_of(frame).to_parquet(truth / "risk.parquet")

    def replay(_, *, training, cache, **__):
        replayed.append((cache.name, training.prior))
        return SimpleNamespace(predictions=frame, folds=None, k=2, drain_reach=REACH)

    promised = pd.DataFrame({"promised": [True, False], "target": 0.5, "fold": [1, 2], "threshold": [0.6, np.nan]})
    monkeypatch.setattr(fleets, "simulate", simulate)
    monkeypatch.setattr(fleets, "make_matrix", lambda *_: None)
    monkeypatch.setattr(fleets, "run_backtest", replay)
    monkeypatch.setattr(fleets, "walk_promises", lambda *_, **__: SimpleNamespace(folds=promised))
    one = plan(first_seed=101, scenarios=["base"], seeds=1)[0]
    folder = run_fleet(one, tmp_path, "shipped")
    young = [("profile", "shipped"), ("profile", None)]
    assert replayed == [("profile", "shipped"), ("profile", None), ("profile", "shipped"), *young, ("paper", None)]
    assert json.loads((folder / FACTS).read_text())["promises"] == {"0.5": {"1": 0.6}}
    assert run_fleet(one, tmp_path, "shipped") == folder
    (folder / FACTS).unlink()  # as a kill leaves it
    assert run_fleet(one, tmp_path, "shipped") == folder
    assert len(replayed) == 12
    monkeypatch.setattr(fleets, "source_digest", lambda *_: "other code")
    assert run_fleet(one, tmp_path, "shipped") != folder
    assert not folder.exists()
