"""Records of the ledger: decisions with their inputs, calls, and outcomes of calls."""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from policy.config import PolicyConfig
from policy.fleet import Level, NodeView, Signals
from policy.plan import Action, Plan, PolicyState, RungRequest, Verb
from policy.risk_record import ModelName
from scheduler.ports.codec import plain_of
from scheduler.ports.readings import NodeReading, Write
from scheduler.ports.workloads import Workload

SettledKind = Literal["done", "already", "conflict", "timeout", "refused", "gone", "found", "not_found", "blocked"]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A decision and its inputs.

    ``fleet``, ``state``, ``signals``, ``config``: as passed to :func:`policy.decide.decide`.
    """

    fleet: tuple[NodeView, ...]
    state: PolicyState
    signals: Signals
    config: PolicyConfig
    plan: Plan
    model: ModelName | None
    decided_at: datetime | None
    holder: str
    code: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Intent:
    """A call for an action, recorded before it is made.

    ``key``: idempotency key, the same for each repetition of the call.
    ``read``: the node, as read at most a few seconds before.
    """

    round: int
    at: datetime
    node: str
    verb: Verb
    to: Level
    key: str
    action: Action
    read: NodeReading
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """Outcome of a call.

    ``kind``: of the result; ``found`` and ``not_found``: derived from the re-read node after a missing response.
    ``confirmed``: whether the desired state is reached.
    """

    at: datetime
    kind: SettledKind
    confirmed: bool
    message: str = ""
    writes: tuple[Write, ...] = ()


def digest_of(plan: Plan) -> str:
    """Return a digest of a decision, without times and numbers that change in each round.

    A second digest after ``:`` covers the messages about the fleet, see :func:`is_worth_recording`.
    """
    nodes = {
        name: (node.tier, node.wanted, node.target, len(node.rules), node.held_out) for name, node in plan.nodes.items()
    }
    stages = {name: state.stage for name, state in plan.stages.items()}
    substance = {"nodes": nodes, "over": sorted(plan.over_budget), "open": sorted(plan.open_causes), "stages": stages}
    return f"{_sha256(plain_of(substance))}:{_sha256(plan.reasons)}"


def is_worth_recording(plan: Plan, last: str | None) -> bool:
    """Whether to record a decision, given the digest of the last recorded one.

    True if it has actions, alerts or requests, its digest differs, or there is a new message about the fleet.
    """
    if plan.actions or plan.alerts or plan.requests or plan.stopped or last is None:
        return True
    substance, _, messages = digest_of(plan).partition(":")
    last_substance, _, last_messages = last.partition(":")
    return substance != last_substance or (bool(plan.reasons) and messages != last_messages)


def _sha256(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def key_of(number: int, action: Action) -> str:
    """Return the idempotency key of an action of one decision."""
    text = f"{number}|{action.node}|{action.verb}|{action.to.name}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


CallKind = Literal["checkpoint", "evict", "verify", "probe"]
FindingKind = Literal[
    "started", "acknowledged", "unanswered", "waiting", "returned", "hanging", "stuck", "empty", "verified", "probed",
    "escalated", "ended", "cancelled",
]  # fmt: skip
"""Findings about a node. ``started``: an evacuation started; ``acknowledged``, ``unanswered``: a checkpoint request
was, or was not, acknowledged; ``waiting``: for a workload to finish; ``returned``: evicted work keeps coming back;
``hanging``: a workload does not terminate; ``verified``: a diagnostic ended; ``probed``: a probe ended; ``escalated``:
operators were notified; ``ended``, ``cancelled``: the evacuation, probe or request ended after, or before, it was
completed."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call of an evacuation, recorded before it is made.

    ``key``: idempotency key, the same for each repetition.
    ``workload``: as listed just before; None: the call is about the node.
    ``request``: the cheaper rung that it belongs to, with its expected savings and costs; None: a drain.
    """

    at: datetime
    node: str
    kind: CallKind
    key: str
    means: str
    workload: Workload | None = None
    why: str = ""
    writes: tuple[Write, ...] = ()
    request: RungRequest | None = None
