"""Remote-write bodies written by hand, and an ASGI call without a server."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cramjam
from starlette.applications import Starlette

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


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def call(
    app: Starlette,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    stall: bool = False,
) -> Answer:
    """One request; a body in several pieces arrives in several messages, ``stall`` keeps the last one back."""
    path, _, query = path.partition("?")
    pieces = [body] if isinstance(body, bytes) else list(body)
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if not stall:
        messages[-1]["more_body"] = False
    given: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        given.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()],
        "server": ("test", 80),
        "client": ("test", 1),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    await app(scope, receive, send)
    start = given[0]
    return Answer(
        start["status"],
        {key.decode(): value.decode() for key, value in start["headers"]},
        b"".join(message.get("body", b"") for message in given[1:]),
    )


async def write(app: Starlette, series: Iterable[tuple[Mapping[str, str], Samples]], **more: Any) -> Answer:
    return await call(app, "/api/v1/write", block(write_request(series)), headers=WRITE_HEADERS, **more)
