"""Decoder of Prometheus remote write 1.0: from a protobuf body to samples of known series.

The protobuf descriptor is built here, with labels declared as bytes. A series is recognized by the digest of these
bytes, so its labels are decoded once rather than in each request.
"""

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from foundation.instants import to_ms
from foundation.server.problems import RequestRefused
from telemetry.bounds import BAD_TIME, EARLIEST_MS, LATEST_MS
from telemetry.collect.series.batch import OTHER_SERIES
from telemetry.collect.series.identity import XID_COUNT_METRICS, Series, SeriesCatalogue, XidCount

# A snappy copy of 3 bytes expands to 64 at most, which bounds the ratio of a valid block.
_MAX_GROWTH = 22

_LOG = logging.getLogger(__name__)

STALE_BITS: Final = 0x7FF0000000000002
"""Bits of the NaN that marks a series as stale (Prometheus' ``StaleNaN``)."""

STALE: Final = "stale marker"
LINK: Final = "of a single NVLink"
"""Reasons why :class:`RemoteWriteDecoder` drops samples."""

_BETWEEN_LABELS: Final = b"\xff\xff\xff"
# These bytes can neither follow a label (their tag has an unknown wire type) nor occur in its text (invalid UTF-8), so
# the same bytes split into other labels have another digest or cannot be decoded.
_SERIES_KEPT: Final = 600_000
_CLAIM_MS: Final = 600_000  # a metric absent for this long (a changed exporter) yields to a lower-priority one
_LABEL_LIMIT: Final = 256
_LABEL_BYTES: Final = 65_536

MAX_MESSAGES: Final = 1_000_000
"""Maximum series, labels and samples of a request: a 2-byte message takes 50 bytes in memory."""

_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}


