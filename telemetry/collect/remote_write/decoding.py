"""Prometheus remote write 1.0: from a protobuf body to samples of the series that are channels.

The message is known to the protobuf library through a descriptor that is built here, in which the labels of a series
are plain bytes. A series is then recognised by the digest of these bytes, and its labels are decoded once in its life
rather than with each sample.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from telemetry.collect.remote_write.problems import Refused
from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount

# A copy of three bytes makes 64 at most, so that no honest block grows more.
_MOST_GROWTH = 22

_LOG = logging.getLogger(__name__)

STALE_BITS: Final = 0x7FF0000000000002
"""The NaN with which Prometheus ends a series (model/value, StaleNaN)."""

STALE: Final = "stale_marker"
NOT_A_CHANNEL: Final = "not_a_channel"
LINK: Final = "nvlink_link"
BAD_TIME: Final = "time"
OTHER_METRIC: Final = "told_by_another_metric"
"""Why a sample is dropped: the reasons that :class:`RemoteWriteDecoder` counts."""

_EARLIEST_MS: Final = 946_684_800_000  # 2000-01-01: earlier instants are counters taken for clocks
_LATEST_MS: Final = 7_258_118_400_000  # 2200-01-01
_SERIES_KEPT: Final = 600_000
_CLAIM_MS: Final = 600_000  # a metric that was not seen for this long (the exporter was changed) gives way to the next
_LABEL_LIMIT: Final = 256
_LABEL_BYTES: Final = 65_536


def decompress(block: bytes, limit: int) -> bytes:
    """Decompress a snappy block; raises ``Refused``: 413 if it announces over ``limit``, 400 if it is damaged."""
    try:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > limit:
            raise Refused.too_large(f"the body would decompress to {size} bytes: send at most {limit}")
        if size > len(block) * _MOST_GROWTH:
            raise Refused.unreadable(f"a body of {len(block)} bytes announces {size}")
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise Refused.unreadable(f"the body is no snappy block: {error}") from error


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one request, and how many are not among them, by reason; ``series`` is what ``index`` counts in."""

    series: list[Series | XidCount]
    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    dropped: Counter[str]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(slots=True)
class _Claim:
    """Which of the metrics that may be one channel of a GPU is taken for it, and until when it was (ms).

    Two of them (AMD's junction and edge temperatures) come in different requests, and would contradict each other.
    """

    rank: int
    ms: int = 0


class _Known(NamedTuple):
    number: int
    rank: int
    claim: _Claim


