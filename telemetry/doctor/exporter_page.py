"""Looking at one exporter page: a saved one, one look, or several looks over some time."""

from __future__ import annotations

import email.utils
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from telemetry.collect.series.exposition import is_openmetrics, parse_line
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.unused import unused_reason
from telemetry.dataset.channel import Channel
from telemetry.dataset.channels import is_sentinel
from telemetry.doctor.observation import ChannelSeen, Finding, Observation
from telemetry.errors import InputError
from telemetry.http import Answer, Connection, HttpError, fetch, shown_url

XID_METRICS = (XID_COUNT_METRIC,)
"""Metrics of the exporter that tell single XIDs and that predrain reads."""

MAX_LINES = 200_000
"""Lines of a page that are looked at: 3,000 GPUs' worth."""


@dataclass(slots=True)
class PageLines:
    """What a page holds.

    ``values``: value by (channel, gpu, MIG instance, part).
    ``names``: metric name by channel, the first seen.
    ``sentinels``: values that mean "not supported", by channel.
    ``stamps_ms``: time stamps on lines of devices.
    ``mig``: whether a series is of a MIG instance.
    ``nameless``: lines of a channel whose labels name no GPU or no node.
    ``faults``: lines that are not of the format, the first few.
    ``unknown``: metric names that are neither a channel nor known to be of no use.
    ``xid_metric``: whether single XIDs are told.
    ``amd``: whether the names are those of AMD's exporter.
    ``whole``: whether the page ends as a page does.
    """

    values: dict[tuple[str, str, str | None, str | None], float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    sentinels: Counter[str] = field(default_factory=Counter)
    stamps_ms: list[int] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    models: dict[str, str] = field(default_factory=dict)
    drivers: set[str] = field(default_factory=set)
    mig: bool = False
    nameless: int = 0
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    xid_metric: bool = False
    amd: bool = False
    whole: bool = True

    @property
    def gpus(self) -> set[str]:
        """GPUs that have a value of any channel."""
        return {gpu for _, gpu, _, _ in self.values}


def read_lines(body: bytes, catalogue: SeriesCatalogue) -> PageLines:
    """Read a page.

    Returns: lines that are not of the format are counted and do not hide the others.
    """
    text = body.decode("utf-8", "replace")
    openmetrics = is_openmetrics(text)
    found = PageLines(whole=openmetrics or not text or text.endswith("\n"))
    metrics = catalogue.metric_names()
    lines = text.split("\n")
    for number, raw in enumerate(lines[:MAX_LINES], start=1):
        line = raw.removesuffix("\r")
        if line.startswith("#"):
            found.xid_metric = found.xid_metric or any(name in line for name in XID_METRICS)
            continue
        try:
            sample = parse_line(line, openmetrics=openmetrics)
        except ValueError as error:
            found.fault_count += 1
            if len(found.faults) < 3:
                found.faults.append(f"line {number}: {error}")
            continue
        if sample is not None:
            _take(found, catalogue, metrics, sample.name, sample.labels, sample.value, sample.timestamp_ms)
    if len(lines) > MAX_LINES:
        found.fault_count += len(lines) - MAX_LINES
        found.faults.append(f"only the first {MAX_LINES:,} lines were looked at")
    return found


def _take(
    found: PageLines,
    catalogue: SeriesCatalogue,
    metrics: dict[str, str],
    name: str,
    labels: dict[str, str],
    value: float,
    timestamp_ms: int | None,
) -> None:
    if name in XID_METRICS:
        found.xid_metric = True
        return
    series = catalogue.identify(name, labels)
    if isinstance(series, XidCount):
        return
    if series is None:
        if name in metrics:
            found.nameless += 1
        elif unused_reason(name) is None:
            found.unknown[name] += 1
        return
    _remember(found, series, name)
    if timestamp_ms is not None:
        found.stamps_ms.append(timestamp_ms)
    if bool(is_sentinel([value])[0]):
        found.sentinels[series.channel] += 1
    elif not math.isnan(value):
        found.values[series.channel, series.gpu, series.mig_instance, series.part] = value * series.scale


def _remember(found: PageLines, series: Series, name: str) -> None:
    found.names.setdefault(series.channel, name)
    found.nodes.add(series.node)
    found.mig = found.mig or series.mig_instance is not None
    found.amd = found.amd or name.lower().startswith(("gpu_", "amd_"))
    for what, told in series.inventory:
        if what == "model":
            found.models[series.gpu] = told
        elif what == "driver":
            found.drivers.add(told)


MAX_PAGE_BYTES: Final = 64 << 20
_SKEW_S: Final = 5.0  # a Date header is whole seconds, and NTP keeps clocks far closer
_SLOW_S: Final = 5.0  # half of the usual scrape timeout of 10 s
_OLD_STAMP_S: Final = 300.0  # the look-back of Prometheus
_LOOK_EVERY_S: Final = 2.0
_FEWEST_CHANGES: Final = 2


@dataclass(frozen=True, slots=True)
class Look:
    """One page as it came.

    ``at``: when it was asked for, aware UTC.
    ``elapsed_s``: how long the answer took; None for a file.
    ``skew_s``: the exporter's clock minus ours, by the answer's Date; None where there is none.
    """

    lines: PageLines
    at: datetime
    elapsed_s: float | None = None
    skew_s: float | None = None


def observe_file(
    path: Path,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Observation:
    """Look at a saved page.

    Raises ``InputError`` if the file cannot be read, is too large, or holds no series of a device.
    """
    try:
        if path.stat().st_size > MAX_PAGE_BYTES:
            raise InputError(
                f"the file is larger than {MAX_PAGE_BYTES:,} bytes", str(path), "Give one page of an exporter."
            )
        body = path.read_bytes()
    except OSError as error:
        raise InputError(f"the page cannot be read: {error.strerror}", str(path), "Check the path.") from error
    catalogue = SeriesCatalogue(channels, mapping, default_node=path.name.split(".")[0])
    return judge_looks([Look(read_lines(body, catalogue), clock())], str(path))


def observe_page(
    connection: Connection,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    watch_s: float = 0.0,
    timeout_s: float = 10.0,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Observation:
    """Look at a page, once or for some time.

    ``watch_s``: for how long; 0: one look. Twice the exporter's interval tells it (60 s of the usual 30 s).
    Raises ``InputError`` if the page cannot be had, or holds no series of a device.
    """
    host = connection.url.split("//", 1)[-1].split("/", 1)[0].rsplit(":", 1)[0].strip("[]")
    catalogue = SeriesCatalogue(channels, mapping, default_node=host)
    count = 1 + int(watch_s // _LOOK_EVERY_S)
    looks: list[Look] = []
    for number in range(count):
        if number:
            sleep(_LOOK_EVERY_S)
        at = clock()
        try:
            answer = fetch(connection, timeout_s=timeout_s, max_bytes=MAX_PAGE_BYTES)
        except HttpError as refused:
            raise InputError(
                str(refused), shown_url(connection.url), "Check the address and the credentials."
            ) from None
        looks.append(Look(read_lines(answer.body, catalogue), at, answer.duration_s, _skew(answer, at)))
        progress(number + 1, count)
    return judge_looks(looks, shown_url(connection.url))


def judge_looks(looks: list[Look], where: str) -> Observation:
    """Say what one or more looks at a page found.

    Raises ``InputError`` if the newest page holds no series of a device.
    """
    newest = looks[-1].lines
    units = len(set().union(*(look.lines.gpus for look in looks)))
    if not newest.names:
        hint = (
            f"{newest.nameless} lines have a channel's name but no label that names GPU and node. "
            if (newest.nameless)
            else ""
        )
        raise InputError(
            "the page holds no series of a GPU",
            where,
            f"{hint}Give the page of dcgm-exporter or AMD's device-metrics-exporter, or name its labels by --mapping.",
        )
    age = _stamp_age(looks[-1])
    seen = {}
    for channel, name in newest.names.items():
        gpus = {gpu for what, gpu, _, _ in newest.values if what == channel}
        sentinels = newest.sentinels[channel]
        seen[channel] = ChannelSeen(channel, len(gpus), name, None, _constant(looks, channel), sentinels, age)
    return Observation(
        kind="exporter page",
        where=where,
        at=looks[-1].at,
        units=units,
        nodes=len(newest.nodes),
        models=dict(sorted(Counter(newest.models.values()).items())),
        channels=seen,
        xid_events=newest.xid_metric,
        facts=_facts(looks, age),
        findings=tuple(_findings(looks, age)),
        unknown=tuple(sorted(newest.unknown)),
    )


def _skew(answer: Answer, at: datetime) -> float | None:
    try:
        told = email.utils.parsedate_to_datetime(answer.headers["date"])
    except (KeyError, ValueError):
        return None
    if told.tzinfo is None:
        told = told.replace(tzinfo=UTC)
    # The header is cut to whole seconds, on average half a second ago, and was written while we waited.
    return (told - at).total_seconds() + 0.5 - answer.duration_s / 2


def _stamp_age(look: Look) -> float | None:
    stamps = look.lines.stamps_ms
    return look.at.timestamp() - max(stamps) / 1000.0 if stamps else None


def _changes(looks: list[Look]) -> list[datetime]:
    """Return when the page was seen with other values than before."""
    return [now.at for before, now in pairwise(looks) if now.lines.values != before.lines.values]


def _constant(looks: list[Look], channel: str) -> bool | None:
    if not _changes(looks):
        return None
    first = {key: value for key, value in looks[0].lines.values.items() if key[0] == channel}
    return all(look.lines.values.get(key) == value for look in looks[1:] for key, value in first.items())


def _facts(looks: list[Look], age: float | None) -> dict[str, str]:
    newest = looks[-1]
    facts = {
        "exporter": "AMD" if newest.lines.amd else "NVIDIA",
        "drivers": ", ".join(sorted(newest.lines.drivers)) or "not told",
        "time stamps on lines": "none" if age is None else f"yes, newest {age:,.0f} s old",
        "MIG instances": "yes" if newest.lines.mig else "no",
    }
    if newest.elapsed_s is not None:
        facts["answer took"] = f"{max(look.elapsed_s or 0.0 for look in looks):.2f} s"
    if newest.skew_s is not None:
        facts["clock"] = f"{newest.skew_s:+.1f} s against ours"
    if len(looks) > 1:
        changes = _changes(looks)
        facts["repeated pages"] = f"{len(looks) - 1 - len(changes)} of {len(looks) - 1}"
        if len(changes) >= _FEWEST_CHANGES:
            gaps = [(b - a).total_seconds() for a, b in pairwise(changes)]
            facts["exporter's interval"] = f"about {statistics.median(gaps):.0f} s"
    return facts


def _findings(looks: list[Look], age: float | None) -> list[Finding]:
    newest, lines = looks[-1], looks[-1].lines
    found = []
    if lines.fault_count:
        first = lines.faults[0]
        found.append(
            Finding(f"{lines.fault_count} lines are not of the format: {first}", "Update the exporter, or report it.")
        )
    if not lines.whole:
        found.append(Finding("the page ends inside a line", "Save or fetch it again: it is cut short."))
    if lines.nameless:
        found.append(
            Finding(
                f"{lines.nameless} lines of channels name no GPU or no node",
                "Name the labels that do in a mapping file (--mapping, `labels:`).",
            )
        )
    if newest.skew_s is not None and abs(newest.skew_s) > _SKEW_S:
        found.append(
            Finding(f"the exporter's clock is {newest.skew_s:+.0f} s off ours", "Check time synchronisation there.")
        )
    slowest = max(look.elapsed_s or 0.0 for look in looks)
    if slowest > _SLOW_S:
        found.append(
            Finding(
                f"the page took {slowest:.1f} s",
                "Look at the node: a slow driver precedes a GPU that falls off the bus. Raise the scrape timeout "
                "only if it always was so.",
            )
        )
    if age is not None and age > _OLD_STAMP_S:
        found.append(Finding(f"the newest time stamp on a line is {age:,.0f} s old", "Restart the exporter."))
    if sum(lines.sentinels.values()):
        names = ", ".join(sorted(lines.sentinels))
        found.append(
            Finding(f"values that mean not supported are passed on ({names}); they are read as null", problem=False)
        )
    if not lines.xid_metric and not lines.amd:
        found.append(
            Finding(
                "single XIDs are not told, only the last one",
                "Add `DCGM_EXP_XID_ERRORS_COUNT, gauge, XIDs of the last window by number` to the counter file, and "
                "follow the kernel log (`predrain collect kernel-log`).",
                problem=False,
            )
        )
    if len(looks) > _FEWEST_CHANGES and not _changes(looks):
        span = (looks[-1].at - looks[0].at).total_seconds()
        found.append(
            Finding(
                f"no value changed within {span:.0f} s",
                "Watch for longer than the exporter's interval (30 s by default); if nothing changes then, it hangs.",
                problem=span > 120,
            )
        )
    return found
