"""Daily files of states: one source that is samples, events and inventory at once."""

from datetime import timedelta
from pathlib import Path

import pandas as pd

from telemetry.config import ChannelDeclaration
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.store import Dataset
from telemetry.importing.importer import import_dataset
from telemetry.importing.ingest import ImportResult
from telemetry.importing.quarantine import BY_MAPPING

DAYS = pd.date_range("2026-03-01", periods=20, freq="D").strftime("%Y-%m-%d")
MAPPING = """
samples: {columns: {date: timestamp, serial: node, failure: null, model: null}, time: {timezone: UTC},
  ignore_others: true}
events: {columns: {date: timestamp, serial: node, failure: type}, time: {timezone: UTC},
  values: {type: {"0": null, "1": failure}}, ignore_others: true}
inventory: {columns: {date: seen_at, serial: node}, time: {timezone: UTC}, ignore_others: true}
"""


def daily_rows() -> pd.DataFrame:
    """One drive that stays, one that fails on day 10, one that leaves on day 5, and one that comes on day 15."""
    lives = {"stays": (0, 20), "fails": (0, 11), "leaves": (0, 6), "comes": (15, 20)}
    rows = [
        {
            "date": day,
            "serial": serial,
            "model": "MAKER X 100" if serial != "comes" else "MAKER Y 2",
            "failure": int(serial == "fails" and number == end - 1),
            "errors": 2**54 + number,
            "unknown_attribute": 1,
        }
        for serial, (begin, end) in lives.items()
        for number, day in enumerate(DAYS)
        if begin <= number < end
    ]
    return pd.DataFrame(rows)


def import_daily(folder: Path, frame: pd.DataFrame) -> ImportResult:
    folder.mkdir(parents=True, exist_ok=True)
    for day, rows in frame.groupby("date"):
        rows.to_csv(folder / f"{day}.csv", index=False)
    (folder.parent / "mapping.yaml").write_text(MAPPING)
    return import_dataset(
        folder.parent / "dataset",
        samples=[folder],
        events=[folder],
        inventory=folder,
        step=timedelta(days=1),
        channels=resolve_channels({"errors": ChannelDeclaration(kind="counter", unit="count")}),
        dedupe=timedelta(seconds=60),
        delay=timedelta(days=1),
        mapping=folder.parent / "mapping.yaml",
    )


def installations(dataset: Dataset) -> dict[str, tuple[str, str | None]]:
    frame = dataset.inventory()
    return {
        row.node: (str(row.installed_at)[:10], None if pd.isna(row.removed_at) else str(row.removed_at)[:10])
        for row in frame.itertuples()
    }


def test_daily_rows_become_stays_events_and_samples(tmp_path: Path) -> None:
    result = import_daily(tmp_path / "days", daily_rows())
    assert result.quarantined == {}
    assert installations(result.dataset) == {
        "stays": ("2026-03-01", None),
        "fails": ("2026-03-01", "2026-03-11"),
        "leaves": ("2026-03-01", "2026-03-06"),
        "comes": ("2026-03-16", None),
    }
    events = result.dataset.events()
    assert events[["node", "type"]].to_numpy().tolist() == [["fails", "failure"]]
    assert str(events["timestamp"].iloc[0]) == "2026-03-11 23:59:59.999000+00:00"
    assert result.accounting.tables["events"].left_out[BY_MAPPING] == len(daily_rows()) - 1
    assert result.dataset.meta.counts["samples"] == len(daily_rows())


def test_a_drive_that_reappears_after_its_failure_has_one_stay_and_keeps_its_event(tmp_path: Path) -> None:
    rows = daily_rows()
    back = rows[(rows["serial"] == "stays") & (rows["date"] >= DAYS[14])].assign(serial="fails")
    result = import_daily(tmp_path / "days", pd.concat([rows, back]))
    assert installations(result.dataset)["fails"] == ("2026-03-01", None)
    assert result.dataset.events()["node"].tolist() == ["fails"]
    assert result.quarantined == {}


def test_a_sighting_without_a_time_is_set_aside(tmp_path: Path) -> None:
    rows = daily_rows()
    (tmp_path / "days").mkdir()
    rows[rows["serial"] == "leaves"].head(1).assign(date=None, serial="undated").to_csv(
        tmp_path / "days" / "undated.csv", index=False
    )
    result = import_daily(tmp_path / "days", rows)
    assert "undated" not in installations(result.dataset)
    assert sum(result.quarantined.values()) >= 1
