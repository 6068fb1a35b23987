"""What came of alerts, by hand-made events: right, wrong, open and inconclusive, counted once an alert."""

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from features.config import LabelSection
from serving.scores.alert_outcomes import label_settings_of, outcomes_of
from telemetry.dataset.schema import EVENTS
from tests.serving.http.world import DECIDED, record
from tests.serving.score_folder import write_scores

EVERY = timedelta(hours=6)
START = DECIDED - timedelta(days=6)
END = DECIDED


def inventory(*units: str, **removed: datetime) -> pd.DataFrame:
    rows = [
        {"gpu": unit, "node": f"n-{unit}", "slot": "0", "installed_at": START - timedelta(days=90),
         "removed_at": removed.get(unit)}
        for unit in units
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    for name in ("installed_at", "removed_at"):
        frame[name] = pd.to_datetime(frame[name], utc=True).astype("datetime64[ms, UTC]")
    return frame


def events(*rows: tuple[str, datetime, str, str]) -> pd.DataFrame:
    plain: list[dict[str, Any]] = [
        {"timestamp": day, "node": f"n-{unit}", "gpu": unit, "type": kind, "code": code, "detail": "", "source": "test",
         "known_at": day}
        for unit, day, kind, code in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(plain, schema=EVENTS).to_pandas()


def decide(folder: Path, number: int, *raised: tuple[str, float, str]) -> None:
    when = START + number * EVERY
    write_scores(folder, [record(unit, f"n-{unit}", risk, tier, decided=when) for unit, risk, tier in raised]
          + [record("calm", "n-calm", 0.001, decided=when)], when)  # fmt: skip


def outcomes_after(folder: Path, happened: pd.DataFrame, installations: pd.DataFrame) -> dict[str, Any]:
    return outcomes_of(folder, happened, installations, data_end=END, labels=LabelSection())


def test_alerts_are_judged_by_what_followed(tmp_path: Path) -> None:
    for number in range(4):  # stands over four decisions: one alert, for they lie within a horizon
        decide(tmp_path, number, ("right", 0.6, "high"), ("wrong", 0.2, "elevated"), ("drained", 0.2, "elevated"))
    decide(tmp_path, 23, ("open", 0.3, "elevated"))
    happened = events(
        ("right", START + timedelta(hours=10), "failure", "GPU_LOST"),
        ("drained", START + timedelta(hours=1), "drain", "elevated"),
        ("late", START + timedelta(hours=30), "failure", "GPU_LOST"),
    )
    outcomes = outcomes_after(tmp_path, happened, inventory("right", "wrong", "drained", "open", "late", "calm"))
    verdicts = {alert["unit"]: alert["verdict"] for alert in outcomes["alerts"]}
    assert verdicts == {"right": "right", "wrong": "wrong", "drained": "open", "open": "open"}
    assert outcomes["verdicts"] == {"right": 1, "wrong": 1, "inconclusive": 0, "open": 2}
    assert outcomes["precision"] == 0.5
    assert outcomes["lead_hours"] == {"median": 10.0, "least": 10.0, "greatest": 10.0}
    assert (outcomes["decisions"], outcomes["horizon_hours"]) == (5, 24.0)
    assert (outcomes["incidents"], outcomes["caught"]) == (2, 1)  # the other one was looked ahead to, and missed


def test_an_alert_that_stands_longer_than_its_episode_opens_another(tmp_path: Path) -> None:
    for number in range(10):  # until 54 h, each episode of 24 h and the gap
        decide(tmp_path, number, ("a", 0.2, "elevated"))
    decide(tmp_path, 10)
    decide(tmp_path, 11, ("a", 0.2, "elevated"))
    outcomes = outcomes_after(tmp_path, events(), inventory("a", "calm"))

    def opened(outcomes: dict[str, Any]) -> list[timedelta]:
        return [datetime.fromisoformat(alert["at"]) - START for alert in outcomes["alerts"]]

    assert opened(outcomes) == [timedelta(hours=hours) for hours in (66, 30, 0)]
    assert outcomes["verdicts"]["wrong"] == 3
    failed = events(("a", START + timedelta(hours=40), "failure", "GPU_LOST"))
    longer = outcomes_of(
        tmp_path, failed, inventory("a", "calm"), data_end=END, labels=LabelSection(),
        drain_horizon=timedelta(hours=48),
    )  # fmt: skip
    assert opened(longer) == [timedelta(hours=hours) for hours in (54, 0)]
    assert (longer["horizon_hours"], longer["verdicts"]["right"], longer["verdicts"]["wrong"]) == (48.0, 1, 1)


def test_a_failure_between_two_episodes_of_a_standing_alert_was_caught(tmp_path: Path) -> None:
    for number in range(10):
        decide(tmp_path, number, ("a", 0.2, "elevated"))
    failed = events(("a", START + timedelta(hours=26), "failure", "GPU_LOST"))  # the first ended at 24:10
    outcomes = outcomes_after(tmp_path, failed, inventory("a", "calm"))
    assert (outcomes["incidents"], outcomes["caught"]) == (1, 1)


def test_a_unit_that_the_model_selects_alerts_whatever_its_tier(tmp_path: Path) -> None:
    when = START
    selected = record("a", "n-a", 0.6, "high", decided=when)
    write_scores(tmp_path, [selected, record("b", "n-b", 0.05, "watch", decided=when)], when)
    outcomes = outcomes_after(tmp_path, events(), inventory("a", "b"))
    assert [(alert["unit"], alert["tier"]) for alert in outcomes["alerts"]] == [("a", "high")]


def test_gpus_of_a_node_that_alert_and_fail_together_count_once(tmp_path: Path) -> None:
    gpus = ["a", "b", "c"]
    for number in range(3):
        when = START + number * EVERY
        write_scores(
            tmp_path, [record(gpu, "n", 0.2 + i / 10, "elevated", decided=when) for i, gpu in enumerate(gpus)], when
        )
    installations = inventory(*gpus).assign(node="n")
    happened = events(*[(gpu, START + timedelta(hours=10, minutes=i), "xid", ("79", "48", "48")[i])
                        for i, gpu in enumerate(gpus)]).assign(node="n")  # fmt: skip
    outcomes = outcomes_after(tmp_path, happened, installations)
    assert [(alert["unit"], alert["node"], alert["verdict"]) for alert in outcomes["alerts"]] == [("c", "n", "right")]
    assert (outcomes["incidents"], outcomes["caught"]) == (1, 1)
    expected = {"incidents": 1, "caught": 1, "lead_hours": 10.0}
    assert outcomes["by_class"] == dict.fromkeys(("bus", "memory"), expected)


def test_an_alert_is_right_whichever_gpu_of_its_node_fails(tmp_path: Path) -> None:
    write_scores(tmp_path, [record("a", "n", 0.3, "elevated", decided=START)], START)
    happened = events(("b", START + timedelta(hours=10), "failure", "GPU_LOST")).assign(node="n")
    outcomes = outcomes_after(tmp_path, happened, inventory("a", "b").assign(node="n"))
    assert outcomes["verdicts"]["right"] == 1
    assert outcomes["incidents"] == outcomes["caught"] == 1


def test_nothing_judged_is_no_precision(tmp_path: Path) -> None:
    decide(tmp_path, 23)
    outcomes = outcomes_after(tmp_path, events(), inventory("calm"))
    assert outcomes["precision"] is None
    assert outcomes["lead_hours"] is None
    assert outcomes["alerts"] == []
    (tmp_path / "empty" / "decisions").mkdir(parents=True)
    assert outcomes_after(tmp_path / "empty", events(), inventory("calm"))["decisions"] == 0


def test_a_unit_that_leaves_unfailed_says_nothing(tmp_path: Path) -> None:
    decide(tmp_path, 0, ("gone", 0.3, "elevated"))
    outcomes = outcomes_after(tmp_path, events(), inventory("gone", "calm", gone=START + timedelta(hours=5)))
    assert outcomes["alerts"][0]["verdict"] == "inconclusive"


def test_alerts_are_judged_by_the_labels_of_the_model_that_gave_them(tmp_path: Path) -> None:
    (tmp_path / "decisions").mkdir()
    assert label_settings_of(tmp_path)[0] == LabelSection()
    own_labels = LabelSection(gap=timedelta(0), xids={"bus": (7,)})
    decide(tmp_path, 0, ("a", 0.3, "elevated"))
    decide(tmp_path, 1, ("a", 0.3, "elevated"))
    older, newest = sorted((tmp_path / "decisions").glob("2*"))
    for folder in (older, newest):
        summary = json.loads((folder / "summary.json").read_text())
        written = {"labels": own_labels.model_dump(mode="json"), "drain_horizon_seconds": 3 * 86_400.0}
        (folder / "summary.json").write_text(json.dumps(summary | written))
    assert label_settings_of(tmp_path) == (own_labels, timedelta(days=3))
    (newest / "summary.json").write_text('{"labels": {"horizon": "soon"}}')
    assert label_settings_of(tmp_path)[0] == own_labels
    happened = events(("a", START + timedelta(hours=9), "xid", "7"))
    installations = inventory("a", "calm")
    verdicts = [
        outcomes_of(tmp_path, happened, installations, data_end=END, labels=labels)["alerts"][-1]["verdict"]
        for labels in (LabelSection(), label_settings_of(tmp_path)[0])
    ]
    assert verdicts == ["wrong", "right"]


def test_an_incident_in_a_planned_maintenance_proves_nothing(tmp_path: Path) -> None:
    decide(tmp_path, 0, ("gone", 0.6, "high"))
    begin = START + timedelta(hours=8)
    happened = events(
        ("gone", begin, "maintenance", (begin + timedelta(hours=2)).isoformat()),
        ("gone", begin + timedelta(hours=1), "failure", "GPU_LOST"),
    )
    outcomes = outcomes_after(tmp_path, happened, inventory("gone", "calm"))
    assert (outcomes["verdicts"]["right"], outcomes["verdicts"]["wrong"], outcomes["incidents"]) == (0, 0, 0)
