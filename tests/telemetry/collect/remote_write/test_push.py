"""What a pushed table may hold: nothing that the fold would have to set aside."""

import io
import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from telemetry.collect.remote_write.problems import Refused
from telemetry.collect.remote_write.push import read_arrow, read_json
from telemetry.dataset.channels import CATALOGUE

NOW = datetime(2026, 3, 1, tzinfo=UTC)
KEYS = {"timestamp": "2026-03-01T00:00:00Z", "node": "n1", "gpu": "g"}
GOOD = KEYS | {"gpu_temp_c": 41}
XID = KEYS | {"type": "xid", "code": "79"}


def pushed(body: bytes | dict[str, Any]) -> dict[Any, pa.Table]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_json(content, None, CATALOGUE, now=NOW, row_limit=100)


def pushed_arrow(**columns: Any) -> pa.Table:
    made = {
        "timestamp": pa.array([NOW, NOW], pa.timestamp("ms", "UTC")),
        "node": ["n", "n"],
        "gpu": ["g", "h"],
    } | columns
    table, sink = pa.table(made), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    read = read_arrow(sink.getvalue(), "samples", CATALOGUE, now=NOW, row_limit=100, byte_limit=1_000_000)
    return read["samples"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"samples": [GOOD | {"node": "  "}]}, "samples row 0: node is empty"),
        ({"samples": [GOOD, GOOD | {"gpu": ""}]}, "samples row 1: gpu is empty: write null for the whole node"),
        ({"events": [XID | {"gpu": ""}]}, "events row 0: gpu is empty: write null for the whole node"),
        ({"samples": [GOOD | {"node": "n" * 200_000}]}, "node has 200000 characters, more than 253"),
        ({"samples": [GOOD | {"gpu": "g" * 254}]}, "gpu has 254 characters, more than 253"),
        ({"samples": [KEYS]}, "samples hold no value of any channel: send at least one"),
        ({"samples": [KEYS | {"gpu_temp_c": None}]}, "no value of any channel"),
        (
            {"samples": [GOOD | {"timestamp": "2026-03-02T00:00:01Z"}]},
            "samples row 0: timestamp is an instant more than a day from now (1772409601000 ms since 1970): "
            "check the sender's clock",
        ),
        ({"samples": [GOOD | {"timestamp": "9999-12-31T00:00:00Z"}]}, "more than a day from now"),
        ({"samples": [GOOD | {"timestamp": "1999-12-31T23:59:59Z"}]}, "timestamp is an instant before 2000"),
        (b'{"samples": [{"gpu_temp_c": 1e400}]}', "samples row 0: gpu_temp_c is inf, beyond any float"),
        (b'{"samples": [{"gpu_temp_c": 1}, {"gpu_temp_c": 1e39}]}', "samples row 1: gpu_temp_c is 1e+39, beyond any"),
        (b'{"samples": [{"energy_mj": -1e400}]}', "samples row 0: energy_mj is -inf, beyond any double"),
        ({"events": [XID | {"code": "x79"}]}, "events row 0: the code of an xid is 'x79', not 1 to 6 digits"),
        ({"events": [XID | {"code": "1234567"}]}, "is '1234567', not 1 to 6 digits"),
        ({"events": [XID, XID | {"code": None}]}, "events row 1: the code of an xid is null, not 1 to 6 digits"),
        ({"events": [XID | {"code": "79\n"}]}, "not 1 to 6 digits"),
        ({"events": [XID | {"source": "s" * 1001}]}, "source has 1001 characters, more than 1000"),
        ({"events": [XID | {"known_at": "2126-03-01T00:00:00Z"}]}, "known_at is an instant more than a day from now"),
        ({"inventory": [{"node": "n", "seen_at": "2026-04-01T00:00:00Z"}]}, "seen_at is an instant more than a day"),
    ],
)
def test_what_the_fold_would_set_aside_is_refused(body: Any, detail: str) -> None:
    with pytest.raises(Refused) as refused:
        pushed(body)
    assert refused.value.status == 422
    assert detail in refused.value.detail
    assert len(refused.value.detail) < 300


def test_a_long_detail_is_cut_and_the_rest_of_the_row_lands() -> None:
    long = {"timestamp": "2026-03-01T23:59:00Z", "code": "123456", "detail": "d" * 9000}
    rows = pushed({"events": [XID | long, XID | {"type": "drain", "code": "down"}]})["events"].to_pylist()
    assert [(row["code"], row["detail"]) for row in rows] == [("123456", "d" * 4000), ("down", None)]


@pytest.mark.parametrize(
    ("columns", "detail"),
    [
        ({}, "samples hold no value of any channel"),
        ({"sample_count": [1, 2]}, "samples hold no value of any channel"),
        ({"gpu_temp_c": [1.0, 2.0], "gpu": ["g", ""]}, "samples row 1: gpu is empty"),
        ({"gpu_temp_c": [1.0, 2.0], "node": ["n", "n" * 254]}, "samples row 1: node has 254 characters"),
        ({"gpu_temp_c": [1.0, 2.0], "timestamp": pa.array([0, 0], pa.timestamp("ms", "UTC"))}, "before 2000"),
    ],
)
def test_tables_are_held_to_the_same(columns: dict[str, Any], detail: str) -> None:
    with pytest.raises(Refused) as refused:
        pushed_arrow(**columns)
    assert (refused.value.status, detail in refused.value.detail) == (422, True), refused.value.detail


def test_one_infinite_gauge_does_not_lose_a_collectors_file() -> None:
    """The fold sets that value aside, and takes the others."""
    assert pushed_arrow(gpu_temp_c=[float("inf"), 41.0]).column("gpu_temp_c").to_pylist() == [float("inf"), 41.0]


def test_a_node_without_a_gpu_is_null_and_an_empty_table_is_no_error() -> None:
    assert pushed({"samples": [GOOD | {"gpu": None}]})["samples"].column("gpu").to_pylist() == [None]
    assert pushed({"samples": []}) == {}


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
def test_arrow_times_without_a_zone_are_refused_as_those_of_json_are(unit: str) -> None:
    naive = pa.array([NOW.replace(tzinfo=None)] * 2, pa.timestamp(unit))
    with pytest.raises(Refused, match="samples: timestamp has no time zone: send instants such as"):
        pushed_arrow(timestamp=naive, gpu_temp_c=[1.0, 2.0])
    zoned = pa.array([NOW] * 2, pa.timestamp(unit, "Asia/Tokyo"))
    assert pushed_arrow(timestamp=zoned, gpu_temp_c=[1.0, 2.0]).column("timestamp")[0].as_py() == NOW
