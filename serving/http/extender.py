"""The Kubernetes scheduler-extender protocol, version 1: which nodes a pod may go to, and which it had better.

Protocol: ``k8s.io/kube-scheduler/extender/v1`` (``ExtenderArgs``, ``ExtenderFilterResult``, ``HostPriority``,
``MaxExtenderPriority`` = 10). Its Go types have no JSON names of their own, so keys are read whatever their case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from serving.http.bodies import as_json, plain, read_json
from serving.http.limits import ThreadWork
from serving.http.metrics import RequestMetrics
from serving.http.score_cache import ScoreCache
from serving.http.settings import ServiceSettings
from serving.scores.fleet import Fleet, NodeState
from telemetry.collect.remote_write.problems import Refused

_LOG = logging.getLogger(__name__)
_AT_ONCE: Final = 2**18  # bytes of a body that is read within a few milliseconds

MOST_PRIORITY: Final = 10
"""``MaxExtenderPriority``."""

_BEST: Final = {"clear": 10, "watch": 7, "elevated": 4, "high": 1}
_SPREAD: Final = {"clear": 2, "watch": 2, "elevated": 2, "high": 1}
_UNKNOWN: Final = 7
# Bands do not overlap: clear 8 to 10, watch 5 to 7, elevated 2 to 4, high 0 and 1. A node of which nothing is known
# stands with the best of those to watch: it is no better than a clear one, and must not be shunned.


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes that the scheduler asks about.

    ``names``: in the scheduler's order.
    ``nodes``: the ``NodeList`` as sent, where the scheduler is configured without ``nodeCacheCapable``; None with it.
    """

    names: tuple[str, ...]
    nodes: dict[str, Any] | None


def candidates(args: Any) -> Candidates:
    """Read ``ExtenderArgs``.

    Raises ``Refused``: 400, if it is not of that form.
    """
    if not isinstance(args, dict):
        raise Refused(400, "send ExtenderArgs: an object with Pod and NodeNames or Nodes", "invalid")
    fields = {str(key).lower(): value for key, value in args.items()}
    names = fields.get("nodenames")
    if names is not None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused(400, "NodeNames is no list of strings", "invalid")
        return Candidates(tuple(names), None)
    nodes = fields.get("nodes")
    if nodes is None:
        raise Refused(400, "ExtenderArgs holds neither NodeNames nor Nodes", "invalid")
    items = _items(nodes)
    if not isinstance(nodes, dict) or items is None or not all(_name(item) is not None for item in items):
        raise Refused(400, "Nodes is no NodeList of nodes with names", "invalid")
    return Candidates(tuple(str(_name(item)) for item in items), nodes)


def kept_nodes(names: Sequence[str], fleet: Fleet | None, now: datetime) -> tuple[list[str], dict[str, str]]:
    """Decide which nodes a pod may go to.

    ``names``: Nodes, in the scheduler's order.
    ``fleet``: None: nothing is known.
    Returns ``kept``: in the same order; never empty if ``names`` is not. A node is left out only if its tier is
    ``high`` by scores that have not expired; where that would leave none, the least risky one stays.
    """
    states = {name: _state(name, fleet, now) for name in names}
    high = {name: state for name, state in states.items() if state is not None and state.tier == "high"}
    kept = [name for name in names if name not in high]
    if not kept and high:
        least = min(high.values(), key=lambda state: (state.risk or 0.0, state.node)).node
        del high[least]
        kept = [least]
    return kept, {
        name: f"predrain: a GPU is at high risk of failing (node risk {state.risk:.2g})" for name, state in high.items()
    }


def priority(state: NodeState | None) -> int:
    """Return a node's priority from 0 to 10: by tier, and inside a tier by risk, never lower for the less risky."""
    if state is None or state.risk is None or state.tier not in _BEST:
        return _UNKNOWN
    return _BEST[state.tier] - round(_SPREAD[state.tier] * state.risk)


def filter_result(asked: Candidates, fleet: Fleet | None, now: datetime) -> dict[str, Any]:
    """Return ``ExtenderFilterResult``."""
    kept, removed = kept_nodes(asked.names, fleet, now)
    return _result(asked, kept, removed)