def decompress(block: bytes, limit: int) -> bytes:
    """Decompress a snappy block; raises ``RequestRefused``: 413 if its size exceeds ``limit``, 400 if corrupt."""
    try:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > limit:
            raise RequestRefused.too_large(f"the body would decompress to {size} bytes: send at most {limit}")
        if size > len(block) * _MAX_GROWTH:
            raise RequestRefused.unreadable(f"a body of {len(block)} bytes declares {size}")
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise RequestRefused.unreadable(f"the body is not a snappy block: {error}") from error


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a request, with the numbers of dropped ones by reason; ``index`` refers to ``series``."""

    series: list[Series | XidCount]
    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    dropped: Counter[str]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(slots=True)
class _Claim:
    """Rank of the metric in use for a channel of a GPU, and the time of its last sample (Unix ms).

    Two metrics of a channel (AMD's junction and edge temperatures) may come in different requests and would conflict.
    """

    rank: int
    ms: int = 0

    def refuse(self, rank: int, last_ms: int, now_ms: int) -> str | None:
        """Claim the channel for samples of ``rank`` up to ``last_ms``; return the reason to drop them, or None."""
        if not EARLIEST_MS <= last_ms < LATEST_MS:
            return BAD_TIME if rank > self.rank else None
        if rank > self.rank and last_ms - self.ms <= _CLAIM_MS:
            return OTHER_SERIES
        # A sender's clock that is ahead must not extend the claim into the future.
        self.rank, self.ms = rank, max(self.ms, min(last_ms, now_ms))
        return None


class _Known(NamedTuple):
    number: int
    rank: int
    claim: _Claim


class RemoteWriteDecoder:
    """Decodes requests; the cache of series identities (100 bytes each) is cleared above ``series_kept``."""

    def __init__(
        self,
        catalogue: SeriesCatalogue,
        *,
        series_kept: int = _SERIES_KEPT,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._catalogue = catalogue
        self._metrics = {*catalogue.metric_names(), *XID_COUNT_METRICS}
        self._max_series = series_kept
        self._clock = clock
        self._lock = threading.Lock()
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        # New objects: pending samples refer to the list that they were decoded with.
        self._series: list[Series | XidCount] = []
        self._digests: dict[bytes, _Known | str] = {}  # or the reason to leave it out
        self._by_series: dict[Series | XidCount, _Known] = {}
        self._claims: dict[tuple[str, str, str | None], _Claim] = {}

    def decode(self, body: bytes, *, limit: int) -> Samples:
        """Decode a ``prometheus.WriteRequest``.

        Raises ``RequestRefused`` if the body is malformed, or exceeds ``limit`` samples or :data:`MAX_MESSAGES`.
        """
        if len(body) > 2 * MAX_MESSAGES:  # a message takes 2 bytes or more
            check_messages(body, MAX_MESSAGES)
        request = _WRITE_REQUEST()
        try:
            request.ParseFromString(body)
        except DecodeError as error:
            raise RequestRefused.unreadable(f"the body is not a remote-write request: {error}") from error
        if sum(len(series.samples) for series in request.timeseries) > limit:
            raise RequestRefused.unreadable(f"the request has more than {limit} samples: send smaller requests")
        dropped: Counter[str] = Counter()
        index: list[int] = []
        ms: list[int] = []
        values: list[float] = []
        now_ms = to_ms(self._clock())
        with self._lock:
            if len(self._digests) > self._max_series:
                self._forget()
            digests, new = self._observe(request)
            for series, digest in zip(request.timeseries, digests, strict=True):
                samples = series.samples
                known = self._digests.get(digest)
                if known is None:
                    # A changed node label clears the cache, so series outside of ``new`` may be unknown too.
                    known, may_keep = self._learn(new.get(digest) or _labels(list(series.labels), _LabelCache()))
                    if may_keep:
                        self._digests[digest] = known
                if isinstance(known, str):
                    dropped[known] += len(samples)
                    continue
                if not samples:
                    continue
                number, rank, claim = known
                last = samples[-1]
                reason = claim.refuse(rank, last.timestamp, now_ms)
                if reason is not None:
                    dropped[reason] += len(samples)
                elif len(samples) == 1:  # the usual case: one scrape
                    index.append(number)
                    ms.append(last.timestamp)
                    values.append(last.value)
                else:
                    index += [number] * len(samples)
                    ms += [sample.timestamp for sample in samples]
                    values += [sample.value for sample in samples]
            book = self._series
        times, numbers = np.array(ms, np.int64), np.array(values, np.float64)
        stale = numbers.view(np.int64) == STALE_BITS
        implausible = ~stale & ((times < EARLIEST_MS) | (times >= LATEST_MS))
        dropped.update({STALE: int(stale.sum()), BAD_TIME: int(implausible.sum())})
        keep = ~(stale | implausible)
        return Samples(book, np.array(index, np.int32)[keep], times[keep], numbers[keep], +dropped)

    def _observe(self, request: Any) -> tuple[list[bytes], dict[bytes, dict[str, str]]]:
        """Return the digest of each series of a request, and the labels of new series by digest.

        The labels of all new series are evidence for the choice of node label, before any is identified.
        """
        digests: list[bytes] = []
        new: dict[bytes, dict[str, str]] = {}
        cache = _LabelCache()
        for series in request.timeseries:
            encoded = list(series.labels)
            digest = hashlib.blake2b(_BETWEEN_LABELS.join(encoded), digest_size=16).digest()
            digests.append(digest)
            if digest not in self._digests and digest not in new:
                new[digest] = _labels(encoded, cache)
        if new:
            revision = self._catalogue.nodes.revision
            self._catalogue.observe(labels for labels in new.values() if labels.get("__name__") in self._metrics)
            if self._catalogue.nodes.revision != revision:
                self._forget()
            self._catalogue.report_nodes()
        return digests, new

    def _learn(self, labels: dict[str, str]) -> tuple[_Known | str, bool]:
        """Return a series or the reason to leave it out, and whether to cache that: its node may become known later."""
        name = labels.get("__name__", "")
        if not name:
            raise RequestRefused.unreadable("a series has no __name__")
        series = self._catalogue.identify(name, labels)
        if series is None:
            return self._catalogue.left_out_reason(name), name not in self._metrics
        return self._remember(name, series), True

    def _remember(self, name: str, series: Series | XidCount) -> _Known | str:
        if isinstance(series, Series) and series.part is not None:
            self._warn_of_links(name)
            return LINK
        # Series that differ only in workload labels are one; an entry for every pod would grow without bound.
        known = self._by_series.get(series)
        if known is None:
            rank, claim = 0, _Claim(0)
            if isinstance(series, Series):
                rank, key = series.rank, (series.gpu, series.channel, series.mig_instance)
                claim = self._claims.setdefault(key, _Claim(rank))
            known = self._by_series[series] = _Known(len(self._series), rank, claim)
            self._series.append(series)
        return known

    def _warn_of_links(self, name: str) -> None:
        # Prometheus may split the links of one GPU over several requests: the sum is unknown when the first one must be
        # answered, and a partial sum of counters would look like a reset.
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s of single NVLink links is left out: let the exporter give the field's total of the GPU, or send a "
                "recording rule `sum by (UUID, Hostname) (%s)` under that name",
                name,
                name,
            )


def check_messages(body: bytes, limit: int) -> None:
    """Raise ``RequestRefused`` if a request has more than ``limit`` series, labels and samples, without decoding it.

    Most corrupt bodies pass; the decoder reports the error.
    """
    count = 0
    ends = [len(body)]
    position, size = 0, len(body)
    while True:
        while position >= ends[-1]:
            ends.pop()
            if not ends:
                return
        tag, position = _varint(body, position, size)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length, position = _varint(body, position, size)
            count += 1
            if count > limit:
                raise RequestRefused.too_large(f"the request holds more than {limit} series, labels and samples")
            if len(ends) == 1 and tag >> 3 == 1:  # a series: its labels and samples count, too
                ends.append(min(position + length, size))
            else:
                position += length
        elif kind == 0:
            _, position = _varint(body, position, size)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise RequestRefused.unreadable(f"the request has a field of wire type {kind}")


def _varint(body: bytes, position: int, size: int) -> tuple[int, int]:
    """Return a varint and the position after it; truncated at the end of the body."""
    number = shift = 0
    while position < size and shift < 70:
        byte = body[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return number, position


class _LabelCache(dict[bytes, tuple[str, str]]):
    """Decoded labels of one request, by encoded label; its series share most of their labels."""

    def __missing__(self, encoded: bytes) -> tuple[str, str]:
        label = _LABEL()
        try:
            label.ParseFromString(encoded)
        except DecodeError as error:
            raise RequestRefused.unreadable(f"a label cannot be decoded: {error}") from error
        self[encoded] = (label.name, label.value)
        return self[encoded]


def _labels(encoded: list[bytes], cache: _LabelCache) -> dict[str, str]:
    if len(encoded) > _LABEL_LIMIT:
        raise RequestRefused.unreadable(f"a series has {len(encoded)} labels")
    if sum(map(len, encoded)) > _LABEL_BYTES:
        raise RequestRefused.unreadable(f"the labels of a series are longer than {_LABEL_BYTES} bytes")
    return dict(map(cache.__getitem__, encoded))


def _messages() -> tuple[Any, Any]:
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="remote_write.proto", package="predrain", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None]) -> None:
        descriptor = file.message_type.add(name=name)
        for number, (title, label, type_, of) in enumerate(fields, 1):
            descriptor.field.add(name=title, number=number, label=label, type=type_, type_name=of)

    optional, repeated = kind.LABEL_OPTIONAL, kind.LABEL_REPEATED
    message("Label", ("name", optional, kind.TYPE_STRING, None), ("value", optional, kind.TYPE_STRING, None))
    message("Sample", ("value", optional, kind.TYPE_DOUBLE, None), ("timestamp", optional, kind.TYPE_INT64, None))
    message(
        "TimeSeries",
        ("labels", repeated, kind.TYPE_BYTES, None),  # decoded only for new series
        ("samples", repeated, kind.TYPE_MESSAGE, ".predrain.Sample"),
    )
    message("WriteRequest", ("timeseries", repeated, kind.TYPE_MESSAGE, ".predrain.TimeSeries"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = [pool.FindMessageTypeByName(f"predrain.{name}") for name in ("WriteRequest", "Label")]
    request, label = (message_factory.GetMessageClass(kind) for kind in kinds)
    return request, label


_WRITE_REQUEST, _LABEL = _messages()
