"""A spool is bounded, what is pushed arrives once and in order, and each answer of a receiver has a meaning."""

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from foundation.http import BodyTooLarge, Connection, HttpError, HttpResponse
from telemetry.collect import pushing
from telemetry.collect.pushing import Deferred, HttpTarget, Pusher, Rejected, Spool, parse_bytes
from telemetry.staging.folder import Kind, StagingFolder

AT = datetime(2026, 3, 1, tzinfo=UTC)


def stage_frame(staging: StagingFolder, kind: Kind, age: int, name: str | None = None) -> Path:
    """Stage one row as a file that is older than others with a smaller ``age``."""
    if kind == "samples":
        table = pa.table({"timestamp": [AT], "node": ["n"], "gpu": [f"GPU-{age}"], "power_w": [1.0]})
    else:
        table = pa.table(
            {"timestamp": [AT], "node": ["n"], "type": ["xid"], "code": [str(age)], "known_at": [AT]}
            if kind == "events"
            else {"node": ["n"], "gpu": [f"GPU-{age}"], "seen_at": [AT]}
        )
    path = staging.stage(kind, table, name=name)
    os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    return path


@pytest.fixture
def staging(tmp_path: Path) -> StagingFolder:
    return StagingFolder(tmp_path / "spool", writer="nvml-n")


def test_a_writer_s_own_files_come_in_the_order_in_which_they_were_staged(staging: StagingFolder) -> None:
    new, old = stage_frame(staging, "samples", 1), stage_frame(staging, "events", 9)
    named = stage_frame(staging, "events", 5, name="nvml-n.gpu_lost.GPU-0.17")
    for writer in ("nvml-n-2", "exporters", "nvml-n.b"):
        stage_frame(StagingFolder(staging.root, writer=writer), "events", 2)
    stage_frame(staging, "events", 3, name="nvml-n-2.gpu_lost.GPU-0.17")
    files = Spool(staging, "nvml-n", None).files()
    assert files == [old, named, new]


def test_over_the_limit_the_oldest_samples_go_first_and_events_last(staging: StagingFolder) -> None:
    events = [stage_frame(staging, "events", age) for age in (30, 31)]
    sightings = [stage_frame(staging, "inventory", age) for age in (20, 21)]
    samples = [stage_frame(staging, "samples", age) for age in (10, 11, 12)]
    size = {path: path.stat().st_size for path in (*events, *sightings, *samples)}
    total = sum(size.values())
    spool = Spool(staging, "nvml-n", total)
    spool.trim()
    assert not spool.counts
    for order, path in enumerate([samples[2], samples[1], samples[0], sightings[1], sightings[0], events[1]], start=1):
        assert path.exists()
        total -= size[path]
        spool._limit_bytes = total
        spool.trim()
        assert not path.exists()
        assert spool.counts["files_dropped"] == order
    assert events[0].exists()


def test_refused_files_are_put_aside_with_the_reason_and_bounded(staging, monkeypatch, caplog):
    monkeypatch.setattr(pushing, "REFUSED_FILES", 2)
    spool = Spool(staging, "nvml-n", None)
    for age in (3, 2, 1):
        stage_frame(staging, "events", age)
    for file in spool.files():
        spool.refuse(file, "422: no such column")
    aside = sorted((staging.root / "refused" / "events").iterdir())
    assert (len(aside), spool.counts["files_rejected"], spool.files()) == (2, 3, [])
    assert f"{aside[0]}: 422: no such column" in caplog.text


class Killed(BaseException):
    """The process ends here."""


class MemoryTarget(HttpTarget):
    """Takes each name once; ``moods`` say how it answers next, and it stumbles over the file ``bad``."""

    def __init__(self, *moods: str, bad: str = "") -> None:
        self.taken: list[str] = []
        self.moods = list(moods)
        self.bad = bad

    def __str__(self) -> str:
        return "memory"

    def send(self, path: Path) -> None:
        name = path.stem
        mood = self.moods.pop(0) if self.moods else "takes"
        if name == self.bad or mood == "stumbles":
            raise Deferred("answered 500", server_error=True)
        if mood == "down":
            raise Deferred("it is down")
        if mood == "refuses":
            raise Rejected("not this one")
        if name not in self.taken:
            self.taken.append(name)
        if mood == "takes and breaks off":
            raise Deferred("half an answer")
        if mood == "takes and we are killed":
            raise Killed


def test_while_the_other_side_is_down_the_spool_keeps_all_and_pauses_grow(staging: StagingFolder) -> None:
    stage_frame(staging, "events", 1)
    spool = Spool(staging, "nvml-n", None)
    pusher = Pusher(spool, MemoryTarget(*["down"] * 12))
    pauses = [later.after_s or 0.0 for _ in range(12) if (later := pusher.push())]
    for pause_s, expected_s in zip(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300], strict=True):
        assert 0.75 * expected_s <= pause_s <= 1.25 * expected_s
    assert len(spool.files()) == 1
    assert (pusher.push(), pusher.sent) == (None, 1)


