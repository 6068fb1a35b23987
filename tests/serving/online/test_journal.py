"""What was pushed is on the disk before it is acknowledged, and there after a crash."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from features.errors import InputError
from serving.online.journal import Journal, NotKeptError
from serving.online.snapshot import read_snapshot
from serving.online.upkeep import OnlineUpkeep, UpkeepSettings
from tests.features.small_fleet import HOUR, T0
from tests.serving.batch_world import World, make_world
from tests.serving.http.test_online_life import END, Clock
from tests.serving.http.test_telemetry_route import cut, late_samples

TABLE = pa.table({"a": [1.5, None], "b": ["x", "y"]})


def contents(journal: Journal, first: int = 0) -> list[tuple[str, float, list[object]]]:
    return [
        (each.kind, (each.at - T0).total_seconds(), each.table.column("a").to_pylist())
        for each in journal.arrivals(first)
    ]


def test_arrivals_are_read_again_in_order_and_torn_ends_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder)
    assert list(journal.arrivals()) == []
    journal.append("samples", TABLE, T0)
    place = journal.append("events", TABLE, T0 + HOUR)
    journal.take_back(place)
    journal.append("events", TABLE.slice(1), T0 + 2 * HOUR)
    first = journal.cut()
    assert first == journal.cut()  # nothing has come since
    journal.append("samples", TABLE.slice(0, 1), T0 + 3 * HOUR)
    whole = [("samples", 0.0, [1.5, None]), ("events", 7200.0, [None])]
    assert contents(journal) == [*whole, ("samples", 10800.0, [1.5])]
    assert contents(journal, first) == [("samples", 10800.0, [1.5])]
    again = Journal(folder)
    assert again.bytes == journal.bytes == sum(each.stat().st_size for each in folder.iterdir())
    again.append("samples", TABLE.slice(0, 1), T0 + 4 * HOUR)
    assert len(contents(again)) == 4
    newest = max(folder.iterdir())
    body = newest.read_bytes()
    for damaged in (body[:-1], body[:20], body[:60] + b"?" + body[61:], b"junk" + body[4:]):
        newest.write_bytes(damaged)
        assert contents(Journal(folder)) == [*whole, ("samples", 10800.0, [1.5])]
    journal.forget_before(first)
    assert contents(journal) == [("samples", 10800.0, [1.5])]


def test_what_follows_a_damaged_record_is_read_and_the_damage_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    ends = []
    for at in range(3):
        journal.append("samples", TABLE.slice(0, 1), T0 + at * HOUR)
        ends.append(journal.bytes)
    path = next((tmp_path / "journal").iterdir())
    whole = path.read_bytes()
    for place in range(0, ends[-1], 7):  # a byte here, a byte there
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        again, hit = Journal(tmp_path / "journal"), sum(place >= end for end in ends)
        assert [at for _, at, _ in contents(again)] == [at * 3600.0 for at in range(3) if at != hit]
        assert again.damaged == ({path.name: ends[0]} if hit < 2 else {})  # at the end it may be a torn one
    path.write_bytes(whole[: ends[0]] + b"PDJ1" * 20 + whole[ends[0] :])
    again = Journal(tmp_path / "journal")
    assert len(contents(again)) == 3
    assert again.damaged == {path.name: 80}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: for us, a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_takes_nothing_and_leaves_what_was_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append("samples", TABLE, T0)
    large = pa.table({"a": np.random.default_rng(1).normal(size=10_000)})
    with files_of_at_most(20_000):
        for _ in range(3):
            with pytest.raises(NotKeptError, match="what was pushed cannot be kept: File too large"):
                journal.append("samples", large, T0)
        journal.append("events", TABLE, T0)  # what still fits is taken
    journal.append("samples", large, T0)
    assert [each.table.num_rows for each in journal.arrivals()] == [2, 2, 10_000]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("journal"))


def upkeep_of(folder: Path, dataset: Path | None, world: World, clock: Clock) -> OnlineUpkeep:
    """One whose thread does not run: tests do its rounds."""
    model = world_model(world)
    return OnlineUpkeep(folder / "online", dataset, lambda: model, UpkeepSettings(), clock)


_MODELS: dict[int, object] = {}


def world_model(world: World) -> object:
    if id(world) not in _MODELS:
        from policy.risk_record import ModelName
        from policy.tiers import TierThresholds
        from serving.http.model import load_model
        from serving.online.deciding import OnlineModel

        loaded = load_model(world.bundle.path)
        name = ModelName(loaded.digest, loaded.profile, None)
        _MODELS[id(world)] = OnlineModel.of(loaded.bundle, loaded.scorer, name, TierThresholds(None, None, None))
    return _MODELS[id(world)]


def values_of(upkeep: OnlineUpkeep) -> tuple[pd.DataFrame, np.ndarray]:
    assert upkeep.state is not None
    rows = upkeep.state.rows(END)
    return rows.keys, rows.values


def events_at(at: datetime, details: list[str | None]) -> pd.DataFrame:
    """Say one thing of a GPU as often as there are details, a minute apart, as a push lays it out."""
    times = pd.Series([at + each * timedelta(minutes=1) for each in range(len(details))], dtype="datetime64[ms, UTC]")
    told = {"node": "node0", "gpu": "gpu01", "type": "xid", "code": "63", "detail": details, "source": "test"}
    return pd.DataFrame({"timestamp": times} | told | {"known_at": times, "pci_bus_id": None})


@pytest.mark.parametrize("snapshot_first", [False, True])
def test_a_killed_process_has_lost_nothing_that_was_pushed(
    tmp_path: Path, world: World, *, snapshot_first: bool
) -> None:
    """Nothing is closed or stopped: what another process would find on the disk is all there is."""
    samples, border = late_samples(world)
    data = cut(world, tmp_path / "cut", border)
    clock = Clock(END - HOUR)
    first = upkeep_of(tmp_path, data, world, clock)
    first.round()
    if snapshot_first:
        assert first.save()
    parts = np.array_split(np.arange(samples.num_rows), 6)
    event = events_at(END - HOUR, [None])
    for at, part in enumerate(parts):
        clock.now += timedelta(minutes=10)
        first.push(samples.take(pa.array(part)), event if at == 2 else None)
        if at == 3 and snapshot_first:
            assert first.save()
    assert first.state is not None
    clock.now = END
    second = upkeep_of(tmp_path, data, world, clock)
    second.round()
    assert second.state is not None
    keys, values = values_of(first)
    again_keys, again_values = values_of(second)
    pd.testing.assert_frame_equal(keys, again_keys)
    np.testing.assert_allclose(again_values, values, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert len(second.state.fleet[1]) == len(first.state.fleet[1])
    assert second.served.decision is not None
    assert first.state.totals == second.state.totals or not snapshot_first
    # The next snapshot holds it all, and the journal is empty again.
    assert second.save()
    assert second.journal.bytes == 0
    assert read_snapshot(tmp_path / "online").journal > 0
    third = upkeep_of(tmp_path, None, world, clock)
    third.round()
    np.testing.assert_array_equal(values_of(third)[1], again_values)


def test_a_push_that_the_disk_does_not_take_is_not_taken_at_all(tmp_path: Path, world: World) -> None:
    samples, border = late_samples(world)
    upkeep = upkeep_of(tmp_path, cut(world, tmp_path / "cut", border), world, Clock(END))
    upkeep.round()
    assert upkeep.state is not None
    before = upkeep.state.totals
    with files_of_at_most(100):
        with pytest.raises(NotKeptError, match="cannot be kept"):
            upkeep.push(samples, None)
        assert not upkeep.save()
    assert upkeep.state.totals == before
    assert (upkeep.counts.not_kept, upkeep.counts.snapshot_failures) == (1, 1)
    assert any("cannot be kept" in each for each in upkeep.warnings)
    absorbed, _ = upkeep.push(samples, None)
    assert absorbed.stored == samples.num_rows
    assert not any("cannot be kept" in each for each in upkeep.warnings)
    assert upkeep.save()
    assert os.listdir(tmp_path / "online.journal") == []


def test_decisions_go_on_when_the_clock_was_ahead(tmp_path: Path, world: World) -> None:
    clock = Clock(END)
    upkeep = upkeep_of(tmp_path, world.dataset.path, world, clock)
    known = []
    for step in (timedelta(0), timedelta(days=2), timedelta(days=-2)):
        clock.now += step
        upkeep._rest_until = 0.0
        upkeep.round()
        assert upkeep.served.decision is not None
        assert upkeep.served.decision.t <= clock.now
        known.append(upkeep.served.decision.known)
    assert known[0] > 0
    assert known == [known[0], 0, known[0]]


def push_hours_of_events(upkeep: OnlineUpkeep) -> None:
    for hour in range(12):
        upkeep.push(None, events_at(END - timedelta(days=1, hours=hour), ["x" * 4000] * 30))


@pytest.mark.parametrize(("limit", "most"), [("MOST_EVENTS", 50), ("MOST_EVENT_BYTES", 2**20)])
def test_no_sender_of_events_makes_the_state_grow_without_end(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(f"serving.online.upkeep.{limit}", most)
    upkeep = upkeep_of(tmp_path, world.dataset.path, world, Clock(END))
    upkeep.round()
    assert upkeep.state is not None
    before = len(upkeep.state.fleet[1])
    upkeep.push(None, events_at(END - 3 * HOUR, ["x" * 4000] * 30))
    with pytest.raises(InputError, match=r"the online state holds \d+ events, \d+ and \d+ MiB at most"):
        push_hours_of_events(upkeep)
    assert before + 30 <= len(upkeep.state.fleet[1]) < before + 12 * 30
    assert upkeep.push(None, None)[1]["rows"] == 0
