"""Batch scoring of a whole dataset: the risks of training's own kernels, once, and no guess."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from features.config import FeatureSection
from foundation.errors import InputError
from foundation.files import FolderSwap
from foundation.times import instant_ms, milliseconds
from models.bundle.store import save_bundle
from models.config import PrecisionTargetsSection, ServingSection
from models.rows.ranking import name_hashes
from policy.risk_record import RiskRecord
from policy.tiers import TierThresholds
from predrain.score import summarize
from serving.scores.batch import OUT_OF_USE, ServedModel, due_decision, expiry, score_decision
from serving.scores.feature_settings import drain_horizon, live_config
from serving.scores.writing import ScoresFolder, nothing_due
from telemetry.dataset.store import Dataset
from tests.features.small_fleet import (
    HOUR,
    T0,
    events_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    write_dataset,
    xid,
)
from tests.serving.batch_world import (
    DECISION,
    DOWN,
    HOLLOW,
    HOURS,
    LABELS,
    PATCHY,
    SILENT,
    STALE,
    World,
    fitted_on,
    make_world,
    manifest,
)

MINUTE = timedelta(minutes=1)
END = T0 + HOURS * HOUR
LAST = END - 3 * HOUR


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def run(
    world: World,
    out: Path,
    *,
    now: datetime = END,
    at: datetime | None = None,
    tiers: TierThresholds | None = None,
    **settings: Any,
) -> Any:
    return score_decision(
        world.dataset,
        world.model,
        ScoresFolder(out),
        ServingSection(**settings),
        tiers=tiers,
        clock=lambda: now,
        decision_time=at,
    )


def records_of(folder: Path) -> dict[str, RiskRecord]:
    lines = (folder / "risks.jsonl").read_text().splitlines()
    records = [RiskRecord.from_json(json.loads(line)) for line in lines]
    return {record.unit: record for record in records}


def content_of(out: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("hour", [6, 12, 15, 21, 24])
def test_a_risk_is_that_of_the_training_matrix_at_the_same_decision_time(world, tmp_path, hour):
    t = T0 + hour * HOUR
    result = run(world, tmp_path, at=t)
    known = {unit: record for unit, record in records_of(result.folder).items() if record.status == "ok"}
    rows = world.matrix.rows
    positions = np.flatnonzero(
        (rows["decision_time"] == t).to_numpy() & ~rows["augmented"].to_numpy() & rows["unit"].isin(set(known))
    )
    assert len(positions) == len(known) >= 7
    fitted = world.bundle.fitted
    units, times = rows["unit"].iloc[positions], np.full(len(positions), instant_ms(t))
    scores = fitted.score_arrays(
        world.matrix.values(positions), times, name_hashes(units), pd.factorize(rows["node"].iloc[positions])[0]
    )["mean_log_odds"]
    risks = fitted.risk("mean_log_odds", scores.score)
    for place, unit in enumerate(units):
        record = known[unit]
        assert record.risk == pytest.approx(float(risks[place]), rel=1e-6)
        assert record.score == pytest.approx(float(scores.score[place]), rel=1e-6)
        assert (record.rank, record.alert) == (int(scores.rank[place]), bool(scores.alert[place]))
        assert record.risks["6h"] == record.risk
        assert record.risks["1h"] <= record.risks["6h"] <= record.risks["24h"]


def test_who_has_no_fresh_telemetry_is_unknown_and_takes_nobodys_rank(world: World, tmp_path: Path) -> None:
    result = run(world, tmp_path, at=LAST)
    records = records_of(result.folder)
    assert len(records) == 12
    why = {unit: record.unknown_reason for unit, record in records.items() if record.status == "unknown"}
    assert why == {
        STALE: "the newest sample is 6 h old, more than 1 h",
        SILENT: "no sample yet",
        HOLLOW: "the newest sample is 9 h old, more than 1 h",
        PATCHY: why[PATCHY],
        DOWN: OUT_OF_USE,
    }
    assert why[PATCHY].endswith("% of the samples expected in the last 3 h, less than 50%")
    assert records[STALE].sample_age_seconds == 6 * 3600
    assert records[SILENT].sample_age_seconds is None
    assert records[SILENT].completeness == 0
    assert 0.05 < records[PATCHY].completeness < 0.5
    known = [record for record in records.values() if record.status == "ok"]
    assert sorted(record.rank for record in known if record.rank is not None) == list(range(1, 8))
    assert sum(record.alert for record in records.values()) == 2
    assert all(600 <= record.sample_age_seconds < 3600 for record in known if record.sample_age_seconds is not None)
    assert result.summary["status"] == {"ok": 7, "unknown": 5}
    assert result.summary["tiers"]["unknown"] == 5
    assert result.summary["newest_sample"] == "2026-01-01T20:50:00Z"


def test_what_is_too_old_or_too_little_is_the_operators_to_say(world: World, tmp_path: Path) -> None:
    lenient = run(world, tmp_path, at=LAST, stale_after=10 * HOUR, min_completeness=0.0)
    unknown = {unit for unit, record in records_of(lenient.folder).items() if record.status == "unknown"}
    assert unknown == {SILENT, DOWN}


def test_a_second_run_changes_nothing(world: World, tmp_path: Path) -> None:
    first = run(world, tmp_path)
    content = content_of(tmp_path)
    again = run(world, tmp_path, now=END + 5 * MINUTE)
    assert (first.written, again.written) == (True, False)
    assert content_of(tmp_path) == content
    assert again.summary == first.summary
    assert json.loads((tmp_path / "latest.json").read_text()) == {"format": 2, "decision": "20260101T210000Z"}
    assert sorted(path.name for path in first.folder.iterdir()) == ["risks.jsonl", "risks.parquet", "summary.json"]


def test_both_files_hold_the_same_records_the_riskiest_first(world: World, tmp_path: Path) -> None:
    folder = run(world, tmp_path).folder
    lines = [json.loads(line) for line in (folder / "risks.jsonl").read_text().splitlines()]
    table = pq.read_table(folder / "risks.parquet").to_pylist()
    for line, row in zip(lines, table, strict=True):
        for name in ("decision_time", "issued_at", "expires_at"):
            assert datetime.fromisoformat(line.pop(name)) == row.pop(name)
        assert dict(row.pop("risks")) == line.pop("risks")
        assert row == line
    risks = [line["risk"] for line in lines if line["risk"] is not None]
    assert risks == sorted(risks, reverse=True)
    assert [line["status"] for line in lines] == ["ok"] * 7 + ["unknown"] * 5
    assert lines[0]["slot"] is not None
    assert lines[0]["model"] == {"digest": lines[0]["model"]["digest"], "profile": "mean_log_odds", "version": None}


def test_alerts_and_raised_tiers_are_explained_and_no_more_than_asked(world: World, tmp_path: Path) -> None:
    plain = run(world, tmp_path / "plain", at=LAST)
    records = records_of(plain.folder)
    assert plain.summary["thresholds"] == {"watch": None, "elevated": None, "high": None}
    assert plain.summary["threshold_sources"]["high"] == "none: no backtest was given"
    assert {record.tier for record in records.values()} == {"clear", "unknown"}
    for record in records.values():
        assert bool(record.reasons) == record.alert
        assert sum(reason.share for reason in record.reasons) <= 1.0001
        assert all("fleet at that time" in reason.text and reason.share > 0 for reason in record.reasons)
    ordered = sorted((record.risk for record in records.values() if record.risk is not None), reverse=True)
    tiers = TierThresholds(ordered[3], ordered[1], ordered[0])
    raised = run(world, tmp_path / "raised", at=LAST, tiers=tiers, max_explained=3, max_reasons=1)
    records = records_of(raised.folder)
    assert raised.summary["tiers"] == {"clear": 3, "watch": 2, "elevated": 1, "high": 1, "unknown": 5}
    assert raised.summary["unexplained"] == 1
    explained = sorted(record.rank for record in records.values() if record.reasons and record.rank is not None)
    assert explained == [1, 2, 3]
    assert all(len(record.reasons) <= 1 for record in records.values())


def test_the_decision_that_is_due_waits_for_the_delay_and_ends_with_the_data(world: World) -> None:
    config = live_config(world.bundle, world.dataset.meta)
    assert due_decision(config, T0 + 9 * HOUR + 9 * MINUTE) == T0 + 6 * HOUR
    assert due_decision(config, T0 + 9 * HOUR + 10 * MINUTE) == T0 + 9 * HOUR
    assert due_decision(config, END + 30 * HOUR) == END
    with pytest.raises(InputError, match="no decision is due yet: the dataset runs from 2026-01-01T00:00:00Z"):
        due_decision(config, T0 + 5 * MINUTE)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (T0 + 7 * HOUR, r"07:00:00Z is not a decision time of this model \(--at\)\. "
                        r"Give 2026-01-01T06:00:00Z or 2026-01-01T09:00:00Z\."),
        (END + 3 * HOUR, r"lies outside the dataset, which reaches from 2026-01-01T00:00:00Z to 2026-01-02T00:00:00Z"),
        (END, r"2026-01-02T00:00:00Z is in the future; it is 2026-01-01T23:00:00Z now"),
    ],
)  # fmt: skip
def test_a_decision_time_that_cannot_be_scored_is_refused(world, tmp_path, at, message):
    with pytest.raises(InputError, match=message):
        run(world, tmp_path, now=END - HOUR, at=at)
    assert not (tmp_path / "latest.json").exists()


def test_a_risk_expires_with_its_horizon_or_after_two_intervals(world: World, tmp_path: Path) -> None:
    config = live_config(world.bundle, world.dataset.meta)
    t = T0 + 6 * HOUR
    assert expiry(config, t, t + 8 * MINUTE) == t + 6 * HOUR + 8 * MINUTE
    assert expiry(config, t, t + 10 * MINUTE) == t + 6 * HOUR + 10 * MINUTE
    assert expiry(config, t, t + 5 * HOUR) == t + 10 * MINUTE + 6 * HOUR
    late = run(world, tmp_path, now=END + 20 * HOUR)
    assert all(record.expired(END + 20 * HOUR) for record in records_of(late.folder).values())
    assert late.lag_seconds == 18 * 3600
    # A replay says so too: of the decision that was asked for.
    replay = run(world, tmp_path / "replay", now=LAST + timedelta(hours=20), at=LAST - 6 * HOUR)
    assert replay.lag_seconds == 24 * 3600


def test_an_older_decision_does_not_move_the_pointer_and_old_ones_are_pruned(world: World, tmp_path: Path) -> None:
    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "decisions").iterdir())

    for hour in (21, 6, 3):
        run(world, tmp_path, at=T0 + hour * HOUR)
    assert json.loads((tmp_path / "latest.json").read_text())["decision"] == "20260101T210000Z"
    left = tmp_path / "decisions" / ".20260101T000000Z.building"
    left.mkdir()
    (left / "risks.jsonl").write_text("{")
    assert run(world, tmp_path, at=LAST, retention=16 * HOUR).written is False
    assert there() == ["20260101T060000Z", "20260101T210000Z"]
    assert run(world, tmp_path, at=LAST, retention=timedelta(0)).written is False
    assert there() == ["20260101T210000Z"]


def test_a_lost_pointer_or_a_damaged_decision_is_made_good(world: World, tmp_path: Path) -> None:
    first = run(world, tmp_path)
    (tmp_path / "latest.json").unlink()
    assert run(world, tmp_path).written is False
    assert (tmp_path / "latest.json").exists()
    (first.folder / "risks.jsonl").unlink()
    assert run(world, tmp_path).written is True
    assert len(records_of(first.folder)) == 12


def test_two_runs_at_once_do_not_write_the_same_decision(world: World, tmp_path: Path) -> None:
    with (
        FolderSwap(ScoresFolder(tmp_path).folder_of(LAST)),
        pytest.raises(InputError, match="another run is writing this folder"),
    ):
        run(world, tmp_path, at=LAST)


def test_another_model_does_not_rewrite_a_decision_and_says_so(world: World, tmp_path: Path) -> None:
    run(world, tmp_path)
    content = content_of(tmp_path)
    other_model = replace(
        world.model, bundle=replace(world.bundle, digest="f" * 64), note="the current model stays in use: x"
    )
    result = score_decision(world.dataset, other_model, ScoresFolder(tmp_path), ServingSection(), clock=lambda: END)
    assert result.notes == (
        "the current model stays in use: x",
        "another model already scored this decision; this model scores the next one",
    )
    assert content_of(tmp_path) == content


def test_nothing_is_due_until_the_next_decision_time_and_its_delay(world: World, tmp_path: Path) -> None:
    scores = ScoresFolder(tmp_path)
    assert nothing_due(scores, END) is None
    run(world, tmp_path)
    result = nothing_due(scores, END + 9 * MINUTE)
    assert (result.written, result.decision_time, result.lag_seconds) == (False, LAST, 0)
    assert nothing_due(scores, END + 10 * MINUTE) is None
    assert nothing_due(scores, LAST - HOUR) is None
    (result.folder / "risks.parquet").unlink()
    assert nothing_due(scores, END) is None


def test_a_dataset_of_events_alone_is_never_stale(world: World, tmp_path: Path) -> None:
    features = FeatureSection(groups=("history", "static"))
    events = events_of([xid(3.2, "gpu01", "node0"), xid(4.5, "gpu02", "node0", "63")])
    dataset = write_dataset(tmp_path / "data", inventory_of(gpus(6)), events=events, hours=HOURS)
    matrix = make_matrix(dataset, tmp_path / "matrix", features=features, decision=DECISION, labels=LABELS)
    bundle = save_bundle(tmp_path / "bundle", fitted_on(matrix), manifest(matrix, features=features))
    scores = ScoresFolder(tmp_path / "scores")
    result = score_decision(dataset, ServedModel(bundle), scores, ServingSection(), clock=lambda: END)
    records = records_of(result.folder)
    assert {unit: record.status for unit, record in records.items() if unit != "gpu01"} == {
        f"gpu{i:02d}": "ok" for i in (0, 2, 3, 4, 5)
    }
    assert records["gpu01"].unknown_reason == OUT_OF_USE  # not repaired within a day
    assert {
        (record.sample_age_seconds, record.completeness) for record in records.values() if record.status == "ok"
    } == {(None, 1.0)}
    assert result.summary["newest_sample"] is None
    with pytest.raises(InputError, match=r"reads telemetry \(\d+ channels\), and the dataset has none of it"):
        live_config(world.bundle, dataset.meta)


def test_a_fleet_without_gpus_is_scored_by_node(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key not in ("gpu", "slot")} for row in gpus(4, a_node=1)]
    inventory = inventory_of(rows).assign(gpu=None)
    samples = samples_of(inventory, HOURS, seed=4)
    dataset = write_dataset(tmp_path / "data", inventory, samples=samples, hours=HOURS, unit="node")
    matrix = make_matrix(dataset, tmp_path / "matrix", decision=DECISION, labels=LABELS)
    bundle = save_bundle(tmp_path / "bundle", fitted_on(matrix), manifest(matrix))
    scores = ScoresFolder(tmp_path / "scores")
    result = score_decision(dataset, ServedModel(bundle), scores, ServingSection(), clock=lambda: END)
    records = records_of(result.folder)
    assert sorted(records) == ["node0", "node1", "node2", "node3"]
    assert all((record.gpu, record.slot, record.unit) == (None, None, record.node) for record in records.values())
    assert {record.status for record in records.values()} == {"ok"}
    assert result.summary["unit"] == "node"
    assert any("nodes" in reason.text for record in records.values() for reason in record.reasons)


def test_a_bundle_that_does_not_fit_the_dataset_is_refused(world: World) -> None:
    meta = world.dataset.meta
    config = live_config(world.bundle, meta)
    assert config.columns == world.matrix.config.columns
    assert config.channels == world.matrix.config.channels
    with pytest.raises(InputError, match="the dataset's step is 5m, but the bundle's is 10m"):
        live_config(world.bundle, replace(meta, step=5 * MINUTE))
    with pytest.raises(InputError, match="the bundle was trained on gpus, but the dataset's unit is the node"):
        live_config(world.bundle, replace(meta, unit="node"))

    def saying(**change: Any) -> Any:
        return replace(world.bundle, manifest={**world.bundle.manifest, **change})

    assert drain_horizon(world.bundle, config) == config.labels.horizon == timedelta(hours=6)
    for horizon, hours in ((timedelta(hours=72), 72), (timedelta(hours=1), 6), (None, 6)):
        targets = PrecisionTargetsSection(horizon=horizon).model_dump(mode="json")
        params = {**world.bundle.manifest["params"], "models": {"precision_targets": targets}}
        assert drain_horizon(saying(params=params), config) == timedelta(hours=hours)
    with pytest.raises(InputError, match="the bundle has no training parameters"):
        live_config(saying(params=None), meta)
    with pytest.raises(InputError, match="the bundle has no training step"):
        live_config(saying(params={}), meta)
    with pytest.raises(InputError, match="the kind of the bundle's channel 'volts' is unknown"):
        live_config(saying(channels=["volts"]), meta)
    with pytest.raises(InputError, match="feature columns of this version of predrain differ"):
        live_config(saying(channels=["power_w"]), meta)


def test_a_channel_that_the_dataset_lost_is_unknown_and_named(world: World, tmp_path: Path) -> None:
    lost = {name: channel for name, channel in world.dataset.meta.channels.items() if name != "xid_last"}
    dataset = Dataset.open(world.dataset.path)
    dataset.meta = replace(dataset.meta, channels=lost)
    result = score_decision(dataset, world.model, ScoresFolder(tmp_path), ServingSection(), clock=lambda: END)
    assert result.summary["missing_channels"] == ["xid_last"]
    assert "channels of the model without data: 1 (xid_last)" in summarize(result)["notes"]
    assert result.summary["status"]["ok"] == 7


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"and is not a folder of scores \(notes\.txt\)"):
        ScoresFolder(tmp_path)
    with pytest.raises(InputError, match="the path is a file"):
        ScoresFolder(tmp_path / "notes.txt")


def test_the_decision_times_of_the_matrix_are_those_that_are_scored(world: World) -> None:
    config = live_config(world.bundle, world.dataset.meta)
    times = np.unique(milliseconds(world.matrix.rows["decision_time"][~world.matrix.rows["augmented"]]))
    due = {due_decision(config, T0 + HOUR * hour) for hour in range(1, HOURS + 2)}
    assert {int(time.timestamp() * 1000) for time in due} == set(times.tolist()) - {int(END.timestamp() * 1000)} | {
        int(due_decision(config, END + HOUR).timestamp() * 1000)
    }
