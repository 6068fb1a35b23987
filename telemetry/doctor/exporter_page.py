"""Looking at one exporter page, saved or served."""

from __future__ import annotations

import email.utils
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from telemetry.collect.series.exposition import Sample, is_openmetrics, parse_line
from telemetry.collect.series.identity import XID_COUNT_METRIC, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.unused import is_unused
from telemetry.dataset.channels import Channel, is_sentinel
from telemetry.doctor.observation import ChannelSeen, Finding, Observation, findings_of
from telemetry.errors import InputError
from telemetry.http import Answer, Connection, HttpError, fetch, shown_url

MAX_PAGE_BYTES: Final = 64 << 20

_SKEW_S: Final = 5.0  # a Date header is whole seconds, and NTP keeps clocks far closer
_SLOW_S: Final = 5.0  # half of the usual scrape timeout of 10 s
_OLD_STAMP_S: Final = 300.0  # the look-back of Prometheus


@dataclass(slots=True)
class _Page:
    """What the lines of a page hold; ``nameless`` counts those whose labels name no GPU or no node."""

    gpus: dict[str, set[str]] = field(default_factory=dict)  # with a value, by channel
    names: dict[str, str] = field(default_factory=dict)  # the first metric seen, by channel
    sentinels: Counter[str] = field(default_factory=Counter)
    newest_ms: int | None = None
    nodes: set[str] = field(default_factory=set)
    models: dict[str, str] = field(default_factory=dict)
    drivers: set[str] = field(default_factory=set)
    mig: bool = False
    nameless: int = 0
    faults: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    xid_metric: bool = False
    amd: bool = False


def observe_file(
    path: Path, *, channels: Mapping[str, Channel], mapping: SourceMapping | None = None, now: datetime
) -> Observation:
    """Look at a saved page; ``InputError`` if the file cannot be read, is too large, or holds no series of a device."""
    try:
        if path.stat().st_size > MAX_PAGE_BYTES:
            raise InputError(
                f"the file is larger than {MAX_PAGE_BYTES:,} bytes", str(path), "Give one page of an exporter."
            )
        body = path.read_bytes()
    except OSError as error:
        raise InputError(f"the page cannot be read: {error.strerror}", str(path), "Check the path.") from error
    catalogue = SeriesCatalogue(channels, mapping, default_node=path.name.split(".")[0])
    return observe_body(body, catalogue, str(path), now)


def observe_page(
    connection: Connection,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    timeout_s: float = 10.0,
    now: datetime,
) -> Observation:
    """Look at a served page; ``InputError`` if it cannot be had, or holds no series of a device."""
    host = connection.url.split("//", 1)[-1].split("/", 1)[0].rsplit(":", 1)[0].strip("[]")
    where = shown_url(connection.url)
    try:
        answer = fetch(connection, timeout_s=timeout_s, max_bytes=MAX_PAGE_BYTES)
    except HttpError as refused:
        raise InputError(str(refused), where, "Check the address and the credentials.") from None
    return observe_body(answer.body, SeriesCatalogue(channels, mapping, default_node=host), where, now, answer)


def observe_body(
    body: bytes, catalogue: SeriesCatalogue, where: str, now: datetime, answer: Answer | None = None
) -> Observation:
    """Look at the text of a page, and at the ``answer`` that brought it."""
    text = body.decode("utf-8", "replace")
    page = _read(text, catalogue)
    if not page.names:
        hint = ""
        if page.nameless:
            hint = f"{page.nameless} lines have a channel's name but no label that names GPU and node. "
        raise InputError(
            "the page holds no series of a GPU",
            where,
            f"{hint}Give the page of dcgm-exporter or AMD's device-metrics-exporter, or name its labels by --mapping.",
        )
    age_s = None if page.newest_ms is None else now.timestamp() - page.newest_ms / 1000.0
    skew_s = None if answer is None else _skew(answer, now)
    whole = is_openmetrics(text) or text.endswith("\n")
    facts = {
        "exporter": "AMD" if page.amd else "NVIDIA",
        "drivers": ", ".join(sorted(page.drivers)) or "unknown",
        "time stamps on lines": "none" if age_s is None else f"yes, newest {age_s:,.0f} s old",
        "MIG instances": "yes" if page.mig else "no",
    }
    if answer is not None:
        facts["response time"] = f"{answer.duration_s:.2f} s"
    if skew_s is not None:
        facts["clock"] = f"{skew_s:+.1f} s against ours"
    findings = _findings(page, age_s or 0.0, skew_s or 0.0, 0.0 if answer is None else answer.duration_s)
    findings += findings_of((not whole, "the page ends inside a line", "Save or fetch it again: it is cut short."))
    return Observation(
        kind="exporter page",
        where=where,
        at=now,
        units=len(set().union(*page.gpus.values())),
        nodes=len(page.nodes),
        models=dict(sorted(Counter(page.models.values()).items())),
        channels={
            channel: ChannelSeen(channel, len(page.gpus.get(channel, ())), name, None, page.sentinels[channel])
            for channel, name in page.names.items()
        },
        xid_events=page.xid_metric,
        facts=facts,
        findings=tuple(findings),
        unknown=tuple(sorted(page.unknown)),
    )


