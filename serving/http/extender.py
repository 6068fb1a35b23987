"""The Kubernetes scheduler-extender protocol, version 1: filters and prioritizes nodes for pods.

Protocol: ``k8s.io/kube-scheduler/extender/v1`` (``ExtenderArgs``, ``ExtenderFilterResult``, ``HostPriority``,
``MaxExtenderPriority`` = 10). Its Go types have no JSON tags, so keys are matched case-insensitively.
Requests must list node names, as kube-scheduler sends them with ``nodeCacheCapable: true``.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from foundation.running import Poller
from foundation.server.problems import RequestRefused
from policy.tiers import may_use_risk
from serving.http.bodies import as_json, read_json
from serving.http.limits import ServiceSettings, ThreadWork
from serving.http.metrics import RequestMetrics
from serving.http.score_cache import ScoreCache
from serving.scores.reading import ScoredFleet, ScoredNode
from telemetry.identity.nodes import NodeNames

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 5.0


class ControllerDecisions:
    """Polls the newest decision in the controller's ledger.

    ``open_ledger``: opens a :class:`scheduler.ledger.reader.LedgerReader`; None: there is no ledger.
    ``out``: nodes that the decision closes to new work, with the expiry of the underlying prediction. Stage, breaker,
    budgets, opt-outs and the kill switch are already applied. Empty if the ledger is unreadable: an unknown decision
    removes no node.
    """

    def __init__(self, open_ledger: Callable[[], Any] | None) -> None:
        self.out: Mapping[str, datetime] = {}
        self._open = open_ledger
        self._reader: Any = None
        self._problem: str | None = None
        self._poller = Poller("ledger", self.refresh, _POLL_S)

    def start(self) -> None:
        """Start polling the ledger in a thread."""
        if self._open is not None:
            self._poller.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._poller.stop()

    def refresh(self) -> None:
        """Read the newest decision."""
        assert self._open is not None
        try:
            self._reader = self._reader or self._open()  # kept open: opening checks the whole file
            ends = {node: entry["expires_at"] for node, entry in self._reader.out_of_service().items()}
            self.out = {node: datetime.fromisoformat(end) for node, end in ends.items() if end is not None}
            problem = None
        except Exception as error:  # the file may be moved, replaced or damaged at any time
            self.out, self._reader, problem = {}, None, f"{type(error).__name__}: {error}"
        if problem != self._problem:
            _LOG.warning("the ledger cannot be read, so the extender filters no nodes: %s", problem or "resolved")
            self._problem = problem


_MAX_INLINE_BYTES: Final = 2**18  # bytes; smaller bodies are parsed within a few milliseconds

MAX_PRIORITY: Final = 10
"""``MaxExtenderPriority``."""

_BEST: Final = {"clear": 10, "watch": 7, "elevated": 4, "high": 1}
_SPREAD: Final = {"clear": 2, "watch": 2, "elevated": 2, "high": 1}
_UNKNOWN: Final = 7
# The ranges of the tiers do not overlap: clear 8 to 10, watch 5 to 7, elevated 2 to 4, high 0 and 1. A node of unknown
# risk ranks with the best nodes of tier watch: below a clear one, but not avoided.


_GPU: Final = "nvidia.com/gpu"
_COUNTS: Final = ("kueue.x-k8s.io/pod-group-total-count", "leaderworkerset.sigs.k8s.io/size")
_GANGS: Final = (
    "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/jobset-name", "kueue.x-k8s.io/pod-group-name",
    "leaderworkerset.sigs.k8s.io/name", "scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group",
    "training.kubeflow.org/job-name", "volcano.sh/job-name",
)  # fmt: skip
"""Labels and annotations that hold the size of a gang (``_COUNTS``), or mark a pod as part of one (``_GANGS``)."""


_Job = tuple[float, bool]


def job_of(args: Any) -> _Job:
    """Return the number of GPUs of the pod's job, and whether it is preemptible (priority below 0).

    The number is infinite if the job is preemptible, unreadable, without GPUs, or a gang of unknown size.
    """
    pod: Any = {str(key).lower(): value for key, value in args.items()}.get("pod")
    try:
        meta, spec = pod.get("metadata") or {}, pod.get("spec") or {}
        if isinstance(priority := spec.get("priority"), int) and priority < 0:
            return math.inf, True
        marks = {**(meta.get("labels") or {}), **(meta.get("annotations") or {})}
        limits = [(container.get("resources") or {}).get("limits") or {} for container in spec["containers"]]
        of_pod = sum(int(limit.get(_GPU, 0)) for limit in limits)
        pods = next((int(marks[name]) for name in _COUNTS if name in marks), 1)
        unsized = pods == 1 and any(name in marks for name in _GANGS)
        return (math.inf if unsized or of_pod * pods <= 0 else of_pod * pods), False
    except (AttributeError, KeyError, TypeError, ValueError):
        return math.inf, False


def candidates(args: Any) -> list[str]:
    """Return the node names in ``ExtenderArgs``, in the scheduler's order.

    Raises ``RequestRefused`` (400) if they are missing or malformed.
    """
    if not isinstance(args, dict):
        raise RequestRefused(400, "send ExtenderArgs: an object with Pod and NodeNames", "invalid")
    names = {str(key).lower(): value for key, value in args.items()}.get("nodenames")
    if names is None:
        raise RequestRefused(400, "ExtenderArgs holds no NodeNames: set nodeCacheCapable: true", "invalid")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestRefused(400, "NodeNames is not a list of strings", "invalid")
    return names


def kept_nodes(
    names: Sequence[str],
    fleet: ScoredFleet | None,
    now: datetime,
    out: Mapping[str, datetime] | None = None,
    max_share: float = 1.0,
) -> tuple[list[str], dict[str, str]]:
    """Return the nodes that a pod may be placed on, and the reason for each removed node.

    ``fleet``: None: no scores.
    ``out``: nodes that the controller closes to new work, and until when; None: filter by the scores alone.
    ``max_share``: maximum share to remove, of the fleet and of ``names``; one node may always be removed.
    At least one node is kept unless ``names`` is empty. Only nodes of tier ``high`` by unexpired scores are removed,
    the riskiest first.
    """
    names = list(dict.fromkeys(names))  # deduplicated, so that the last node is always kept
    if fleet is None:
        return names, {}
    high = {name: state for name in names if (state := fleet.state(name, now)) is not None and state.tier == "high"}
    if not high:
        return names, {}
    riskiest = [state for state in fleet.states(now) if state.tier == "high"]
    if out is not None:
        known = NodeNames(out)
        ends = {state.node: out.get(known.find(state.node) or "") for state in riskiest}
        riskiest = [state for state in riskiest if (end := ends[state.node]) is not None and now < end]
    places = {
        state.node: place for place, state in enumerate(riskiest[: _max_excluded(max_share, len(fleet.scores.nodes))])
    }
    removed = sorted((name for name in high if high[name].node in places), key=lambda name: places[high[name].node])
    removed = removed[: min(_max_excluded(max_share, len(names)), len(names) - 1)]
    return [name for name in names if name not in removed], {
        name: f"predrain: a GPU is at high risk of failing (node risk {high[name].risk:.2g})" for name in removed
    }


def _max_excluded(share: float, nodes: int) -> int:
    return max(1, math.floor(share * nodes))


def priority(state: ScoredNode | None) -> int:
    """Return a node's priority from 0 to 10: by tier, then by risk within the tier."""
    if state is None or state.risk is None or state.tier not in _BEST:
        return _UNKNOWN
    return _BEST[state.tier] - round(_SPREAD[state.tier] * state.risk)


