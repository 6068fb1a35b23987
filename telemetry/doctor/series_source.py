"""Looking at series: of an exporter's page, saved or served, or the newest of a Prometheus (or what has its API)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pandas as pd

from foundation.errors import InputError
from foundation.http import (
    BodyTooLarge,
    Connection,
    HttpError,
    HttpResponse,
    ask,
    check_status,
    retried,
    retry_policy,
    shown_url,
)
from foundation.instants import to_ms
from telemetry.accounting import Accounting
from telemetry.collect.exporters import clock_skew_s
from telemetry.collect.prometheus.client import Bounds, PrometheusClient, TooMuch, quoted, selector
from telemetry.collect.series.exposition import LineReader, Sample, is_openmetrics
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.rows import NO_NUMBER, SENTINEL
from telemetry.dataset.channels import Channel, is_unused
from telemetry.doctor.observation import ChannelSeen, Observation, SourceKind, TelemetryFinding, findings_of
from telemetry.values.numbers import is_sentinel

MAX_BYTES: Final = 64 << 20
"""Size of a page, and of each answer of a Prometheus: four metrics of 50,000 GPUs."""

LOOK_BACK_MS: Final = 86_400_000
"""A metric that had a sample within this time and has none now has stopped."""

_MAX_PAUSE_S: Final = 10.0
_RETRY_FOR_S: Final = 30.0
_NAMES_AT_ONCE: Final = 4
_SKEW_S: Final = 5.0  # a Date header is whole seconds, and NTP keeps clocks far closer
_SLOW_S: Final = 5.0  # half of the usual scrape timeout of 10 s
_OLD_STAMP_S: Final = 300.0  # the look-back of Prometheus
_GPU_METRIC: Final = re.compile(r"DCGM_|dcgm_|gpu_|amd_|nvidia_", re.IGNORECASE)
_COLUMNS: Final = ("channel", "metric", "gpu", "node", "mig", "model", "driver", "value")


def observe_file(
    path: Path, *, channels: Mapping[str, Channel], mapping: SourceMapping | None = None, now: datetime
) -> Observation:
    """Look at a saved page; ``InputError`` if the file cannot be read, is too large, or holds no series of a device."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"the file is larger than {MAX_BYTES:,} bytes", str(path), "Give one page of an exporter.")
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
    answer = _fetch(connection, timeout_s)
    catalogue = SeriesCatalogue(channels, mapping, default_node=host)
    return observe_body(answer.body, catalogue, shown_url(connection.url), now, answer)


def observe_body(
    body: bytes, catalogue: SeriesCatalogue, where: str, now: datetime, answer: HttpResponse | None = None
) -> Observation:
    """Look at the text of a page, and at the ``answer`` that brought it; faulty lines do not hide the others."""
    text = body.decode("utf-8", "replace").replace("\r\n", "\n")
    openmetrics = is_openmetrics(text)
    lines: LineReader[tuple[str, dict[str, str]]] = LineReader(lambda name, labels: (name, labels))
    problems: Counter[str] = Counter()
    examples: dict[str, str] = {}
    values = lines.read(text.split("\n"), openmetrics=openmetrics, problems=problems, examples=examples)
    samples = [Sample(*series, value, ms) for series, value, ms in values]
    accounting = Accounting()
    accounting.take("sample values", problems.total(), problems, examples)
    series, nameless = _identified(samples, catalogue, accounting)
    if series.empty:
        hint = f"{nameless} lines have a channel's name but no label that names GPU and node. " if nameless else ""
        raise InputError(
            "the page holds no series of a GPU",
            where,
            f"{hint}Give the page of dcgm-exporter or AMD's device-metrics-exporter, or name its labels by --mapping.",
        )
    stamps = [sample.timestamp_ms for sample in samples if sample.timestamp_ms is not None]
    age_s = now.timestamp() - max(stamps) / 1000.0 if stamps else None
    skew_s = None if answer is None else clock_skew_s(answer, now)
    duration_s = 0.0 if answer is None else answer.duration_s
    facts = {"time stamps on lines": "none" if age_s is None else f"yes, newest {age_s:,.0f} s old"}
    if answer is not None:
        facts["response time"] = f"{duration_s:.2f} s"
    if skew_s is not None:
        facts["clock"] = f"{skew_s:+.1f} s against this host"
    findings = findings_of(
        (
            problems,
            f"{problems.total()} lines are not of the format: {next(iter(examples.values()), '')}",
            "Update the exporter, or report it.",
        ),
        (
            abs(skew_s or 0.0) > _SKEW_S,
            f"the exporter's clock is {skew_s or 0.0:+.0f} s off this host's",
            "Check time synchronisation there.",
        ),
        (
            duration_s > _SLOW_S,
            f"the page took {duration_s:.1f} s",
            "Look at the node: a slow driver precedes a GPU that falls off the bus. Raise the scrape timeout "
            "only if it always was so.",
        ),
        (
            (age_s or 0.0) > _OLD_STAMP_S,
            f"the newest time stamp on a line is {age_s or 0.0:,.0f} s old",
            "Restart the exporter.",
        ),
        (
            not openmetrics and not text.endswith("\n"),
            "the page ends inside a line",
            "Save or fetch it again: it is cut short.",
        ),
    )
    known = catalogue.metric_names()
    unknown = {sample.name for sample in samples if not is_unused(sample.name)} - {*known, XID_COUNT_METRIC}
    has_xids = XID_COUNT_METRIC in text
    facts, findings = {"node": _node(catalogue)} | facts, [*findings, *_identity_findings(catalogue)]
    seen = _observation("exporter page", where, now, series, nameless, has_xids, facts, findings, unknown)
    return replace(seen, accounting=accounting)


