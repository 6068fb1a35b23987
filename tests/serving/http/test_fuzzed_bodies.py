"""Bodies that nobody meant to send: each is answered with a 4xx problem, or a 200 that is whole; never a 500."""

import http.client
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.http.model_world import ARROW, NAMES, scoring, stream_of
from tests.serving.http.world import Client, Running
from tests.waiting import wait

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {"rows": 200, "body_bytes": 2_000_000, "decoded_bytes": 4_000_000}
    with scoring(tmp_path_factory.mktemp("fuzzed"), **limits) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Running) -> Client:
    return service.client()


def send(client: Client, path: str, body: bytes, media: str) -> int:
    """Send; check that the answer is one that may be given."""
    try:
        status, content, headers = client.send("POST", path, body, media)
    except (http.client.HTTPException, OSError):  # the service closed while more was being sent: ask what it is
        assert client.send("GET", "/healthz")[0] == 200
        return 413
    assert status == 200 or 400 <= status < 500, (status, content)
    if status != 200:
        assert headers["Content-Type"] == "application/problem+json"
        assert content["status"] == status
        assert content["detail"]
    return int(status)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["2026-01-01T00:00:00Z", "GPU-n1-0", "n1", 1e308, -1e308, 1e-320]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*NAMES, "unit", "x"]), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
KEYS = st.sampled_from(
    ["nodes", "gpus", "rows", "instances", "inputs", "dataframe_split", "dataframe_records", "params", "columns"]
)
PATHS = st.sampled_from(["/v1/predict", "/invocations"])


@FEW
@given(PATHS, st.dictionaries(KEYS, VALUES, max_size=2) | VALUES)
def test_any_json_is_answered(client: Client, path: str, body: Any) -> None:
    send(client, path, json.dumps(body).encode(), "application/json")  # NaN and Infinity among it


@FEW
@given(PATHS, st.data())
def test_a_damaged_json_is_answered(client: Client, path: str, data: st.DataObject) -> None:
    row = {"unit": "a", "decision_time": "2026-01-01T00:00:00Z", NAMES[0]: 61.5, NAMES[1]: None}
    valid = json.dumps({"rows" if path == "/v1/predict" else "instances": [row] * 5}).encode()
    start = data.draw(st.integers(0, len(valid)))
    end = data.draw(st.integers(start, min(len(valid), start + 20)))
    send(client, path, valid[:start] + data.draw(st.binary(max_size=12)) + valid[end:], "application/json")
    assert send(client, path, valid[: start or 1], "application/json") == (200 if start == len(valid) else 400)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 100_000, 413),
        (b'{"rows":' + b"[" * 60 + b"]" * 60 + b"}", 422),
        (b'{"rows":[{"%s":NaN}]}' % NAMES[0].encode(), 400),
        (b'{"rows":[{"%s":' % NAMES[0].encode() + b"9" * 5000 + b"}]}", 400),
        (b'{"nodes":["' + b"n" * 100_000 + b'"]}', 200),
        (b'{"nodes":["\\ud800"]}', 400),
        (b'{"nodes":["a"],"nodes":["b"]}', 200),
        (b"", 400),
    ],
)  # fmt: skip
def test_json_made_to_hurt_is_refused(client: Client, body: bytes, status: int) -> None:
    answered = send(client, "/v1/predict", body, "application/json")
    assert answered in (status, 400, 413) if status >= 400 else answered == status


def plain_stream(rows: int = 5) -> bytes:
    columns = {name: pa.array(np.linspace(0, 1, rows)) for name in NAMES}
    return stream_of(pa.table({"unit": [f"g{i}" for i in range(rows)], **columns}))


@FEW
@given(st.data())
def test_a_damaged_arrow_stream_is_answered(client: Client, data: st.DataObject) -> None:
    """Any byte may lie: lengths, offsets, types. Memory must not be read beyond the body, nor the process end."""
    stream = bytearray(plain_stream())
    for _ in range(data.draw(st.integers(1, 6))):
        offset = data.draw(st.integers(0, len(stream) - 5))
        value = data.draw(
            st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**24, 255]) | st.integers(-(2**31), 2**31 - 1)
        )
        struct.pack_into("<i", stream, offset, value)
    cut = data.draw(st.integers(0, len(stream)))
    send(client, "/v1/predict", bytes(stream), ARROW)
    send(client, "/v1/predict", bytes(stream[:cut]), ARROW)


HOSTILE = {
    "struct": pa.table({NAMES[0]: [{"a": 1}]}),
    "binary": pa.table({NAMES[0]: [b"\xff\xfe"]}),
    "twice": pa.table([pa.array([1.0]), pa.array([2.0])], names=[NAMES[0], NAMES[0]]),
    "no name": pa.table([pa.array([1.0])], names=[""]),
    "unknown": pa.table({"x" * 5000: [1.0]}),
    "no columns": pa.table({}),
    "many columns": pa.table({f"c{at}": [1.0] for at in range(3000)}),
    "deep": pa.table({NAMES[0]: pa.array([1.0]), "unit": pa.array([[[[["g"]]]]])}),
    "dictionary": pa.table({NAMES[0]: [1.0], "unit": pa.array(["g"]).dictionary_encode()}),
    "null type": pa.table({NAMES[0]: pa.nulls(3)}),
    "decimal": pa.table({NAMES[0]: pa.array([1]).cast(pa.decimal128(38, 0))}),
    "run ends": pa.table({NAMES[0]: pa.RunEndEncodedArray.from_arrays([3], [1.0])}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arrow_of_another_kind_is_refused_or_read(client: Client, name: str) -> None:
    status = send(client, "/v1/predict", stream_of(HOSTILE[name]), ARROW)
    assert status in ((200, 400, 422) if name in ("dictionary", "null type") else (400, 413, 422))


def test_a_column_whose_name_is_no_text_is_refused(client: Client) -> None:
    assert send(client, "/v1/predict", plain_stream().replace(b"unit", b"\xffnit"), ARROW) == 400


def test_refusals_leave_no_memory_behind(service: Running, client: Client) -> None:
    """What is refused a thousand times takes no more memory than what is refused once."""
    bodies = [
        (b"[" * 1_900_000, "application/json"),
        (b'{"rows":[' + b"{}," * 100_000 + b"{}]}", "application/json"),
        (plain_stream(190)[:-40], ARROW),
        (stream_of(HOSTILE["many columns"]), ARROW),
    ]

    def storm(rounds: int) -> int:
        for _ in range(rounds):
            for body, media in bodies:
                assert 400 <= send(client, "/v1/predict", body, media) < 500
        return resident()

    storm(3)
    first = storm(2)
    last = storm(12)
    assert last - first < 40 * 2**20
    wait(lambda: service.active == 0)  # an answer is there a moment before it is counted


def resident() -> int:
    """Bytes of memory that this process holds; its threads are the service."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
