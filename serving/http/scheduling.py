"""``/scheduler``: the routes of the scheduler extender, which let everything pass when anything of ours is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from serving.http.extender import Candidates, candidates, filter_result, no_preference, pass_all, priorities
from serving.http.metrics import RequestCounts
from serving.http.request import Answer, Request
from serving.http.routing import Route
from serving.http.score_cache import ScoreKeeper
from serving.http.strict_json import read_json
from serving.http.work import Work
from serving.scores.fleet import Fleet

_LOG = logging.getLogger(__name__)
_AT_ONCE = 2**18  # bytes of a body that is read within a few milliseconds


class Scheduling:
    """The extender's two verbs."""

    def __init__(
        self,
        keeper: ScoreKeeper,
        counts: RequestCounts,
        clock: Callable[[], datetime],
        reading: Work,
        stale_after_s: float | None = None,
    ) -> None:
        self._stale_after_s = stale_after_s
        self._keeper = keeper
        self._counts = counts
        self._clock = clock
        self._reading = reading

    def routes(self) -> list[Route]:
        """Return the routes; none asks for a token, because kube-scheduler sends none."""
        return [
            Route("POST", "/scheduler/filter", self._filter),
            Route("POST", "/scheduler/prioritize", self._prioritize),
        ]

    async def _filter(self, request: Request) -> Answer:
        asked = await self._asked(request)
        return Answer.json(self._safely(asked, partial(self._filtered, asked), pass_all))

    async def _prioritize(self, request: Request) -> Answer:
        asked = await self._asked(request)
        return Answer.json(self._safely(asked, partial(self._prioritized, asked), no_preference))

    def _filtered(self, asked: Candidates) -> dict[str, Any]:
        now = self._clock()
        result = filter_result(asked, self._fleet(now), now)
        self._counts.removed += len(result["FailedNodes"])
        return result

    def _prioritized(self, asked: Candidates) -> list[dict[str, Any]]:
        now = self._clock()
        return priorities(asked, self._fleet(now), now)

    def _fleet(self, now: datetime) -> Fleet | None:
        fleet = self._keeper.served.fleet
        return None if fleet is None or fleet.stale(now, self._stale_after_s) else fleet

    def _safely(self, asked: Candidates, decide: Callable[[], Any], otherwise: Callable[[Candidates], Any]) -> Any:
        try:
            return decide()
        except Exception:  # a fault of ours must not keep a pod from running
            self._counts.passed_through += 1
            _LOG.exception("the extender lets all of %d nodes pass", len(asked.names))
            return otherwise(asked)

    async def _asked(self, request: Request) -> Candidates:
        body = await request.body()
        if len(body) <= _AT_ONCE and request.headers.get("content-encoding") is None:
            return candidates(read_json(body))
        return await self._reading.run(lambda: candidates(read_json(request.plain(body))))