def observe_prometheus(
    connection: Connection,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    matchers: str = "",
    timeout_s: float = 60.0,
    now: datetime,
) -> Observation:
    """Look at the newest value of each series of the channels that a server has.

    ``matchers``: of every selector, without braces; may be empty.
    Raises ``InputError`` if the server cannot be asked, refuses, or has no metric of a channel.
    """
    bounds = Bounds(request_s=timeout_s, body_bytes=MAX_BYTES, retry_for_s=_RETRY_FOR_S)
    mapping = SourceMapping() if mapping is None else mapping
    catalogue, where = SeriesCatalogue(channels, mapping), shown_url(connection.url)

    async def observe() -> Observation:
        async with PrometheusClient(connection, bounds=bounds, concurrency=1, allow_partial=True) as client:
            return await _observe_server(client, where, catalogue, mapping, matchers, now)

    try:
        return asyncio.run(observe())
    except TooMuch as error:
        raise InputError(f"the server does not answer: {error}", where, "Select fewer series with --match.") from error


async def _observe_server(
    client: PrometheusClient,
    where: str,
    catalogue: SeriesCatalogue,
    mapping: SourceMapping,
    matchers: str,
    now: datetime,
) -> Observation:
    at_ms, known = to_ms(now), catalogue.metric_names()

    async def ask(query: str) -> list[Sample]:
        vector = await client.vector(query, at_ms)
        return [Sample(labels.get("__name__", ""), labels, value, None) for labels, value in vector]

    names = await client.metric_names(f"{{{matchers}}}" if matchers else None, at_ms - LOOK_BACK_MS, at_ms)
    if not names:
        raise InputError(
            "the server has no series of the last day",
            where,
            "Check the scrape configuration. Old data: `predrain collect prometheus`, then `predrain doctor DATASET`.",
        )
    read = [name for name in names if name in known]
    if not read:
        raise InputError(
            f"none of the {len(names):,} metrics is a channel of predrain",
            where,
            "Check --match, or name your recording rules in a mapping file (--mapping, `metrics:`).",
        )
    # Without the labels of pods and links an answer is a third as large.
    # Those of one metric are evidence of which label names the node.
    catalogue.observe(sample.labels for sample in await ask(selector(read[0], [matchers])))
    fields = ("node", "gpu", "serial", "pci_bus_id", "slot", "mig_instance", "model", "driver")
    labels = [label for field in fields for name in mapping.label_names(field) for label in (f"exported_{name}", name)]
    by = ", ".join(["__name__", *dict.fromkeys(labels), "clock_type", "clock_index"])
    samples: list[Sample] = []
    for start in range(0, len(read), _NAMES_AT_ONCE):
        pattern = quoted("|".join(map(re.escape, read[start : start + _NAMES_AT_ONCE])))
        chosen = ",".join(filter(None, (f"__name__=~{pattern}", matchers)))
        samples += await ask(f"max by ({by}) ({{{chosen}}})")
    accounting = Accounting()
    series, nameless = _identified(samples, catalogue, accounting)
    stopped = ", ".join(sorted({known[name] for name in read} - {known.get(sample.name) for sample in samples}))
    jobs = {sample.labels["job"] for sample in await ask(f"count by (job) ({selector(read[0], [matchers])})")}
    pattern = quoted("|".join(map(re.escape, sorted(jobs))))
    down = sum(sample.value for sample in await ask(f"count(up{{job=~{pattern}}} == 0)")) if jobs else 0.0
    findings = findings_of(
        (
            stopped,
            f"within the last day there was {stopped}, and now there is none",
            "Look at the exporters' counter file and targets: they were changed, or they stopped.",
        ),
        (down, f"{down:,.0f} targets of the exporters' jobs are down", "Look at `up == 0` in Prometheus."),
    )
    unknown = {name for name in names if _GPU_METRIC.match(name) and not is_unused(name)} - {*known, XID_COUNT_METRIC}
    has_xids = XID_COUNT_METRIC in names
    findings += _identity_findings(catalogue)
    facts = {"node": _node(catalogue)}
    seen = _observation("Prometheus", where, now, series, nameless, has_xids, facts, findings, unknown)
    without = {known[name]: ChannelSeen(known[name], 0, name) for name in read}
    return replace(seen, channels=without | dict(seen.channels), accounting=accounting)


