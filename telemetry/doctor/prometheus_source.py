"""Looking at a Prometheus (or what has its API) by a handful of instant queries, each about many metrics at once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from telemetry.collect.prometheus.promql import quoted, selector
from telemetry.collect.series.identity import XID_COUNT_METRIC, SeriesCatalogue
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.unused import is_unused
from telemetry.dataset.channels import Channel
from telemetry.doctor.observation import ChannelSeen, Finding, Observation, findings_of
from telemetry.errors import InputError
from telemetry.http import Connection, HttpError, fetch, shown_url

LOOK_BACK_S: Final = 86_400
"""A metric that had a sample within this time and has none now has stopped."""

_NAMES_AT_ONCE: Final = 20
_GPU_METRIC: Final = re.compile(r"DCGM_|dcgm_|gpu_|amd_|nvidia_", re.IGNORECASE)
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
        """Return the one number that a query gives; None if it gives none."""
        found = self.vector(query)
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
    questions: Questions, *, channels: Mapping[str, Channel], mapping: SourceMapping | None = None
) -> Observation:
    """Look at what a server has of the channels now.

    Raises ``InputError`` if the server cannot be asked, refuses, or has no metric of ours.
    """
    where = shown_url(questions.connection.url)
    known = SeriesCatalogue(channels, mapping).metric_names()
    try:
        names = questions.names()
        if not names:
            raise InputError(
                "the server has no series of the last day",
                where,
                "Is anything scraped? Of old data: `predrain collect prometheus`, then `predrain doctor DATASET`.",
            )
        mine = [name for name in names if name in known]
        if not mine:
            raise InputError(
                f"none of the {len(names):,} metrics is a channel of ours",
                where,
                "Check --match, or name your recording rules in a mapping file (--mapping, `metrics:`).",
            )
        return _observe(questions, names, mine, known, where)
    except HttpError as refused:
        raise InputError(str(refused), where, "Check the credentials and --match.") from None


def _observe(
    questions: Questions, names: list[str], mine: list[str], known: Mapping[str, str], where: str
) -> Observation:
    series, blanks = _counts(questions, mine, "{0}"), _counts(questions, mine, _BLANKS)
    gpus: dict[str, int] = {}
    for label in _DEVICE_LABELS:  # rows of NVLink links name their GPU by another label than the rest
        for name, count in _counts(questions, mine, f"count by (__name__, {label}) ({{1}})", f'{label}!=""').items():
            gpus.setdefault(name, count)
    seen: dict[str, ChannelSeen] = {}
    for name in mine:
        all_blank = blanks.get(name, 0) >= series.get(name, 0)
        made = ChannelSeen(known[name], 0 if all_blank else gpus.get(name, 0), name, None, blanks.get(name, 0))
        if known[name] not in seen or made.gpus > seen[known[name]].gpus:
            seen[known[name]] = made
    chosen = questions.one(map(re.escape, mine))
    stopped = {known[name] for name in mine} - {known[name] for name in series}
    blank = {known[name] for name, count in blanks.items() if count}
    return Observation(
        kind="Prometheus",
        where=where,
        at=questions.at,
        units=_distinct(questions, chosen, _DEVICE_LABELS),
        nodes=_distinct(questions, chosen, _NODE_LABELS),
        models=_models(questions, mine[0]),
        channels=seen,
        xid_events=XID_COUNT_METRIC in names,
        facts={"exporter": "AMD" if not any(name.startswith("DCGM") for name in mine) else "NVIDIA"},
        findings=tuple(_findings(questions, mine[0], ", ".join(sorted(stopped)), ", ".join(sorted(blank)))),
        unknown=tuple(
            sorted(
                name
                for name in names
                if name not in known and name != XID_COUNT_METRIC and _GPU_METRIC.match(name) and not is_unused(name)
            )
        ),
    )


def _counts(questions: Questions, names: list[str], template: str, matcher: str = "") -> dict[str, int]:
    """Count by metric what a query gives; ``{0}`` is the selector of some metrics, ``{1}`` the same with a matcher."""
    found: dict[str, int] = {}
    for start in range(0, len(names), _NAMES_AT_ONCE):
        chosen = questions.one(map(re.escape, names[start : start + _NAMES_AT_ONCE]))
        query = template.format(chosen, f"{chosen[:-1]},{matcher}}}")
        answer = questions.vector(f"count by (__name__) ({query})")
        found |= {labels["__name__"]: int(value) for labels, value in answer if "__name__" in labels}
    return found


def _distinct(questions: Questions, chosen: str, labels: tuple[str, ...]) -> int:
    """Count the values of the first of some labels that the series have."""
    for label in labels:
        for name in (f"exported_{label}", label):
            found = questions.number(f'count(count by ({name}) ({chosen[:-1]},{name}!=""}}))')
            if found:
                return int(found)
    return 0


def _models(questions: Questions, name: str) -> dict[str, int]:
    for label in _MODEL_LABELS:
        found = questions.vector(f'count by ({label}) ({questions.metric(name)[:-1]},{label}!=""}})')
        if found:
            return dict(sorted((labels[label], int(count)) for labels, count in found if label in labels))
    return {}


def _findings(questions: Questions, name: str, stopped: str, blank: str) -> list[Finding]:
    jobs = questions.vector(f"count by (job) ({questions.metric(name)})")
    pattern = "|".join(re.escape(labels["job"]) for labels, _ in jobs if labels.get("job"))
    down = questions.number(f"count(up{{job=~{quoted(pattern)}}} == 0)") if pattern else None
    return findings_of(
        (
            stopped,
            f"within the last day there was {stopped}, and now there is none",
            "Look at the exporters' counter file and targets: they were changed, or they stopped.",
        ),
        (down, f"{down or 0:,.0f} targets of the exporters' jobs are down", "Look at `up == 0` in Prometheus."),
        (blank, f"values that mean not supported are stored ({blank}); they are read as null", "", False),
    )
