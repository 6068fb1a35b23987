import json

import numpy as np
import pytest
from scipy.stats import poisson

from evaluation.drift.check import failure_verdicts, risk_verdicts
from evaluation.drift.movement import by_group
from evaluation.drift.outcomes import RiskCounts, rate_changes
from models.rows.training_set import TrainingRows
from models.training.reference import LabelledRows, Outcomes, dated, sample_rows
from tests.models.drifting_fleet import COLUMNS, DAY_MS, DriftingFleet


def drift_verdict(findings, cause):
    [verdict] = [verdict for verdict in findings.verdicts if verdict.cause == cause and verdict.drift]
    return verdict


def test_a_steady_fleet_raises_no_verdict_though_its_driver_is_upgraded_and_its_units_age():
    checks = [
        DriftingFleet(seed=seed).check(day, fitted)
        for seed in range(12)
        for fitted, day in ((35, 42), (35, 49), (35, 56), (42, 49))
    ]
    assert sum(check.drift for check in checks) <= 0.05 * len(checks)
    notes = [verdict for check in checks for verdict in check.verdicts if not verdict.drift]
    assert {verdict.cause for verdict in notes} == {"fleet"}
    assert notes[0].text == "The driver changed on part of the fleet."
    assert any("driver 560: 0% before" in fact for fact in notes[0].facts)


def test_a_counter_that_a_new_driver_counts_otherwise_is_laid_to_the_telemetry():
    fleet = DriftingFleet(seed=1)
    for column in fleet.column("pcie_replay_total"):
        fleet.X[fleet.upgraded, column] = 20 * fleet.X[fleet.upgraded, column] + 5
    check = fleet.check(42)
    assert check.causes == ("telemetry",)
    verdict = drift_verdict(check, "telemetry")
    assert verdict.text == "PCIe replays changed with a driver or exporter update."
    assert any("on units whose driver changed, compared with other units on the same days" in f for f in verdict.facts)
    assert check.summary == "the telemetry changed"


def test_a_reading_that_moves_on_all_units_while_the_driver_rolls_is_not_laid_to_the_driver():
    fleet = DriftingFleet(seed=2)
    for column in fleet.column("pcie_replay_total"):
        fleet.X[fleet.day >= 38, column] += 10
    check = fleet.check(45)
    assert check.causes == ("readings",)
    assert drift_verdict(check, "readings").text == (
        "PCIe replays changed; workload, gaps and drivers do not explain it."
    )


def test_a_channel_that_falls_silent_on_part_of_the_fleet_is_laid_to_the_telemetry():
    fleet = DriftingFleet(seed=3)
    silent = (fleet.day >= 36) & (fleet.node % 3 == 0)
    fleet.X[np.ix_(silent, fleet.column("gpu_temp_c"))] = np.nan
    verdict = drift_verdict(fleet.check(45), "telemetry")
    assert verdict.text == "GPU temperature stopped reporting on part of the fleet."
    assert any(fact.startswith("GPU temperature: missing in 0% of rows before, in 3") for fact in verdict.facts)


def test_samples_that_come_with_other_gaps_are_laid_to_the_telemetry():
    fleet = DriftingFleet(seed=4)
    late = fleet.day >= 36
    for column in fleet.column("gaps__samples"):
        fleet.X[late, column] = fleet.rng.binomial(30, 0.3, int(late.sum())) / 30
    assert drift_verdict(fleet.check(45), "telemetry").text == "Gaps between samples changed."


def test_idle_gpus_are_laid_to_the_workload_and_the_temperature_with_them():
    fleet = DriftingFleet(seed=5)
    late = fleet.day >= 36
    for column in (*fleet.column("gpu_util_pct"), *fleet.column("gpu_temp_c")):
        low = float(fleet.X[:, column].min())
        fleet.X[late, column] = low + 0.4 * (fleet.X[late, column] - low)
    check = fleet.check(45)
    assert check.causes == ("workload",)
    assert drift_verdict(check, "workload").text == "The workload changed."
    assert any("GPU temperature" in fact for fact in drift_verdict(check, "workload").facts)


def test_gpus_of_a_new_model_are_a_change_of_the_fleet():
    fleet = DriftingFleet(seed=6)
    fleet.X[(fleet.day >= 36) & (fleet.unit % 5 == 0), fleet.column("static__model")[0]] = 2
    verdict = drift_verdict(fleet.check(45), "fleet")
    assert verdict.text == "The composition of the fleet changed."
    assert any(fact.startswith("model C: 0% before, ") for fact in verdict.facts)


