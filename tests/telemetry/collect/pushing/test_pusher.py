"""What is pushed arrives once and in order, whatever the other side does and whenever we are killed."""

import random
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.collect.pushing.pusher import Pusher, Spool
from telemetry.collect.pushing.targets import FolderTarget, Later, Refused
from telemetry.collect.running import Backoff
from telemetry.dataset.channels import CATALOGUE
from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind
from tests.telemetry.collect.pushing.test_spool import land


class Killed(BaseException):
    """The process ends here."""


class MemoryTarget:
    """Takes each name once; ``moods`` say how it answers next."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.moods: list[str] = []

    def send(self, kind: Kind, path: Path, name: str) -> None:
        mood = self.moods.pop(0) if self.moods else "takes"
        if mood == "down":
            raise Later("it is down")
        if mood == "refuses":
            raise Refused("not this one")
        if name not in self.taken:
            self.taken.append(name)
        if mood == "takes and breaks off":
            raise Later("half an answer")
        if mood == "takes and we are killed":
            raise Killed


@pytest.fixture
def landing(tmp_path: Path) -> Landing:
    return Landing(tmp_path / "spool", writer="nvml-n")


def test_all_is_sent_in_order_and_leaves_the_spool(landing: Landing) -> None:
    names = [land(landing, "events", age).stem for age in (3, 2, 1)]
    target = MemoryTarget()
    spool = Spool(landing, "nvml-n", None)
    result = Pusher(spool, target).round()
    assert (target.taken, spool.files()) == (names, [])
    assert (result.sent, result.refused, result.pause_s) == (3, 0, None)


def test_while_the_other_side_is_down_the_spool_keeps_all_and_pauses_grow(landing: Landing) -> None:
    land(landing, "events", 1)
    target = MemoryTarget()
    spool = Spool(landing, "nvml-n", None)
    pusher = Pusher(spool, target, Backoff(1.0, 60.0, lambda: 1.0))
    target.moods = ["down"] * 8
    pauses = [pusher.round().pause_s for _ in range(8)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(spool.files()) == 1
    assert pusher.round().sent == 1
    land(landing, "events", 1)
    target.moods = ["down"]
    assert pusher.round().pause_s == 1


def test_the_other_side_s_wish_is_kept_where_it_is_longer(landing: Landing) -> None:
    land(landing, "events", 1)

    class Busy(MemoryTarget):
        def send(self, kind: Kind, path: Path, name: str) -> None:
            raise Later("busy", 120.0)

    assert Pusher(Spool(landing, "nvml-n", None), Busy()).round().pause_s == 120.0


def test_a_refused_file_does_not_hold_up_the_next(landing: Landing) -> None:
    land(landing, "events", 2)
    name = land(landing, "events", 1).stem
    target = MemoryTarget()
    target.moods = ["refuses"]
    result = Pusher(Spool(landing, "nvml-n", None), target).round()
    assert (result.sent, result.refused, target.taken) == (1, 1, [name])


def test_a_file_that_fails_for_good_on_a_server_that_takes_others_is_put_aside(landing: Landing) -> None:
    bad = land(landing, "events", 9).stem
    names = [land(landing, "events", age).stem for age in (2, 1)]

    class Stumbling(MemoryTarget):
        def send(self, kind: Kind, path: Path, name: str) -> None:
            if name == bad:
                raise Later("answered 500", poison=True)
            super().send(kind, path, name)

    target = Stumbling()
    spool = Spool(landing, "nvml-n", None)
    pusher = Pusher(spool, target)
    for _ in range(20):
        pusher.round()
    assert target.taken == names
    assert (spool.refused, spool.files()) == (1, [])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["takes", "down", "takes and breaks off", "takes and we are killed"]), max_size=12))
def test_nothing_is_lost_or_sent_twice(tmp_path_factory: pytest.TempPathFactory, moods: list[str]) -> None:
    landing = Landing(tmp_path_factory.mktemp("spool"), writer="nvml-n")
    names = [land(landing, "events", age).stem for age in (4, 3, 2, 1)]
    target = MemoryTarget()
    target.moods = list(moods)
    for _ in range(len(moods) + 1):
        pusher = Pusher(Spool(landing, "nvml-n", None), target, Backoff(1, 2, random.Random(7).random))
        try:
            pusher.round()
        except Killed:
            continue
    assert target.taken == names
    assert Spool(landing, "nvml-n", None).files() == []


def test_another_landing_folder_takes_a_name_once(landing: Landing, tmp_path: Path) -> None:
    path = land(landing, "samples", 1)
    folder = tmp_path / "shared" / "fleet.live"
    target = FolderTarget(folder, "nvml-n", CATALOGUE)
    with pytest.raises(Later, match="does not exist: mount its file system, or make it"):
        target.send("samples", path, path.stem)
    folder.mkdir(parents=True)
    for _ in range(2):
        target.send("samples", path, path.stem)
    (there,) = (folder / "samples").glob("*.parquet")
    assert pq.read_table(there).equals(pq.read_table(path))
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(Refused, match="the file cannot be read"):
        target.send("samples", path, "another")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        target.send("samples", path, "a third")


def test_the_thread_sends_what_lands_and_stops(landing: Landing) -> None:
    target = MemoryTarget()
    arrived = threading.Event()

    class Telling(MemoryTarget):
        def send(self, kind: Kind, path: Path, name: str) -> None:
            target.send(kind, path, name)
            arrived.set()

    pusher = Pusher(Spool(landing, "nvml-n", None), Telling())
    pusher.start()
    name = land(landing, "events", 1).stem
    pusher.wake()
    assert arrived.wait(10)
    pusher.stop(10)
    assert target.taken == [name]
