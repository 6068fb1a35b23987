"""The routes: what is staged, what is answered, and when."""

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pyarrow as pa
import pytest
from starlette.applications import Starlette

from foundation.errors import InputError
from foundation.server.token_file import TokenFile, digest_of
from telemetry.collect.remote_write.decoding import LINK
from telemetry.collect.remote_write.decoding import STALE as STALE_MARKER
from telemetry.collect.remote_write.group_commit import ReceiverSettings
from telemetry.collect.remote_write.receiver import ARROW, Receiver
from telemetry.collect.series.batch import assemble
from telemetry.staging.folder import StagingFolder
from tests.staged import staged_table
from tests.telemetry.collect.remote_write.encoding import (
    STALE,
    WRITE_HEADERS,
    block,
    call,
    labels,
    write,
    write_request,
)

T0 = 1_772_323_200_000
NOW = datetime(2026, 3, 1, tzinfo=UTC)
TOKEN = "0123456789abcdef0123"


def run(
    folder: Path, steps: Callable[[Starlette, Receiver], Awaitable[Any]], **settings: Any
) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    staging = StagingFolder(folder / "d.live", writer="test")
    settings.setdefault("flush_interval_s", 0.02)

    async def whole() -> Any:
        receiver = Receiver(staging, ReceiverSettings(**settings), clock=lambda: NOW)
        try:
            return await steps(Starlette(routes=receiver.routes()), receiver)
        finally:
            await receiver.close()

    result = asyncio.run(whole())
    return result, staged(staging)


def written(folder: Path, *requests: list[Any]) -> dict[str, list[dict[str, Any]]]:
    async def steps(app: Starlette, _: Receiver) -> None:
        for series in requests:
            await write(app, series)

    return run(folder, steps, flush_interval_s=0.001)[1]


def staged(staging: StagingFolder) -> dict[str, list[dict[str, Any]]]:
    kinds = ("samples", "events", "inventory", "jobs")
    return {kind: staged_table(staging.root, kind).to_pylist() for kind in kinds}


def problem(answer: httpx.Response) -> str:
    content = json.loads(answer.content)
    assert answer.headers["content-type"] == "application/problem+json"
    assert content["status"] == answer.status_code
    return str(content["detail"])


