"""What the ledger is given: a decision with all that went into it, the calls it led to, and what they came to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from policy.config import PolicyConfig
from policy.fleet import Level, NodeView, Signals
from policy.plan import Action, Plan, Verb
from policy.risk_record import ModelName
from policy.state import PolicyState
from scheduler.answers import Write
from scheduler.plain import plain_of
from scheduler.readings import NodeReading

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
    ``read``: the node, as it was re-read just before.
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
    ``confirmed``: whether what was asked for stands.
    """

    at: datetime
    kind: SettledKind
    confirmed: bool
    words: str = ""
    writes: tuple[Write, ...] = ()


def digest_of(plan: Plan) -> str:
    """Give what a decision comes to in substance, without times and numbers that change with each round.

    Two rounds with the same digest and nothing to do differ in nothing that a person would look for. What is said of
    the fleet has a digest of its own behind the other, see :func:`tells_anew`.
    """
    plain = plain_of(
        {
            "nodes": {
                name: (each.tier, each.wanted, each.target, len(each.rules), each.held_out)
                for name, each in plan.nodes.items()
            },
            "over": tuple(sorted(plan.over_budget)),
            "open": tuple(sorted(plan.open_causes)),
            "stages": {name: each.stage for name, each in plan.stages.items()},
        }
    )
    return f"{_sha256(plain)}:{_sha256(plan.reasons)}"


def tells_anew(plan: Plan, last: str | None) -> bool:
    """Tell whether a decision is worth a record, given the digest of the one recorded last.

    It is where something is to be done, an alert begins or the substance is another; and where something is said of the
    fleet that was not said then. A switch that stays set is said in each round, and that nothing is said any more is
    not worth a record.
    """
    if plan.actions or plan.alerts or last is None:
        return True
    substance, _, said = digest_of(plan).partition(":")
    before, _, said_before = last.partition(":")
    return substance != before or (bool(plan.reasons) and said != said_before)


def _sha256(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def key_of(number: int, action: Action) -> str:
    """Name a call: of one decision, on one node, with one verb."""
    text = f"{number}|{action.node}|{action.verb}|{action.to.name}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
