"""A node as Slurm reports it, and the change of one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from foundation.slurm import instant, number, states_of

State = Literal["DRAIN", "FAIL", "UNDRAIN"]

_OUT: Final = {
    "DRAIN": "DRAIN", "DRAINED": "DRAIN", "DRAINING": "DRAIN", "FAIL": "FAIL", "FAILING": "FAIL",
}  # fmt: skip
_BASE: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "DOWN", "ERROR"})
_DOWN: Final = frozenset({
    "DOWN", "ERROR", "NOT_RESPONDING", "NO_RESPOND", "INVALID_REG", "INVAL", "POWERED_DOWN", "POWERING_DOWN",
    "POWERING_UP", "POWER_DOWN",
})  # fmt: skip
_ELSEWHERE: Final = {
    "MAINTENANCE": "a maintenance reservation", "MAINT": "a maintenance reservation",
    "REBOOT_REQUESTED": "a reboot", "REBOOT": "a reboot", "REBOOT_ISSUED": "a reboot",
}  # fmt: skip
_BUSY: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "NOT_RESPONDING", "NO_RESPOND"})
# What jobs and pings change in a state: no sign that a person or tool wrote to the node.


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node.

    ``states``: base state and flags, upper case; drained, draining and failing are ``DRAIN`` and ``FAIL``.
    ``reason``, ``user``: exactly as Slurm holds it; None: none. Who set it.
    ``extra``: exactly as Slurm holds it.
    ``gpus``: of the generic resource that makes the fleet.
    ``whole``: False: the report lacks something without which nothing may be written.
    """

    name: str
    states: frozenset[str]
    reason: str | None = None
    user: str | None = None
    reason_at: datetime | None = None
    booted_at: datetime | None = None
    extra: str = ""
    weight: int = 1
    gpus: int = 0
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    whole: bool = True

    @property
    def out(self) -> frozenset[str]:
        """``DRAIN`` and ``FAIL``, whichever stand."""
        return self.states & {"DRAIN", "FAIL"}

    @property
    def down(self) -> bool:
        """Whether it cannot take work."""
        return bool(self.states & _DOWN)

    @property
    def readable(self) -> bool:
        """Whether it is known who took it out of service; otherwise nothing may be done to it."""
        known = self.whole and bool(self.states & _BASE)
        return known and not (self.out and self.reason is None)

    @property
    def elsewhere(self) -> str | None:
        """What other operation its state names; None: none."""
        return next((name for flag, name in _ELSEWHERE.items() if flag in self.states), None)

    @property
    def version(self) -> str:
        """A digest of all that people and tools write to a node; jobs and pings do not change it."""
        content = (sorted(self.states - _BUSY), self.reason, self.user, self.reason_at, self.extra, self.weight)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What is written to a node, all in one request; None: left as it is.

    ``state``: ``DRAIN`` and ``FAIL`` come with a reason.
    """

    state: State | None = None
    reason: str | None = None
    extra: str | None = None
    weight: int | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return self == NodeChange()


def node_of(row: Mapping[str, Any], gres: str) -> SlurmNode:
    """Read a node from a report's row, of any version; raises ``ValueError`` if it has no name."""
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a node without a name: {str(row)[:80]}")
    states = [*states_of(row.get("state")), *states_of(row.get("state_flags"))]
    reason, extra, weight = row.get("reason"), row.get("extra"), number(row.get("weight"))
    whole = isinstance(reason, str) and isinstance(extra, str) and weight is not None and bool(states)
    user = row.get("reason_set_by_user")
    return SlurmNode(
        name, frozenset(_OUT.get(state, state) for state in states),
        reason if isinstance(reason, str) and reason.strip() else None,
        user if isinstance(user, str) and user else None,
        instant(row.get("reason_changed_at")), instant(row.get("boot_time")),
        extra if isinstance(extra, str) else "", weight if weight is not None else 0,
        count_of(str(row.get("gres") or ""), gres), _names(row.get("features")), _names(row.get("partitions")), whole,
    )  # fmt: skip


def count_of(resources: str, gres: str) -> int:
    """Count a generic resource in Slurm's text: ``gpu:h100:8(S:0-1),nic:2``.

    >>> count_of("gpu:h100:4(S:0),gpu:a100:2,nic:2", "gpu"), count_of("gpu", "gpu"), count_of("(null)", "gpu")
    (6, 1, 0)
    """
    total = 0
    for resource in re.sub(r"\([^)]*\)", "", resources).split(","):
        kind, *rest = resource.strip().removeprefix("gres/").removeprefix("gres:").split(":")
        if kind == gres:
            total += int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return total


def _names(value: object) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value
    return tuple(str(name) for name in listed if str(name)) if isinstance(listed, list) else ()
