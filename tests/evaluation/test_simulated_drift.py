"""What the health check says of simulated fleets: one whose driver upgrade changes a counter, and a steady one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from features.matrix.matrix import FeatureMatrix
from models.bundle.store import save_bundle
from models.training.final import fit_final
from pipeline.health import Health, check_health
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params

SMALL = """
models:
  profile: logistic
  learners: [logistic]
  parallel: {members: [logistic]}
  cascade: {stages: [logistic]}
  horizons: []
features:
  windows: [6h]
  groups: [telemetry, workload, gaps, history, static]
  history_windows: [30d]
  channels: [pcie_replay_total, gpu_temp_c, power_w, gpu_util_pct]
  static: [model, driver]
training: {candidate_windows: [21d], window: 21d, augmentation: 0, negative_ratio: 20}
decision: {every: 12h}
"""
FITTED = timedelta(days=28)
"""While the upgrade, on days 24 to 31 of 60, rolls over the nodes."""

CHECKED = (35, 42, 49, 56)
SEED = 121


@pytest.fixture(scope="module")
def checks(tmp_path_factory) -> dict[str, dict[int, Health]]:
    """Findings by scenario and day of the check, of 128 GPUs over 60 days each."""
    from simulator.simulate import simulate

    folder = tmp_path_factory.mktemp("drift")
    (folder / "small.yaml").write_text(SMALL)
    params = load_params([folder / "small.yaml"])
    by_scenario = {}
    for scenario in ("drift", "base"):
        fleet: Path = folder / scenario
        simulate(fleet / "dataset", gpus=128, days=60, seed=SEED, scenario=scenario, acceleration=10.0)
        matrix: FeatureMatrix = make_matrix(fleet / "dataset", params, fleet / "matrix")
        begin = matrix.span[0]
        fitted = fit_final(
            matrix,
            training=params.training,
            models=params.models,
            backtest=params.backtest,
            seed=params.seed,
            until=begin + FITTED,
        )
        save_bundle(fleet / "bundle", fitted, {"profile": "logistic", "params": {"seed": params.seed}})
        by_scenario[scenario] = {
            day: check_health(fleet / "bundle", fleet / "matrix", until=begin + timedelta(days=day)) for day in CHECKED
        }
    return by_scenario


def test_a_counter_that_the_upgrade_inflates_is_reported_as_a_change_of_the_telemetry_that_names_it(checks):
    health = checks["drift"][42]
    assert not health.healthy
    [verdict] = [verdict for verdict in health.findings.verdicts if verdict.cause == "telemetry"]
    assert verdict.drift
    assert verdict.text == "PCIe replays read differently since a driver or exporter changed."
    assert any(
        "on units whose driver changed, against units that had not changed on the same" in f for f in verdict.facts
    )
    assert "DRIFT: the telemetry changed" in health.to_text()


def test_it_is_found_at_every_check_and_never_reported_as_a_change_of_the_failures(checks):
    for day, health in checks["drift"].items():
        causes = health.findings.causes
        assert {"telemetry", "readings"} & set(causes), day
        assert "failures" not in causes, day
        assert "fleet" not in causes, day


def test_a_steady_fleet_raises_no_alarm_though_its_driver_is_upgraded_alike(checks):
    for day, health in checks["base"].items():
        assert health.healthy, (day, health.findings.summary)
        notes = health.findings.verdicts
        assert {note.text for note in notes} <= {"The driver changed on part of the fleet."}, day
    assert checks["base"][35].findings.verdicts  # worth knowing, and no drift
    drifting, steady = (checks[name][42].findings.features for name in ("drift", "base"))
    assert any("pcie_replay_total" in row["feature"] and row["moved"] for row in drifting)
    assert not any("pcie_replay_total" in row["feature"] and row["moved"] for row in steady)
