"""Pushed tables and remote-write bodies of a hostile or broken client: the good rows beside them reach the dataset."""

import contextlib
from datetime import timedelta
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.server.problems import RequestRefused
from telemetry.bounds import BAD_TIME
from telemetry.collect.remote_write.decoding import MAX_MESSAGES, RemoteWriteDecoder
from telemetry.collect.series.batch import OTHER_SERIES
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from tests.telemetry.collect.remote_write.encoding import NOW, T0, field, instants, labels, pushed, write_request


def push(folder: Path, table: pa.Table, kind: str) -> tuple[httpx.Response, list[dict[str, object]], str]:
    """The answer to one push, the rows that were staged and the receiver's metrics."""
    _, answer, metrics = pushed(folder, table, kind)
    rows = [row for path in folder.glob(f"{kind}/*.parquet") for row in pq.read_table(path).to_pylist()]
    return answer, rows, metrics


BAD_MS = [2**53, -(2**53), 2**63 - 1, -(2**63), 0, 4_102_444_800_000]


@pytest.mark.parametrize("bad_ms", BAD_MS)
@pytest.mark.parametrize("column", ["timestamp", "known_at"])
def test_an_event_with_an_impossible_instant_is_left_out_alone(tmp_path: Path, column: str, bad_ms: int) -> None:
    stamps = {name: instants(T0, bad_ms if name == column else T0, T0) for name in ("timestamp", "known_at")}
    table = pa.table(
        {**stamps, "node": ["n1"] * 3, "type": ["xid"] * 3, "code": ["48", "63", "79"], "source": ["x"] * 3}
    )
    answer, rows, metrics = push(tmp_path, table, "events")
    assert answer.status_code == 200
    assert [entry["count"] for entry in answer.json()["left_out"]] == [1]
    assert [row["code"] for row in rows] == ["48", "79"]
    left_out = f'reason="{column}: {BAD_TIME}",table="events"'
    assert f"predrain_ingest_left_out_total{{{left_out}}} 1.0" in metrics


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_an_impossible_instant_in_another_unit_is_left_out(tmp_path: Path, unit: str) -> None:
    scale = {"s": 0.001, "us": 1000, "ns": 1_000_000}[unit]
    good = round(T0 * scale)
    bad = {"s": 2**61 // 125 + good, "us": 2**62, "ns": 2**62}[unit]  # 2**61 / 125 s wraps to the good one in ms
    table = pa.table({"timestamp": instants(good, bad, unit=unit), "node": ["n1", "n2"], "gpu_temp_c": [40.0, 41.0]})
    _, rows, _ = push(tmp_path, table, "samples")
    assert [(row["node"], row["timestamp"]) for row in rows] == [("n1", NOW)]


def test_a_push_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    table = pa.table({"timestamp": instants(2**53), "node": ["n1"], "gpu_temp_c": [40.0]})
    answer, rows, _ = push(tmp_path, table, "samples")
    assert (answer.status_code, rows) == (422, [])


def test_jobs_that_still_run_and_rows_without_an_optional_instant_are_kept(tmp_path: Path) -> None:
    table = pa.table({"seen_at": instants(T0), "gpu": ["g"], "node": ["n1"]})
    answer, rows, _ = push(tmp_path, table, "inventory")
    assert (answer.status_code, len(rows)) == (204, 1)


def decoder() -> RemoteWriteDecoder:
    return RemoteWriteDecoder(SeriesCatalogue(CATALOGUE), clock=lambda: NOW)


@pytest.mark.parametrize("between", [b"", b"\xff\xff\xff"])
@pytest.mark.parametrize("joined", range(6))
def test_another_division_of_the_bytes_of_the_labels_does_not_replace_the_series(joined: int, between: bytes) -> None:
    sent = labels(instance="elsewhere:9400")
    encoded = [field(1, key.encode()) + field(2, value.encode()) for key, value in sorted(sent.items())]
    encoded[joined : joined + 2] = [between.join(encoded[joined : joined + 2])]  # the second label hides the first
    reader = decoder()
    reader.decode(write_request([(labels(gpu="GPU-b"), [(T0, 40.0)])]), limit=100)  # `Hostname` is found to be the node
    with_sample = field(2, b"\x09" + b"\0" * 8 + b"\x10\x01")
    with contextlib.suppress(RequestRefused):
        reader.decode(field(1, b"".join(field(1, piece) for piece in encoded) + with_sample), limit=100)
    samples = reader.decode(write_request([(sent, [(T0, 40.0)])]), limit=100)
    assert [(samples.series[i].node, v) for i, v in zip(samples.index, samples.values, strict=True)] == [("n1", 40.0)]


@pytest.mark.parametrize("claimed_ms", [2**62, -5, 7_000_000_000_000, 2**63 - 1, T0 + 3_600_000 * 24 * 365])
def test_a_time_that_cannot_be_right_claims_no_channel(claimed_ms: int) -> None:
    reader = decoder()
    first, other = "gpu_junction_temperature", "gpu_edge_temperature"
    reader.decode(write_request([(labels(first), [(claimed_ms, 1.0)])]), limit=9)
    later_ms = T0 + 660_000
    samples = reader.decode(write_request([(labels(other), [(later_ms, 50.0)])]), limit=9)
    assert (samples.values.tolist(), samples.dropped[OTHER_SERIES]) == ([50.0], 0)


BOMBS = {
    "empty series": b"\x0a\x00",
    "series with an empty sample": b"\x0a\x02\x12\x00",
    "series with an empty label": b"\x0a\x02\x0a\x00",
    "tags in more bytes than needed": b"\x8a\x00\x00",
    "groups": b"\x7b\x7c",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_of_messages_is_refused_before_it_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BOMBS[kind] * (2 * MAX_MESSAGES // len(BOMBS[kind]) + MAX_MESSAGES)
    monkeypatch.setattr("telemetry.collect.remote_write.decoding._WRITE_REQUEST", None)  # decoding would fail
    with pytest.raises(RequestRefused):
        decoder().decode(body, limit=MAX_MESSAGES)


def test_one_series_of_many_empty_samples_is_refused() -> None:
    samples = b"\x12\x00" * (MAX_MESSAGES + 1)
    with pytest.raises(RequestRefused) as caught:
        decoder().decode(field(1, samples), limit=MAX_MESSAGES)
    assert caught.value.status == 413


def honest_labels(number: int) -> dict[str, str]:
    node, slot = divmod(number, 8)
    return labels(gpu=f"GPU-{number:08d}", pod="p" * 80) | {"Hostname": f"n{node}", "gpu": str(slot)}


def test_a_large_honest_request_is_decoded() -> None:
    count = 12_000
    sent = [(honest_labels(n), [(T0 - 15_000 * (n % 4), float(n % 90))]) for n in range(count)]
    body = write_request(sent)
    assert len(body) > 2 * MAX_MESSAGES
    assert len(decoder().decode(body, limit=MAX_MESSAGES)) == count


def test_rows_just_ahead_are_staged_for_compaction_to_judge(tmp_path: Path) -> None:
    ahead = NOW + timedelta(days=400)
    table = pa.table({"timestamp": instants(int(ahead.timestamp() * 1000)), "node": ["n1"], "gpu_temp_c": [40.0]})
    answer, rows, _ = push(tmp_path, table, "samples")
    assert (answer.status_code, len(rows)) == (204, 1)
