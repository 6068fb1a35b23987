"""What one look at a source shows, before anything is evaluated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from telemetry.accounting import Accounting

SourceKind = Literal["exporter page", "Prometheus", "dataset"]


@dataclass(frozen=True, slots=True)
class ChannelSeen:
    """What a source has of one channel.

    ``gpus``: GPUs (nodes, where a fleet has none) that had a value.
    ``name``: the name under which the source has it, where that differs.
    ``null_share``: share of the rows without a value; None where there are no rows, only the newest values.
    ``sentinels``: values that mean "not supported".
    """

    channel: str
    gpus: int
    name: str | None = None
    null_share: float | None = None
    sentinels: int = 0


@dataclass(frozen=True, slots=True)
class TelemetryFinding:
    """An observation besides the channels; ``problem``: it spoils the telemetry, rather than being good to know."""

    what: str
    do: str = ""
    problem: bool = True


def findings_of(*checks: tuple[object, str, str] | tuple[object, str, str, bool]) -> list[TelemetryFinding]:
    """Return a finding for each check that holds: (whether it holds, what, do, problem)."""
    return [TelemetryFinding(*finding) for holds, *finding in checks if holds]


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at one source.

    ``where``: its URL or path, without credentials.
    ``units``: GPUs seen (nodes, where a fleet has none).
    ``models``: GPUs seen of each board model; empty if unknown.
    ``xid_events``: whether it reports single XIDs, not only the latched gauge.
    ``unknown``: names in the source that are neither a channel nor known to be of no use.
    ``accounting``: what was read and what became of it.
    """

    kind: SourceKind
    where: str
    at: datetime
    units: int
    nodes: int
    models: Mapping[str, int]
    channels: Mapping[str, ChannelSeen]
    xid_events: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[TelemetryFinding, ...] = ()
    unknown: tuple[str, ...] = ()
    accounting: Accounting = field(default_factory=Accounting, compare=False)