def arrow(table: pa.Table, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def sample_table(rows: int = 2) -> pa.Table:
    return pa.table(
        {
            "timestamp": pa.array([T0 + i for i in range(rows)]).cast(pa.timestamp("ms", "UTC")),
            "node": ["n1"] * rows,
            "gpu": pa.array(["GPU-a"] * rows).dictionary_encode(),
            "gpu_temp_c": pa.array([41.0] * rows, pa.float32()),
        }
    )


class Disk:
    """A disk that may be full, or hang until ``works`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.works = threading.Event()
        self.works.set()
        whole = StagingFolder.stage

        def stage(staging: StagingFolder, *args: Any, **more: Any) -> Path | None:
            self.works.wait(60)
            if self.full:
                raise InputError("the disk is full", "somewhere", "Free space.")
            return whole(staging, *args, **more)

        monkeypatch.setattr(StagingFolder, "stage", stage)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_requests_of_one_moment_become_one_file_and_are_answered_after_it(tmp_path: Path) -> None:
    async def steps(app: Starlette, receiver: Receiver) -> list[httpx.Response]:
        first = [(labels(), [(T0, 41.0), (T0 + 1, STALE)])]
        second = [(labels("DCGM_FI_DEV_POWER_USAGE", pod="p"), [(T0, 300.5)]), (labels("up"), [(T0, 1.0)])]
        answers = await asyncio.gather(write(app, first), write(app, second))
        values, rows = (receiver.accounting.tables[name] for name in ("sample values", "samples"))
        assert (values.read, values.used, values.left_out) == (4, 2, {STALE_MARKER: 1, "up: known, and not used": 1})
        assert (rows.read, rows.used, receiver.accounting.tables["requests"].used) == (1, 1, 2)
        return list(answers)

    answers, rows = run(tmp_path, steps)
    assert [answer.status_code for answer in answers] == [204, 204]
    assert len(list((tmp_path / "d.live" / "samples").iterdir())) == 1
    (row,) = rows["samples"]
    assert (row["gpu"], row["node"], row["gpu_temp_c"], row["power_w"]) == ("GPU-a", "n1", 41.0, 300.5)
    (seen,) = rows["inventory"]
    assert (seen["gpu"], seen["slot"], seen["seen_at"].timestamp() * 1000) == ("GPU-a", "0", T0)


def test_the_inventory_is_written_again_when_it_changes_and_every_hour(tmp_path: Path) -> None:
    seen = [(0, "1"), (1, "1"), (2, "2"), (59, "2"), (62, "2"), (63, "2")]
    rows = written(
        tmp_path, *([(labels(DCGM_FI_DRIVER_VERSION=driver), [(T0 + at * 60_000, 1.0)])] for at, driver in seen)
    )
    written_rows = [((row["seen_at"].timestamp() * 1000 - T0) / 60_000, row["driver"]) for row in rows["inventory"]]
    assert written_rows == [(0, "1"), (2, "2"), (62, "2")]
    assert len(rows["samples"]) == 6


def test_rises_of_the_exporters_xid_counts_are_events_once_across_restarts(tmp_path: Path) -> None:
    def count(minute: int, value: float, xid: str) -> list[Any]:
        at = T0 + minute * 60_000
        name = "DCGM_EXP_XID_ERRORS_COUNT"
        return [(labels(), [(at, 1.0)]), (labels(name, xid=xid), [(at, value)])]

    written(tmp_path, count(0, 1, "31"), count(1, 1, "79"), count(2, 1, "79"))  # the first is older than what we saw
    rows = written(tmp_path, count(2, 1, "79"), count(3, 1, "79"), count(4, 2, "79"))
    written_rows = [((row["timestamp"].timestamp() * 1000 - T0) / 60_000, row["code"]) for row in rows["events"]]
    assert written_rows == [(1, "79"), (4, "79")]
    assert all(row["known_at"] >= NOW for row in rows["events"])


def test_single_links_are_left_out_and_counted(tmp_path: Path) -> None:
    async def steps(app: Starlette, receiver: Receiver) -> int:
        name = "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"
        await write(app, [(labels(name, nvlink="0"), [(T0, 1.0)]), (labels(name), [(T0, 5.0)])])
        return receiver.accounting.tables["sample values"].left_out[LINK]

    dropped, rows = run(tmp_path, steps)
    assert (dropped, rows["samples"][0]["nvlink_replay_total"]) == (1, 5.0)


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    async def steps(app: Starlette, receiver: Receiver) -> httpx.Response:
        task = asyncio.create_task(write(app, [(labels(), [(T0, 1.0)])]))
        while not receiver._commit.held_samples:
            await asyncio.sleep(0.001)
        await receiver.close()
        return await task

    answer, rows = run(tmp_path, steps, flush_interval_s=60.0)
    assert (answer.status_code, len(rows["samples"])) == (204, 1)


def test_a_disk_that_does_not_take_them_is_503_and_unready_until_it_does(tmp_path: Path, disk: Disk) -> None:
    disk.full = True

    async def steps(app: Starlette, _: Receiver) -> list[httpx.Response]:
        series = [(labels(), [(T0, 41.0)])]
        answers = [await write(app, series), await call(app, "/readyz", method="GET")]
        push = arrow(sample_table())
        answers.append(await call(app, "/v1/telemetry?kind=samples", push, headers={"content-type": ARROW}))
        disk.full = False
        answers += [await write(app, series), await call(app, "/readyz", method="GET")]
        return answers

    answers, rows = run(tmp_path, steps)
    assert [answer.status_code for answer in answers] == [503, 503, 503, 204, 200]
    assert answers[0].headers["retry-after"] == "5"
    assert "the disk is full" in problem(answers[0])
    assert len(rows["samples"]) == 1


def test_a_rise_that_a_full_disk_does_not_take_lands_later(tmp_path: Path, disk: Disk) -> None:
    async def steps(app: Starlette, _: Receiver) -> list[int]:
        statuses = []
        for minute, value, full in [(0, 1.0, False), (1, 2.0, True), (1, 2.0, False)]:
            disk.full = full
            at = T0 + minute * 60_000
            count = labels("DCGM_EXP_XID_ERRORS_COUNT", xid="79")
            statuses.append((await write(app, [(labels(), [(at, 1.0)]), (count, [(at, value)])])).status_code)
        return statuses

    statuses, rows = run(tmp_path, steps, flush_interval_s=0.001)
    assert statuses == [204, 503, 204]
    assert [row["code"] for row in rows["events"]] == ["79"]


def test_a_request_that_cannot_be_staged_does_not_hold_up_the_others(tmp_path, monkeypatch):
    def failing(series: Any, *args: Any, **more: Any) -> pa.Table:
        if any(one.gpu == "GPU-bad" for one in series):
            raise ZeroDivisionError
        return assemble(series, *args, **more)

    monkeypatch.setattr("telemetry.collect.series.batch.assemble", failing)

    async def steps(app: Starlette, receiver: Receiver) -> list[int]:
        gpus = ("GPU-a", "GPU-bad", "GPU-b")
        answers = await asyncio.gather(*(write(app, [(labels(gpu=gpu), [(T0, 1.0)])]) for gpu in gpus))
        assert receiver._commit.held_samples == 0
        return [answer.status_code for answer in answers]

    statuses, rows = run(tmp_path, steps)
    assert statuses == [204, 503, 204]
    assert {row["gpu"] for row in rows["samples"]} == {"GPU-a", "GPU-b"}


def test_memory_is_bounded(tmp_path: Path, disk: Disk) -> None:
    disk.works.clear()

    async def steps(app: Starlette, receiver: Receiver) -> list[httpx.Response]:
        first = asyncio.create_task(write(app, [(labels(), [(T0 + i, 1.0) for i in range(8)])]))
        while not receiver._commit.held_samples:
            await asyncio.sleep(0.001)
        refused = await write(app, [(labels(), [(T0 + 50 + i, 1.0) for i in range(3)])])
        taken = asyncio.create_task(write(app, [(labels(), [(T0 + 90, 1.0)])]))
        disk.works.set()
        return [await first, refused, await taken]

    answers, rows = run(tmp_path, steps, held_samples=10, flush_interval_s=0.001)
    assert [answer.status_code for answer in answers] == [204, 503, 204]
    assert "too many samples wait" in problem(answers[1])
    assert len(rows["samples"]) == 9


@pytest.mark.parametrize(
    ("headers", "body", "status", "detail"),
    [
        ({"content-type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}, b"", 415, "remote write 1.0"),
        ({"content-type": "text/plain"}, b"", 415, "application/x-protobuf"),
        ({"content-encoding": "gzip"}, b"", 415, "snappy"),
        ({}, b"\xff\xff\xff\xff\xff\xff", 400, "snappy"),
        ({}, block(b"\xff\xff\xff"), 400, "not a remote-write request"),
        ({}, block(b"x" * 3000), 413, "would decompress to 3000 bytes"),
        ({}, b"x" * 2000, 413, "larger than 1000 bytes"),
        ({}, [b"x" * 600, b"x" * 600], 413, "larger than 1000 bytes"),
        ({"content-length": "5000"}, b"", 413, "larger than 1000 bytes"),
        ({}, block(write_request([(labels(), [(T0 + i, 1.0) for i in range(30)])])), 400, "more than 20 samples"),
    ],
)
def test_what_cannot_be_taken_is_refused_for_good(tmp_path, headers, body, status, detail):
    async def steps(app: Starlette, _: Receiver) -> httpx.Response:
        return await call(app, "/api/v1/write", body, headers=WRITE_HEADERS | headers)

    answer, rows = run(tmp_path, steps, body_bytes=1000, decoded_bytes=2000, request_rows=20)
    assert answer.status_code == status
    assert detail in problem(answer)
    assert rows["samples"] == []


def test_bodies_that_are_being_read_are_bounded(tmp_path: Path) -> None:
    async def steps(app: Starlette, receiver: Receiver) -> httpx.Response:
        slow = asyncio.create_task(call(app, "/api/v1/write", b"x" * 90, headers=WRITE_HEADERS, stall=True))
        while not receiver._held_bytes:
            await asyncio.sleep(0.001)
        answer = await call(app, "/api/v1/write", b"x" * 50, headers=WRITE_HEADERS)
        assert (await slow).status_code == 408
        assert receiver._held_bytes == 0
        return answer

    answer, _ = run(tmp_path, steps, held_bytes=100, body_timeout_s=2.0)
    assert answer.status_code == 503
    assert "too many bodies" in problem(answer)


def test_tokens_open_the_posts_and_may_change(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# tokens\n\n{TOKEN}\n")

    async def steps(app: Starlette, _: Receiver) -> list[int]:
        async def status(header: dict[str, str]) -> int:
            body = block(write_request([(labels(), [(T0, 1.0)])]))
            return (await call(app, "/api/v1/write", body, headers=WRITE_HEADERS | header)).status_code

        own = {"authorization": f"Bearer {TOKEN}"}
        statuses = [await status({}), await status({"authorization": "Bearer wrong"}), await status(own)]
        statuses.append(await status({"authorization": f"Basic {TOKEN}"}))
        tokens.write_text("a-quite-different-token\n")
        statuses += [await status(own), await status({"authorization": "bearer a-quite-different-token"})]
        tokens.unlink()
        statuses.append(await status({"authorization": "Bearer a-quite-different-token"}))
        statuses.append((await call(app, "/healthz", method="GET")).status_code)
        return statuses

    assert run(tmp_path, steps, tokens=tokens)[0] == [401, 401, 204, 401, 401, 204, 204, 200]


def test_a_token_file_is_read_when_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    tokens = TokenFile(path, lambda line, _number, _where: (digest_of(line), line), "")
    (tmp_path / "next").write_text("new\n")
    (tmp_path / "next").replace(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert tokens.grant("old") == "old"
    path.chmod(0o644 if path.stat().st_mode & 0o777 == 0o600 else 0o600)
    assert (tokens.grant("old"), tokens.grant("new")) == (None, "new")


def test_a_push_of_a_table_lands_once_by_its_name(tmp_path: Path) -> None:
    async def steps(app: Starlette, _: Receiver) -> list[int]:
        path, headers = "/v1/telemetry?kind=samples&name=n1-7", {"content-type": ARROW}
        return [(await call(app, path, arrow(sample_table()), headers=headers)).status_code for _ in range(2)]

    statuses, rows = run(tmp_path, steps)
    assert statuses == [204, 204]
    assert [row["gpu_temp_c"] for row in rows["samples"]] == [41.0, 41.0]


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("?kind=samples", b"garbage", 400, "not an Arrow IPC stream"),
        ("?kind=samples", arrow(sample_table())[:-150], 400, "not an Arrow IPC stream"),
        ("", arrow(sample_table()), 422, "kind is None: use one of"),
        ("?kind=samples&name=../x", arrow(sample_table()), 422, "cannot name a staged file"),
        ("?kind=events", arrow(sample_table()), 422, "events cannot be staged with the columns"),
        ("?kind=samples", arrow(sample_table(500)), 413, "more than 400 rows"),
        ("?kind=samples", arrow(sample_table(), "zstd"), 400, "send it without compression"),
        (
            "?kind=samples",
            arrow(pa.table({"node": pa.DictionaryArray.from_arrays([0] * 300, ["x" * 1000])})),
            413,
            "unpacks to more than",
        ),
        ("?kind=samples", arrow(pa.table({"node": [["a"]]})), 400, "has the type list"),
        ("?kind=samples", arrow(pa.table({"timestamp": pa.array([T0]).cast(pa.timestamp("ms"))})), 422, "no time zone"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tmp_path, path, body, status, detail):
    async def steps(app: Starlette, _: Receiver) -> httpx.Response:
        return await call(app, f"/v1/telemetry{path}", body, headers={"content-type": ARROW})

    answer, rows = run(tmp_path, steps, request_rows=400, decoded_bytes=100_000)
    assert (answer.status_code, detail in problem(answer)) == (status, True), answer.content
    assert not any(rows.values())