def test_units_installed_since_the_fit_and_units_taken_out_are_a_change_of_the_fleet():
    fleet = DriftingFleet(seed=7)
    new = (fleet.day >= 36) & (fleet.unit % 4 == 0)
    fleet.X[new, fleet.column("static__age")[0]] = fleet.day[new] - 35.5
    assert any("installed since" in fact for fact in drift_verdict(fleet.check(45), "fleet").facts)


def joined(seed, *, make=None, channel="pcie_replay_total"):
    """A fleet of which one make lacks a channel, joined by units that have it: of that of the others, or a new one."""
    fleet = DriftingFleet(seed=seed)
    new, lacking = fleet.node % 4 == 0, fleet.unit % 2 == 0
    model = fleet.column("static__model")[0]
    fleet.X[new, model] = 1 if make is None else make
    for column in fleet.column(channel):
        fleet.X[~new & lacking, column] = np.nan
        fleet.X[new, column] += 0 if make is None else 30
    fleet.leave_out(new & (fleet.day < 36))
    return fleet


@pytest.mark.parametrize("make", [None, 2])
@pytest.mark.parametrize("seed", [10, 12])
def test_another_mix_of_makes_changes_the_fleet_and_not_its_telemetry_or_readings(seed, make):
    check = joined(seed, make=make).check(49)
    assert check.causes == ("fleet",)
    moved = {row["feature"] for row in check.features if row["moved"]}
    assert not any("pcie" in name for name in moved)
    # the numbers stay those of the whole fleet
    assert make is None or any("pcie" in row["feature"] and row["psi"] > 0.2 for row in check.features)


def test_what_moves_within_makes_is_reported_though_others_join():
    fleet = joined(14, make=2)
    for column in fleet.column("gpu_temp_c"):
        fleet.X[(fleet.day >= 38) & (fleet.node % 3 == 0), column] = np.nan
    for column in fleet.column("pcie_replay_total"):
        fleet.X[fleet.day >= 38, column] += 10
    check = fleet.check(49)
    assert set(check.causes) == {"fleet", "telemetry", "readings"}
    assert drift_verdict(check, "telemetry").text == "GPU temperature stopped reporting on part of the fleet."
    assert drift_verdict(check, "readings").text.startswith("PCIe replays changed")


@pytest.mark.parametrize("share", [8, 2])
def test_units_that_join_silent_are_reported_where_their_make_reported_before(share):
    fleet = DriftingFleet(seed=20)
    new = fleet.node % share == 0
    fleet.X[np.ix_(new, fleet.column("gpu_temp_c"))] = np.nan
    fleet.leave_out(new & (fleet.day < 36))
    assert "GPU temperature stopped reporting" in drift_verdict(fleet.check(49), "telemetry").text


def test_a_driver_that_is_another_everywhere_is_not_reported_for_a_part():
    fleet = DriftingFleet(seed=16)
    fleet.X[:, fleet.column("static__driver")[0]] = fleet.day >= 36
    texts = [verdict.text for verdict in fleet.check(55).verdicts if verdict.cause == "fleet"]
    assert texts == ["The driver changed."]


@pytest.mark.parametrize(
    ("positives", "incidents", "expected", "text"),
    [
        (40, 20, 10.0, "Risks are too low: more failures than predicted."),
        (10, 5, 100.0, "Risks are too high: fewer failures than predicted."),
        (0, 0, 50.0, "Risks are too high: fewer failures than predicted."),
        (0, 0, 20.0, None),  # five incidents' worth: chance, one in 150
        (1, 1, 12.0, None),
        (12, 3, 3.0, None),  # four times as many, of three incidents: chance
        (13_000, 13_000, 10_000.0, None),  # sure, and little
        (0, 0, 0.0, None),
    ],
)
def test_risks_that_outcomes_contradict_are_reported_where_it_is_sure_and_much(positives, incidents, expected, text):
    verdicts = risk_verdicts(RiskCounts(positives, incidents, expected, rows_each=4))
    assert [(verdict.cause, verdict.drift, verdict.text) for verdict in verdicts] == (
        [("risks", True, text)] if text else []
    )
    assert risk_verdicts(None) == []


@pytest.mark.parametrize("rows_each", [1, 4, 12])
def test_right_risks_are_hardly_ever_called_wrong(rows_each):
    for expected in (0.5, 1, 2, 4, 8, 30):
        counts = np.arange(120)
        alarms = [
            bool(risk_verdicts(RiskCounts(rows_each * int(n), int(n), rows_each * expected, rows_each))) for n in counts
        ]
        assert poisson.pmf(counts, expected) @ np.array(alarms) <= 0.01


