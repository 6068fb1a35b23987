"""What the ledger is given: a decision with all that went into it, the calls it led to, and what they came to."""

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
    """A decision, and all that it was made from.

    ``fleet``, ``state``, ``signals``, ``config``: as given to :func:`policy.decide.decide`.
    ``notes``: what was out of the ordinary.
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
    """A call that is about to be made.

    ``key``: the idempotency key: the same for a repetition of the same call, another one for any other.
    ``read``: the node, as it was read or listed at most a few seconds before.
    ``writes``: what is to be written.
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
    """What a call came to.

    ``kind``: the answer's; ``found`` and ``not_found``: there was none, and the node was read again to see.
    ``confirmed``: whether the desired state was read back.
    """

    at: datetime
    kind: SettledKind
    confirmed: bool
    message: str = ""
    writes: tuple[Write, ...] = ()


def digest_of(plan: Plan) -> str:
    """Return a digest of a decision's substance, without times and numbers that change with each round.

    The messages about the fleet have a digest of their own behind the other, see :func:`is_worth_recording`.
    """
    nodes = {
        name: (node.tier, node.wanted, node.target, len(node.rules), node.held_out) for name, node in plan.nodes.items()
    }
    stages = {name: state.stage for name, state in plan.stages.items()}
    substance = {"nodes": nodes, "over": sorted(plan.over_budget), "open": sorted(plan.open_causes), "stages": stages}
    return f"{_sha256(plain_of(substance))}:{_sha256(plan.reasons)}"


def is_worth_recording(plan: Plan, last: str | None) -> bool:
    """Whether a decision is worth a record, given the digest of the one recorded last.

    It is if there are actions or requests, an alert begins, the substance is another, or there is a new message
    about the fleet.
    """
    if plan.actions or plan.alerts or plan.requests or plan.stopped or last is None:
        return True
    substance, _, messages = digest_of(plan).partition(":")
    last_substance, _, last_messages = last.partition(":")
    return substance != last_substance or (bool(plan.reasons) and messages != last_messages)


def _sha256(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def key_of(number: int, action: Action) -> str:
    """Name a call: of one decision, on one node, with one verb."""
    text = f"{number}|{action.node}|{action.verb}|{action.to.name}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


CallKind = Literal["checkpoint", "evict", "verify", "probe"]
FindingKind = Literal[
    "started", "acknowledged", "unanswered", "waiting", "returned", "hanging", "stuck", "empty", "verified", "probed",
    "escalated", "ended", "cancelled",
]  # fmt: skip
"""What is found out about a node while it drains. ``started``: a drain mark is set and followed; ``acknowledged``,
``unanswered``: of a checkpoint; ``waiting``: for a workload's own end; ``returned``: evicted work came back again and
again; ``hanging``: a workload does not end; ``verified``: a diagnostic ended; ``probed``: one of an idle node;
``escalated``: people were notified; ``ended``: the mark is gone; ``cancelled``: the mark is set and nothing more
is done."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that is about to be made.

    ``kind``: ``checkpoint``, ``evict``, ``verify``, ``probe``.
    ``key``: the idempotency key: the same for each repetition.
    ``means``: through what: ``scheduler``, ``webhook``, ``command``.
    ``workload``: as it was listed just before; None: the call is about the node.
    ``writes``: what is to be written, where that is known.
    ``request``: the cheap rung that it belongs to, with what it is expected to save and cost; None: a drain.
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
