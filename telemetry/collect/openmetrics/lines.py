"""Lines ``series value timestamp`` of a dump, by the gigabyte.

``promtool tsdb dump-openmetrics`` and files for ``promtool tsdb create-blocks-from openmetrics`` write seconds and end
in ``# EOF``; ``promtool tsdb dump`` (the only one of older promtools) writes milliseconds. The first time stamp tells
which: as milliseconds, 1e11 is the year 1973, as seconds it is 5138.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.exposition import Sample, parse_line
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.unused import unused_reason
from telemetry.errors import InputError

NO_TIME: Final = "line without a time stamp"
BAD_LINE: Final = "line that cannot be read"
BAD_TIME: Final = "time stamp before 2000 or after 2200"
"""Why a line is left out, beside the reasons of metrics that are not ours."""

_COMPRESSION: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_BLOCK_BYTES: Final = 8 * 2**20
_LONGEST_LINE: Final = 2**20
_HEADS_KEPT: Final = 100_000
_SECONDS_BELOW: Final = 1e11
_EARLIEST_MS: Final = 946_684_800_000
_LATEST_MS: Final = 7_258_118_400_000
_NUMERIC: Final = b"0123456789+-.eE"
_REST: Final = re.compile(rb" [^ #\r]+ [^ #\r]+\Z")


class _Stream(Protocol):
    def read(self, size: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Samples of some consecutive lines.

    ``index``: number of the series in :attr:`DumpReader.series`; shape (n,).
    ``ms``: milliseconds since 1970, UTC; shape (n,).
    ``values``: shape (n,).
    """

    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    bytes_read: int