def test_more_failures_and_other_failures_are_a_change_of_the_failures():
    fleet = DriftingFleet(seed=8, rate=0.01)
    fleet.incidents += fleet.draw(0.03, start=36, kind="bus")
    check = fleet.check(49)
    assert check.causes == ("failures",)
    verdict = drift_verdict(check, "failures")
    assert verdict.text == "The failure rate increased."
    assert any(fact.startswith("class bus: 0 incidents before, ") for fact in verdict.facts)
    assert check.outcomes["ratio"] > 2


def test_alerts_that_fail_while_nothing_moves_are_laid_to_the_failures():
    fell = (0.0001, "2 of 40 alerted nodes failed, 5.0 %; before 20 of 40, 50.0 %")
    [verdict] = failure_verdicts([], fell, anything_moved=False)
    assert verdict.text == "The precision of alerts decreased without feature drift."
    assert failure_verdicts([], fell, anything_moved=True) == []
    assert rate_changes(Outcomes(0, {}), Outcomes(5, {"bus": 1})) == []


def test_a_unit_that_fails_again_within_a_week_counts_once():
    fleet = DriftingFleet(seed=9, rate=0.0)
    start = fleet.at(10)
    fleet.incidents = [
        (0, start, "bus"),
        (0, start + 3 * DAY_MS, "bus"),
        (0, start + 9 * DAY_MS, "bus"),
        (1, start, "memory"),
    ]
    labelled = LabelledRows.join(TrainingRows.of(fleet.rows), fleet.labels())
    counted = labelled.outcomes(fleet.at(0), fleet.at(30), known_by_ms=fleet.at(40))
    assert counted.incidents == {"bus": 2, "memory": 1}
    between = labelled.outcomes(fleet.at(11), fleet.at(30), known_by_ms=fleet.at(40))
    assert between.incidents == {"bus": 1}


def test_windows_side_by_side_count_every_incident_once():
    fleet = DriftingFleet(seed=15, rate=0.02)
    labelled = LabelledRows.join(TrainingRows.of(fleet.rows), fleet.labels())

    def counted(first, last):
        return labelled.outcomes(fleet.at(first), fleet.at(last) - 1, known_by_ms=fleet.at(56))

    total, days = counted(7, 49), [counted(day, day + 1) for day in range(7, 49)]
    assert sum(day.total for day in days) == total.total > 50
    assert sum(day.rows for day in days) == total.rows


@pytest.mark.parametrize("seed", [10, 11])
def test_what_comes_after_a_check_changes_nothing_of_it(seed):
    fleet, poisoned = DriftingFleet(seed=seed), DriftingFleet(seed=seed)
    poisoned.X[poisoned.day >= 45] = 1e6
    poisoned.incidents = [incident for incident in poisoned.incidents if incident[1] < fleet.at(45) - 600_000]
    poisoned.incidents += poisoned.draw(0.3, start=45.01)
    assert poisoned.check(45) == fleet.check(45)
    assert poisoned.check(56) != fleet.check(56)


def test_findings_and_reference_survive_json_and_the_order_of_rows_does_not_matter():
    fleet = DriftingFleet(seed=12)
    check = fleet.check(45)
    assert json.loads(json.dumps(check.to_json(), allow_nan=False)) == check.to_json()
    rows = TrainingRows.of(fleet.rows)
    order = np.random.default_rng(0).permutation(len(fleet.rows))
    chosen = sample_rows(rows, fleet.at(7), fleet.at(34), limit=500, seed=3)
    shuffled = sample_rows(TrainingRows.of(fleet.rows.iloc[order]), fleet.at(7), fleet.at(34), limit=500, seed=3)
    assert len(chosen) == 500
    assert set(order[shuffled]) == set(chosen)
    assert sum(group["features"] for group in check.groups) == len(COLUMNS)
    assert by_group([]) == []


def test_ages_are_compared_as_dates_so_that_time_passing_changes_nothing():
    fleet = DriftingFleet(seed=13, nodes=2)
    column = fleet.column("static__age")[0]
    rows = TrainingRows.of(fleet.rows)
    dates = dated(fleet.X, rows.time, COLUMNS)[:, column].reshape(-1, fleet.units)
    assert (dates == dates[0]).all()
    assert (fleet.X[:, 0] == dated(fleet.X, rows.time, COLUMNS)[:, 0]).all()


def test_a_check_without_rows_finds_nothing():
    fleet = DriftingFleet(seed=14)
    check = fleet.check(35)
    assert (check.rows, check.drift, check.summary) == (0, False, "nothing to compare")
