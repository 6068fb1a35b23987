"""The service: its routes, what watches over them, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from policy.tiers import UNKNOWN
from serving.http.access_log import AccessLog
from serving.http.asking import Asking
from serving.http.fleet import Fleet
from serving.http.invocations import Invocations
from serving.http.keeper import ScoreKeeper
from serving.http.metrics import MEDIA, RequestCounts, family
from serving.http.model import ModelHolder
from serving.http.openapi import document
from serving.http.request import Answer, Held, Request
from serving.http.routing import Application, Route
from serving.http.scheduling import Scheduling
from serving.http.scores import parse_instant
from serving.http.settings import MIB, ServiceSettings
from serving.http.strict_json import write_json
from serving.http.tokens import ScopedTokens
from serving.http.work import Work

_TEXT = "text/plain; charset=utf-8"
_READING = 2
_READING_QUEUE = 64


class Service:
    """Serves the scores of a folder, and scores rows with a bundle.

    Parameters
    ----------
    scores : pathlib.Path
        What ``predrain score --out`` writes; need not exist yet.
    model : pathlib.Path, optional
        A bundle's folder; default: feature rows are not scored.
    tokens : pathlib.Path, optional
        Default: anybody who reaches the port may ask.
    settings : ServiceSettings, optional
    clock : callable, optional
        Aware now.
    log : AccessLog, optional
        Default: standard error.

    Attributes
    ----------
    keeper : ScoreKeeper
    holder : ModelHolder
    api, extender : Application
        ASGI applications for two ports.

    Raises
    ------
    InputError
        If the token file cannot be used.
    """

    def __init__(
        self,
        scores: Path,
        model: Path | None = None,
        *,
        tokens: Path | None = None,
        settings: ServiceSettings | None = None,
        clock: Callable[[], datetime] | None = None,
        log: AccessLog | None = None,
    ) -> None:
        self.settings = settings or ServiceSettings()
        self.counts = RequestCounts()
        self.keeper = ScoreKeeper(scores, self.settings.poll_s)
        self.holder = ModelHolder(model)
        self._clock = clock or (lambda: datetime.now(UTC))
        self._log = log or AccessLog()
        retry = self.settings.retry_after_s
        self._reading = Work("reading", _READING, _READING_QUEUE, retry)
        # The extender has a thread of its own: a scheduler does not wait behind large predictions.
        self._placing = Work("placing", 1, _READING_QUEUE, retry)
        self._scoring = Work("scoring", 1, self.settings.scoring, retry)
        asking = Asking(self.keeper, self.holder, self.settings, self._clock, self._reading, self._scoring)
        held = Held()
        self.api = Application(
            [
                Route("GET", "/healthz", self._healthz, always=True),
                Route("GET", "/readyz", self._readyz, always=True),
                Route("GET", "/metrics", self._metrics, "read", always=True),
                Route("GET", "/openapi.json", self._openapi),
                *asking.routes(),
                *Invocations(asking, self.settings).routes(),
            ],
            self.settings,
            self.counts,
            self._log,
            tokens=None if tokens is None else ScopedTokens(tokens),
            held=held,
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
        )

    def start(self) -> None:
        """Begin to read the scores and to load the model, in threads."""
        self.keeper.start()
        self.holder.start()

    def close(self) -> None:
        """End the threads, and write what is left of the log."""
        self.keeper.stop()
        for work in (self._reading, self._placing, self._scoring):
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
            if served.fleet.expired(now):
                reasons.append(f"the scores of {scores.decision} have expired: score the fleet again")
            elif served.fleet.stale(now, self.settings.stale_after_s):
                age_s = (now - scores.decided).total_seconds()
                reasons.append(f"the scores of {scores.decision} are stale, {age_s:.0f} s old: score the fleet again")
        if self.holder.trouble is not None:
            reasons.append(self.holder.trouble)
        return reasons

    def _warnings(self) -> list[str]:
        served = self.keeper.served
        warnings = []
        if served.fleet is not None and served.trouble is not None:
            warnings.append(f"newer scores cannot be served: {served.trouble}")
        if served.fleet is not None and served.fleet.tiers[UNKNOWN] == len(served.fleet.scores.units):
            warnings.append("no unit's risk is known: look after the telemetry")
        error = served.status.get("error")
        if isinstance(error, str) and error:
            warnings.append(f"the last attempt to score failed: {error}")
        return warnings

    async def _healthz(self, _: Request) -> Answer:
        return Answer(b"ok\n", media=_TEXT)

    async def _readyz(self, _: Request) -> Answer:
        reasons, warnings = self.why_not_ready(), self._warnings()
        if not reasons:
            return Answer.json({"status": "ready", "warnings": warnings})
        problem = {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": 503,
            "detail": "; ".join(reasons),
            "reasons": reasons,
            "warnings": warnings,
        }
        return Answer(write_json(problem), 503, "application/problem+json")

    async def _openapi(self, _: Request) -> Answer:
        return Answer.json(document(self.settings))

    async def _metrics(self, _: Request) -> Answer:
        page = self.counts.exposition() + self._score_metrics(self.keeper.served.fleet) + self._model_metrics()
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
        page += family("scores_expired", "gauge", "Whether all scores have expired.", {"": fleet.expired(now)})
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
        if not self.holder.wanted:
            return ""
        model = self.holder.model
        page = family("model_loaded", "gauge", "Whether rows can be scored.", {"": model is not None})
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
