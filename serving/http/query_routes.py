"""``/v1``: nodes by risk, one node with its reasons, predictions. MLflow's protocol: ``/ping`` and ``/invocations``.

Of MLflow 2 and 3's request bodies, those with column names are accepted: ``dataframe_split``, ``dataframe_records``,
``instances`` and ``inputs`` as records, and ``inputs`` as one list per column. Tensors are rejected, because their
features have no names.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from foundation.server.problems import RequestRefused
from policy.risk_record import RiskRecord, format_utc
from policy.tiers import UNKNOWN
from serving.champion import LoadedModel, ModelHolder
from serving.http.application import TEXT, TOKEN
from serving.http.bodies import ARROW, JSON, as_json, media_of, one_of, quoted, read_json, unknown_name
from serving.http.limits import ServiceSettings, ThreadWork
from serving.http.schemas import (
    INVOCATIONS,
    PREDICT_BODIES,
    NodeAnswer,
    NodesAnswer,
    NodesQuery,
    PredictAnswer,
    Predictions,
    request_body,
)
from serving.http.score_cache import ScoreCache
from serving.scores.reading import ScoredFleet, ScoredNode

if TYPE_CHECKING:
    from serving.champion import FeatureRows


_KINDS: Final = ("nodes", "gpus", "rows")
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # Slurm rejects a job whose list it cannot parse
_MAX_INLINE_BYTES: Final = 512  # bytes; for smaller bodies a thread would cost more than the lookup
_CONTAINERS: Final = 64
_OWN_COLUMNS: Final = 2  # unit and decision_time


@dataclass(frozen=True, slots=True)
class QueryRoutes:
    """Serves risks from the scores, and from the model for feature rows."""

    cache: ScoreCache
    holder: ModelHolder
    settings: ServiceSettings
    clock: Callable[[], datetime]
    reading: ThreadWork
    scoring: ThreadWork

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(
            "/v1/nodes/{node:name}",
            self._node,
            summary="Return the risk of a node, its GPUs and reasons.",
            response_model=NodeAnswer,
            dependencies=[TOKEN],
        )
        app.add_api_route(
            "/v1/nodes",
            self._nodes,
            summary="List nodes, by default the riskiest first.",
            response_model=NodesAnswer,
            dependencies=[TOKEN],
            responses={200: TEXT},
        )
        app.add_api_route(
            "/v1/predict",
            self._predict,
            methods=["POST"],
            summary="Return the risk of nodes or GPUs by name, or of feature rows.",
            response_model=PredictAnswer,
            dependencies=[TOKEN],
            openapi_extra={"requestBody": request_body(PREDICT_BODIES, arrow=ARROW, exact=True)},
        )
        app.add_api_route(
            "/ping",
            self.ping,
            summary="Return whether the model is loaded (MLflow's protocol).",
            response_class=PlainTextResponse,
        )
        app.add_api_route(
            "/invocations",
            self.invoke,
            methods=["POST"],
            summary="Score feature rows in MLflow's protocol.",
            response_model=Predictions,
            dependencies=[TOKEN],
            openapi_extra={"requestBody": request_body(INVOCATIONS)},
        )

    def fleet(self) -> ScoredFleet:
        """Return the current scores; raises ``RequestRefused`` (503) if there are none."""
        return self.cache.fleet(self.settings.retry_after_s)

    def model(self) -> LoadedModel:
        """Return the model for feature rows.

        Raises ``RequestRefused``: 409 if the service has none, 503 if it is not loaded.
        """
        if not self.holder.has_source:
            raise RequestRefused(409, "feature rows are scored by a service that was started with --model", "model")
        if self.holder.model is None:
            reason = str(self.holder.why_not_loaded)
            raise RequestRefused(503, reason, "model", retry_after_s=self.settings.retry_after_s)
        return self.holder.model

    async def _scored(
        self,
        model: LoadedModel,
        read: "Callable[[], FeatureRows]",
        respond: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> Response:
        """Parse rows in one thread pool, and score them in another."""
        rows = await self.reading.run(read)
        return await self.scoring.run(lambda: as_json(respond(model.score(rows))))

    async def _nodes(self, query: Annotated[NodesQuery, Query()]) -> Response:
        fleet, now = self.fleet(), self.clock()
        if query.decision is not None and query.decision != fleet.scores.decision:
            raise RequestRefused(
                409, f"newer scores are served ({fleet.scores.decision}): restart at the first page", "decision"
            )
        states = fleet.states(now)
        tiers = query.tier or (["elevated", "high"] if query.format == "hostlist" else [])
        if tiers:
            states = [state for state in states if state.tier in tiers]
        end = query.offset + query.limit
        following = None
        if end < len(states):
            page_query = query.model_copy(update={"offset": end, "decision": fleet.scores.decision})
            following = f"/v1/nodes?{urlencode(page_query.model_dump(), doseq=True)}"
        page = _sorted(states, query.sort)[query.offset : end]
        if query.format == "hostlist":
            return self._hostlist(fleet, now, page)
        window = {"total": len(states), "offset": query.offset, "next": following}
        return as_json(frame(fleet, now) | window | {"nodes": [node_answer(state) for state in page]})

    def _hostlist(self, fleet: ScoredFleet, now: datetime, page: list[ScoredNode]) -> Response:
        """Return names for ``sbatch --exclude``: at most half of the nodes, because jobs must still start."""
        if not fleet.holds(now) or fleet.stale(now, self.settings.stale_after_s):
            detail = f"the scores of {format_utc(fleet.scores.decided)} are too old to exclude nodes"
            raise RequestRefused(503, detail, "scores", retry_after_s=self.settings.retry_after_s)
        names = [state.node for state in page if _HOST.fullmatch(state.node)]
        return PlainTextResponse(",".join(names[: len(fleet.scores.nodes) // 2]) + "\n")

    async def _node(self, node: str) -> Response:
        fleet, now = self.fleet(), self.clock()
        name = fleet.names.find(node)
        if name is None:
            raise RequestRefused(404, without_score(fleet, node), "node")
        return as_json(frame(fleet, now) | node_with_units(fleet, name, now))

    async def _predict(self, request: Request) -> Response:
        media = media_of(request)
        if media not in (ARROW, JSON):
            raise RequestRefused(415, f"send {JSON} or {ARROW}", "media_type")
        body, rows = await request.body(), None
        if media == JSON:
            inline = len(body) <= _MAX_INLINE_BYTES
            kind, rows = self._request_of(body) if inline else await self.reading.run(lambda: self._request_of(body))
            if kind in ("nodes", "gpus"):
                names = rows
                if inline:
                    return self._looked_up(kind, names)
                return await self.reading.run(lambda: self._looked_up(kind, names))
        model = self.model()

        def read() -> "FeatureRows":
            from serving.http.rows import rows_of_arrow, rows_of_records

            if media == ARROW:
                return rows_of_arrow(body, model.columns, self.settings.rows, self.settings.decoded_bytes)
            return rows_of_records(rows, model.columns, self.settings.rows)

        return await self._scored(model, read, partial(self._rows_answer, model))

    async def ping(self) -> Response:
        """Return 200 if a model is loaded."""
        self.model()
        return PlainTextResponse("\n")

    async def invoke(self, request: Request) -> Response:
        """Return the predictions of MLflow's scoring protocol."""
        if media_of(request) != JSON:
            raise RequestRefused(415, f"send {JSON}", "media_type")
        model, body = self.model(), await request.body()
        read = partial(_read, body, model, self.settings.rows)
        return await self._scored(model, read, lambda predictions: {"predictions": predictions})

    def _request_of(self, body: bytes) -> tuple[str, Any]:
        model, rows = self.holder.model, self.settings.rows
        values = rows * (1 if model is None else len(model.columns) + _OWN_COLUMNS)
        return one_of(read_json(body, containers=rows + _CONTAINERS, values=values), _KINDS)

    def _looked_up(self, kind: str, names: Any) -> Response:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RequestRefused(422, f"{kind} is not a list of names", "invalid")
        if not names:
            raise RequestRefused(422, f"{kind} is empty", "invalid")
        if len(names) > self.settings.rows:
            raise RequestRefused(413, f"{len(names)} {kind}: ask for at most {self.settings.rows}", "too_large")
        fleet, now = self.fleet(), self.clock()
        find = self._node_of if kind == "nodes" else self._unit_of
        return as_json(frame(fleet, now) | {kind: [find(fleet, name, now) for name in names]})

    @staticmethod
    def _node_of(fleet: ScoredFleet, name: str, now: datetime) -> dict[str, Any]:
        node = fleet.names.find(name)
        if node is None:
            unscored = node_answer(ScoredNode(name, UNKNOWN, None, 0, 0, 0))
            return unscored | {"expires_at": None, "sample_age_seconds": None, "units": [], "scored": False}
        return node_with_units(fleet, node, now) | {"scored": True}

    @staticmethod
    def _unit_of(fleet: ScoredFleet, name: str, now: datetime) -> dict[str, Any]:
        record = fleet.unit(name)
        if record is None:
            reason = "no score has this name"
            return {
                "unit": name,
                "gpu": name,
                "status": UNKNOWN,
                "unknown_reason": reason,
                "risk": None,
                "tier": UNKNOWN,
                "scored": False,
            }
        return unit_answer(record, now) | {"scored": True}

    def _rows_answer(self, model: LoadedModel, predictions: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "issued_at": format_utc(self.clock()),
            "horizon_seconds": model.horizon_seconds,
            "model": model.about(),
            # Only the caller knows how old its rows are, and so when the risk expires.
            "expires_at": None,
            "predictions": predictions,
        }


