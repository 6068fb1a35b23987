"""The service: its routes, what watches over them, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.champion.sources import BundleSource
from serving.http.access_log import AccessLog
from serving.http.hosts import AllowedHosts
from serving.http.invocations import Invocations
from serving.http.limits import RateLimit
from serving.http.metrics import RequestCounts
from serving.http.model import ModelHolder
from serving.http.openapi import document
from serving.http.query_routes import Asking
from serving.http.request import Answer, Held, Request
from serving.http.routing import Application, Route
from serving.http.scheduling import Scheduling
from serving.http.score_cache import ScoreKeeper
from serving.http.settings import MIB, ServiceSettings
from serving.http.strict_json import write_json
from serving.http.tokens import ScopedTokens
from serving.http.tracing import Tracing
from serving.http.work import Work
from serving.pages.dataset_reader import DatasetReader
from serving.pages.history import ScoreHistory
from serving.pages.routes import FleetPages, Health, LedgerPages
from serving.pages.session import Sessions
from serving.scores.fleet import Fleet
from serving.scores.reading import parse_instant
from serving.scores.status import last_run_metrics
from telemetry.exposition.writer import MEDIA, family

_TEXT = "text/plain; charset=utf-8"
_READING = 2
_READING_QUEUE = 64


class Service:
    """Serves the scores of a folder, and scores rows with a bundle.

    ``scores``: what ``predrain score --out`` writes; need not exist yet.
    ``model``: a bundle's folder, or what names one; default: feature rows are not scored.
    ``tokens``: Default: anybody who reaches the port may ask.
    ``reader``: gives the pages what a dataset holds; is started and stopped with the service.
    ``hosts``: Names, beside localhost and addresses, under which requests may come where no token is asked for.
    ``api``, ``extender``: ASGI applications for two ports.
    Raises ``InputError`` if the token file cannot be used.
    """

    def __init__(
        self,
        scores: Path,
        model: Path | BundleSource | None = None,
        *,
        tokens: Path | None = None,
        settings: ServiceSettings | None = None,
        clock: Callable[[], datetime] | None = None,
        log: AccessLog | None = None,
        reader: DatasetReader | None = None,
        ledger: LedgerPages | None = None,
        tracing: Tracing | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self.settings = settings or ServiceSettings()
        self.counts = RequestCounts()
        self._scores = scores
        self.keeper = ScoreKeeper(scores, self.settings.poll_s)
        self.holder = ModelHolder(model, self.settings.poll_s)
        self._clock = clock or (lambda: datetime.now(UTC))
        self._log = log or AccessLog()
        retry = self.settings.retry_after_s
        self._reading = Work("reading", _READING, _READING_QUEUE, retry)
        # The extender has a thread of its own: a scheduler does not wait behind large predictions.
        self._placing = Work("placing", 1, _READING_QUEUE, retry)
        self._scoring = Work("scoring", 1, self.settings.scoring, retry)
        asking = Asking(self.keeper, self.holder, self.settings, self._clock, self._reading, self._scoring)
        # The pages have threads of their own: a person's page must not wait behind predictions, nor they behind it.
        # Two, so that one that waits for a dataset holds up no other.
        self._rendering = Work("pages", 2, _READING_QUEUE, retry)
        self._reader = reader
        scoped = None if tokens is None else ScopedTokens(tokens)
        pages = FleetPages(
            self.keeper,
            ScoreHistory(scores),
            self._clock,
            self._rendering,
            self._health,
            sessions=None if scoped is None else Sessions(scoped, self._clock),
            reader=reader,
            ledger=ledger,
            document=lambda: document(self.settings),
        )
        rate = self.settings.rate_per_s
        self._limit = None if rate is None else RateLimit(rate, self.settings.rate_burst)
        held = Held()
        local = AllowedHosts(hosts)
        self.api = Application(
            [
                Route("GET", "/healthz", self._healthz, always=True),
                Route("GET", "/readyz", self._readyz, always=True),
                Route("GET", "/metrics", self._metrics, "read", always=True),
                Route("GET", "/openapi.json", self._openapi),
                *asking.routes(),
                *Invocations(asking, self.settings).routes(),
                *pages.routes(),
            ],
            self.settings,
            self.counts,
            self._log,
            tokens=scoped,
            held=held,
            limit=self._limit,
            tracing=tracing,
            hosts=local if scoped is None else None,
        )
        self.extender = Application(
            [
                Route("GET", "/healthz", self._healthz, always=True),
                *Scheduling(self.keeper, self.counts, self._clock, self._placing, self.settings.stale_after_s).routes(),
            ],
            # Ten thousand whole nodes are larger than any body of the API; with nodeCacheCapable they are names.
            replace(self.settings, body_bytes=max(self.settings.body_bytes, 128 * MIB)),
            self.counts,
            self._log,
            hosts=local,
        )

    def start(self) -> None:
        """Begin to read the scores and to load the model, in threads."""
        self.keeper.start()
        self.holder.start()
        if self._reader is not None:
            self._reader.start()

    def close(self) -> None:
        """End the threads, and write what is left of the log."""
        self.keeper.stop()
        self.holder.stop()
        if self._reader is not None:
            self._reader.stop()
        for work in (self._reading, self._placing, self._scoring, self._rendering):
            work.close()
        self._log.close()

    def why_not_ready(self) -> list[str]:
        """Return what keeps the service from being asked; empty if it is ready."""
        reasons: list[str] = []
        served, now = self.keeper.served, self._clock()
        if served.fleet is None:
            reasons.append(f"no scores can be served: {served.trouble}")
        else:
            scores = served.fleet.scores
            if served.fleet.known == 0:
                reasons.append("no unit's risk is known: look after the telemetry")
            elif served.fleet.expired(now):
                reasons.append(f"the scores of {scores.decision} have expired: score the fleet again")
            if not served.fleet.expired(now) and served.fleet.stale(now, self.settings.stale_after_s):
                age_s = (now - scores.decided).total_seconds()
                reasons.append(f"the scores of {scores.decision} are stale, {age_s:.0f} s old: score the fleet again")
        if self.holder.trouble is not None:
            reasons.append(self.holder.trouble)
        return reasons

    def _warnings(self) -> list[str]:
        served = self.keeper.served
        warnings = []
        if self.holder.model is not None and self.holder.refused is not None:
            warnings.append(self.holder.refused)
        if served.fleet is not None and served.trouble is not None:
            warnings.append(f"newer scores cannot be served: {served.trouble}")
        error = served.status.get("error")
        if isinstance(error, str) and error:
            warnings.append(f"the last attempt to score failed: {error}")
        return warnings

    def _health(self) -> Health:
        model = self.holder.model
        return Health(self.why_not_ready(), self._warnings(), None if model is None else model.about())

    async def _healthz(self, _: Request) -> Answer:
        return Answer(b"ok\n", media=_TEXT)

    async def _readyz(self, _: Request) -> Answer:
        reasons, warnings = self.why_not_ready(), self._warnings()
        if not reasons:
            return Answer.json({"status": "ready", "warnings": warnings} | self._facts())
        problem = {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": 503,
            "detail": "; ".join(reasons),
            "reasons": reasons,
            "warnings": warnings,
        } | self._facts()
        return Answer(write_json(problem), 503, "application/problem+json")

    def _facts(self) -> dict[str, Any]:
        """Return what is told of model and telemetry beside the reasons."""
        facts: dict[str, Any] = {}
        if self.holder.wanted:
            model = self.holder.model
            facts["model"] = None if model is None else model.about()
        return facts

    async def _openapi(self, _: Request) -> Answer:
        return Answer.json(document(self.settings))

    async def _metrics(self, _: Request) -> Answer:
        page = self.counts.exposition() + self._score_metrics(self.keeper.served.fleet) + self._model_metrics()
        page += last_run_metrics(self._scores)
        return Answer(page.encode(), media=MEDIA)

    def _score_metrics(self, fleet: Fleet | None) -> str:
        page = family("log_lines_dropped_total", "counter", "Log lines that nobody read.", {"": self._log.dropped})
        page += family("score_loads_total", "counter", "Decisions that were read.", {"": self.keeper.loads})
        text = "Attempts to read scores that failed."
        page += family("score_load_failures_total", "counter", text, {"": self.keeper.failures})
        page += family("ready", "gauge", "Whether /readyz says so.", {"": not self.why_not_ready()})
        if fleet is None:
            return page
        scores, now = fleet.scores, self._clock()
        page += family("units", "gauge", "Units by tier, as scored.", _by_tier(fleet.tiers))
        page += family("nodes", "gauge", "Nodes by tier, as scored.", _by_tier(fleet.node_tiers))
        text = "Whether no unit's risk holds: all have expired, or none is known."
        page += family("scores_expired", "gauge", text, {"": not fleet.holds(now)})
        for name, text, when in (
            ("decision_timestamp_seconds", "Decision time of the scores.", scores.decided),
            ("scores_expiry_timestamp_seconds", "When the last score expires.", scores.expires),
        ):
            page += family(name, "gauge", text, {"": when.timestamp()})
        age_s = (now - scores.decided).total_seconds()
        page += family("scores_age_seconds", "gauge", "Time since the decision.", {"": age_s})
        fitted = _fitted_at(scores.summary)
        if fitted is not None:
            age = {"": (now - fitted).total_seconds()}
            page += family("scores_model_age_seconds", "gauge", "Time since the model of the scores was fitted.", age)
        ages = [record.sample_age_s for record in scores.units.values() if record.sample_age_s is not None]
        if ages:
            values = {'{which="newest"}': min(ages) + age_s, '{which="oldest"}': max(ages) + age_s}
            page += family("sample_age_seconds", "gauge", "Age of the units' newest samples.", values)
        return page

    def _model_metrics(self) -> str:
        page = family("model_loads_total", "counter", "Models that were taken.", {"": self.holder.loads})
        page += family("model_refusals_total", "counter", "Models that were refused.", {"": self.holder.refusals})
        if not self.holder.wanted:
            return page
        model = self.holder.model
        page += family("model_loaded", "gauge", "Whether rows can be scored.", {"": model is not None})
        current = self.holder.refused is None
        page += family("model_current", "gauge", "Whether it is the one that is asked for.", {"": current})
        if model is not None:
            age_s = (self._clock() - model.fitted_at).total_seconds()
            page += family("model_age_seconds", "gauge", "Time since the model was fitted.", {"": age_s})
        return page


def _fitted_at(summary: Mapping[str, Any]) -> datetime | None:
    model = summary.get("model")
    try:
        return parse_instant(model.get("fitted_at")) if isinstance(model, dict) else None
    except ValueError:
        return None


def _by_tier(counts: Mapping[str, int]) -> dict[str, float]:
    return {f'{{tier="{tier}"}}': count for tier, count in counts.items()}