def pass_all(asked: Candidates) -> dict[str, Any]:
    """Return the ``ExtenderFilterResult`` that leaves every node in: the answer to any trouble of ours."""
    return _result(asked, list(asked.names), {})


def priorities(asked: Candidates, fleet: Fleet | None, now: datetime) -> list[dict[str, Any]]:
    """Return ``HostPriorityList``."""
    return [{"Host": name, "Score": priority(_state(name, fleet, now))} for name in asked.names]


def no_preference(asked: Candidates) -> list[dict[str, Any]]:
    """Return the ``HostPriorityList`` that prefers none."""
    return [{"Host": name, "Score": 0} for name in asked.names]


class ExtenderRoutes:
    """The extender's two verbs."""

    def __init__(
        self,
        cache: ScoreCache,
        metrics: RequestMetrics,
        clock: Callable[[], datetime],
        reading: ThreadWork,
        settings: ServiceSettings,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._metrics = metrics
        self._clock = clock
        self._reading = reading

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; none asks for a token, because kube-scheduler sends none."""
        app.add_api_route("/scheduler/filter", self._filter, methods=["POST"])
        app.add_api_route("/scheduler/prioritize", self._prioritize, methods=["POST"])

    async def _filter(self, request: Request) -> Response:
        asked = await self._asked(request)
        return as_json(self._safely(asked, partial(self._filtered, asked), pass_all))

    async def _prioritize(self, request: Request) -> Response:
        asked = await self._asked(request)
        return as_json(self._safely(asked, partial(self._prioritized, asked), no_preference))

    def _filtered(self, asked: Candidates) -> dict[str, Any]:
        now = self._clock()
        result = filter_result(asked, self._fleet(now), now)
        self._metrics.removed += len(result["FailedNodes"])
        return result

    def _prioritized(self, asked: Candidates) -> list[dict[str, Any]]:
        now = self._clock()
        return priorities(asked, self._fleet(now), now)

    def _fleet(self, now: datetime) -> Fleet | None:
        fleet = self._cache.served.fleet
        return None if fleet is None or fleet.stale(now, self._settings.stale_after_s) else fleet

    def _safely(self, asked: Candidates, decide: Callable[[], Any], otherwise: Callable[[Candidates], Any]) -> Any:
        try:
            return decide()
        except Exception:  # a fault of ours must not keep a pod from running
            self._metrics.passed_through += 1
            _LOG.exception("the extender lets all of %d nodes pass", len(asked.names))
            return otherwise(asked)

    async def _asked(self, request: Request) -> Candidates:
        body = await request.body()
        if len(body) <= _AT_ONCE and request.headers.get("content-encoding") is None:
            return candidates(read_json(body))
        return await self._reading.run(
            lambda: candidates(read_json(plain(request, body, self._settings.decoded_bytes)))
        )


def _result(asked: Candidates, kept: list[str], removed: dict[str, str]) -> dict[str, Any]:
    nodes = None
    if asked.nodes is not None:
        keep = set(kept)
        items = [item for item in _items(asked.nodes) or () if _name(item) in keep]
        others = {key: value for key, value in asked.nodes.items() if key.lower() != "items"}
        nodes = others | {"items": items}
    return {
        "Nodes": nodes,
        "NodeNames": kept if asked.nodes is None else None,
        # Evicting other pods would not make a node safer: newer schedulers (1.21) then look elsewhere for victims,
        # older ones know FailedNodes alone.
        "FailedNodes": removed,
        "FailedAndUnresolvableNodes": removed,
        "Error": "",
    }


def _state(name: str, fleet: Fleet | None, now: datetime) -> NodeState | None:
    return None if fleet is None else fleet.state(name, now)


def _items(nodes: Any) -> list[Any] | None:
    if not isinstance(nodes, dict):
        return None
    items = next((value for key, value in nodes.items() if key.lower() == "items"), None)
    return items if isinstance(items, list) else None


def _name(item: Any) -> str | None:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None
