"""The folder that the controllers share: versions, switches, the lease between processes, a disk that goes away."""

import fcntl
import json
import os
import threading
from datetime import timedelta
from unittest.mock import Mock

import pytest
from filelock import FileLock

from foundation.running import Patience
from scheduler.ports.clock import ManualClock
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Switches, WriteResult
from scheduler.slurm import folder as module
from scheduler.slurm.folder import NONE_YET, SharedFolder
from tests import waiting
from tests.clock import Clock
from tests.policy.decide_world import HOUR, T0

LEASE = timedelta(seconds=30)


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def shared(tmp_path, time) -> SharedFolder:
    return SharedFolder(tmp_path, ManualClock(T0), time.monotonic)


def another(shared: SharedFolder, time: Clock) -> SharedFolder:
    return SharedFolder(shared.path, ManualClock(T0 - 5 * HOUR), time.monotonic)  # its wall clock is hours behind


def test_a_folder_that_is_not_there_or_writable_by_everybody_is_refused(tmp_path):
    with pytest.raises(SchedulerError, match="does not exist"):
        SharedFolder(tmp_path / "not mounted", ManualClock(T0)).hold_lease("a", LEASE)
    tmp_path.chmod(0o777)
    with pytest.raises(SchedulerError, match="every user can write"):
        SharedFolder(tmp_path, ManualClock(T0)).hold_lease("a", LEASE)
    assert list(tmp_path.iterdir()) == []


HANGS = {
    "state": lambda shared, _: (shared.load("state"), shared.save("state", "a", NONE_YET)),
    "switches": lambda shared, _: (shared.read_switches(), shared.set_switches(Switches(kill=True))),
    "asked": lambda shared, _: (shared.notes("asked"), shared.note("asked", "k", {}, lambda _: True)),
    "lease": lambda shared, until: _raised(shared.guarded("a", until, lambda: WriteResult("done"))),
}


@pytest.mark.parametrize("document", HANGS)
def test_a_disk_that_hangs_is_an_error_in_time_and_is_used_again_afterwards(tmp_path, document):
    shared, file = SharedFolder(tmp_path, ManualClock(T0)), tmp_path / f"{document}.json"
    until = shared.hold_lease("a", LEASE)
    shared.patience = Patience(0.2)
    file.unlink(missing_ok=True)
    os.mkfifo(file)  # an open of it does not return
    with pytest.raises(SchedulerError, match=r"does not respond: timed out after 0\.2 s"):
        HANGS[document](shared, until)
    with pytest.raises(SchedulerError, match="an earlier call has not ended yet"):
        shared.hold_lease("a", LEASE)
    shared.drop_lease("a")  # a failure is ignored, and takes no time
    os.close(os.open(file, os.O_WRONLY))
    file.unlink(missing_ok=True)
    waiting.wait(lambda: _lease(shared))
    shared.patience = Patience(30)
    HANGS[document](shared, _lease(shared))


def test_a_lock_of_the_lease_that_comes_too_late_keeps_no_other_controller_out(tmp_path):
    shared, file = SharedFolder(tmp_path, ManualClock(T0)), tmp_path / "lease.json"
    until, content = shared.hold_lease("a", LEASE), file.read_bytes()
    shared.patience = Patience(0.2)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SchedulerError, match="timed out after"), shared.fenced("a", until):
        pass
    file.write_bytes(content)  # read now, under the lock
    file.unlink()
    assert SharedFolder(tmp_path, ManualClock(T0)).hold_lease("b", LEASE) is not None


def test_a_call_under_the_lease_that_hangs_is_left_without_a_wait_for_the_lock(shared, monkeypatch):
    until, left, gate = shared.hold_lease("a", LEASE), [], threading.Event()
    monkeypatch.setattr(shared, "patience", Patience(0.2))
    monkeypatch.setattr(shared, "_write", lambda *_: gate.wait(300))
    monkeypatch.setattr(FileLock, "release", lambda lock, *_, **__: left.append(threading.current_thread()))
    assert shared.guarded("a", until, lambda: shared.note("asked", "k", {}, lambda _: True)).kind == "refused"
    gate.set()
    waiting.wait(lambda: len(left) >= 2)  # those of the document and of the lease, on a disk that may hang
    assert threading.current_thread() not in left