def without_score(fleet: ScoredFleet, node: str) -> str:
    """Return why a node has no score."""
    candidates = fleet.names.candidates(node)
    if len(candidates) > 1:
        return f"node {quoted(node)} is ambiguous: it may be {' or '.join(map(quoted, candidates[:3]))}"
    return f"there is no score of node {quoted(node)}"


def frame(fleet: ScoredFleet, now: datetime) -> dict[str, Any]:
    """Return the fields of every response from the scores: decision, times, model, staleness."""
    scores = fleet.scores
    return {
        "decision": scores.decision,
        "decision_time": format_utc(scores.decided),
        "issued_at": format_utc(scores.issued),
        "expires_at": format_utc(scores.expires),
        "horizon_seconds": next(iter(scores.units.values())).horizon.total_seconds(),
        "model": scores.model,
        "expired": fleet.expired(now),
        "age_seconds": round((now - scores.decided).total_seconds()),
    }


def unit_answer(record: RiskRecord, now: datetime) -> dict[str, Any]:
    """Return a record as of now: an expired one has no risk, only its last known risk and tier."""
    content = record.to_json()
    del content["format"]
    if record.status == "ok" and record.expired(now):
        content |= {
            "status": "expired",
            "unknown_reason": f"the score expired at {format_utc(record.expires_at)}",
            "last_known": {"risk": record.risk, "tier": record.tier},
            "risk": None,
            "risks": {},
            "score": None,
            "rank": None,
            "alert": False,
            "tier": UNKNOWN,
        }
    return content


