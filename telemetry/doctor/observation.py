"""What one look at a source found, before anything is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

SourceKind = Literal["exporter page", "Prometheus", "dataset", "collector", "NVML"]
"""What was looked at."""


@dataclass(frozen=True, slots=True)
class ChannelSeen:
    """What a source has of one channel.

    ``gpus``: GPUs (nodes, where a fleet has none) that had a value.
    ``name``: the name under which the source has it, where that differs.
    ``null_share``: share of the rows looked at without a value; None where there are no rows, only the newest values.
    ``constant``: whether no GPU's value ever changed; None if there was no time in which it could.
    ``sentinels``: values that mean "not supported".
    """

    channel: str
    gpus: int
    name: str | None = None
    null_share: float | None = None
    constant: bool | None = None
    sentinels: int = 0
    age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a look found beside the channels.

    ``do``: what to do about it, a sentence; empty if nothing.
    ``problem``: whether it spoils the telemetry, or is only good to know.
    """

    what: str
    do: str = ""
    problem: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at one source.

    ``where``: its URL or path, without credentials.
    ``at``: When, aware UTC.
    ``units``: GPUs seen (nodes, where a fleet has none).
    ``models``: GPUs seen of each board model; empty if unknown.
    ``xid_events``: whether it tells single XIDs (not only the latched gauge); None if it cannot be told.
    ``judged``: whether it can tell which channels are missing (a collector's state file cannot).
    ``facts``: what else is good to know, by what it is.
    ``findings``: what else was found.
    ``unknown``: names in the source that are neither a channel nor known to be of no use.
    """

    kind: SourceKind
    where: str
    at: datetime
    units: int
    nodes: int
    models: Mapping[str, int]
    channels: Mapping[str, ChannelSeen]
    xid_events: bool | None = None
    judged: bool = True
    cannot: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
