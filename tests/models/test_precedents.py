"""Past incidents that looked the same: found as the definition says, without looking ahead, and told with numbers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.errors import InputError
from models.bundle.store import load_bundle, save_bundle
from models.precedent_table import COLUMNS, precedent_facts, precedent_frame, tell_precedent, tell_worth
from models.precedents import GROUP_CAP, NEAREST, PrecedentLibrary, Precedents, library_at, weights_of
from models.prepared import SignedLogScaler
from pipeline.report.precedents import precedents as precedents_section
from tests.models.fake_matrix import START, FakeMatrix
from tests.models.small_models import COLUMNS as FEATURES
from tests.models.small_models import fitted_models

DAY_MS = 86_400_000


def library(seed=0, incidents=30, healthy=200):
    rng = np.random.default_rng(seed)
    usual = np.column_stack([rng.normal(60, 5, healthy), rng.normal(400, 60, healthy), *rng.poisson(0.3, (3, healthy))])
    ill = np.column_stack(
        [rng.normal(75, 5, incidents), rng.normal(400, 60, incidents), *rng.poisson(4, (3, incidents))]
    )
    code = rng.integers(0, 2, (healthy + incidents, 1))
    rows = np.column_stack([np.concatenate([ill, usual]), code]).astype(np.float32)
    return PrecedentLibrary(
        columns=FEATURES,
        incidents=rows[:incidents],
        healthy=rows[incidents:],
        unit=tuple(f"g{i % 7}" for i in range(incidents)),
        decision_ms=np.arange(incidents) * DAY_MS,
        start_ms=np.arange(incidents) * DAY_MS + 9 * 3_600_000,
        failure_class=tuple("memory" if i % 3 else "bus" for i in range(incidents)),
    )


SIGNAL = np.array([1.0, 0.2, 0.5, 0.7, 0.0, 3.0])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_the_nearest_are_those_of_a_slow_search(seed):
    rng = np.random.default_rng(seed)
    held = library(seed % 5)
    row, phi = held.incidents[rng.integers(len(held))] + rng.normal(0, 1, 6).astype(np.float32), rng.normal(size=6)
    found = held.find(row, phi)
    scaler = SignedLogScaler().fit(held.healthy)
    weight = np.abs(phi)
    weight[5] = 0  # a code has no distance
    weight /= weight.sum()
    telemetry, history = weight[:3].sum(), weight[3:5].sum()
    weight[:3] *= min(1, GROUP_CAP / telemetry)
    weight[3:5] *= min(1, GROUP_CAP / history)
    own = scaler.transform(row[None])[0]

    def distance(other):
        scaled = scaler.transform(other[None])[0]
        return sum(weight * np.abs(scaled - own)) / sum(weight * np.abs(own))

    distances = sorted(distance(each) for each in held.incidents)
    assert [each.distance for each in found.found] == pytest.approx(distances[:NEAREST], abs=1e-5)
    assert found.incidents_as_close == NEAREST
    usual = np.array([distance(each) for each in held.healthy])
    assert abs(found.healthy_as_close - (usual <= found.found[-1].distance).sum()) <= 1  # equal to the last bit or not


def test_no_group_weighs_more_than_its_cap_and_codes_weigh_nothing():
    weight = weights_of(np.array([5.0, -3.0, 1.0, 0.5, 0.5, 90.0]), FEATURES)
    assert weight[:3].sum() == pytest.approx(GROUP_CAP)
    assert weight[3:5].sum() == pytest.approx(0.1)
    assert weight[5] == 0
    assert weight[0] / weight[1] == pytest.approx(5 / 3)
    assert not weights_of(np.zeros(6), FEATURES).any()


def test_an_incident_seen_again_is_alike_and_an_unremarkable_unit_is_not():
    held = library()
    again = held.find(held.incidents[4], SIGNAL)
    assert again.alike
    assert again.found[0].at == 4
    assert again.found[0].distance == pytest.approx(0, abs=1e-6)
    assert tell_worth(again).startswith("3 of 30 past incidents (10%) and ")
    alike = [held.find(row, SIGNAL).alike for row in held.healthy]
    assert np.mean(alike) < 0.2
    strange = np.array([61, 4e9, 0, 0, 0, 0], np.float32)
    nothing = held.find(strange, np.array([0.1, 3, 0, 0, 0, 0.0]))
    assert not nothing.alike
    assert tell_worth(nothing).startswith("nothing in the past looked like this: 3 of 30 past incidents")


def test_nothing_to_compare_is_said():
    held = library()
    empty = replace(held, incidents=held.incidents[:0], unit=(), decision_ms=np.zeros(0, np.int64), failure_class=())
    assert tell_worth(empty.find(held.incidents[0], SIGNAL)) == "no incident is known yet to compare with"
    unmoved = held.find(held.incidents[0], np.zeros(6))
    assert unmoved == Precedents((), 0, 30, 0, 200)
    assert tell_worth(unmoved) == "nothing that raised the score can be compared with the past"
    bare = replace(held, healthy=held.healthy[:0])
    assert bare.find(held.incidents[0], SIGNAL).found == ()


def test_a_precedent_is_told_with_both_numbers():
    held = library()
    row = held.incidents[4].copy()
    there = held.incidents[4]
    row[0] += 0.5
    found = held.find(row, SIGNAL).found[0]
    text = tell_precedent(held, found, row, [FEATURES[0].name, "unknown__name"], "g1")
    model = "AB"[int(there[5])]
    assert text.endswith(
        f"like g4 ({model}) on 1970-01-05 00:00 UTC, 9.0 h before a memory failure: now as then GPU temperature "
        f"averaged {row[0]:.1f} °C over the last 6 h (then {there[0]:.1f} °C)"
    )
    same = tell_precedent(held, found, row, [], "g4")
    assert "like the same unit (" in same
    assert same.endswith(": alike in what counted less")


def test_a_library_holds_each_incident_at_its_last_decision_and_only_what_was_known():
    matrix = FakeMatrix(seed=4)
    as_of = START + timedelta(days=25)
    held = library_at(matrix, as_of, seed=1)
    known = matrix.labels(as_of)
    grid = ~matrix.rows["augmented"] & (known["complete_at"] <= as_of)
    positive = matrix.rows[grid & (known["label"] == 1)].join(known[["incident", "incident_start"]])
    last = positive.sort_values("decision_time").groupby("incident").tail(1)
    assert sorted(held.unit) == sorted(last["unit"])
    assert len(held) == last["incident"].nunique() > 5
    assert (held.start_ms > held.decision_ms).all()
    assert (np.diff(held.start_ms) >= 0).all()
    assert set(held.failure_class) == set(held.class_counts()) <= {"memory", "bus"}
    assert len(held.healthy) == 2000


def test_a_poisoned_future_changes_no_library():
    as_of = START + timedelta(days=25)
    clean, poisoned = FakeMatrix(seed=4), FakeMatrix(seed=4)
    rng = np.random.default_rng(0)
    # labels complete only after the time, and features of rows decided after it, become nonsense
    late = poisoned.rows["decision_time"] > as_of - timedelta(hours=24)
    poisoned.features[late.to_numpy()] = rng.normal(50, 9, (int(late.sum()), poisoned.features.shape[1]))
    later = poisoned.events["known_at"] > as_of
    poisoned.events.loc[later, "failure_class"] = "other"
    poisoned.events.loc[later, "unit"] = poisoned.events["unit"].iloc[0]
    one, two = (library_at(each, as_of, seed=1).to_bytes() for each in (clean, poisoned))
    assert one == two
    after = [library_at(each, START + timedelta(days=39), seed=1).to_bytes() for each in (clean, poisoned)]
    assert after[0] != after[1]  # the poison would show


def test_a_library_survives_its_file_and_a_bundle(tmp_path):
    held = library()
    back = PrecedentLibrary.from_bytes(held.to_bytes(), FEATURES)
    assert back.to_bytes() == held.to_bytes()
    assert back.find(held.incidents[3], SIGNAL) == held.find(held.incidents[3], SIGNAL)
    fitted = replace(fitted_models(), precedents=held)
    path = save_bundle(tmp_path / "b", fitted, {"profile": "mean_rank"}).path
    loaded = load_bundle(path)
    assert loaded.fitted.precedents is not None
    assert loaded.fitted.precedents.to_bytes() == held.to_bytes()
    assert "precedents.parquet" in loaded.manifest["files"]
    (path / "precedents.parquet").write_bytes(b"spoilt")
    with pytest.raises(InputError, match=r"precedents\.parquet is not the file that was saved"):
        load_bundle(path)
    with pytest.raises(ValueError, match="its features are not the 5 of the bundle"):
        PrecedentLibrary.from_bytes(held.to_bytes(), FEATURES[:5])
    with pytest.raises(ValueError, match="not a library of precedents"):
        PrecedentLibrary.from_bytes(b"spoilt", FEATURES)


def test_the_table_says_what_followed_and_what_chance_would_have_given():
    matrix = FakeMatrix(seed=4)
    as_of = START + timedelta(days=25)
    held = library_at(matrix, as_of, seed=1)
    labels = matrix.labels(None)
    label, later = labels["label"].fillna(-1), matrix.rows["decision_time"] > as_of
    hit, miss = (int(np.flatnonzero((label == each) & later)[0]) for each in (1, 0))
    told = []
    for row in (hit, miss):
        X = matrix.values([row])[0]
        found = held.find(X, np.ones(6))
        told.append({"row": row, "precedents": precedent_facts(held, found, X, [], str(matrix.rows["unit"][row]))})
    frame = precedent_frame(matrix, [{"reasons": told, "library": held.class_counts()}, {"reasons": []}])
    assert tuple(frame.columns) == COLUMNS
    assert frame["place"].tolist() == [1, 2, 3] * 2
    first = frame[frame["label"] == 1].iloc[0]
    assert first["failure_class"] == labels["failure_class"][hit]
    counts = held.class_counts()
    assert first["chance"] == pytest.approx(counts[first["failure_class"]] / len(held))
    assert frame.loc[frame["label"] == 0, "chance"].isna().all()
    assert precedent_frame(matrix, [{"reasons": []}]).empty


def test_a_backtest_keeps_them_and_the_report_shows_them(small_backtest):
    frame = pd.read_parquet(small_backtest / "evaluation" / "extra_precedents.parquet")
    assert (frame.loc[frame["place"] > 0, "precedent_start"] < frame.loc[frame["place"] > 0, "decision_time"]).all()
    assert frame["worth"].str.len().gt(10).all()
    page = (small_backtest / "report" / "index.html").read_text()
    assert "Past incidents that looked the same" in page


def test_the_reports_section_counts_each_incident_once_and_says_chance():
    def row(unit, label, true, found, likeness, alike):
        return {
            "fold": 0, "decision_time": pd.Timestamp("2026-02-01", tz="UTC"), "unit": unit, "place": 1,
            "precedent_class": found, "likeness": likeness, "alike": alike, "label": label, "failure_class": true,
            "chance": 0.25 if label else np.nan, "commonest": 0.0 if label else np.nan, "text": "x", "worth": "y",
        }  # fmt: skip

    frame = pd.DataFrame(
        [
            row("a", 1.0, "bus", "bus", 0.9, True),
            row("a", 1.0, "bus", "bus", 0.9, True),  # the same incident at the next decision
            row("b", 1.0, "memory", "bus", 0.7, True),
            row("c", 0.0, None, "bus", 0.95, True),
            row("d", 0.0, None, "bus", 0.4, False),
        ]
    )
    context = SimpleNamespace(extras={"precedents": frame}, alerts=(), unit_word="GPU")
    section = precedents_section(None, context)
    assert "Of 2 incidents" in section.before[1]
    assert "the same class in 1 (50" in section.before[1]
    [table] = section.tables
    assert [[cell.text for cell in each][1] for each in table.rows] == ["3", "1", "1"]
    assert precedents_section(None, SimpleNamespace(extras={}, alerts=())) is None