def node_answer(state: ScoredNode) -> dict[str, Any]:
    """Return a node's state without its units."""
    return {
        "node": state.node,
        "tier": state.tier,
        "risk": state.risk,
        "counts": {"known": state.known, "unknown": state.unknown, "expired": state.expired},
    }


def node_with_units(fleet: ScoredFleet, node: str, now: datetime) -> dict[str, Any]:
    """Return a node with its units, the riskiest first, its earliest expiry and the sample age of its stalest unit."""
    records = fleet.scores.nodes[node]
    worst_first = sorted(records, key=lambda record: -1.0 if record.risk is None else record.risk, reverse=True)
    expiries = [record.expires_at for record in records if record.status == "ok"]
    ages = [record.sample_age_seconds for record in records if record.sample_age_seconds is not None]
    since_s = (now - fleet.scores.decided).total_seconds()
    state = fleet.state(node, now)
    assert state is not None
    return node_answer(state) | {
        "expires_at": format_utc(min(expiries)) if expiries else None,
        "sample_age_seconds": round(max(ages) + since_s) if ages else None,
        "units": [unit_answer(record, now) for record in worst_first],
    }


def _sorted(states: list[ScoredNode], sort: str) -> list[ScoredNode]:
    """Sort states that are given riskiest first; by risk, unknown ones are last in both directions."""
    if sort == "-risk":
        return states
    if sort == "risk":
        known = [state for state in states if state.risk is not None]
        return [*reversed(known), *states[len(known) :]]
    return sorted(states, key=lambda state: state.node, reverse=sort == "-node")


FORMS: Final = ("dataframe_split", "dataframe_records", "instances", "inputs")
_SPLIT: Final = ("columns", "data", "index")
_COLUMN_LISTS: Final = 1024  # in addition to the rows: one list per column
_FRAME_COLUMNS: Final = 3  # unit, decision_time and the index


def _read(body: bytes, model: LoadedModel, limit: int) -> "FeatureRows":
    from serving.http.rows import rows_of_records, rows_of_table

    values = (limit + 1) * (len(model.columns) + _FRAME_COLUMNS)
    content = read_json(body, containers=limit + _COLUMN_LISTS, values=values)
    if isinstance(content, dict) and content.pop("params", None):
        raise RequestRefused(422, "this model has no params: leave them out", "invalid")
    form, value = one_of(content, FORMS)
    if form == "dataframe_split":
        return rows_of_table(*_split(value), model.columns, limit)
    if form == "inputs" and isinstance(value, dict):
        return rows_of_table(*_turned(value), model.columns, limit, form)
    return rows_of_records(value, model.columns, limit, form)


def _split(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, dict) or not {"columns", "data"} <= value.keys():
        raise RequestRefused(422, "dataframe_split is not an object with columns and data", "invalid")
    for key in value:
        if key not in _SPLIT:
            raise RequestRefused(422, unknown_name(key, _SPLIT, "key of dataframe_split"), "invalid")
    return value["columns"], value["data"]


def _turned(value: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    if not value or not all(isinstance(column, list) for column in value.values()):
        raise RequestRefused(422, "inputs is neither a list of records nor one list of values per column", "invalid")
    lengths = {len(column) for column in value.values()}
    if len(lengths) > 1:
        raise RequestRefused(422, "inputs: the columns have different lengths", "invalid")
    return list(value), [list(row) for row in zip(*value.values(), strict=True)]