class DumpReader:
    """Reads one dump, block by block, in bounded memory.

    ``path``: plain text, or compressed: ``.gz``, ``.zst``, ``.bz2``, ``.lz4``.

    The text before a line's number is looked up; only one that is new goes through the grammar, and so does a line
    whose rest is not simply two numbers.
    """

    def __init__(self, path: Path, catalogue: SeriesCatalogue) -> None:
        self.path = path
        self.series: list[Series | XidCount] = []
        self.left_out: Counter[str] = Counter()
        self.lines = 0
        self._catalogue = catalogue
        self._ours = catalogue.metric_names()
        self._heads: dict[bytes, int] = {}
        self._numbers: dict[Series | XidCount, int] = {}
        self._reasons: list[str] = []
        self._reason_numbers: dict[str, int] = {}
        self._in_seconds: bool | None = None
        self._bad_line: tuple[int, str] | None = None

    @property
    def first_fault(self) -> str | None:
        """The first line that could not be read, for the user; None if all could."""
        return None if self._bad_line is None else f"line {self._bad_line[0]}: {self._bad_line[1]}"

    def blocks(self) -> Iterator[Block]:
        """Yield the samples of our series.

        Raises ``InputError`` if the file does not exist, its compression is damaged or cut, or a line is longer than 1
        MiB.
        """
        read = 0
        carry = b""
        with self._open() as stream:
            while True:
                chunk = self._read(stream)
                read += len(chunk)
                text = carry + chunk
                cut = text.rfind(b"\n") + 1 if chunk else len(text)
                if not chunk and not text:
                    return
                if len(text) - cut > _LONGEST_LINE:
                    number = self.lines + text.count(b"\n") + 1
                    raise InputError(
                        f"a line is longer than {_LONGEST_LINE} bytes",
                        f"{self.path}, line {number}",
                        "Give a dump of lines `name{labels} value timestamp`.",
                    )
                carry = text[cut:]
                if cut:
                    yield self._block(text[:cut].split(b"\n"), read)
                if not chunk:
                    return

    def _open(self) -> pa.NativeFile:
        compression = _COMPRESSION.get(self.path.suffix)
        try:
            return pa.input_stream(str(self.path), compression=compression)
        except FileNotFoundError:
            raise InputError("the file does not exist", str(self.path), "Give the path of a dump.") from None
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"the file cannot be read: {error}", str(self.path), "Give a file.") from error

    def _read(self, stream: _Stream) -> bytes:
        try:
            return stream.read(_BLOCK_BYTES)
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"the file is damaged or cut: {error}", str(self.path), "Make the dump again; nothing has landed of it."
            ) from error

    def _block(self, lines: list[bytes], read: int) -> Block:
        if len(self._heads) > _HEADS_KEPT:  # a dump with that many series: learn them anew as they come
            self._heads.clear()
        index: list[int] = []
        value_texts: list[bytes] = []
        time_texts: list[bytes] = []
        odd: list[tuple[int, float, int]] = []
        heads = self._heads
        for line in lines:
            self.lines += 1
            parts = line.rsplit(b" ", 2)
            number = heads.get(parts[0]) if len(parts) == 3 else None
            if number is None:
                number = self._learn(line, parts, odd)
                if number is None:
                    continue
            if number < 0:
                self.left_out[self._reasons[~number]] += 1
                continue
            index.append(number)
            value_texts.append(parts[1])
            time_texts.append(parts[2])
        if lines and not lines[-1]:
            self.lines -= 1  # what follows the last line end is no line
        numbers, times, values = self._numbers_of(index, time_texts, value_texts, odd)
        if odd:
            numbers = np.append(numbers, np.array([each[0] for each in odd], np.int32))
            values = np.append(values, np.array([each[1] for each in odd]))
            times = np.append(times, np.array([each[2] for each in odd], np.int64))
        inside = (times >= _EARLIEST_MS) & (times < _LATEST_MS)
        if not inside.all():
            self.left_out[BAD_TIME] += int((~inside).sum())
            numbers, times, values = numbers[inside], times[inside], values[inside]
        return Block(numbers, times, values, read)

    def _numbers_of(
        self, index: list[int], times: list[bytes], values: list[bytes], odd: list[tuple[int, float, int]]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        plain = not (b"".join(values).translate(None, _NUMERIC + b"NaInf") or b"".join(times).translate(None, _NUMERIC))
        if plain:
            try:
                numbers = np.fromiter(map(float, values), np.float64, len(values))
                if self._in_seconds:
                    # Time stamps finer than a millisecond are cut towards the past, as the grammar does it.
                    seconds = np.fromiter(map(float, times), np.float64, len(times))
                    ms = np.floor(np.round(seconds * 1000, 3)).astype(np.int64)
                else:
                    ms = np.fromiter(map(int, times), np.int64, len(times))
            except (ValueError, OverflowError):
                plain = False
        if plain:
            return np.array(index, np.int32), ms, numbers
        good: list[tuple[int, float, int]] = []
        for number, time, value in zip(index, times, values, strict=True):
            sample = self._parse(b"x " + value + b" " + time)
            if sample is not None:
                self._take(sample, number, good)
        odd.extend(good)
        return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.float64)

    def _learn(self, line: bytes, parts: list[bytes], odd: list[tuple[int, float, int]]) -> int | None:
        """Return the number of a new series, or None if the line is done with: odd, a comment, or of no use."""
        stripped = line.strip()
        if not stripped or stripped.startswith(b"#"):
            return None
        if self._in_seconds is None:
            self._in_seconds = _is_seconds(stripped.rsplit(None, 1)[-1])
        sample = self._parse(line)
        if sample is None:
            return None
        number = self._number(sample.name, sample.labels)
        if (
            len(parts) == 3
            and b" # {" not in line
            and _REST.fullmatch(line[len(parts[0]) :])
            and _is_head(parts[0], sample)
        ):
            self._heads[parts[0]] = number
            return number
        self._take(sample, number, odd)
        return None

    def _take(self, sample: Sample, number: int, odd: list[tuple[int, float, int]]) -> None:
        if number < 0:
            self.left_out[self._reasons[~number]] += 1
        elif sample.timestamp_ms is None:
            self.left_out[NO_TIME] += 1
        else:
            odd.append((number, sample.value, sample.timestamp_ms))

    def _parse(self, line: bytes) -> Sample | None:
        try:
            return parse_line(line.decode(), openmetrics=bool(self._in_seconds))
        except (ValueError, UnicodeDecodeError) as error:
            self._fault(error)
            return None

    def _fault(self, error: Exception) -> None:
        self.left_out[BAD_LINE] += 1
        if self._bad_line is None:
            self._bad_line = (self.lines, str(error))

    def _number(self, name: str, labels: dict[str, str]) -> int:
        """Return a series' number; below 0 it is the complement of the reason's."""
        found = self._catalogue.identify(name, labels)
        if found is not None:
            if found not in self._numbers:
                self._numbers[found] = len(self.series)
                self.series.append(found)
            return self._numbers[found]
        if name == XID_COUNT_METRIC or name in self._ours:
            reason = f"{name}: its labels name no GPU or no node"
        else:
            reason = f"{name}: {unused_reason(name) or 'no channel of ours'}"
        if reason not in self._reason_numbers:
            self._reason_numbers[reason] = len(self._reasons)
            self._reasons.append(reason)
        return ~self._reason_numbers[reason]


def _is_head(text: bytes, sample: Sample) -> bool:
    """Whether a text before the numbers is the whole series of a sample: a label's value may hold blanks."""
    try:
        series = parse_line(text.decode() + " 0")
    except (ValueError, UnicodeDecodeError):
        return False
    return series is not None and (series.name, series.labels) == (sample.name, sample.labels)


def _is_seconds(text: bytes) -> bool:
    try:
        return abs(float(text)) < _SECONDS_BELOW
    except ValueError:
        return True
