"""``/v1``: nodes by risk, one node with its reasons, and predictions of nodes, GPUs and feature rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from policy.risk_record import instant_words
from policy.tiers import UNKNOWN
from serving.http.model import LoadedModel, ModelHolder
from serving.http.request import JSON, Answer, Request, unknown_name
from serving.http.routing import Route
from serving.http.score_cache import ScoreKeeper
from serving.http.settings import ServiceSettings
from serving.http.strict_json import may_hold_booleans, read_json, shown
from serving.http.work import Work
from serving.scores.fleet import ALL_TIERS, Fleet, NodeState, frame, node_answer, node_with_units, unit_answer
from telemetry.receiving.problems import Refused

if TYPE_CHECKING:
    from serving.http.rows import FeatureRows

SORTS: Final = ("-risk", "risk", "node", "-node")

ARROW: Final = "application/vnd.apache.arrow.stream"
_KINDS: Final = ("nodes", "gpus", "rows")
_REMOVED: Final = {
    "samples": "samples are not scored by the service: write them to a dataset (`predrain collect`), "
    "compact and score it (`predrain score --every`), and ask for nodes or gpus",
}
"""Keys of earlier versions, and what to do now."""
_PAGE: Final = 100
_AT_ONCE: Final = 512  # bytes of a body that names so few nodes that a thread would cost more than the answer
_CONTAINERS: Final = 64
_ROWS: Final = re.compile(rb'\s*\{\s*"rows"')
_MOST_REASONS: Final = 10
_OWN_COLUMNS: Final = 2  # unit and decision_time


class Asking:
    """Answers from the scores, and from the model where rows are given."""

    def __init__(
        self,
        keeper: ScoreKeeper,
        holder: ModelHolder,
        settings: ServiceSettings,
        clock: Callable[[], datetime],
        reading: Work,
        scoring: Work,
    ) -> None:
        self._keeper = keeper
        self._holder = holder
        self._settings = settings
        self._clock = clock
        self._reading = reading
        self._scoring = scoring

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("GET", "/v1/nodes", self._nodes, "read"),
            Route("GET", "/v1/nodes/{node}", self._node, "read"),
            Route("POST", "/v1/predict", self._predict, "read"),
        ]

    def fleet(self) -> Fleet:
        """Return the scores to answer from.

        Raises ``Refused``: 503, if there are none.
        """
        served = self._keeper.served
        if served.fleet is None:
            detail = f"no scores can be served: {served.trouble}"
            raise Refused(503, detail, "scores", retry_after_s=self._settings.retry_after_s)
        return served.fleet

    def model(self) -> LoadedModel:
        """Return the model that scores rows.

        Raises ``Refused``: 409 if the service has none, 503 if it is not loaded.
        """
        if not self._holder.wanted:
            raise Refused(409, "feature rows are scored by a service that was started with --model", "model")
        if self._holder.model is None:
            raise Refused(503, str(self._holder.trouble), "model", retry_after_s=self._settings.retry_after_s)
        return self._holder.model

    async def score(
        self,
        request: Request,
        read: Callable[[bytes, LoadedModel], FeatureRows],
        write: Callable[[LoadedModel, Any], Any],
        top: int = 0,
    ) -> Answer:
        """Read a body's rows in one thread, and score and answer them in another.

        ``read``: from the plain body and the model to ``FeatureRows``.
        ``top``: reasons of each row that alerts at most.
        """
        model = self.model()
        body = await request.body()
        rows = await self._reading.run(lambda: read(request.plain(body), model))
        return await self._scored(model, rows, write, top)

    async def _scored(
        self, model: LoadedModel, rows: FeatureRows, write: Callable[[LoadedModel, Any], Any], top: int
    ) -> Answer:
        return await self._scoring.run(lambda: Answer.json(write(model, model.explained(rows, top))))

    async def _nodes(self, request: Request) -> Answer:
        sort, tiers, offset, limit, decision = self._page(request)
        fleet, now = self.fleet(), self._clock()
        if decision is not None and decision != fleet.scores.decision:
            raise Refused(
                409, f"newer scores are served ({fleet.scores.decision}): begin with the first page", "decision"
            )
        states = fleet.states(now)
        if tiers:
            states = [state for state in states if state.tier in tiers]
        page = _sorted(states, sort)[offset : offset + limit]
        following = None
        if offset + limit < len(states):
            pairs = [("sort", sort), *(("tier", tier) for tier in tiers), ("offset", str(offset + limit))]
            pairs += [("limit", str(limit)), ("decision", fleet.scores.decision)]
            following = f"/v1/nodes?{urlencode(pairs)}"
        found = {"total": len(states), "offset": offset, "next": following}
        return Answer.json(frame(fleet, now) | found | {"nodes": [node_answer(state) for state in page]})

    def _page(self, request: Request) -> tuple[str, list[str], int, int, str | None]:
        sort, tiers, offset, limit, decision = SORTS[0], [], 0, _PAGE, None
        for name, value in request.query(("sort", "tier", "offset", "limit", "decision")):
            if name == "sort":
                if value not in SORTS:
                    raise Refused(400, unknown_name(value, SORTS, "sort"), "invalid")
                sort = value
            elif name == "tier":
                for tier in value.split(","):
                    if tier not in ALL_TIERS:
                        raise Refused(400, unknown_name(tier, ALL_TIERS, "tier"), "invalid")
                    tiers.append(tier)
            elif name == "decision":
                decision = value
            elif name == "offset":
                offset = _whole(name, value, 0, 10**9)
            else:
                limit = _whole(name, value, 1, self._settings.page)
        return sort, tiers, offset, limit, decision

    async def _node(self, request: Request) -> Answer:
        request.query(())
        fleet, now = self.fleet(), self._clock()
        state = fleet.state(request.parameter, now)
        if state is None:
            raise Refused(404, f"there is no score of node {shown(request.parameter)}", "node")
        return Answer.json(frame(fleet, now) | node_with_units(state, fleet.scores.nodes[state.node], now))

    async def _predict(self, request: Request) -> Answer:
        top = 0
        for name, value in request.query(("reasons",)):
            top = _whole(name, value, 0, _MOST_REASONS)
        media = request.media()
        if media == ARROW:
            return await self.score(request, self._read_arrow, self._rows_answer, top)
        if media != JSON:
            raise Refused(415, f"send {JSON} or {ARROW}", "media_type")
        body = await request.body()
        small = len(body) <= _AT_ONCE and request.headers.get("content-encoding") is None
        if small:
            kind, value = self._asked(body)
            if kind in ("nodes", "gpus"):
                return self._looked_up(kind, value)
        answer = await self._reading.run(lambda: self._large(request.plain(body)))
        if isinstance(answer, Answer):
            return answer
        model, rows = answer
        return await self._scored(model, rows, self._rows_answer, top)

    def _large(self, body: bytes) -> Answer | tuple[LoadedModel, FeatureRows]:
        """Return an answer, or the model and the rows that it is to score."""
        kind, value = self._asked(body)
        if kind in ("nodes", "gpus"):
            return self._looked_up(kind, value)
        from serving.http.rows import rows_of_records  # noqa: PLC0415 - numpy, for rows only

        model = self.model()
        return model, rows_of_records(value, model.columns, self._settings.rows, booleans=may_hold_booleans(body))

    def _asked(self, body: bytes) -> tuple[str, Any]:
        model, rows = self._holder.model, self._settings.rows
        if model is None and _ROWS.match(body):  # say that there is no model before that there are too many values
            self.model()
        values = rows * (1 if model is None else len(model.columns) + _OWN_COLUMNS)
        content = read_json(body, containers=rows + _CONTAINERS, values=values, finite=False)
        if not isinstance(content, dict):
            raise Refused(422, "send an object with nodes, gpus or rows", "invalid")
        for key in content:
            if key in _REMOVED:
                raise Refused(422, _REMOVED[key], "invalid")
            if key not in _KINDS:
                raise Refused(422, unknown_name(key, _KINDS, "key"), "invalid")
        if len(content) != 1:
            raise Refused(422, f"send exactly one of {', '.join(_KINDS)}", "invalid")
        ((kind, value),) = content.items()
        return kind, value

    def _looked_up(self, kind: str, names: Any) -> Answer:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused(422, f"{kind} is no list of names", "invalid")
        if not names:
            raise Refused(422, f"{kind} names none", "invalid")
        if len(names) > self._settings.rows:
            raise Refused(413, f"{len(names)} {kind}: ask for at most {self._settings.rows}", "too_large")
        fleet, now = self.fleet(), self._clock()
        find = self._node_of if kind == "nodes" else self._unit_of
        return Answer.json(frame(fleet, now) | {kind: [find(fleet, name, now) for name in names]})

    @staticmethod
    def _node_of(fleet: Fleet, name: str, now: datetime) -> dict[str, Any]:
        state = fleet.state(name, now)
        if state is None:
            return node_with_units(NodeState(name, UNKNOWN, None, 0, 0, 0), (), now) | {"scored": False}
        return node_with_units(state, fleet.scores.nodes[name], now) | {"scored": True}

    @staticmethod
    def _unit_of(fleet: Fleet, name: str, now: datetime) -> dict[str, Any]:
        record = fleet.scores.units.get(name)
        if record is None:
            why = "there is no score of it"
            return {
                "unit": name,
                "gpu": name,
                "status": UNKNOWN,
                "why_unknown": why,
                "risk": None,
                "tier": UNKNOWN,
                "scored": False,
            }
        return unit_answer(record, now) | {"scored": True}

    def _read_arrow(self, body: bytes, model: LoadedModel) -> FeatureRows:
        from serving.http.rows import rows_of_arrow  # noqa: PLC0415 - numpy and Arrow, for rows only

        return rows_of_arrow(body, model.columns, self._settings.rows, self._settings.decoded_bytes)

    def _rows_answer(self, model: LoadedModel, predictions: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "issued_at": instant_words(self._clock()),
            "horizon_s": model.horizon_s,
            "model": model.about(),
            # Only the caller knows how old its rows are, so how long the answer holds.
            "expires_at": None,
            "predictions": predictions,
        }


def _sorted(states: list[NodeState], sort: str) -> list[NodeState]:
    """Sort states that come with the riskiest first; unknown ones stand last either way."""
    if sort == "-risk":
        return states
    if sort == "risk":
        known = [state for state in states if state.risk is not None]
        return [*reversed(known), *states[len(known) :]]
    return sorted(states, key=lambda state: state.node, reverse=sort == "-node")


def _whole(name: str, value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 10 and least <= int(value) <= most):
        raise Refused(400, f"{name} is {shown(value)}: give a whole number from {least} to {most}", "invalid")
    return int(value)