class RemoteWriteDecoder:
    """Decodes requests; keeps what up to ``series_kept`` series are (some 100 bytes each), then learns them again."""

    def __init__(self, catalogue: SeriesCatalogue, *, series_kept: int = _SERIES_KEPT) -> None:
        self._catalogue = catalogue
        self._kept = series_kept
        self._lock = threading.Lock()
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        # New objects: samples that wait to be written refer to the list that they were decoded with.
        self._series: list[Series | XidCount] = []
        self._digests: dict[bytes, _Known | str] = {}  # or why it is left out
        self._own: dict[Series | XidCount, _Known] = {}
        self._claims: dict[tuple[str, str, str | None], _Claim] = {}

    def decode(self, body: bytes, *, limit: int) -> Samples:
        """Decode a ``prometheus.WriteRequest``; raises ``Refused`` if it is none, or has over ``limit`` samples."""
        request = _WRITE_REQUEST()
        try:
            request.ParseFromString(body)
        except DecodeError as error:
            raise Refused.unreadable(f"the body is no remote-write request: {error}") from error
        if sum(len(series.samples) for series in request.timeseries) > limit:
            raise Refused.unreadable(f"the request holds more than {limit} samples: send smaller ones")
        dropped: Counter[str] = Counter()
        index: list[int] = []
        ms: list[int] = []
        values: list[float] = []
        with self._lock:
            if len(self._digests) > self._kept:
                self._forget()
            for series in request.timeseries:
                samples = series.samples
                digest = hashlib.blake2b(b"".join(series.labels), digest_size=16).digest()
                known = self._digests.get(digest)
                if known is None:
                    known = self._digests[digest] = self._learn(series.labels)
                if isinstance(known, str):
                    dropped[known] += len(samples)
                    continue
                if not samples:
                    continue
                number, rank, claim = known
                if rank > claim.rank and samples[-1].timestamp - claim.ms <= _CLAIM_MS:
                    dropped[OTHER_METRIC] += len(samples)
                    continue
                claim.rank, claim.ms = rank, max(claim.ms, samples[-1].timestamp)
                index += [number] * len(samples)
                ms += [sample.timestamp for sample in samples]
                values += [sample.value for sample in samples]
            book = self._series
        times, numbers = np.array(ms, np.int64), np.array(values, np.float64)
        stale = numbers.view(np.int64) == STALE_BITS
        wrong = ~stale & ((times < _EARLIEST_MS) | (times >= _LATEST_MS))
        dropped.update({STALE: int(stale.sum()), BAD_TIME: int(wrong.sum())})
        keep = ~(stale | wrong)
        return Samples(book, np.array(index, np.int32)[keep], times[keep], numbers[keep], +dropped)

    def _learn(self, encoded: Any) -> _Known | str:
        labels = _labels(encoded)
        name = labels.get("__name__", "")
        if not name:
            raise Refused.unreadable("a series has no __name__")
        series = self._catalogue.identify(name, labels)
        if series is None:
            return NOT_A_CHANNEL
        if isinstance(series, Series) and series.part is not None:
            self._warn_of_links(name)
            return LINK
        # Series that differ in their pod only are one: remembering each of a job's pods would never end.
        if series not in self._own:
            rank, claim = 0, _Claim(0)
            if isinstance(series, Series):
                rank, key = series.rank, (series.gpu, series.channel, series.mig_instance)
                claim = self._claims.setdefault(key, _Claim(rank))
            self._own[series] = _Known(len(self._series), rank, claim)
            self._series.append(series)
        return self._own[series]

    def _warn_of_links(self, name: str) -> None:
        # Prometheus spreads the links of one GPU over requests that come at different times: their sum is not known
        # when the first of them must be answered, and a part of a counter's sum would look like a reset.
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s of single NVLink links is left out: let the exporter give the field's total of the GPU, or send a "
                "recording rule `sum by (UUID, Hostname) (%s)` under that name",
                name,
                name,
            )


def _labels(encoded: Any) -> dict[str, str]:
    if len(encoded) > _LABEL_LIMIT:
        raise Refused.unreadable(f"a series has {len(encoded)} labels")
    if sum(map(len, encoded)) > _LABEL_BYTES:
        raise Refused.unreadable(f"the labels of a series are longer than {_LABEL_BYTES} bytes")
    labels = {}
    for content in encoded:
        label = _LABEL()
        try:
            label.ParseFromString(content)
        except DecodeError as error:
            raise Refused.unreadable(f"a label cannot be decoded: {error}") from error
        labels[label.name] = label.value
    return labels


def _messages() -> tuple[Any, Any]:
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="remote_write.proto", package="predrain", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None]) -> None:
        made = file.message_type.add(name=name)
        for number, (title, label, type_, of) in enumerate(fields, 1):
            made.field.add(name=title, number=number, label=label, type=type_, type_name=of)

    one, many = kind.LABEL_OPTIONAL, kind.LABEL_REPEATED
    message("Label", ("name", one, kind.TYPE_STRING, None), ("value", one, kind.TYPE_STRING, None))
    message("Sample", ("value", one, kind.TYPE_DOUBLE, None), ("timestamp", one, kind.TYPE_INT64, None))
    message(
        "TimeSeries",
        ("labels", many, kind.TYPE_BYTES, None),  # Label, decoded only for a series that is new
        ("samples", many, kind.TYPE_MESSAGE, ".predrain.Sample"),
    )
    message("WriteRequest", ("timeseries", many, kind.TYPE_MESSAGE, ".predrain.TimeSeries"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = [pool.FindMessageTypeByName(f"predrain.{name}") for name in ("WriteRequest", "Label")]
    request, label = (message_factory.GetMessageClass(kind) for kind in kinds)
    return request, label


_WRITE_REQUEST, _LABEL = _messages()
