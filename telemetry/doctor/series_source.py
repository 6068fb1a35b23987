"""Observation of series: of an exporter's metrics page (file or URL), or the newest values in a Prometheus server."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from foundation.errors import InputError
from foundation.files import read_small
from foundation.http import BodyTooLarge, Connection, HttpError, ask, check_status, shown_url
from foundation.text import quantity
from telemetry.accounting import Accounting
from telemetry.collect.prometheus.backfill import BackfillPlan
from telemetry.collect.prometheus.client import Bounds
from telemetry.collect.prometheus.preview import preview_backfill
from telemetry.collect.series.batch import NO_NUMBER, SENTINEL, SeriesBook, SeriesValue
from telemetry.collect.series.exposition import LineReader, Sample, is_openmetrics
from telemetry.collect.series.identity import XID_COUNT_METRICS, Series, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel, is_unused
from telemetry.doctor.diagnosis import ChannelSeen, Observation, SourceKind, TelemetryFinding, findings_of
from telemetry.values.numbers import is_sentinel

MAX_BYTES: Final = 64 << 20  # four metrics of 50,000 GPUs
LOOK_BACK: Final = timedelta(days=1)
"""A metric with a sample within this time but none now has stopped."""

_RETRY_FOR_S: Final = 30.0
_OLD: Final = timedelta(minutes=5)  # Prometheus' lookback delta
_GPU_METRIC: Final = re.compile(r"DCGM_|dcgm_|gpu_|amd_|nvidia_", re.IGNORECASE)
_COLUMNS: Final = ("metric", "channel", "gpu", "node", "mig", "model", "driver", "value")


def observe_file(
    path: Path, *, channels: Mapping[str, Channel], mapping: SourceMapping | None = None, now: datetime
) -> Observation:
    """Observe a saved page; raises ``InputError`` if it is unreadable, too large, or has no series of a device."""
    try:
        body = read_small(path, MAX_BYTES)
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
    """Observe a served page; raises ``InputError`` if it cannot be fetched, or has no series of a device."""
    host = connection.url.split("//", 1)[-1].split("/", 1)[0].rsplit(":", 1)[0].strip("[]")
    try:
        answer = ask(connection, "GET", timeout_s=timeout_s, max_bytes=MAX_BYTES)
        check_status(answer, connection.url)
    except (HttpError, BodyTooLarge) as error:
        advice = "Check the address, the credentials, that the server runs, and that this host may reach it."
        raise InputError(f"no response: {error}", shown_url(connection.url), advice) from error
    catalogue = SeriesCatalogue(channels, mapping, default_node=host)
    return observe_body(answer.body, catalogue, shown_url(connection.url), now)


def observe_body(body: bytes, catalogue: SeriesCatalogue, location: str, now: datetime) -> Observation:
    """Observe the text of a page; malformed lines are skipped and reported."""
    text = body.decode("utf-8", "replace").replace("\r\n", "\n")
    openmetrics = is_openmetrics(text)
    lines: LineReader[tuple[str, dict[str, str]]] = LineReader(lambda name, labels: (name, labels))
    problems: Counter[str] = Counter()
    examples: dict[str, str] = {}
    readings = lines.read(text.split("\n"), openmetrics=openmetrics, problems=problems, examples=examples)
    samples = [Sample(*series, value, ms) for series, value, ms in readings]
    known = {*catalogue.metric_names(), *XID_COUNT_METRICS}
    left_out = Counter(catalogue.left_out_reason(sample.name) for sample in samples if sample.name not in known)
    book, of_channels = SeriesBook(catalogue), [sample for sample in samples if sample.name in known]
    numbers = [book.number((("__name__", sample.name), *sample.labels.items())) for sample in of_channels]
    book.identify()
    values = np.array([sample.value for sample in of_channels], np.float64)
    newest = list(book.read(np.array(numbers, np.int32), values, left_out))
    accounting = Accounting()
    accounting.take("sample values", problems.total(), problems, examples)
    if not newest:
        nameless = _nameless(catalogue, left_out)
        unnamed = f"{quantity(nameless, 'line')} of known channels without labels that name GPU and node. "
        hint = unnamed if nameless else ""
        raise InputError(
            "the page has no series of a GPU",
            location,
            f"{hint}Give the page of dcgm-exporter or AMD's device-metrics-exporter, or name its labels by --mapping.",
        )
    stamps = [sample.timestamp_ms for sample in samples if sample.timestamp_ms is not None]
    age_s = now.timestamp() - max(stamps) / 1000.0 if stamps else 0.0
    findings = findings_of(
        (
            problems,
            f"{quantity(problems.total(), 'malformed line')}: {next(iter(examples.values()), '')}",
            "Update the exporter, or report it.",
        ),
        (
            timedelta(seconds=age_s) > _OLD,
            f"the newest timestamp in the page is {age_s:,.0f} s old",
            "Restart the exporter.",
        ),
        (
            not openmetrics and not text.endswith("\n"),
            "the page is truncated",
            "Save or fetch it again.",
        ),
    )
    names = {sample.name for sample in samples} | {name for name in XID_COUNT_METRICS if name in text}
    return _observation("exporter page", location, now, catalogue, newest, names, left_out, {}, findings, accounting)


def observe_prometheus(
    connection: Connection,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    match: str | None = None,
    timeout_s: float = 60.0,
    now: datetime,
) -> Observation:
    """Observe the newest value of each series of a channel on a server, like ``assess`` before it fetches.

    ``match``: label matchers in braces that every series must satisfy.
    Raises ``InputError`` if the server is unreachable, rejects the query, or has no metric of a channel.
    """
    plan = BackfillPlan(start=now - LOOK_BACK, end=now, match=match, allow_partial=True)
    bounds = Bounds(request_s=timeout_s, body_bytes=MAX_BYTES, retry_for_s=_RETRY_FOR_S)
    preview = preview_backfill(connection, plan, channels=channels, mapping=mapping, bounds=bounds, now=now)
    catalogue, newest = preview.catalogue, preview.newest
    known = catalogue.metric_names()
    going = {series.channel for _, series, _ in newest if isinstance(series, Series)}
    stopped = ", ".join(sorted({known[name] for name in preview.metrics if name in known} - going))
    findings = findings_of(
        (
            stopped,
            f"{stopped} stopped within the last day",
            "Check the exporters' counter file and targets for changes.",
        ),
        (
            preview.age > max(2 * (preview.interval or timedelta(0)), _OLD),
            f"the newest sample is {preview.age.total_seconds():,.0f} s old",
            "Check the targets of the scrape configuration: no GPU samples arrive.",
        ),
        (
            preview.targets_down,
            f"{preview.targets_down:,} targets of the exporters' jobs are down",
            "Query `up == 0` in Prometheus.",
        ),
    )
    names = {name for name in preview.names if _GPU_METRIC.match(name) or name in known}
    location = shown_url(connection.url)
    return _observation(
        "Prometheus", location, now, catalogue, newest, names, preview.left_out, preview.facts, findings, Accounting()
    )


def _identity_findings(catalogue: SeriesCatalogue) -> list[TelemetryFinding]:
    decision = catalogue.nodes.decision()
    doubled = [f"{gpu} ({', '.join(sorted(at))})" for gpu, at in catalogue.targets.items() if len(at) > 1]
    nameless = decision.label is None and bool(decision.rejected) and not catalogue.nodes.has_other
    return findings_of(
        (
            nameless or (decision.doubt and not catalogue.nodes.is_given),
            f"the node is {'not known' if nameless else 'uncertain'}: {decision}",
            "Add the node's name by relabeling (`__meta_kubernetes_pod_node_name` to `node`), or name the label that "
            "has it in a mapping file (--mapping, `labels: {node: LABEL}`).",
        ),
        (
            catalogue.by_place,
            f"GPUs whose UUID is a placeholder are identified by node and PCI address: {catalogue.placed()}",
            "Check the driver or the virtual machine's vGPU profile; a replaced board has the same identity.",
        ),
        (
            doubled,
            f"several targets report {quantity(len(doubled), 'GPU')}, such as {next(iter(doubled), '')}",
            "Scrape one exporter a node: values of a stale one are mixed with those of the other, and only large "
            "counters (energy, violations) show which is stale.",
        ),
    )


def _nameless(catalogue: SeriesCatalogue, left_out: Counter[str]) -> int:
    return sum(left_out[catalogue.left_out_reason(name)] for name in catalogue.metric_names())


def _observation(
    kind: SourceKind,
    location: str,
    now: datetime,
    catalogue: SeriesCatalogue,
    newest: Sequence[SeriesValue],
    names: Set[str],
    left_out: Counter[str],
    facts: Mapping[str, str],
    findings: list[TelemetryFinding],
    accounting: Accounting,
) -> Observation:
    """Summarize the newest values by channel; ``names``: all metrics, including those without a value."""
    known, nameless = catalogue.metric_names(), _nameless(catalogue, left_out)
    channels = {known[name]: ChannelSeen(known[name], 0, name) for name in names if name in known}
    rows = [
        (metric, series.channel, series.gpu, series.node, series.mig_instance,
         *map(dict(series.inventory).get, ("model", "driver")), value)
        for metric, series, value in newest
        if isinstance(series, Series)
    ]  # fmt: skip
    series = pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"value": float})
    blank = is_sentinel(series["value"].to_numpy())
    no_number = series["value"].isna() & ~blank
    without_value = Counter({SENTINEL: int(blank.sum()), NO_NUMBER: int(no_number.sum())})
    accounting.take("sample values", len(newest) + left_out.total(), left_out + without_value)
    valued = series[~no_number & ~blank]
    gpus = valued.groupby("channel")["gpu"].nunique()
    sentinels = series.loc[blank, "channel"].value_counts()
    metrics = series["metric"].astype(str)
    is_amd = not metrics.str.startswith("DCGM").any() and bool(metrics.str.match("(?:gpu|amd)_", case=False).any())
    has_xids = not XID_COUNT_METRICS.isdisjoint(names)
    series_findings = findings_of(
        (
            nameless,
            f"{quantity(nameless, 'line')} of known channels without labels that name a GPU and a node",
            "Name the labels that do in a mapping file (--mapping, `labels:`).",
        ),
        (
            len(sentinels),
            f"values that mean not supported are passed on ({', '.join(sorted(sentinels.index))}); "
            "they are read as null",
            "",
            False,
        ),
        (
            not has_xids and not is_amd,
            "only the last XID is reported, not each one",
            "Add `DCGM_EXP_XID_ERRORS_COUNT, gauge, XIDs of the last window by number` to the counter file, and "
            "follow the kernel log (`predrain collect kernel-log`).",
            False,
        ),
    )
    node, is_from_elsewhere = catalogue.nodes.decision(), catalogue.nodes.has_other
    exporter = {
        "node": "the host of the page" if node.label is None and is_from_elsewhere else str(node),
        "exporter": "AMD" if is_amd else "NVIDIA",
        "drivers": ", ".join(sorted(series["driver"].dropna().unique())) or "unknown",
        "MIG instances": "yes" if series["mig"].notna().any() else "no",
    }
    channels |= {
        str(channel): ChannelSeen(
            str(channel), int(gpus.get(channel, 0)), str(metric), None, int(sentinels.get(channel, 0))
        )
        for channel, metric in series.drop_duplicates("channel").set_index("channel")["metric"].items()
    }
    models = series.dropna(subset="model").drop_duplicates("gpu", keep="last")["model"].value_counts().sort_index()
    return Observation(
        kind=kind,
        where=location,
        at=now,
        units=valued["gpu"].nunique(),
        nodes=series["node"].nunique(),
        models={str(model): int(count) for model, count in models.items()},
        channels=channels,
        xid_events=has_xids,
        facts=exporter | dict(facts),
        findings=(*findings, *_identity_findings(catalogue), *series_findings),
        unknown=tuple(sorted(name for name in names - {*known, *XID_COUNT_METRICS} if not is_unused(name))),
        accounting=accounting,
    )
