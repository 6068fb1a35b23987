"""Looking at a Prometheus (or what speaks its API) by a handful of instant queries.

Most questions are asked of all metrics at once: filters such as ``>=`` keep a metric's name, functions drop it. What
needs a function is asked metric by metric, and left unknown where the server refuses.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from telemetry.collect.prometheus.selectors import quoted, selector
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.unused import unused_reason
from telemetry.dataset.channel import Channel
from telemetry.doctor.exporter_page import XID_METRICS
from telemetry.doctor.observation import ChannelSeen, Finding, Observation
from telemetry.errors import InputError
from telemetry.http import Connection, HttpError, fetch, shown_url

LOOK_BACK_S: Final = 86_400
"""A metric that had a sample within this time and has none now has stopped."""

_RECENT: Final = "10m"
_RECENT_S: Final = 600
_NAMES_AT_ONCE: Final = 60
_TOO_MUCH: Final = frozenset({413, 422, 503, 504})
_GPU_METRIC: Final = re.compile(r"DCGM_|dcgm_|gpu_|amd_|nvidia_", re.IGNORECASE)
_STEADY: Final = ("power_w", "gpu_temp_c", "gpu_util_pct")
_BLANKS: Final = (
    "({0} >= 4611686018427387904) or ({0} >= 2147483632 <= 2147483635) or ({0} >= 140737488355328 <= 140737488355331)"
)
_DEVICE_LABELS: Final = ("UUID", "uuid", "gpu_uuid", "serial_number")
_NODE_LABELS: Final = ("hostname", "Hostname", "node", "kubernetes_node", "instance")
_MODEL_LABELS: Final = ("modelName", "model_name", "card_series", "card_model")


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask, and how.

    ``matchers``: matchers of every selector, without braces; may be empty.
    ``at``: the time of every query, aware.
    """

    connection: Connection
    matchers: str
    at: datetime
    timeout_s: float = 30.0

    def names(self) -> list[str]:
        """Return the names of the metrics that had a sample within :data:`LOOK_BACK_S`."""
        start = self.at.timestamp() - LOOK_BACK_S
        match = f"&match[]={quote(self.one(['.+']), safe='')}" if self.matchers else ""
        path = f"/api/v1/label/__name__/values?start={start:.3f}&end={self.at.timestamp():.3f}{match}"
        return [str(each) for each in self._ask(path, None)]

    def vector(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the answer to an instant query: labels and value of each series."""
        data = self._ask("/api/v1/query", {"query": query, "time": f"{self.at.timestamp():.3f}"})
        try:
            return [(dict(each["metric"]), float(each["value"][1])) for each in data["result"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._foreign() from error

    def number(self, query: str) -> float | None:
        """Return the one number that a query gives; None if it gives none, or the server refuses it."""
        try:
            found = self.vector(query)
        except HttpError:
            return None
        return found[0][1] if found and math.isfinite(found[0][1]) else None

    def one(self, names: Iterable[str]) -> str:
        """Return the selector of several metrics, given as regular expressions."""
        parts = [f"__name__=~{quoted('|'.join(names))}", self.matchers]
        return "{" + ",".join(part for part in parts if part) + "}"

    def metric(self, name: str) -> str:
        """Return the selector of one metric."""
        return selector(name, [self.matchers])

    def _ask(self, path: str, form: Mapping[str, str] | None) -> Any:
        answer = fetch(self.connection, path, form=form, timeout_s=self.timeout_s, max_bytes=32 << 20)
        try:
            content = json.loads(answer.body)
            if content["status"] != "success":
                raise self._foreign()
            return content["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign() from error

    def _foreign(self) -> InputError:
        return InputError(
            "the answer is not of Prometheus' API",
            shown_url(self.connection.url),
            "Give the base address of Prometheus, Thanos or VictoriaMetrics, before /api/v1.",
        )


def observe_prometheus(
    questions: Questions,
    *,
    channels: Mapping[str, Channel],
    mapping: SourceMapping | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Observation:
    """Look at what a server has of the channels now.

    Raises ``InputError`` if the server cannot be asked, refuses, or has no metric of ours.
    """
    where = shown_url(questions.connection.url)
    catalogue = SeriesCatalogue(channels, mapping)
    known = catalogue.metric_names()
    try:
        names = questions.names()
        mine = [name for name in names if name in known]
        if not names:
            raise InputError(
                "the server has no series of the last 10 minutes",
                where,
                "Is anything scraped? Of old data: `predrain collect prometheus`, then `predrain doctor DATASET`.",
            )
        if not mine:
            raise InputError(
                f"none of the {len(names):,} metrics is a channel of ours",
                where,
                "Check --match, or name your recording rules in a mapping file (--mapping, `metrics:`).",
            )
        counts = _counts(questions, mine, "{0}")
        blanks = _counts(questions, mine, _BLANKS)
        device = _label(questions, mine[0], _DEVICE_LABELS)
        seen = _seen(questions, mine, known, device, (counts, blanks), progress)
        units = _units(questions, mine, device)
    except HttpError as refused:
        raise InputError(str(refused), where, "Check the credentials and --match.") from None
    node_label = _label(questions, mine[0], _NODE_LABELS)
    nodes = questions.number(f"count(count by ({node_label}) ({questions.one(map(re.escape, mine))}))")
    facts, findings = _pace(questions, {known[name]: name for name in mine})
    xid_events = any(name in names for name in XID_METRICS)
    findings += _stopped(mine, known, counts)
    findings += _down(questions, mine)
    if sum(blanks.values()):
        what = ", ".join(sorted({known[name] for name, count in blanks.items() if count}))
        findings.append(
            Finding(f"values that mean not supported are stored ({what}); they are read as null", "", False)
        )
    return Observation(
        kind="Prometheus",
        where=where,
        at=questions.at,
        units=units,
        nodes=int(nodes or 0),
        models=_models(questions, mine[0]),
        channels=seen,
        xid_events=xid_events,
        facts=facts | {"exporter": "AMD" if not any(name.startswith("DCGM") for name in mine) else "NVIDIA"},
        findings=tuple(findings),
        unknown=tuple(
            sorted(
                name
                for name in names
                if name not in known
                and name not in XID_METRICS
                and _GPU_METRIC.match(name)
                and unused_reason(name) is None
            )
        ),
    )


def _counts(questions: Questions, names: list[str], template: str) -> dict[str, int]:
    """Count the series of each metric that a filter keeps; fewer metrics at once where that is too much to ask."""
    found: dict[str, int] = {}
    waiting = [names[start : start + _NAMES_AT_ONCE] for start in range(0, len(names), _NAMES_AT_ONCE)]
    while waiting:
        chosen = waiting.pop()
        selected = questions.one(map(re.escape, chosen))
        try:
            answer = questions.vector(f"count by (__name__) ({template.format(selected)})")
        except HttpError as refused:
            if refused.status not in _TOO_MUCH or len(chosen) == 1:
                raise
            waiting += [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]
            continue
        found |= {labels["__name__"]: int(value) for labels, value in answer if "__name__" in labels}
    return found


def _seen(
    questions: Questions,
    mine: list[str],
    known: Mapping[str, str],
    device: str,
    counted: tuple[dict[str, int], dict[str, int]],
    progress: Callable[[int, int], None],
) -> dict[str, ChannelSeen]:
    seen: dict[str, ChannelSeen] = {}
    counts, blanks = counted
    for number, name in enumerate(mine, start=1):
        progress(number, len(mine))
        channel = known[name]
        chosen = questions.metric(name)
        if name not in counts:
            seen.setdefault(channel, ChannelSeen(channel, 0, name))
            continue
        gpus = _devices(questions, name, device)
        changed = questions.number(f"max(changes({chosen}[1h]))")
        age = questions.number(f"time() - max(timestamp({chosen}))")
        made = ChannelSeen(
            channel,
            0 if blanks.get(name, 0) >= counts[name] else gpus,
            name,
            None,
            None if changed is None else changed == 0,
            blanks.get(name, 0),
            age,
        )
        if channel not in seen or made.gpus > seen[channel].gpus:
            seen[channel] = made
    return seen


def _label(questions: Questions, name: str, choices: tuple[str, ...]) -> str:
    """Return the first of some labels that a metric has."""
    for label in choices:
        for each in (f"exported_{label}", label):
            found = questions.number(f'count({questions.metric(name)[:-1]},{each}!=""}})')
            if found:
                return each
    return choices[0]


def _devices(questions: Questions, name: str, device: str) -> int:
    """Count the GPUs of a metric; rows of NVLink links name theirs by another label than the rest."""
    for label in dict.fromkeys((device, *_DEVICE_LABELS)):
        found = questions.number(f'count(count by ({label}) ({questions.metric(name)[:-1]},{label}!=""}}))')
        if found:
            return int(found)
    return 0


def _units(questions: Questions, mine: list[str], device: str) -> int:
    chosen = questions.one(map(re.escape, mine))
    return int(questions.number(f'count(count by ({device}) ({chosen[:-1]},{device}!=""}}))') or 0)


def _models(questions: Questions, name: str) -> dict[str, int]:
    for label in _MODEL_LABELS:
        found = questions.vector(f'count by ({label}) ({questions.metric(name)[:-1]},{label}!=""}})')
        if found:
            return dict(sorted((labels[label], int(count)) for labels, count in found if label in labels))
    return {}


def _pace(questions: Questions, by_channel: Mapping[str, str]) -> tuple[dict[str, str], list[Finding]]:
    """Compare how often is scraped with how often values change."""
    name = next((by_channel[channel] for channel in _STEADY if channel in by_channel), None)
    if name is None:
        return {}, []
    chosen = f"{questions.metric(name)}[{_RECENT}]"
    samples = questions.number(f"quantile(0.5, count_over_time({chosen}))")
    if not samples or samples < 2:
        return {}, []
    facts = {"scrape interval": f"about {_RECENT_S / samples:.0f} s"}
    findings = []
    # An idle board's power still flickers, so the busiest tenth of the boards shows the exporter's own pace.
    changes = questions.number(f"quantile(0.9, changes({chosen}))")
    if changes:
        steps = samples - 1.0
        facts["values change every"] = f"about {_RECENT_S / samples * steps / changes:.0f} s"
        repeated = 1.0 - changes / steps
        facts["repeated samples"] = f"{max(repeated, 0.0):.0%}"
        if repeated > 1 / 3:
            findings.append(
                Finding(
                    f"{repeated:.0%} of the samples repeat the one before: scraping is faster than the exporter reads",
                    "Scrape as often as the exporter reads its GPUs (30 s by default, `-c` in ms), not more often.",
                    problem=False,
                )
            )
    return facts, findings


def _stopped(mine: list[str], known: Mapping[str, str], counts: dict[str, int]) -> list[Finding]:
    gone = sorted({known[name] for name in mine if name not in counts} - {known[name] for name in counts})
    if not gone:
        return []
    return [
        Finding(
            f"within the last day there was {', '.join(gone)}, and now there is none",
            "Look at the exporters' counter file and targets: somebody changed them, or they stopped.",
        )
    ]


def _down(questions: Questions, mine: list[str]) -> list[Finding]:
    jobs = questions.vector(f"count by (job) ({questions.metric(mine[0])})")
    names = sorted({labels["job"] for labels, _ in jobs if labels.get("job")})
    if not names:
        return []
    down = questions.number(f"count(up{{job=~{quoted('|'.join(map(re.escape, names)))}}} == 0)")
    if not down:
        return []
    return [Finding(f"{down:,.0f} targets of the exporters' jobs are down", "Look at `up == 0` in Prometheus.")]