@pytest.mark.parametrize("mood", ["refuses", "stumbles"])
def test_a_file_that_fails_does_not_hold_up_the_next(staging: StagingFolder, mood: str) -> None:
    first, second = stage_frame(staging, "events", 2).stem, stage_frame(staging, "events", 1).stem
    target = MemoryTarget(mood)
    pusher = Pusher(Spool(staging, "nvml-n", None), target)
    pusher.push()
    pusher.push()
    assert target.taken == ([second] if mood == "refuses" else [second, first])


def test_a_file_that_fails_for_good_on_a_server_that_takes_others_is_put_aside(staging: StagingFolder) -> None:
    bad = stage_frame(staging, "events", 99).stem
    target = MemoryTarget(bad=bad)
    spool = Spool(staging, "nvml-n", None)
    pusher = Pusher(spool, target)
    for age in range(pushing.MAX_SERVER_ERRORS, 0, -1):
        assert not spool.counts
        stage_frame(staging, "events", age)
        pusher.push()
        pusher.push()  # one that takes nothing proves nothing
    assert len(target.taken) == pushing.MAX_SERVER_ERRORS
    assert (spool.counts["files_rejected"], spool.files()) == (1, [])


def test_a_server_that_fails_over_all_is_not_sent_the_whole_spool(staging: StagingFolder) -> None:
    for age in range(9):
        stage_frame(staging, "events", age)
    target = MemoryTarget(*["stumbles"] * 9)
    Pusher(Spool(staging, "nvml-n", None), target).push()
    assert len(target.moods) == 9 - pushing.MAX_SKIPPED


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["takes", "down", "takes and breaks off", "takes and we are killed"]), max_size=12))
def test_nothing_is_lost_or_sent_twice(tmp_path_factory: pytest.TempPathFactory, moods: list[str]) -> None:
    staging = StagingFolder(tmp_path_factory.mktemp("spool"), writer="nvml-n")
    names = [stage_frame(staging, "events", age).stem for age in (4, 3, 2, 1)]
    target = MemoryTarget(*moods)
    for _ in range(len(moods) + 1):
        with contextlib.suppress(Killed):
            Pusher(Spool(staging, "nvml-n", None), target).push()
    assert target.taken == names
    assert Spool(staging, "nvml-n", None).files() == []


def test_the_thread_sends_what_lands_until_it_is_stopped(staging: StagingFolder) -> None:
    target = MemoryTarget("down")
    pusher = Pusher(Spool(staging, "nvml-n", None), target)
    names = [stage_frame(staging, "events", 2).stem]
    pusher.start()
    names.append(stage_frame(staging, "events", 1).stem)
    pusher.stop(60)
    assert target.taken == names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return stage_frame(StagingFolder(tmp_path / "spool", writer="nvml-n"), "samples", 1)


PROBLEM = json.dumps({"title": "Unprocessable", "detail": "unknown column 'x'"}).encode()


@pytest.mark.parametrize(
    ("answer", "raised", "reason", "after_s"),
    [
        (HttpResponse(PROBLEM, {}, 0.1, 422), Rejected, "answered 422: unknown column 'x'", None),
        (HttpResponse(b"no", {"retry-after": "17"}, 0.1, 429), Deferred, "answered 429", 17.0),
        (HttpResponse(b"no", {"retry-after": "999999999"}, 0.1, 503), Deferred, "answered 503", 3600.0),
        (HttpResponse(b"no", {}, 0.1, 500), Deferred, "answered 500", None),
        (HttpResponse(b"no", {}, 0.1, 401), Deferred, "answered 401; check the token", None),
        (HttpResponse(b"no", {"location": "elsewhere"}, 0.1, 302), Deferred, "answered 302", None),
        (BodyTooLarge("long", HttpResponse(b"", {}, 0.1, 500)), Deferred, "answered 500", None),
        (HttpError("connection timed out"), Deferred, "connection timed out", None),
        (InputError("the file cannot be read", "--bearer-token-file", ""), Deferred, "the file cannot be read", None),
    ],
)
def test_each_answer_has_a_meaning(path, answer, raised, reason, after_s, monkeypatch):
    requests: list[dict[str, Any]] = []

    def ask(connection: Connection, method: str, path: str, **request: Any) -> HttpResponse:
        requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pushing, "ask", ask)
    with pytest.raises(raised, match=reason) as caught:
        HttpTarget("http://host:9201").send(path)
    if isinstance(caught.value, Deferred):
        assert (caught.value.after_s, caught.value.server_error) == (after_s, "500" in reason)
    assert len(requests) == 1


@pytest.mark.parametrize(("text", "expected"), [("1GiB", 2**30), ("500 MB", 500_000_000), ("x", None), ("0", None)])
def test_sizes(text: str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is not a size: write a number and a unit"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == expected
