"""Remote write: the decoder against a plain reading of the same samples, and what it refuses."""

import math

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.server.problems import RequestRefused
from telemetry.bounds import BAD_TIME
from telemetry.collect.remote_write.decoding import STALE as STALE_REASON
from telemetry.collect.remote_write.decoding import RemoteWriteDecoder, decompress
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from tests.telemetry.collect.remote_write.encoding import STALE, block, field, labels, varint, write_request

T0 = 1_772_323_200_000


def decoder(**more: int) -> RemoteWriteDecoder:
    return RemoteWriteDecoder(SeriesCatalogue(CATALOGUE), **more)


VALUES = st.one_of(st.floats(allow_nan=False), st.just(STALE), st.integers(0, 9).map(float))
SERIES = st.tuples(
    st.sampled_from([labels(), labels(gpu="GPU-b", pod="x"), labels("node_load1"), labels("DCGM_FI_DEV_XID_ERRORS")]),
    st.lists(st.tuples(st.integers(T0, T0 + 9), VALUES), max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SERIES, max_size=6), st.booleans())
def test_samples_are_those_that_were_sent(sent, warm):
    reader = decoder(series_kept=0 if warm else 100)
    for _ in range(2):
        samples = reader.decode(write_request(sent), limit=100)
        expected = [
            (names["UUID"], at, value)
            for names, pairs in sent
            if names["__name__"].startswith("DCGM")
            for at, value in pairs
            if not math.isnan(value)
        ]
        series = samples.series
        got = [
            (series[i].gpu, at, value) for i, at, value in zip(samples.index, samples.ms, samples.values, strict=True)
        ]
        assert got == expected
        channel_values = [value for names, pairs in sent if names["__name__"].startswith("DCGM") for _, value in pairs]
        assert samples.dropped[STALE_REASON] == sum(map(math.isnan, channel_values))
        others = sum(len(pairs) for names, pairs in sent if names["__name__"] == "node_load1")
        assert samples.dropped.total() - samples.dropped[STALE_REASON] == others


def test_a_series_under_two_pods_is_one_and_absurd_times_are_dropped() -> None:
    sent = [(labels(pod="a"), [(T0, 1.0), (-5, 1.0)]), (labels(pod="b"), [(T0 + 1, 2.0), (2**62, 2.0)])]
    samples = decoder().decode(write_request(sent), limit=100)
    assert len(samples.series) == 1
    assert samples.ms.tolist() == [T0, T0 + 1]
    assert samples.dropped == {BAD_TIME: 2}


def test_of_two_metrics_for_one_channel_the_better_tells_it_until_it_is_gone() -> None:
    reader = decoder()

    def values(name: str, minute: int) -> list[float]:
        body = write_request([(labels(name), [(T0 + minute * 60_000, 1.0)])])
        return list(reader.decode(body, limit=9).values)

    edge, junction = "gpu_edge_temperature", "gpu_junction_temperature"
    assert [values(edge, 0), values(junction, 0), values(edge, 0), values(edge, 9)] == [[1.0], [1.0], [], []]
    assert [values(edge, 11), values(junction, 12), values(edge, 12)] == [[1.0], [1.0], []]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xff\xff", "the body is not a remote-write request"),
        (field(1, field(1, b"\xff\xff")), "a label cannot be decoded"),
        (field(1, field(1, field(1, b"\xff\xfe") + field(2, b"x"))), "a label cannot be decoded"),
        (write_request([({"job": "x"}, [(T0, 1.0)])]), "a series has no __name__"),
        (write_request([(labels(), [(T0 + i, 1.0) for i in range(9)])]), "the request has more than 8 samples"),
        (write_request([({f"l{i}": "v" for i in range(300)}, [])]), "a series has 300 labels"),
    ],
)
def test_garbage_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        decoder().decode(body, limit=8)


def test_a_block_is_measured_before_it_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decompress(block(b"x" * 1000), 1000) == b"x" * 1000

    def never(_: bytes) -> bytes:
        raise AssertionError

    monkeypatch.setattr(cramjam.snappy, "decompress_raw", never)
    with pytest.raises(RequestRefused, match="the body would decompress to 1000 bytes"):
        decompress(block(b"x" * 1000), 999)
    with pytest.raises(RequestRefused, match="a body of 6 bytes declares 1000000"):
        decompress(varint(1_000_000) + b"abc", 2**30)
    with pytest.raises(RequestRefused, match="not a snappy block"):
        decompress(b"\xff\xff\xff\xff\xff\xff", 10)