def filter_result(allowed: list[str], removed: dict[str, str]) -> dict[str, Any]:
    """Return ``ExtenderFilterResult``.

    Preempting other pods would not make a node safer, so schedulers from 1.21 look for victims elsewhere;
    older ones only know FailedNodes.
    """
    failed = {"FailedNodes": removed, "FailedAndUnresolvableNodes": removed}
    return {"Nodes": None, "NodeNames": allowed, **failed, "Error": ""}


def priorities(
    names: Sequence[str], fleet: ScoredFleet | None, now: datetime, gpus: float = math.inf, preemptible: bool = False
) -> list[dict[str, Any]]:
    """Return the ``HostPriorityList`` for a pod; ``gpus`` and ``preemptible`` describe its job."""
    states = {name: None if fleet is None else fleet.state(name, now) for name in names}
    free = {high: may_use_risk(gpus, high=high, preemptible=preemptible) for high in (False, True)}
    return [
        {"Host": name, "Score": MAX_PRIORITY if free[state is not None and state.tier == "high"] else priority(state)}
        for name, state in states.items()
    ]


def add_extender(
    app: FastAPI,
    cache: ScoreCache,
    metrics: RequestMetrics,
    clock: Callable[[], datetime],
    reading: ThreadWork,
    settings: ServiceSettings,
    decisions: ControllerDecisions,
) -> None:
    """Add the extender's two verbs, which need no token because kube-scheduler sends none."""

    def fleet_at(now: datetime) -> ScoredFleet | None:
        fleet = cache.served.fleet
        return None if fleet is None or fleet.stale(now, settings.stale_after_s) else fleet

    def parsed(body: bytes) -> tuple[list[str], _Job]:
        args = read_json(body)
        return candidates(args), job_of(args)

    async def read(request: Request) -> tuple[list[str], _Job]:
        body = await request.body()
        return parsed(body) if len(body) <= _MAX_INLINE_BYTES else await reading.run(lambda: parsed(body))

    def verb(handler: Callable[[list[str], _Job, datetime], Any], fallback: Callable[[list[str]], Any]) -> Any:
        async def handle(request: Request) -> Response:
            names, job = await read(request)
            try:
                return as_json(handler(names, job, clock()))
            except Exception:  # an internal error must not keep a pod from running
                metrics.passed_through.inc()
                _LOG.exception("the extender failed; all %d nodes pass", len(names))
                return as_json(fallback(names))

        return handle

    def filtered(names: list[str], _job: _Job, now: datetime) -> dict[str, Any]:
        out = decisions.out if settings.extender_filter == "ledger" else None
        passed, removed = kept_nodes(names, fleet_at(now), now, out, settings.extender_max_share)
        metrics.removed.inc(len(removed))
        return filter_result(passed, removed)

    filter_nodes = verb(filtered, lambda asked: filter_result(asked, {}))
    prioritize = verb(
        lambda asked, job, now: priorities(asked, fleet_at(now), now, *job),
        lambda asked: [{"Host": name, "Score": 0} for name in asked],
    )
    app.add_api_route("/scheduler/filter", filter_nodes, methods=["POST"])
    app.add_api_route("/scheduler/prioritize", prioritize, methods=["POST"])
