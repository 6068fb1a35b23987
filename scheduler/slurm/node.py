"""A node as reported by Slurm, and a change of it."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from foundation.slurm import instant, number, states_of

State = Literal["DRAIN", "FAIL", "UNDRAIN"]

_NAMES_OF_STATES: Final = {
    "DRAINED": "DRAIN", "DRAINING": "DRAIN", "DRNG": "DRAIN", "FAILING": "FAIL", "FAILG": "FAIL", "ALLOC": "ALLOCATED",
    "MIX": "MIXED", "COMP": "COMPLETING", "PLND": "PLANNED", "RESV": "RESERVED", "MAINTENANCE": "MAINT",
    "REBOOT": "REBOOT_REQUESTED", "BOOT": "REBOOT_ISSUED", "POW_DN": "POWERING_DOWN", "POW_UP": "POWERING_UP",
    "NO_RESPOND": "NOT_RESPONDING", "INVAL": "INVALID_REG", "UNK": "UNKNOWN", "FUTR": "FUTURE",
}  # fmt: skip
# sinfo(1), NODE STATE CODES: short and long names.
_POWER: Final = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP", "POWER_DRAIN"})
_REBOOT: Final = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})
_KNOWN: Final = frozenset({
    "IDLE", "MIXED", "ALLOCATED", "DOWN", "ERROR", "PLANNED", "RESERVED", "MAINT", "COMPLETING", *_POWER, *_REBOOT,
})  # fmt: skip
_OUT: Final = frozenset({"DRAIN", "FAIL"})
_FAILED: Final = frozenset({"DOWN", "ERROR", "INVALID_REG"})
_NO_GRES: Final = ("cpu", "mem", "node", "billing", "energy")
_BUSY: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "NOT_RESPONDING", "BLOCKED"})
# States that change with jobs and pings, without a write by an operator or tool.


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node.

    ``states``: base state and flags in canonical upper-case names, see :func:`flags_of`.
    ``reason``, ``user``: the reason verbatim, and who set it; None: none, or the node is in service.
    ``inactive``: those of ``features`` that need a reboot.
    ``gpus``: count of the generic resource ``slurm.gres``. ``gres``: all kinds, see :func:`kinds_of`.
    ``complete``: False if the report lacks a field that writes depend on.
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
    complete: bool = True
    cpus: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    gres: frozenset[str] = frozenset()
    inactive: frozenset[str] = frozenset()

    @property
    def out(self) -> frozenset[str]:
        """``DRAIN`` and ``FAIL``, if set."""
        return self.states & _OUT

    @property
    def relied_on(self) -> str | None:
        """What depends on the drain: ``scontrol reboot`` or ``POWER_DOWN_ASAP``; None if nothing."""
        return "a reboot" if self.states & _REBOOT else "a power-down" if "POWER_DRAIN" in self.states else None

    @property
    def resting(self) -> str | None:
        """Why the node is out of service as planned, or None; a failed node is never resting."""
        if self.relied_on is not None:  # Slurm reports DOWN while the node reboots
            return self.relied_on
        if self.states & _FAILED:
            return None
        return (
            "a maintenance reservation" if "MAINT" in self.states else "power saving" if self.states & _POWER else None
        )

    @property
    def down(self) -> bool:
        """Whether the node failed or does not respond, unless it is out of service as planned."""
        return self.resting is None and bool(self.states & (_FAILED | {"NOT_RESPONDING"}))

    @property
    def readable(self) -> bool:
        """Whether the report is complete and a drain has a reason; otherwise the node must not be changed."""
        known = self.complete and bool(self.states & _KNOWN)
        return known and not (self.out and self.reason is None)

    @property
    def version(self) -> str:
        """Digest of everything that operators and tools write to a node; unchanged by jobs and pings."""
        content = (sorted(self.states - _BUSY), self.reason, self.user, self.reason_at, self.extra, self.weight)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Fields to write to a node in one request; None: unchanged. ``DRAIN`` and ``FAIL`` require a reason."""

    state: State | None = None
    reason: str | None = None
    extra: str | None = None
    weight: int | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return self == NodeChange()


def node_of(row: Mapping[str, Any], gres: str) -> SlurmNode:
    """Parse a node of any version; raises ``ValueError`` if it has no name."""
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a node without a name: {str(row)[:80]}")
    states = flags_of([*states_of(row.get("state")), *states_of(row.get("state_flags"))])
    reason, extra, weight = row.get("reason"), row.get("extra"), number(row.get("weight"))
    complete = isinstance(reason, str) and isinstance(extra, str) and weight is not None and bool(states)
    user = row.get("reason_set_by_user")
    features, active = _names(row.get("features")), row.get("active_features")
    # 24.11 keeps the reason of an ended drain until a job starts: ignore it on a node in service.
    holds = bool(states & (_FAILED | _REBOOT | _OUT))
    return SlurmNode(
        name, states,
        reason if holds and isinstance(reason, str) and reason.strip() else None,
        user if holds and isinstance(user, str) and user else None,
        instant(row.get("reason_changed_at")) if holds else None, instant(row.get("boot_time")),
        extra if isinstance(extra, str) else "", weight if weight is not None else 0,
        count_of(str(row.get("gres") or ""), gres), features, _names(row.get("partitions")),
        complete, number(row.get("cpus")), number(row.get("real_memory")), number(row.get("temporary_disk")),
        kinds_of(str(row.get("gres") or "")),
        frozenset() if active is None else frozenset(features) - frozenset(_names(active)),
    )  # fmt: skip


def flags_of(words: Iterable[str]) -> frozenset[str]:
    """Return canonical state names from either notation.

    >>> sorted(flags_of(["IDLE~"])), sorted(flags_of(["DRAINED*"])), sorted(flags_of(["MIX", "MAINTENANCE"]))
    (['IDLE', 'POWERED_DOWN'], ['DRAIN', 'NOT_RESPONDING'], ['MAINT', 'MIXED'])
    """
    return frozenset(_NAMES_OF_STATES.get(name, name) for name in states_of("+".join(words)))


def count_of(resources: str, gres: str) -> int:
    """Count a generic resource in Slurm's format: ``gpu:h100:8(S:0-1),nic:2``.

    >>> count_of("gpu:h100:4(S:0),gpu:a100:2,nic:2", "gpu"), count_of("gpu", "gpu"), count_of("(null)", "gpu")
    (6, 1, 0)
    """
    total = 0
    for resource in re.sub(r"\([^)]*\)", "", resources).split(","):
        kind, *parts = resource.strip().removeprefix("gres/").removeprefix("gres:").split(":")
        if kind == gres:
            total += int(parts[-1]) if parts and parts[-1].isdecimal() else 1
    return total


def kinds_of(resources: str) -> frozenset[str]:
    """Return the generic resources in Slurm's format, without and with their types.

    >>> sorted(kinds_of("gpu:h100:4(S:0),gres/gpu:a100=2,cpu=4,nvme:1"))
    ['gpu', 'gpu:a100', 'gpu:h100', 'nvme']
    """
    kinds = set()
    for resource in re.sub(r"\([^)]*\)", "", resources).split(","):
        kind, *parts = re.split("[:=]", resource.strip().removeprefix("gres/").removeprefix("gres:"))
        if kind and "/" not in kind and kind not in _NO_GRES:
            kinds |= {kind, *(f"{kind}:{name}" for name in parts[:1] if not name.isdecimal())}
    return frozenset(kinds)


def _names(value: object) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value
    return tuple(str(name) for name in listed if str(name)) if isinstance(listed, list) else ()
