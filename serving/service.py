"""The service: its two ASGI applications, unauthenticated paths, and readiness."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from foundation.server.problems import RequestRefused
from serving.champion import FolderBundle, ModelHolder
from serving.http.application import TOKEN, make_application, problem_response
from serving.http.bodies import PROBLEM, as_json, write_json
from serving.http.extender import ControllerDecisions, add_extender
from serving.http.limits import ServiceSettings, ThreadWork
from serving.http.metrics import MEDIA, RequestMetrics, StateMetrics
from serving.http.middleware import Access, RequestGuard, ScopedTokens, TokenGrant
from serving.http.query_routes import QueryRoutes
from serving.http.schemas import Ready
from serving.http.score_cache import ScoreCache
from serving.logs import AccessLog
from serving.pages.routes import FleetPages, is_page
from serving.scores.reading import last_run_metrics

_READING = 2
_READING_QUEUE = 64


class Service:
    """Serves the scores of a folder, and scores feature rows with a bundle.

    ``scores``: output of ``predrain score --out``; may not exist yet.
    ``model``: a bundle's folder, or another source; None: feature rows are not scored.
    ``tokens``: token file; None: no authentication.
    ``hosts``: allowed host names besides localhost and IP addresses, if no tokens are configured.
    ``notice``: returns the banner of every page; pages with a banner reload themselves.
    ``api``, ``extender``: ASGI applications of the two ports.
    Raises ``InputError`` if the token file is unusable.
    """

    def __init__(
        self,
        scores: Path,
        model: Path | FolderBundle | None = None,
        *,
        tokens: Path | None = None,
        settings: ServiceSettings | None = None,
        clock: Callable[[], datetime] | None = None,
        log: AccessLog | None = None,
        ledger: Callable[[], Any] | None = None,
        hosts: Sequence[str] = (),
        notice: Callable[[], str] | None = None,
    ) -> None:
        self.settings = settings or ServiceSettings()
        self.metrics = RequestMetrics()
        self._scores = scores
        self.score_cache = ScoreCache(scores, self.settings.poll_s)
        self.holder = ModelHolder(model, self.settings.poll_s)
        self._clock = clock or (lambda: datetime.now(UTC))
        self._log = log or AccessLog()
        self.metrics.registry.register(
            StateMetrics(self.score_cache, self.holder, self._log, self._clock, lambda: not self.why_not_ready())
        )
        retry = self.settings.retry_after_s
        self._reading = ThreadWork("reading", _READING, _READING_QUEUE, retry)
        # The extender has its own thread, so that schedulers do not wait behind large predictions.
        self._placing = ThreadWork("placing", 1, _READING_QUEUE, retry)
        self._scoring = ThreadWork("scoring", 1, self.settings.scoring, retry)
        # Pages have their own threads, so that they and predictions do not wait for each other.
        self._rendering = ThreadWork("pages", 2, _READING_QUEUE, retry)
        self._tokens = None if tokens is None else ScopedTokens(tokens)
        self._pages = FleetPages(self.score_cache, scores, self._clock, self._rendering, self._health, ledger, notice)
        access = Access(None if self._tokens is None else self._grant, is_page, self._refusal)
        self.api = make_application(access)
        queries = QueryRoutes(self.score_cache, self.holder, self.settings, self._clock, self._reading, self._scoring)
        queries.add_to(self.api)
        self._add_state_routes()
        self._pages.add_to(self.api)
        self._guard(self.api, access, hosts if self._tokens is None else None)
        self.decisions = ControllerDecisions(ledger if self.settings.extender_filter == "ledger" else None)
        self.extender = self._make_extender(hosts)

    def _make_extender(self, hosts: Sequence[str]) -> FastAPI:
        """Create the application of the extender's port, which has no authentication."""
        access = Access(None, lambda _: False, problem_response)
        extender = make_application(access)
        add_extender(
            extender, self.score_cache, self.metrics, self._clock, self._placing, self.settings, self.decisions
        )
        extender.add_api_route("/healthz", self._healthz)
        self._guard(extender, access, hosts)
        return extender

    def _guard(self, app: FastAPI, access: Access, hosts: Sequence[str] | None) -> None:
        """Give each port its own limits: requests to the API must not crowd out the extender's and so delay pods."""
        app.add_middleware(
            RequestGuard, settings=self.settings, access=access, metrics=self.metrics, log=self._log, hosts=hosts
        )

    def _grant(self, request: Request) -> TokenGrant | None:
        assert self._tokens is not None
        return self._tokens.grant(request.headers.get("authorization"), basic=is_page(request.scope["path"]))

    def _refusal(self, request: Request, refused: RequestRefused) -> Response:
        # A request with a foreign host or ambiguous framing is not an ordinary visit: it gets no page.
        if is_page(request.scope["path"]) and refused.reason not in ("host", "framing"):
            return self._pages.refusal(request, refused)
        return problem_response(request, refused)

    def _add_state_routes(self) -> None:
        text: dict[str, Any] = {"response_class": PlainTextResponse}
        ready = "Return whether the service is ready: valid scores, and a loaded model if it has one."
        add = self.api.add_api_route
        add("/healthz", self._healthz, summary="Return whether the process is alive.", **text)
        add("/readyz", self._readyz, summary=ready, response_model=Ready)
        add(
            "/metrics",
            self._metrics,
            summary="Return metrics in Prometheus' text format.",
            dependencies=[TOKEN],
            **text,
        )
        add("/openapi.json", self._openapi, summary="Return the OpenAPI document.", response_model=dict[str, Any])

    def start(self) -> None:
        """Start the threads that read the scores and load the model."""
        self.score_cache.poller.start()
        self.decisions.start()
        self.holder.start()

    def close(self) -> None:
        """Stop the threads and flush the log."""
        self.score_cache.poller.stop()
        self.decisions.stop()
        self.holder.stop()
        for work in (self._reading, self._placing, self._scoring, self._rendering):
            work.close()
        self._log.close()

    def why_not_ready(self) -> list[str]:
        """Return why the service is not ready; empty if it is."""
        reasons: list[str] = []
        served, now = self.score_cache.served, self._clock()
        if served.fleet is None:
            reasons.append(f"no scores can be served: {served.error}")
        else:
            scores = served.fleet.scores
            if served.fleet.known == 0:
                reasons.append("no unit has a known risk: check the telemetry")
            elif served.fleet.expired(now):
                reasons.append(f"the scores of {scores.decision} have expired: score the fleet again")
            if not served.fleet.expired(now) and served.fleet.stale(now, self.settings.stale_after_s):
                age_s = (now - scores.decided).total_seconds()
                reasons.append(f"the scores of {scores.decision} are stale, {age_s:.0f} s old: score the fleet again")
        if self.holder.why_not_loaded is not None:
            reasons.append(self.holder.why_not_loaded)
        return reasons

    def _warnings(self) -> list[str]:
        served = self.score_cache.served
        warnings = []
        if self.holder.model is not None and self.holder.refused is not None:
            warnings.append(self.holder.refused)
        if served.fleet is not None and served.error is not None:
            warnings.append(f"newer scores cannot be served: {served.error}")
        error = served.status.get("error")
        if isinstance(error, str) and error:
            warnings.append(f"the last attempt to score failed: {error}")
        return warnings

    def _health(self) -> dict[str, Any]:
        model = self.holder.model
        facts = None if model is None else model.about()
        return {"reasons": self.why_not_ready(), "warnings": self._warnings(), "model": facts}

    async def _healthz(self) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self) -> Response:
        health = self._health()
        if not self.holder.has_source:
            del health["model"]
        reasons = health["reasons"]
        if not reasons:
            del health["reasons"]
            return as_json({"status": "ready"} | health)
        problem = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": "; ".join(reasons)}
        return Response(write_json(problem | health), 503, media_type=PROBLEM)

    async def _openapi(self) -> Response:
        return as_json(self.api.openapi())

    async def _metrics(self) -> Response:
        page = generate_latest(self.metrics.registry) + last_run_metrics(self._scores).encode()
        return Response(page, media_type=MEDIA)
