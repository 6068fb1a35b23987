"""A spool is bounded: samples go before anything else, the oldest first, and only those of its own collector."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from telemetry.collect.pushing import pusher as module
from telemetry.collect.pushing.pusher import Spool, parse_bytes
from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind

AT = datetime(2026, 3, 1, tzinfo=UTC)


def land(landing: Landing, kind: Kind, age: int, name: str | None = None) -> Path:
    """Land one row as a file that is older than others with a smaller ``age``."""
    if kind == "samples":
        table = pa.table({"timestamp": [AT], "node": ["n"], "gpu": [f"GPU-{age}"], "power_w": [1.0]})
    else:
        table = pa.table(
            {"timestamp": [AT], "node": ["n"], "type": ["xid"], "code": [str(age)], "known_at": [AT]}
            if kind == "events"
            else {"node": ["n"], "gpu": [f"GPU-{age}"], "seen_at": [AT]}
        )
    path = landing.land(kind, table, name=name)
    assert path is not None
    os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    return path


@pytest.fixture
def landing(tmp_path: Path) -> Landing:
    return Landing(tmp_path / "spool", writer="nvml-n")


def test_files_come_in_the_order_in_which_they_landed_under_names_that_stay(landing: Landing) -> None:
    new, old = land(landing, "samples", 1), land(landing, "events", 9)
    named = land(landing, "events", 5, name="nvml-n.gpu_lost.GPU-0.17")
    files = Spool(landing, "nvml-n", None).files()
    assert [each.path for each in files] == [old, named, new]
    assert [each.name for each in files] == [old.stem, "nvml-n.gpu_lost.GPU-0.17", new.stem]
    assert [each.kind for each in files] == ["events", "events", "samples"]


def test_files_of_other_collectors_are_not_ours(landing: Landing) -> None:
    ours = land(landing, "events", 1)
    for writer in ("nvml-n-2", "exporters", "nvml-n.b"):
        land(Landing(landing.root, writer=writer), "events", 2)
    land(landing, "events", 3, name="nvml-n-2.gpu_lost.GPU-0.17")
    assert [each.path for each in Spool(landing, "nvml-n", None).files()] == [ours]


def test_over_the_limit_the_oldest_samples_go_first_and_events_last(landing: Landing) -> None:
    events = [land(landing, "events", age) for age in (30, 31)]
    sightings = [land(landing, "inventory", age) for age in (20, 21)]
    samples = [land(landing, "samples", age) for age in (10, 11, 12)]
    size = {path: path.stat().st_size for path in (*events, *sightings, *samples)}
    total = sum(size.values())
    spool = Spool(landing, "nvml-n", total)
    assert spool.trim() == 0
    for order, path in enumerate([samples[2], samples[1], samples[0], sightings[1], sightings[0], events[1]], start=1):
        assert path.exists()
        total -= size[path]
        spool._limit_bytes = total
        assert spool.trim() == 1
        assert not path.exists()
        assert spool.dropped == order
    assert events[0].exists()


def test_dropping_is_said_once_until_there_was_room_again(landing: Landing, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(landing, "nvml-n", 1)
    said = []
    for _ in range(3):
        land(landing, "samples", 1)
        assert spool.trim() == 1
        said.append(sum("over its limit" in record.message for record in caplog.records))
    assert spool.trim() == 0
    land(landing, "samples", 1)
    spool.trim()
    said.append(sum("over its limit" in record.message for record in caplog.records))
    assert said == [1, 1, 1, 2]


def test_refused_files_are_put_aside_with_the_reason_and_bounded(
    landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFUSED_FILES", 2)
    spool = Spool(landing, "nvml-n", None)
    for age in (3, 2, 1):
        land(landing, "events", age)
    for file in spool.files():
        spool.refuse(file, "422: no such column")
    aside = sorted((landing.root / "refused").glob("*.parquet"))
    assert (len(aside), spool.refused, spool.files()) == (2, 3, [])
    assert "422: no such column" in aside[0].with_suffix(".json").read_text()
    assert len(list((landing.root / "refused").glob("*.json"))) == 2


@pytest.mark.parametrize(("text", "expected"), [("1GiB", 2**30), ("500 MB", 500_000_000), ("1.5k", None), ("7", 7)])
def test_sizes(text: str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is not a size: write a number and a unit"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == expected
