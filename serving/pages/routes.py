"""Routes of the pages: the fleet, a node, a GPU, alert outcomes, the ledger."""

import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from fastapi import FastAPI, Query
from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from foundation.errors import InputError
from foundation.server.problems import RequestRefused
from policy.risk_record import format_utc
from policy.tiers import TIERS, UNKNOWN, node_risk
from serving.http.application import PASSWORD, TOKEN, refusals
from serving.http.bodies import as_json, quoted
from serving.http.limits import ThreadWork
from serving.http.metrics import fitted_at
from serving.http.schemas import Query as QueryModel
from serving.http.score_cache import ScoreCache
from serving.pages.charts import SHADES, Annotation, course, draw, risk_chart, spark
from serving.pages.fleet_table import PAGE_SIZES, FleetQuery, Text, select, table_rows
from serving.pages.rendering import ASSETS, asset, page
from serving.scores.reading import NOWHERE, PastScore, ScoredFleet, natural, past_scores, tier_of

MAX_LEDGER_ROWS: Final = 50
"""Maximum number of decisions, and of calls, on the ledger page."""

_RETRY_S: Final = 10
_PAGES: Final = frozenset({"/", "/outcomes", "/ledger"})
_PAGE_PREFIXES: Final = ("/nodes/", "/gpus/", "/page/")
_REFUSALS: Final = refusals("text/html", {"type": "string"})


def _day(value: object) -> object:
    """Accept ISO dates only; pydantic would also parse numbers and times."""
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
        raise ValueError("write a day such as 2026-03-01")
    return value


Day = Annotated[date, BeforeValidator(_day)]
Verb = Literal["", "publish", "avoid", "probe", "checkpoint", "swap", "drain", "evict", "verify", "release"]


class LedgerQuery(QueryModel):
    """Query of the ledger: decisions, or matching calls.

    ``node``: a name, or a pattern with ``*`` and ``?``; empty: all.
    ``since``, ``until``: first and last day.
    ``before``: number of the call at which the previous page ended.
    """

    node: Text = ""
    verb: Verb = ""
    since: Day | Literal[""] = ""
    until: Day | Literal[""] = ""
    before: int = Field(0, ge=0)

    @property
    def searches(self) -> bool:
        """Whether it selects calls rather than decisions."""
        return bool(self.verb or self.since or self.until or self.before or {*self.node} & {*"*?["})


class AssetQuery(QueryModel):
    """The content digest in a file's URL."""

    v: Text = ""


class ShownDecision(BaseModel):
    """The decision shown on the pages."""

    decision: str


def is_page(path: str) -> bool:
    """Return whether a path belongs to the pages."""
    return path in _PAGES or path.startswith(_PAGE_PREFIXES)


