"""Prometheus metrics of the service."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from foundation.version import VERSION
from policy.risk_record import parse_utc
from serving.champion import ModelHolder
from serving.http.score_cache import ScoreCache
from serving.logs import AccessLog
from serving.scores.reading import ScoredFleet

MEDIA: Final = CONTENT_TYPE_PLAIN_0_0_4
BOUNDS_S: Final[tuple[float, ...]] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency buckets, in seconds; they cover lookups (5 ms) and the extender (200 ms)."""

disable_created_metrics()


class RequestMetrics:
    """Counts and latencies of requests.

    Cardinality is bounded: unknown paths count as route ``unmatched``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.active = Gauge("predrain_http_active_requests", "Requests in progress.", registry=self.registry)
        text = "Extender responses that passed all nodes because of an error."
        self.passed_through = Counter("predrain_extender_passed_through", text, registry=self.registry)
        text = "Nodes removed by the extender's filter."
        self.removed = Counter("predrain_extender_removed_nodes", text, registry=self.registry)
        text = "Responses; unknown paths count as route unmatched, disconnected clients as status 499."
        self._requests = Counter("predrain_http_requests", text, ("route", "status"), registry=self.registry)
        self._seconds = Histogram(
            "predrain_http_request_duration_seconds",
            "Time from the request head to the end of the response.",
            ("route",),
            buckets=BOUNDS_S,
            registry=self.registry,
        )
        Info("predrain_build", "Version of predrain.", registry=self.registry).info({"version": VERSION})

    def note(self, route: str, status: int, seconds: float) -> None:
        """Record a response."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


@dataclass(frozen=True, slots=True, eq=False)
class StateMetrics:
    """State of the service (scores, model, log), read at each scrape."""

    scores: ScoreCache
    model: ModelHolder
    log: AccessLog
    clock: Callable[[], datetime]
    ready: Callable[[], bool]

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        yield _counter("log_lines_dropped", "Log lines dropped because the reader was too slow.", self.log.dropped)
        yield _counter("score_loads", "Decisions loaded.", self.scores.loads)
        yield _counter("score_load_failures", "Failed attempts to load scores.", self.scores.failures)
        yield _gauge("ready", "1 if /readyz returns 200, else 0.", self.ready())
        fleet = self.scores.served.fleet
        if fleet is not None:
            yield from self._of_scores(fleet)
        yield _counter("model_loads", "Models loaded.", self.model.loads)
        yield _counter("model_refusals", "Models rejected.", self.model.refusals)
        if self.model.has_source:
            yield from self._of_model()

    def _of_scores(self, fleet: ScoredFleet) -> Iterable[Metric]:
        scores, now = fleet.scores, self.clock()
        yield _labelled("units", "Units by tier, as scored.", "tier", fleet.tiers)
        yield _labelled("nodes", "Nodes by tier, as scored.", "tier", fleet.node_tiers)
        text = "1 if no unit has a valid risk, else 0."
        yield _gauge("scores_expired", text, not fleet.holds(now))
        yield _gauge("scores_decision_timestamp_seconds", "Decision time of the scores.", scores.decided.timestamp())
        yield _gauge("scores_expiry_timestamp_seconds", "Expiry of the last valid score.", scores.expires.timestamp())
        age_s = (now - scores.decided).total_seconds()
        yield _gauge("scores_age_seconds", "Time since the decision of the scores.", age_s)
        fitted = fitted_at(scores.summary)
        if fitted is not None:
            text = "Time since the fit of the model that made the scores."
            yield _gauge("scores_model_age_seconds", text, (now - fitted).total_seconds())
        ages = [record.sample_age_seconds for record in scores.units.values() if record.sample_age_seconds is not None]
        if ages:
            values = {"newest": min(ages) + age_s, "oldest": max(ages) + age_s}
            text = "Age of the newest sample of the freshest unit (newest) and of the stalest unit (oldest)."
            yield _labelled("sample_age_seconds", text, "which", values)

    def _of_model(self) -> Iterable[Metric]:
        model = self.model.model
        yield _gauge("model_loaded", "1 if the model for feature rows is loaded, else 0.", model is not None)
        text = "0 if a newer model was rejected or the registry is unavailable, else 1."
        yield _gauge("model_current", text, self.model.refused is None)
        if model is not None:
            age_s = (self.clock() - model.bundle.fitted.refit_at).total_seconds()
            yield _gauge("model_age_seconds", "Time since the fit of the model for feature rows.", age_s)


def fitted_at(summary: Mapping[str, object]) -> datetime | None:
    """Return when the model of a decision was fitted, or None if the summary does not contain it."""
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
