"""The lease of a cluster in a file is a lock of the system: no clock keeps it, and no process outlives it."""

import gc
import json
from datetime import timedelta
from pathlib import Path

import pytest

from policy.fleet import Level
from policy.plan import Action
from scheduler.file import FileScheduler
from scheduler.ports.clock import ManualClock
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Precondition
from tests.policy.decide_world import HOUR, T0

LEASE = timedelta(seconds=30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"format": 1, "nodes": [{"name": "n0", "cluster": "c", "group": "g"}]}))
    return path


@pytest.mark.parametrize("ahead", [timedelta(days=3650), timedelta(0), timedelta(days=-3650)])
def test_one_process_has_it_until_it_ends_whatever_its_clock_was(file: Path, ahead: timedelta) -> None:
    holder, follower = FileScheduler(file, ManualClock(T0 + ahead)), FileScheduler(file, ManualClock(T0))
    for _ in range(2):
        assert holder.hold_lease("a", LEASE) == T0 + ahead + LEASE
        assert follower.hold_lease("b", LEASE) is None
    follower.drop_lease("b")
    assert follower.hold_lease("b", LEASE) is None
    del holder
    gc.collect()  # as the end of its process
    assert follower.hold_lease("b", LEASE) == T0 + LEASE
    follower.drop_lease("b")
    assert FileScheduler(file, ManualClock(T0)).hold_lease("c", LEASE) is not None


def test_nothing_is_written_without_it(file: Path) -> None:
    clock = ManualClock(T0)
    scheduler = FileScheduler(file, clock)
    reading = scheduler.revalidate("n0")
    action = Action("publish", "n0", "watch", Level.PUBLISH, 0.2, T0 + HOUR, ("why",))
    precondition = Precondition(reading.version, None, "a", T0 + HOUR)
    assert scheduler.apply(action, precondition).kind == "refused"
    assert scheduler.hold_lease("another", LEASE) is not None
    assert scheduler.apply(action, precondition).kind == "refused"
    assert scheduler.hold_lease("a", LEASE) is not None
    clock.move(LEASE)
    assert scheduler.apply(action, precondition).kind == "refused"
    clock.move(-LEASE)
    assert scheduler.apply(action, precondition).kind == "done"


@pytest.mark.parametrize("content", ["", "null", "[]", "[" * 100_000, '{"format": 1, "nodes": 3}', "\ud800"])
def test_a_file_that_breaks_later_is_a_scheduler_that_cannot_be_read(file: Path, content: str) -> None:
    scheduler = FileScheduler(file, ManualClock(T0))
    file.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(SchedulerError):
        scheduler.read_fleet()
