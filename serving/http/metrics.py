"""The service's own numbers, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from policy.risk_record import parse_utc
from serving.champion.model import ModelHolder
from serving.http.score_cache import ScoreCache
from serving.logs import AccessLog
from serving.scores.fleet import ScoredFleet

MEDIA: Final = CONTENT_TYPE_PLAIN_0_0_4
BOUNDS_S: Final[tuple[float, ...]] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency buckets, seconds: the extender's 200 ms and a look-up's 5 ms lie among them."""

disable_created_metrics()


class RequestMetrics:
    """Requests answered and how long they took.

    Labels are bounded: routes are those of the service (others count as ``unmatched``), statuses those it answers.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.active = Gauge("predrain_http_active_requests", "Requests being answered.", registry=self.registry)
        text = "Extender answers that left every node in because of trouble."
        self.passed_through = Counter("predrain_extender_passed_through", text, registry=self.registry)
        text = "Nodes that the filter has taken out."
        self.removed = Counter("predrain_extender_removed_nodes", text, registry=self.registry)
        self._requests = Counter(
            "predrain_http_requests", "Requests answered.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "predrain_http_request_duration_seconds",
            "Time from a request's head to its answer.",
            ("route",),
            buckets=BOUNDS_S,
            registry=self.registry,
        )
        Info("predrain_build", "Version of predrain.", registry=self.registry).info({"version": predrain_version()})

    def note(self, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


@dataclass(frozen=True, slots=True, eq=False)
class StateMetrics:
    """What the service holds: scores, the model, the log; read when Prometheus asks."""

    scores: ScoreCache
    model: ModelHolder
    log: AccessLog
    clock: Callable[[], datetime]
    ready: Callable[[], bool]

    def collect(self) -> Iterable[Metric]:
        """Give everything that is known now."""
        yield _counter("log_lines_dropped", "Log lines dropped because the reader was too slow.", self.log.dropped)
        yield _counter("score_loads", "Decisions that were read.", self.scores.loads)
        yield _counter("score_load_failures", "Attempts to read scores that failed.", self.scores.failures)
        yield _gauge("ready", "Whether /readyz says so.", self.ready())
        fleet = self.scores.served.fleet
        if fleet is not None:
            yield from self._of_scores(fleet)
        yield _counter("model_loads", "Models that were taken.", self.model.loads)
        yield _counter("model_refusals", "Models that were refused.", self.model.refusals)
        if self.model.wanted:
            yield from self._of_model()

    def _of_scores(self, fleet: ScoredFleet) -> Iterable[Metric]:
        scores, now = fleet.scores, self.clock()
        yield _labelled("units", "Units by tier, as scored.", "tier", fleet.tiers)
        yield _labelled("nodes", "Nodes by tier, as scored.", "tier", fleet.node_tiers)
        text = "Whether no unit's risk holds: all have expired, or none is known."
        yield _gauge("scores_expired", text, not fleet.holds(now))
        yield _gauge("scores_decision_timestamp_seconds", "Decision time of the scores.", scores.decided.timestamp())
        yield _gauge("scores_expiry_timestamp_seconds", "When the last score expires.", scores.expires.timestamp())
        age_s = (now - scores.decided).total_seconds()
        yield _gauge("scores_age_seconds", "Time since the decision.", age_s)
        fitted = fitted_at(scores.summary)
        if fitted is not None:
            text = "Time since the model of the scores was fitted."
            yield _gauge("scores_model_age_seconds", text, (now - fitted).total_seconds())
        ages = [record.sample_age_seconds for record in scores.units.values() if record.sample_age_seconds is not None]
        if ages:
            values = {"newest": min(ages) + age_s, "oldest": max(ages) + age_s}
            yield _labelled("sample_age_seconds", "Age of the units' newest samples.", "which", values)

    def _of_model(self) -> Iterable[Metric]:
        model = self.model.model
        yield _gauge("model_loaded", "Whether rows can be scored.", model is not None)
        yield _gauge("model_current", "Whether it is the one that is asked for.", self.model.refused is None)
        if model is not None:
            age_s = (self.clock() - model.bundle.fitted.refit_at).total_seconds()
            yield _gauge("model_age_seconds", "Time since the model was fitted.", age_s)


def predrain_version() -> str:
    """Return the version that is installed; ``0`` in a checkout that is not."""
    try:
        return version("predrain")
    except PackageNotFoundError:
        return "0"


def fitted_at(summary: Mapping[str, object]) -> datetime | None:
    """Return when the model of a decision was fitted; None where its summary does not say."""
    model = summary.get("model")
    try:
        return parse_utc(model.get("fitted_at")) if isinstance(model, dict) else None
    except ValueError:  # the summary was edited by hand
        return None


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"predrain_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"predrain_{name}", text, value=float(value))


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"predrain_{name}", text, labels=[label])
    for labelled, value in values.items():
        family.add_metric([labelled], float(value))
    return family
