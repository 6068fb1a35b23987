"""Line-by-line parser of the Prometheus text format 0.0.4 and OpenMetrics; a bad line does not affect the others."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, Generic, NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from telemetry.bounds import BAD_TIME, EARLIEST_MS, LATEST_MS

END_OF_PAGE: Final = "# EOF"
BAD_LINE: Final = "line that cannot be read"
TOO_LONG: Final = "line over the length limit"
_EXEMPLAR: Final = re.compile(r' # \{[^"]*(?:"(?:[^"\\]|\\.)*"[^"]*)*\}[^"]*\Z')
_LINE_CHARACTERS: Final = 16_384

_Identity = TypeVar("_Identity")


class Sample(NamedTuple):
    """A parsed line; ``timestamp_ms`` is Unix ms, None if the line has no timestamp."""

    name: str
    labels: dict[str, str]
    value: float
    timestamp_ms: int | None


def is_openmetrics(page: str) -> bool:
    """Return whether a page of unknown content type is OpenMetrics, by its line ``# EOF``."""
    return page.rstrip("\r\n ").rpartition("\n")[2].rstrip("\r") == END_OF_PAGE or f"\n{END_OF_PAGE}\n" in page


def parse_line(line: str, *, openmetrics: bool = False) -> Sample | None:
    """Parse a line; None for comments and blank lines. Raises ValueError if it is malformed."""
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    if " # {" in line:
        line = _EXEMPLAR.sub("", line)
    after_labels = line[line.rfind("}") + 1 :] if line.endswith(tuple("0123456789+-fFnNyY.")) and "}" in line else line
    if len(after_labels.split()) > (2 if after_labels is not line else 3):
        raise ValueError(f"text after the timestamp: {line[:60]!r}")
    try:
        samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise ValueError(f"{str(error)[:100]}: {line[:60]!r}") from error
    if len(samples) != 1:
        raise ValueError(f"not a sample: {line[:60]!r}")
    sample = samples[0]
    try:
        value = float(sample.value)
    except OverflowError:  # the library parses hundreds of digits as an int
        raise ValueError(f"value out of range: {line[:60]!r}") from None
    stamp = None
    if sample.timestamp is not None:
        # The library divides every timestamp by 1000, but OpenMetrics has seconds.
        written = float(sample.timestamp) * 1000.0
        if not math.isfinite(written) or abs(written) > 1e18:
            raise ValueError(f"timestamp out of range: {line[:60]!r}")
        stamp = _whole_ms(written) if openmetrics else round(written)
    return Sample(sample.name, dict(sample.labels), value, stamp)


def _whole_ms(seconds: float) -> int:
    return math.floor(round(seconds * 1000.0, 3))


class LineReader(Generic[_Identity]):
    """Parses lines and caches the identity of each series by its text, because the library takes 0.07 ms a line.

    ``identify`` is called once for each cached series. The cache is cleared when its text exceeds ``max_bytes``.
    """

    def __init__(self, identify: Callable[[str, dict[str, str]], _Identity], max_bytes: int = 32 << 20) -> None:
        self._identify = identify
        self.max_bytes = max_bytes
        self._known: dict[str, _Identity] = {}
        self._known_bytes = 0

    def read(
        self,
        lines: Iterable[str],
        *,
        openmetrics: bool,
        problems: Counter[str],
        examples: dict[str, str] | None = None,
    ) -> Iterator[tuple[_Identity, float, int | None]]:
        """Yield identity, value and timestamp (Unix ms) of each line; unusable lines are counted into ``problems``.

        Timestamps outside :mod:`telemetry.bounds` are a problem. ``examples`` collects one line for each problem.
        """

        def leave_out(number: int, problem: str, example: object) -> None:
            problems[problem] += 1
            if examples is not None:
                examples.setdefault(problem, f"line {number}: {example}")

        for number, line in enumerate(lines, start=1):
            if not line or line.startswith("#"):
                continue
            if len(line) > _LINE_CHARACTERS:
                leave_out(number, TOO_LONG, line[:60])
                continue
            try:
                reading = self._read_line(line, openmetrics=openmetrics)
            except ValueError as error:
                leave_out(number, BAD_LINE, error)
                continue
            if reading is None:
                continue
            if reading[2] is None or EARLIEST_MS <= reading[2] < LATEST_MS:
                yield reading
            else:
                leave_out(number, BAD_TIME, line[-60:])

    def _read_line(self, line: str, *, openmetrics: bool) -> tuple[_Identity, float, int | None] | None:
        head, brace, after_labels = line.rpartition("} ")
        if brace and "_" not in after_labels and head in self._known:
            value, _, stamp = after_labels.partition(" ")
            # Fall through to the parser, which reports why the number is invalid.
            with suppress(ValueError, OverflowError):
                ms = None if not stamp else _whole_ms(float(stamp)) if openmetrics else int(stamp)
                return self._known[head], float(value), ms
        sample = parse_line(line, openmetrics=openmetrics)
        if sample is None:
            return None
        identity = self._identify(sample.name, sample.labels)
        if brace and " # {" not in head and _is_series(head, sample):
            self._remember(head, identity)
        return identity, sample.value, sample.timestamp_ms

    def _remember(self, head: str, identity: _Identity) -> None:
        if self._known_bytes + len(head) > self.max_bytes:
            self._known.clear()
            self._known_bytes = 0
        self._known[head] = identity
        self._known_bytes += len(head)


def _is_series(head: str, sample: Sample) -> bool:
    """Return whether ``head`` is the whole series: the last brace may be inside a label value."""
    try:
        series = parse_line(head + "} 0")
    except ValueError:
        return False
    return series is not None and (series.name, series.labels) == (sample.name, sample.labels)