@dataclass(frozen=True, slots=True)
class FleetPages:
    """Serves the pages.

    ``health``: returns ``reasons`` why the service is not ready, ``warnings``, and the ``model`` for feature rows.
    ``ledger``: opens the controller's ledger, which may appear or disappear at any time; None: not configured.
    """

    newest: ScoreCache
    scores: Path
    clock: Callable[[], datetime]
    work: ThreadWork
    health: Callable[[], Mapping[str, Any]]
    ledger: Callable[[], Any] | None
    notice: Callable[[], str] | None = None

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        pages: dict[str, Any] = {"tags": ["pages"], "responses": _REFUSALS}
        read = pages | {"dependencies": [TOKEN, PASSWORD]}
        for path, handler, summary in (
            ("/", self._fleet, "List nodes or GPUs by risk."),
            ("/nodes/{node:name}", self._node, "Show a node, its GPUs and reasons."),
            ("/gpus/{gpu:name}", self._gpu, "Show a GPU: reasons, earlier scores, outcomes."),
            ("/outcomes", self._outcomes, "Show alert outcomes of the last 30 days."),
            ("/ledger", self._ledger_page, "Show the controller's decisions, of all nodes or one."),
        ):
            app.add_api_route(path, self._in_thread(handler), summary=summary, response_class=HTMLResponse, **read)
        summary = "Return the decision shown, for the pages' script."
        app.add_api_route("/page/decision", self._decision, summary=summary, response_model=ShownDecision, **read)
        assets: dict[int | str, dict[str, Any]] = {
            200: {"content": {media.partition(";")[0]: {"schema": {"type": "string"}} for media in ASSETS.values()}}
        }
        app.add_api_route(
            "/page/{file:name}", self._asset, summary="Return the pages' style, script or icon.",
            response_class=Response, **pages | {"responses": _REFUSALS | assets},
        )  # fmt: skip

    def refusal(self, request: Request, refused: RequestRefused) -> Response:
        """Return an error as a page; for 401 the browser asks for the token as a password."""
        response = page(request, "refusal", refused.status, **self._frame(), refused=refused)
        response.headers.update({name: value for name, value in refused.headers().items() if name != "Content-Type"})
        if refused.status == 401:
            response.headers["WWW-Authenticate"] = 'Basic realm="predrain: a token with the scope read as the password"'
        return response

    def _in_thread(self, make: Callable[..., Response]) -> Callable[..., Awaitable[Response]]:
        """Render in the pages' own threads, preserving the signature that FastAPI inspects."""

        @wraps(make)
        async def handle(**values: Any) -> Response:
            return await self.work.run(lambda: make(**values))

        return handle

    def _frame(self, page: str | None = None) -> dict[str, Any]:
        """Return the template values that all pages share."""
        return {
            "here": page,
            "has_ledger": self.ledger is not None,
            "notice": None if self.notice is None else self.notice(),
            "now": self.clock(),
        }

    def _fleet(self, request: Request, query: Annotated[FleetQuery, Query()]) -> Response:
        fleet, now, places = self.newest.fleet(_RETRY_S), self.clock(), self.newest.served.facts.places
        acted, out = self._actions()
        nodes, gpus = table_rows(fleet, places, now)
        rows = nodes if query.show == "nodes" else gpus
        node_tiers, gpu_tiers = (Counter(row.tier for row in table) for table in (nodes, gpus))
        matching = select(rows, query)
        shown_rows = matching[query.offset : query.offset + query.limit]
        matching_nodes = {row.node for row in matching}
        groups = {place.rack for place in places.values()}, {place.group for place in places.values()}
        return page(
            request,
            "fleet",
            **self._frame("fleet"),
            **self._freshness(fleet, now),
            query=query,
            rows=shown_rows,
            total=len(matching),
            all_total=len(rows),
            acted=acted,
            out=out,
            verdicts=self._verdicts(),
            shades=range(1, SHADES + 1),
            map=draw([row for row in nodes if row.node in matching_nodes], fleet, now),
            racks=sorted((rack for rack in groups[0] if rack), key=natural),
            groups=sorted((group for group in groups[1] if group), key=natural),
            tiers=[*reversed(TIERS), UNKNOWN],
            counts=node_tiers if query.show == "nodes" else gpu_tiers,
            tier_counts=[(tier, gpu_tiers[tier], node_tiers[tier]) for tier in (*reversed(TIERS), UNKNOWN)],
            sizes=PAGE_SIZES,
        )

    def _actions(self) -> tuple[Mapping[str, tuple[str, str]] | None, Mapping[str, Mapping[str, Any]]]:
        """Return the last action on each node (None: no ledger is available), and the nodes out of service."""
        if self.ledger is not None:
            with contextlib.suppress(InputError), contextlib.closing(self.ledger()) as reader:
                return reader.last_actions(), reader.out_of_service()
        return None, {}

    def _verdicts(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the newest alert on each node, with its outcome."""
        outcomes = self.newest.served.facts.outcomes
        alerts = [] if outcomes is None else outcomes["alerts"]
        return {alert["node"]: alert for alert in sorted(alerts, key=lambda alert: alert["at"])}

    def _timeline(
        self, node: str, history: Mapping[str, Sequence[PastScore]], alerts: Sequence[Mapping[str, Any]]
    ) -> Any:
        """Draw a node's risk with actions and failures; None if no score is stored."""
        decided: dict[datetime, list[PastScore]] = {}
        for scores in history.values():
            for score in scores:
                decided.setdefault(score.decided, []).append(score)
        thresholds = self.newest.fleet(_RETRY_S).thresholds
        course = [
            PastScore(time, node_risk(score.risk for score in scores), tier_of(scores, thresholds))
            for time, scores in sorted(decided.items())
        ]
        if not course:
            return None
        annotations = [
            Annotation(
                datetime.fromisoformat(alert["at"]) + timedelta(hours=alert["lead_hours"]),
                "failure",
                "failure",
                alert["incident"],
            )
            for alert in alerts
            if alert["lead_hours"] is not None
        ]
        if self.ledger is not None:
            with contextlib.suppress(InputError), contextlib.closing(self.ledger()) as reader:
                for call in reader.actions(node, since=format_utc(course[0].decided)):
                    if call["confirmed"] and call["verb"] != "publish":
                        label, title = call["verb"].replace("_", " "), f"{call['at']}: {call['verb']}"
                        annotations.append(Annotation(datetime.fromisoformat(call["at"]), "action", label, title))
        return risk_chart(course, {}, f"Risk of {node}, what was done about it, and what failed", annotations)

    def _freshness(self, fleet: ScoredFleet, now: datetime) -> dict[str, Any]:
        scores, health, status = fleet.scores, self.health(), self.newest.served.status
        ages = [record.sample_age_seconds for record in scores.units.values() if record.sample_age_seconds is not None]
        since = (now - scores.decided).total_seconds()
        return {
            "scores": scores,
            "expired": fleet.expired(now),
            "age_s": max(since, 0.0),
            "ahead_s": max(-since, 0.0),
            "left_s": (scores.expires - now).total_seconds(),
            "newest_sample_s": max(min(ages) + since, 0.0) if ages else None,
            "fitted": fitted_at(scores.summary),
            "health": health,
            "scoring": status,
            "facts": self.newest.served.facts,
        }

    def _node(self, request: Request, node: str) -> Response:
        fleet, now, places = self.newest.fleet(_RETRY_S), self.clock(), self.newest.served.facts.places
        state = fleet.state(node, now)
        if state is None:
            raise RequestRefused(404, f"there is no score of node {quoted(node)}", "node")
        records = fleet.scores.nodes[state.node]
        history = past_scores(self.scores, [record.unit for record in records])
        alerts = self._recent_alerts(state.node)
        return page(
            request,
            "node",
            **self._frame("node"),
            scores=fleet.scores,
            expired=fleet.expired(now),
            state=state,
            units=[
                (record, record.status == "ok" and not record.expired(now), spark(history[record.unit]))
                for record in records
            ],
            place=next((places[record.unit] for record in records if record.unit in places), NOWHERE),
            sample_age_seconds=max(
                (record.sample_age_seconds for record in records if record.sample_age_seconds is not None), default=None
            ),
            since_s=max((now - fleet.scores.decided).total_seconds(), 0.0),
            decisions=max((len(scores) for scores in history.values()), default=0),
            recent_alerts=alerts,
            out=self._actions()[1].get(state.node),
            timeline=self._timeline(state.node, history, alerts or ()),
            **self._telemetry([record.unit for record in records]),
        )

    def _gpu(self, request: Request, gpu: str) -> Response:
        fleet, now = self.newest.fleet(_RETRY_S), self.clock()
        record = fleet.unit(gpu)
        if record is None:
            raise RequestRefused(404, f"there is no score of GPU {quoted(gpu)}", "gpu")
        history = past_scores(self.scores, [record.unit])[record.unit]
        named = () if fleet.thresholds is None else fleet.thresholds.thresholds.items()
        bounds = {str(tier): value for tier, value in named if value is not None}
        return page(
            request,
            "gpu",
            **self._frame("gpu"),
            scores=fleet.scores,
            record=record,
            holds=record.status == "ok" and not record.expired(now),
            place=self.newest.served.facts.places.get(record.unit, NOWHERE),
            since_s=max((now - record.decision_time).total_seconds(), 0.0),
            past=history,
            chart=risk_chart(history, bounds, f"Risk of {record.unit} over {len(history)} decisions")
            if history
            else None,
            recent_alerts=self._recent_alerts(record.node),
            **self._telemetry([record.unit]),
        )

    def _telemetry(self, units: Iterable[str]) -> dict[str, Any]:
        """Draw the telemetry behind the reasons of units."""
        facts = self.newest.served.facts
        charts = []
        for unit in units:
            for channel, values in facts.courses.get(unit, {}).items():
                if known := [value for value in values if value is not None]:
                    charts.append((unit, channel, course(values), min(known), max(known), known[-1]))
        return {"telemetry": charts, "data_end": facts.data_end}

    def _recent_alerts(self, node: str) -> list[Mapping[str, Any]] | None:
        """Return the alerts on a node in the last 30 days; None: not evaluated yet."""
        outcomes = self.newest.served.facts.outcomes
        return None if outcomes is None else [alert for alert in outcomes["alerts"] if alert["node"] == node]

    def _outcomes(self, request: Request) -> Response:
        served = self.newest.served
        model = {} if served.fleet is None else served.fleet.scores.summary.get("model")
        backtest = model.get("backtest") if isinstance(model, dict) else None
        outcomes = served.facts.outcomes
        value = None
        if self.ledger is not None and outcomes is not None and outcomes["since"] is not None:
            since = format_utc(datetime.fromisoformat(outcomes["since"]))
            with contextlib.suppress(InputError), contextlib.closing(self.ledger()) as reader:
                value = drains_came_to(reader.drains(since), outcomes["alerts"])
        return page(
            request, "outcomes", **self._frame("outcomes"), outcomes=outcomes, backtest=backtest, value=value
        )  # fmt: skip

    def _ledger_page(self, request: Request, query: Annotated[LedgerQuery, Query()]) -> Response:
        node = "" if query.searches else query.node
        decisions: list[dict[str, Any]] = []
        actions: list[dict[str, Any]] = []
        work: list[dict[str, Any]] = []
        rungs: list[Any] = []
        ledger_error = None
        if self.ledger is not None:
            try:
                with contextlib.closing(self.ledger()) as reader:
                    if query.searches:
                        since = query.since.isoformat() if query.since else ""
                        until = (query.until + timedelta(days=1)).isoformat() if query.until else ""
                        actions = reader.actions(
                            query.node or "*", query.verb, since, until, before=query.before, limit=MAX_LEDGER_ROWS
                        )
                    else:
                        node = reader.node(node) if node else node
                        decisions = reader.why(node, MAX_LEDGER_ROWS) if node else reader.rounds(MAX_LEDGER_ROWS)
                        work = reader.work(node, MAX_LEDGER_ROWS) if node else []
                        rungs = reader.rungs(node or None, self.clock(), MAX_LEDGER_ROWS, self._verdicts_of_alerts())
            except InputError as error:
                ledger_error = str(error)
        return page(
            request,
            "ledger",
            **self._frame("ledger"),
            node=node,
            query=query,
            verbs=get_args(Verb)[1:],
            actions=actions,
            decisions=decisions,
            work=work[::-1],
            rungs=rungs,
            ledger_error=ledger_error,
            most=MAX_LEDGER_ROWS,
        )

    def _verdicts_of_alerts(self) -> list[tuple[str, datetime, timedelta, str]]:
        """Return node, time, horizon and verdict of the alerts with an outcome."""
        outcomes = self.newest.served.facts.outcomes
        if outcomes is None or outcomes["horizon_hours"] is None:
            return []
        horizon = timedelta(hours=outcomes["horizon_hours"])
        return [
            (alert["node"], datetime.fromisoformat(alert["at"]), horizon, alert["verdict"])
            for alert in outcomes["alerts"]
            if alert["verdict"] != "open"
        ]

    async def _decision(self) -> Response:
        return as_json({"decision": self.newest.fleet(_RETRY_S).scores.decision})

    async def _asset(self, request: Request, file: str, _: Annotated[AssetQuery, Query()]) -> Response:
        if file not in ASSETS:
            raise RequestRefused(404, "there is no such file", "path")
        return asset(request, file)


def drains_came_to(drains: Sequence[Mapping[str, Any]], alerts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum up the outcomes of drains in GPU-hours, by the controller's cost-benefit estimates.

    ``drains``: ``at``, ``node``, ``worth``. ``alerts``: newest first; the last one before a drain gives its outcome.
    """
    totals: dict[str, float] = {"right": 0, "wrong": 0, "open": 0, "saved": 0.0, "lost": 0.0}
    for drain in drains:
        drained_at, worth = datetime.fromisoformat(drain["at"]), drain["worth"]
        earlier_alerts = (
            a for a in alerts if a["node"] == drain["node"] and datetime.fromisoformat(a["at"]) <= drained_at
        )
        verdict = next((alert["verdict"] for alert in earlier_alerts), "open")
        if worth is not None and verdict == "right" and worth["risk"] > 0:
            totals["right"], totals["saved"] = totals["right"] + 1, totals["saved"] + worth["saved"] / worth["risk"]
        elif worth is not None and verdict == "wrong" and worth["risk"] < 1:
            totals["wrong"], totals["lost"] = totals["wrong"] + 1, totals["lost"] + worth["lost"] / (1 - worth["risk"])
        else:
            totals["open"] += 1
    return totals
