"""The lease of a cluster in a file ends by observation: no clock of another process or of the past keeps it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from policy.fleet import Level, Marks
from policy.plan import Action
from scheduler.file import FileScheduler
from scheduler.ports.clock import ManualClock
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Precondition
from tests.policy.decide_world import HOUR, T0

LEASE = timedelta(seconds=30)


class Time:
    """A clock that is never set, moved by hand or by whoever sleeps."""

    def __init__(self) -> None:
        self.at = 50.0

    def __call__(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"format": 1, "nodes": [{"name": "n0", "cluster": "c", "group": "g"}]}))
    return path


def process(file: Path, time: Time, ahead: timedelta = timedelta(0), **how: Any) -> FileScheduler:
    return FileScheduler(file, ManualClock(T0 + ahead), elapsed=time, sleep=time.sleep, **how)


@pytest.mark.parametrize("ahead", [timedelta(days=3650), timedelta(0), timedelta(days=-3650)])
def test_after_a_crash_the_next_process_takes_over_within_a_lease_whatever_the_clock_was(
    file: Path, time: Time, ahead: timedelta
) -> None:
    assert process(file, time, ahead).hold_lease("crashed", LEASE) is not None
    follower = process(file, time)
    assert follower.hold_lease("b", LEASE) is None
    time.at += 29
    assert follower.hold_lease("b", LEASE) is None
    time.at += 1
    assert follower.hold_lease("b", LEASE) == T0 + LEASE


def test_a_holder_that_renews_keeps_it_whatever_its_clock_is(file: Path, time: Time) -> None:
    holder, follower = process(file, time, -HOUR), process(file, time)
    for step in range(5):
        holder._clock.move(timedelta(seconds=20))  # type: ignore[attr-defined]
        assert holder.hold_lease("a", LEASE) is not None
        assert follower.hold_lease("b", LEASE) is None, step
        time.at += 20


def test_a_process_of_one_round_watches_until_it_knows(file: Path, time: Time) -> None:
    process(file, time, timedelta(days=3650)).hold_lease("crashed", LEASE)
    assert process(file, time, waits=True).hold_lease("b", LEASE) is not None
    assert 80 <= time.at <= 82


@pytest.mark.parametrize("claimed", [1e18, -5.0, 0.0])
def test_a_length_that_no_lease_has_is_an_hour_at_most(file: Path, time: Time, claimed: float) -> None:
    content = json.loads(file.read_text())
    lease = {"holder": "a", "until": "2026-01-01T00:00:00+00:00", "lasts_s": claimed}
    file.write_text(json.dumps({**content, "lease": lease}))
    follower = process(file, time)
    assert follower.hold_lease("b", LEASE) is None
    time.at += 3599
    assert follower.hold_lease("b", LEASE) is None
    time.at += 1
    assert follower.hold_lease("b", LEASE) is not None


def test_a_holder_whose_clock_is_set_back_writes_nothing_after_its_lease(file: Path, time: Time) -> None:
    holder = process(file, time)
    until = holder.hold_lease("a", LEASE)
    assert until is not None
    holder._clock.move(-HOUR)  # type: ignore[attr-defined]
    reading = holder.revalidate("n0")
    assert reading is not None
    action = Action("publish", "n0", "watch", Level.PUBLISH, 0.2, T0 + HOUR, ("why",))
    precondition = Precondition(reading.version, None, Marks(), "a", until)
    time.at += 31
    assert holder.apply(action, precondition).kind == "refused"
    time.at -= 31
    assert holder.apply(action, precondition).kind == "done"


@pytest.mark.parametrize("content", ["", "null", "[]", "[" * 100_000, '{"format": 1, "nodes": 3}', "\ud800"])
def test_a_file_that_breaks_later_is_a_scheduler_that_cannot_be_read(file: Path, time: Time, content: str) -> None:
    scheduler = process(file, time)
    file.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(SchedulerError):
        scheduler.read_fleet()