def _fetch(connection: Connection, timeout_s: float) -> HttpResponse:
    """Get a page, and again where that may help; a person waits, so that pauses are short."""
    try:
        for attempt in retry_policy(on=lambda error: min(retried(error), _MAX_PAUSE_S)):
            with attempt:
                answer = ask(connection, "GET", timeout_s=timeout_s, max_bytes=MAX_BYTES)
                check_status(answer, connection.url)
        return answer
    except (HttpError, BodyTooLarge) as error:
        do = "Check the address, the credentials, that the server runs, and that this host may reach it."
        raise InputError(f"no answer: {error}", shown_url(connection.url), do) from error


def _identified(
    samples: Sequence[Sample], catalogue: SeriesCatalogue, accounting: Accounting
) -> tuple[pd.DataFrame, int]:
    """Return a row of :data:`_COLUMNS` for each sample of a channel, and how many name no GPU or no node."""
    known = catalogue.metric_names()
    catalogue.observe(sample.labels for sample in samples if sample.name in known)
    rows: list[tuple[Any, ...]] = []
    left_out: Counter[str] = Counter()
    for sample in samples:
        series = catalogue.identify(sample.name, sample.labels)
        if isinstance(series, Series):
            device = dict(series.inventory)
            identity = (series.channel, sample.name, series.gpu, series.node, series.mig_instance)
            rows.append((*identity, device.get("model"), device.get("driver"), sample.value))
        elif series is None:
            left_out[catalogue.left_out_reason(sample.name)] += 1
    nameless = sum(left_out[catalogue.left_out_reason(name)] for name in known)
    frame = pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"value": float})
    blank = is_sentinel(frame["value"].to_numpy())
    left_out[SENTINEL] = int(blank.sum())
    left_out[NO_NUMBER] = int((frame["value"].isna() & ~blank).sum())
    accounting.take("sample values", len(samples), left_out)
    return frame, nameless


def _node(catalogue: SeriesCatalogue) -> str:
    decision = catalogue.nodes.decision()
    return "the host of the page" if decision.label is None and catalogue.nodes.has_other else str(decision)


def _identity_findings(catalogue: SeriesCatalogue) -> list[TelemetryFinding]:
    decision = catalogue.nodes.decision()
    nameless = decision.label is None and bool(decision.rejected) and not catalogue.nodes.has_other
    return findings_of(
        (
            nameless or (decision.doubt and not catalogue.nodes.is_given),
            f"the node is {'not known' if nameless else 'uncertain'}: {decision}",
            "Add the node's name by relabelling (`__meta_kubernetes_pod_node_name` to `node`), or name the label that "
            "has it in a mapping file (--mapping, `labels: {node: LABEL}`).",
        ),
        (
            catalogue.by_place,
            f"GPUs whose UUID is a placeholder are identified by node and PCI address: {catalogue.placed()}",
            "Check the driver or the virtual machine's vGPU profile; a swapped board looks like the one before.",
        ),
    )


def _observation(
    kind: SourceKind,
    where: str,
    now: datetime,
    series: pd.DataFrame,
    nameless: int,
    has_xids: bool,
    facts: Mapping[str, str],
    findings: list[TelemetryFinding],
    unknown: set[str],
) -> Observation:
    """Count what identified series have of each channel."""
    blank = is_sentinel(series["value"].to_numpy())
    valued = series[series["value"].notna() & ~blank]
    gpus = valued.groupby("channel")["gpu"].nunique()
    sentinels = series.loc[blank, "channel"].value_counts()
    metrics = series["metric"].astype(str)
    is_amd = not metrics.str.startswith("DCGM").any() and bool(metrics.str.match("(?:gpu|amd)_", case=False).any())
    more = findings_of(
        (
            nameless,
            f"{nameless} lines of channels name no GPU or no node",
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
            "single XIDs are not reported, only the last one",
            "Add `DCGM_EXP_XID_ERRORS_COUNT, gauge, XIDs of the last window by number` to the counter file, and "
            "follow the kernel log (`predrain collect kernel-log`).",
            False,
        ),
    )
    exporter = {
        "exporter": "AMD" if is_amd else "NVIDIA",
        "drivers": ", ".join(sorted(series["driver"].dropna().unique())) or "unknown",
        "MIG instances": "yes" if series["mig"].notna().any() else "no",
    }
    models = series.dropna(subset="model").drop_duplicates("gpu", keep="last")["model"].value_counts().sort_index()
    return Observation(
        kind=kind,
        where=where,
        at=now,
        units=valued["gpu"].nunique(),
        nodes=series["node"].nunique(),
        models={str(model): int(count) for model, count in models.items()},
        channels={
            str(channel): ChannelSeen(
                str(channel), int(gpus.get(channel, 0)), str(metric), None, int(sentinels.get(channel, 0))
            )
            for channel, metric in series.drop_duplicates("channel").set_index("channel")["metric"].items()
        },
        xid_events=has_xids,
        facts={"node": facts["node"]} | exporter | dict(facts) if "node" in facts else exporter | dict(facts),
        findings=(*findings, *more),
        unknown=tuple(sorted(unknown)),
    )