def _read(text: str, catalogue: SeriesCatalogue) -> _Page:
    """Read the lines of a page; those that are not of the format are kept as faults and do not hide the others."""
    openmetrics = is_openmetrics(text)
    page = _Page()
    metrics = catalogue.metric_names()
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if line.startswith("#"):
            page.xid_metric = page.xid_metric or XID_COUNT_METRIC in line
            continue
        try:
            sample = parse_line(line, openmetrics=openmetrics)
        except ValueError as error:
            page.faults.append(f"line {number}: {error}")
            continue
        if sample is not None:
            _take(page, catalogue, metrics, sample)
    return page


def _take(page: _Page, catalogue: SeriesCatalogue, metrics: Mapping[str, str], sample: Sample) -> None:
    series = catalogue.identify(sample.name, sample.labels)
    if isinstance(series, XidCount) or sample.name == XID_COUNT_METRIC:
        page.xid_metric = True
        return
    if series is None:
        if sample.name in metrics:
            page.nameless += 1
        elif not is_unused(sample.name):
            page.unknown.add(sample.name)
        return
    page.names.setdefault(series.channel, sample.name)
    page.nodes.add(series.node)
    page.mig = page.mig or series.mig_instance is not None
    page.amd = page.amd or sample.name.lower().startswith(("gpu_", "amd_"))
    inventory = dict(series.inventory)
    if "model" in inventory:
        page.models[series.gpu] = inventory["model"]
    if "driver" in inventory:
        page.drivers.add(inventory["driver"])
    if sample.timestamp_ms is not None:
        page.newest_ms = max(page.newest_ms or 0, sample.timestamp_ms)
    if bool(is_sentinel([sample.value])[0]):
        page.sentinels[series.channel] += 1
    elif not math.isnan(sample.value):
        page.gpus.setdefault(series.channel, set()).add(series.gpu)


def _skew(answer: Answer, at: datetime) -> float | None:
    """Return the exporter's clock minus ours, by the answer's Date; None where there is none."""
    try:
        date = email.utils.parsedate_to_datetime(answer.headers["date"])
    except (KeyError, ValueError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    # The header is cut to whole seconds, on average half a second ago, and was written while we waited.
    return (date - at).total_seconds() + 0.5 - answer.duration_s / 2


def _findings(page: _Page, age_s: float, skew_s: float, duration_s: float) -> list[Finding]:
    sentinels = ", ".join(sorted(page.sentinels))
    return findings_of(
        (
            page.faults,
            f"{len(page.faults)} lines are not of the format: {''.join(page.faults[:1])}",
            "Update the exporter, or report it.",
        ),
        (
            page.nameless,
            f"{page.nameless} lines of channels name no GPU or no node",
            "Name the labels that do in a mapping file (--mapping, `labels:`).",
        ),
        (
            abs(skew_s) > _SKEW_S,
            f"the exporter's clock is {skew_s:+.0f} s off ours",
            "Check time synchronisation there.",
        ),
        (
            duration_s > _SLOW_S,
            f"the page took {duration_s:.1f} s",
            "Look at the node: a slow driver precedes a GPU that falls off the bus. Raise the scrape timeout "
            "only if it always was so.",
        ),
        (age_s > _OLD_STAMP_S, f"the newest time stamp on a line is {age_s:,.0f} s old", "Restart the exporter."),
        (sentinels, f"values that mean not supported are passed on ({sentinels}); they are read as null", "", False),
        (
            not page.xid_metric and not page.amd,
            "single XIDs are not reported, only the last one",
            "Add `DCGM_EXP_XID_ERRORS_COUNT, gauge, XIDs of the last window by number` to the counter file, and "
            "follow the kernel log (`predrain collect kernel-log`).",
            False,
        ),
    )
