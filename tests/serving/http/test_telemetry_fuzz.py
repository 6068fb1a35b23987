"""Whatever is pushed, it is taken or refused: never a fault, and what is held stays usable."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.settings import ServiceSettings
from tests.serving.batch_world import World, make_world
from tests.serving.http.test_telemetry_route import ARROW, END, EVENT, SAMPLE, Clock, serving, stream_of
from tests.serving.http.world import Running

TAKEN = {200, 400, 408, 413, 415, 422}
NAMES = st.sampled_from([*SAMPLE, *EVENT, "sample_count", "mig_instance", "known_at", "pci_bus_id", "detail", "x", ""])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [*SAMPLE.values(), *EVENT.values(), "2026-01-01T23:59:00+00:00", "0001-01-01T00:00:00+14:00", "\ud800"]
    ),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
)
ROWS = st.lists(
    st.one_of(
        st.dictionaries(NAMES, VALUES, max_size=8),
        st.builds(lambda change: SAMPLE | change, st.dictionaries(NAMES, VALUES, max_size=2)),
        st.builds(lambda change: EVENT | {"code": "63"} | change, st.dictionaries(NAMES, VALUES, max_size=2)),
        VALUES,
    ),
    max_size=4,
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(["samples", "events", "jobs", "rows", ""]), st.one_of(ROWS, VALUES), max_size=3),
    ROWS,
    VALUES,
)
TYPES = st.sampled_from(
    [
        pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.string(), pa.large_string(), pa.bool_(), pa.null(),
        pa.binary(), pa.date32(), pa.timestamp("ns"), pa.timestamp("s", "Asia/Tokyo"), pa.decimal128(5, 2),
        pa.duration("ms"), pa.list_(pa.int8()), pa.dictionary(pa.int8(), pa.string()),
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def service(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("fuzzed")
    with serving(folder, world, Clock(END), settings=ServiceSettings(rows=50)) as running_:
        yield running_
        state = running_.service.online.upkeep.state  # type: ignore[union-attr]
        assert state is not None
        assert len(state.rows(END).keys) > 0  # after all of that


@given(BODIES, st.booleans())
def test_no_json_whatever_makes_a_fault(service: Running, body: Any, asked: bool) -> None:
    text = json.dumps(body).encode()
    for path in ("/v1/telemetry", "/v1/telemetry?kind=samples", "/v1/telemetry?kind=events"):
        status, answer, _ = service.client().send("POST", path, text)
        assert status in TAKEN, answer
    if asked:
        status, answer, _ = service.client().send("POST", "/v1/predict", text)
        assert status in TAKEN | {503}, answer


@given(st.dictionaries(NAMES, TYPES, max_size=6), st.sampled_from(["samples", "events"]), st.integers(0, 3))
def test_no_arrow_whatever_makes_a_fault(
    service: Running, columns: dict[str, pa.DataType], kind: str, rows: int
) -> None:
    schema = pa.schema([pa.field(name, type_) for name, type_ in columns.items()])
    table = pa.table({name: pa.nulls(rows, type_) for name, type_ in columns.items()}, schema=schema)
    for body in (stream_of(table), stream_of(table)[:-9]):
        status, answer, _ = service.client().send("POST", f"/v1/telemetry?kind={kind}", body, ARROW)
        assert status in TAKEN, answer


@given(st.binary(max_size=200), st.sampled_from(["application/json", ARROW]))
def test_no_bytes_whatever_make_a_fault(service: Running, body: bytes, media: str) -> None:
    status, answer, _ = service.client().send("POST", "/v1/telemetry?kind=samples", body, media)
    assert status in TAKEN, answer


def test_a_bomb_is_refused(service: Running) -> None:
    sink = io.BytesIO()
    with gzip.GzipFile(fileobj=sink, mode="wb") as stream:
        for _ in range(70):
            stream.write(b" " * 2**20)
    status, problem, _ = service.client().send("POST", "/v1/telemetry", sink.getvalue(), Content_Encoding="gzip")
    assert (status, "unpacks to more than" in problem["detail"]) == (413, True)
