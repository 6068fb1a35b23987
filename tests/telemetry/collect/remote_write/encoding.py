"""Remote-write bodies written by hand, and a call of the receiver without a server."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cramjam
import httpx
import pyarrow as pa
from starlette.applications import Starlette

from telemetry.collect.remote_write.group_commit import ReceiverSettings
from telemetry.collect.remote_write.receiver import ARROW, Receiver, application
from telemetry.staging.folder import StagingFolder

STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
WRITE_HEADERS = {
    "content-type": "application/x-protobuf",
    "content-encoding": "snappy",
    "x-prometheus-remote-write-version": "0.1.0",
}

Samples = Sequence[tuple[int, float]]


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def write_request(series: Iterable[tuple[Mapping[str, str], Samples]]) -> bytes:
    """An uncompressed body: of each series its labels and samples (milliseconds, value)."""
    made = []
    for labels, samples in series:
        content = b"".join(
            field(1, field(1, key.encode()) + field(2, value.encode())) for key, value in sorted(labels.items())
        )
        content += b"".join(
            field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + varint(at)) for at, value in samples
        )
        made.append(field(1, content))
    return b"".join(made)


def block(body: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(body))


def labels(name: str = "DCGM_FI_DEV_GPU_TEMP", gpu: str = "GPU-a", **more: str) -> dict[str, str]:
    return {"__name__": name, "UUID": gpu, "Hostname": "n1", "gpu": "0", "job": "dcgm", **more}


async def call(
    app: Starlette,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    stall: bool = False,
) -> httpx.Response:
    """One request; a body in several pieces arrives in several messages, ``stall`` keeps its end back."""

    async def pieces() -> AsyncIterator[bytes]:
        for piece in [body] if isinstance(body, bytes) else body:
            yield piece
        if stall:
            await asyncio.sleep(3600)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.request(method, path, content=pieces(), headers=headers)


async def write(app: Starlette, series: Iterable[tuple[Mapping[str, str], Samples]], **more: Any) -> httpx.Response:
    return await call(app, "/api/v1/write", block(write_request(series)), headers=WRITE_HEADERS, **more)


NOW = datetime(2026, 3, 1, tzinfo=UTC)
T0 = int(NOW.timestamp() * 1000)


def pushed(folder: Path, table: pa.Table, kind: str) -> tuple[Receiver, httpx.Response, str]:
    receiver = Receiver(StagingFolder(folder, writer="receive"), ReceiverSettings(), clock=lambda: NOW)
    body = io.BytesIO()
    with pa.ipc.new_stream(body, table.schema) as stream:
        stream.write_table(table)

    async def run() -> tuple[httpx.Response, httpx.Response]:
        app = application(receiver)
        answer = await call(app, f"/v1/telemetry?kind={kind}", body.getvalue(), headers={"content-type": ARROW})
        metrics = await call(app, "/metrics", method="GET")
        await receiver.close()
        return answer, metrics

    answer, metrics = asyncio.run(run())
    return receiver, answer, metrics.text


def instants(*ms: int | None, unit: str = "ms") -> pa.Array:
    return pa.array(ms, pa.int64()).cast(pa.timestamp(unit, "UTC"))
