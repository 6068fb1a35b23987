"""Whether telemetry was collected because of failures: fleets that were and fleets that were not."""

import json
from datetime import timedelta
from functools import partial

import numpy as np
import pandas as pd
import pytest

from features.selection import find_selection
from tests.processes import invoke
from tests.telemetry.helpers import run_import

DAYS, NODES = 240, 40


def fleet(rng, *, mtbf=120.0):
    """Failures of nodes whose rates differ, by node and day, and telemetry on each day but after some failures."""
    rate = rng.gamma(0.5, 2.0, NODES) / mtbf
    happened = rng.random((NODES, DAYS)) < np.minimum(rate[:, None], 0.2)
    happened[:, 1:] |= happened[:, :-1] & (rng.random((NODES, DAYS - 1)) < 0.1)  # some fail again
    present = np.ones((NODES, DAYS), dtype=bool)
    for node, day in zip(*np.nonzero(happened), strict=True):
        present[node, day + 1 : day + 1 + rng.integers(0, 30)] = False
    return happened & present, present


def failures_of(happened, *, only=None):
    """List failures; ``only``: those that a source without eyes elsewhere sees."""
    node, day = np.nonzero(happened if only is None else happened & only)
    times = pd.Timestamp("2025-01-01", tz="UTC") + pd.to_timedelta(day * 86_400 + node, unit="s")
    return pd.DataFrame({"node": node, "day": day, "source": "log", "timestamp": times})


def from_one_day_on(rng):
    """A collector that comes for the whole fleet."""
    happened, present = fleet(rng)
    present[:, : DAYS * 3 // 4] = False
    return present, failures_of(happened)


def rack_by_rack(rng):
    """A collector that comes for racks one after the other, and brings their XIDs."""
    happened, present = fleet(rng)
    for node in range(NODES):
        present[node, : node // 8 * 40] = False
    return present, failures_of(happened, only=present)


def the_flaky_half(rng):
    """Telemetry of those nodes only that fail more than the others."""
    happened, present = fleet(rng)
    happened[::2] &= rng.random((NODES // 2, DAYS)) < 0.2
    present[::2] = False
    return present, failures_of(happened)


def on_and_off(rng):
    """Nodes that send for ten days now and then, whether they fail or not."""
    happened, _ = fleet(rng)
    present = np.zeros((NODES, DAYS), dtype=bool)
    for node in range(NODES):
        for begin in rng.integers(0, DAYS, 2):
            present[node, begin : begin + 10] = True
    return present, failures_of(happened)


def always(rng):
    happened, present = fleet(rng)
    return present, failures_of(happened)


UNSELECTED = (always, from_one_day_on, rack_by_rack, the_flaky_half, on_and_off)


def windows(rng, *, controls=0, collected_with_them=False):
    """Windows cut around half of the failures, and as many elsewhere as asked for."""
    happened, _ = fleet(rng)
    present = np.zeros((NODES, DAYS), dtype=bool)
    for node, day in zip(*np.nonzero(happened), strict=True):
        if rng.random() < 0.5:
            present[node, max(day - 9, 0) : day + 2] = True
    for _ in range(controls):
        node, begin = rng.integers(NODES), rng.integers(DAYS)
        present[node, begin : begin + 11] = True
    return present, failures_of(happened, only=present if collected_with_them else None)


def after_the_first_failure(rng):
    """A collector that is switched on for a node two days after its failure."""
    happened, present = fleet(rng, mtbf=60.0)
    for node in range(NODES):
        days = np.flatnonzero(happened[node])
        present[node] = np.arange(DAYS) >= days[days > 60].min(initial=DAYS) + 2
    return present, failures_of(happened)


def alarms(make, fleets):
    alarmed = []
    for seed in range(fleets):
        present, failures = make(np.random.default_rng(seed))
        alarmed.append(find_selection(present, np.ones_like(present), failures))
    return alarmed


@pytest.mark.parametrize("make", UNSELECTED)
def test_fleets_that_nobody_selected_raise_no_alarm(make):
    assert alarms(make, 25) == [()] * 25


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (windows, "known without telemetry"),
        (partial(windows, controls=40), "known without telemetry"),
        (partial(windows, collected_with_them=True), "windows of telemetry contain a failure"),
        (after_the_first_failure, "that began to send late"),
    ],
)
def test_fleets_whose_telemetry_was_collected_because_of_failures_raise_an_alarm_that_names_it(make, says):
    alarmed = alarms(make, 10)
    assert sum(any(says in reason for reason in reasons) for reasons in alarmed) >= 9
    assert all(not reasons or reasons[0].startswith("telemetry covers ") for reasons in alarmed)


def test_the_evidence_is_counted_in_node_days_and_node_failures():
    present = np.zeros((20, 200), dtype=bool)
    days = 10 * np.arange(20)
    for node, day in enumerate(days):
        present[node, max(day - 5, 0) : day + 5] = True
    happened = np.zeros_like(present)
    happened[np.arange(20), days] = True
    reasons = find_selection(present, np.ones_like(present), failures_of(happened))
    assert reasons[0] == "telemetry covers 5% of node-days and 100% of 20 node failures"


@pytest.fixture(scope="module")
def windows_around_failures(tmp_path_factory):
    """Give a dataset of five nodes, each with two windows of ten days in half a year that end with a lost GPU."""
    folder, first = tmp_path_factory.mktemp("windows"), pd.Timestamp("2026-01-01", tz="UTC")
    samples, events = [], []
    for node in range(5):
        names = {"node": f"node-{node}", "gpu": f"GPU-{node}"}
        for begin in (3 + 7 * node, 100 + 7 * node):
            times = first + pd.to_timedelta(24 * begin + np.arange(240), unit="h")
            samples.append(pd.DataFrame({"timestamp": times, **names, "gpu_temp_c": 40.0 + np.arange(240) % 7}))
            events.append({"timestamp": times[230], **names, "type": "xid", "code": "79"})
    installations = pd.DataFrame({"node": [f"node-{n}" for n in range(5)], "gpu": [f"GPU-{n}" for n in range(5)]})
    return run_import(
        folder,
        samples=pd.concat(samples),
        events=pd.DataFrame(events),
        inventory=installations.assign(installed_at=first),
        step=timedelta(hours=1),
    ).dataset.path


def test_doctor_reports_the_selection_and_fails(windows_around_failures):
    result = invoke("doctor", windows_around_failures, "--json", code=1)
    assert any(
        "because of failures: telemetry covers" in finding["what"] for finding in json.loads(result.stdout)["findings"]
    )


def test_assess_gives_no_verdict_on_a_selection_and_recommends_nothing(windows_around_failures, tmp_path):
    params = tmp_path / "light.yaml"
    params.write_text("decision: {every: 1d}\nfeatures: {groups: [history], history_windows: [7d]}\n")
    command = ["assess", "--dataset", windows_around_failures, "--out", tmp_path / "out", "--params", params]
    result = invoke(*command)
    content = json.loads((tmp_path / "out" / "assessment.json").read_text())
    assert content["predictable"]["answer"] == "cannot tell"
    assert content["predictable"]["reason"].startswith("telemetry covers ")
    assert content["predictable"]["precision"] == [None, None, None]
    assert content["recommended"] == ["publish"]
    assert "CANNOT TELL" in result.stdout
    assert content["predictable"]["reason"] in result.stdout