def test_a_call_while_another_thread_makes_one_waits_for_its_turn(shared, monkeypatch):
    inside, gate, load = threading.Event(), threading.Event(), shared._read
    monkeypatch.setattr(shared, "_read", lambda name: (inside.set(), gate.wait(300), load(name))[2])
    first = threading.Thread(target=shared.load, args=("state",))
    first.start()
    assert inside.wait(300)
    threading.Timer(0.2, gate.set).start()
    assert shared.load("state").version == NONE_YET
    first.join()


def test_a_thread_that_cannot_be_started_costs_one_call(shared, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(threading, "_start_new_thread", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            shared.load("state")
    assert shared.load("state").version == NONE_YET


def _raised(answer):
    if not answer.confirmed:
        raise SchedulerError(answer.message)


def _lease(shared):
    try:
        return shared.hold_lease("a", LEASE)
    except SchedulerError:
        return None


def test_a_text_is_replaced_only_at_the_version_that_was_read(shared):
    assert shared.load("state") == type(shared.load("state"))(None, NONE_YET)
    first = shared.save("state", "a", NONE_YET)
    assert (first.kind, shared.load("state").text) == ("done", "a")
    assert first.version == shared.load("state").version
    assert shared.save("state", "b", NONE_YET).kind == "conflict"
    assert shared.save("state", "a", first.version).kind == "already"
    second = shared.save("state", "b", first.version)
    third = shared.save("state", "a", second.version)
    assert third.version != first.version  # the same text is another version
    assert shared.save("state", "c", first.version).kind == "conflict"


def test_a_damaged_state_is_reported_and_can_be_replaced(shared):
    (shared.path / "state.json").write_text("{half")
    result = shared.load("state")
    assert result.text == "damaged state.json"
    assert shared.save("state", "new", result.version).kind == "done"


def test_switches_that_cannot_be_read_are_no_switches_that_are_off(shared):
    assert shared.read_switches() == Switches()
    wanted = Switches(kill=True, reset_breaker_at=T0)
    assert shared.set_switches(wanted).kind == "done"
    assert shared.set_switches(wanted).confirmed
    assert shared.read_switches() == wanted
    (shared.path / "switches.json").write_text('{"format": 1, "kil": true}')
    with pytest.raises(SchedulerError, match="Did you mean 'kill'"):
        shared.read_switches()
    assert shared.set_switches(wanted).kind == "done"


def test_one_holder_at_a_time_by_ones_own_watch(shared, time):
    other = another(shared, time)
    assert shared.hold_lease("a", LEASE) == T0 + LEASE
    assert other.hold_lease("b", LEASE) is None
    time.move(seconds=20)
    assert shared.hold_lease("a", LEASE) is not None
    time.move(seconds=20)
    assert other.hold_lease("b", LEASE) is None  # it was prolonged since we first saw it
    time.move(seconds=29)
    assert other.hold_lease("b", LEASE) is None
    time.move(seconds=1)
    assert other.hold_lease("b", LEASE) is not None
    assert shared.hold_lease("a", LEASE) is None
    with shared.fenced("a", T0 + HOUR) as barred:
        assert barred == "a does not hold the lease"
    with other.fenced("b", T0 + HOUR) as barred:
        assert barred is None


@pytest.mark.parametrize("claimed", [1e18, 1e308, -1.0, 0.0, -1e18])
def test_a_lease_of_a_length_that_none_has_is_waited_for_an_hour_and_no_longer(shared, time, claimed):
    shared.hold_lease("a", LEASE)
    file = shared.path / "lease.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "duration_s": claimed}))
    other = another(shared, time)
    assert other.hold_lease("b", LEASE) is None
    time.move(seconds=3599)
    assert other.hold_lease("b", LEASE) is None, "its holder may live"
    time.move(seconds=1)
    assert other.hold_lease("b", LEASE) is not None


def test_a_lease_that_is_given_back_is_free_at_once(shared, time):
    shared.hold_lease("a", LEASE)
    another(shared, time).drop_lease("b")
    assert another(shared, time).hold_lease("b", LEASE) is None
    shared.drop_lease("a")
    assert another(shared, time).hold_lease("b", LEASE) is not None


def test_a_process_that_has_only_just_begun_takes_a_lease_that_is_long_dead(shared, time):
    shared.hold_lease("a", LEASE)
    lease = shared.path / "lease.json"
    old = lease.stat().st_mtime - 60
    os.utime(lease, (old, old))
    assert another(shared, time).hold_lease("b", LEASE) is None
    os.utime(lease, (old - 60, old - 60))
    assert another(shared, time).hold_lease("b", LEASE) is not None
    assert list(shared.path.glob(".probe-*")) == []


def test_a_holder_who_thinks_that_it_still_holds_writes_nothing_more(shared, time):
    until = shared.hold_lease("a", LEASE)
    lease = shared.path / "lease.json"
    old = lease.stat().st_mtime - 120
    os.utime(lease, (old, old))
    other = another(shared, time)
    assert other.hold_lease("b", LEASE) is not None
    with shared.fenced("a", until) as barred:
        assert barred == "a no longer holds the lease"
    other.drop_lease("b")
    with shared.fenced("a", until) as barred:
        assert barred == "a no longer holds the lease"


def test_nobody_takes_the_lease_while_something_is_written_under_it(shared, time, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    shared.hold_lease("a", LEASE)
    time.move(seconds=29)
    with shared.fenced("a", T0 + HOUR) as barred:
        assert barred is None
        time.move(seconds=1000)
        assert another(shared, time).hold_lease("b", LEASE) is None
    with shared.fenced("a", T0 + HOUR) as barred:
        assert barred == "the lease of a has expired"


def test_a_damaged_lease_is_nobodys(shared):
    (shared.path / "lease.json").write_text("[]")
    with pytest.raises(SchedulerError, match="remove it when no controller runs"):
        shared.hold_lease("a", LEASE)


def test_a_lock_that_another_process_keeps_is_waited_for_and_then_reported(shared, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    held = os.open(shared.path / ".state.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    answer = shared.save("state", "a", NONE_YET)
    os.close(held)
    assert answer.kind == "refused"
    assert "state is locked by another process" in answer.message
    assert shared.save("state", "a", NONE_YET).kind == "done"


def test_a_disk_that_goes_away_is_reported_and_not_taken_for_empty(shared):
    shared.save("state", "a", NONE_YET)
    gone = shared.path.with_name("gone")
    shared.path.rename(gone)
    for read in (lambda: shared.load("state"), shared.read_switches, lambda: shared.hold_lease("a", LEASE)):
        with pytest.raises(SchedulerError, match="check that its disk is mounted"):
            read()
    assert shared.save("state", "a", NONE_YET).kind == "refused"
    assert shared.set_switches(Switches(kill=True)).kind == "refused"
    shared.drop_lease("a")
    assert not shared.path.exists()


def test_notes_are_kept_as_long_as_asked(shared):
    shared.note("asked", "x", {"until": 1}, lambda _: True)
    shared.note("asked", "y", {"until": 5}, lambda entry: entry["until"] > 2)
    assert shared.notes("asked") == {"y": {"until": 5}}
    assert json.loads((shared.path / "asked.json").read_text())["format"] == 1


def test_an_error_after_a_call_has_begun_does_not_claim_that_nothing_was_written(shared):
    until = shared.hold_lease("a", LEASE)

    def call():
        raise SchedulerError("the job was submitted, and its number was not saved")

    result = shared.guarded("a", until, call)
    assert (result.kind, "nothing was written" in result.message) == ("refused", False)
