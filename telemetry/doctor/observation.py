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

    Parameters
    ----------
    channel : str
        Our name.
    gpus : int
        GPUs (nodes, where a fleet has none) that had a value.
    name : str or None
        The name under which the source has it, where that differs.
    null_share : float or None
        Share of the rows looked at without a value; None where there are no rows, only the newest values.
    constant : bool or None
        Whether no GPU's value ever changed; None if there was no time in which it could.
    sentinels : int
        Values that mean "not supported".
    age_s : float or None
        Age of the newest value in seconds.
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

    Parameters
    ----------
    what : str
        What is so, with its numbers, a clause.
    do : str
        What to do about it, a sentence; empty if nothing.
    problem : bool
        Whether it spoils the telemetry, or is only good to know.
    """

    what: str
    do: str = ""
    problem: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at one source.

    Parameters
    ----------
    kind : str
        What was looked at.
    where : str
        Its URL or path, without credentials.
    at : datetime
        When, aware UTC.
    units : int
        GPUs seen (nodes, where a fleet has none).
    nodes : int
        Nodes seen.
    models : mapping of str to int
        GPUs seen of each board model; empty if unknown.
    channels : mapping of str to ChannelSeen
        By channel; those of which nothing was seen are absent.
    xid_events : bool or None
        Whether it tells single XIDs (not only the latched gauge); None if it cannot be told.
    judged : bool
        Whether it can tell which channels are missing (a collector's state file cannot).
    cannot : mapping of str to str
        Channels that this kind of source cannot have, and why.
    facts : mapping of str to str
        What else is good to know, by what it is.
    findings : tuple of Finding
        What else was found.
    unknown : tuple of str
        Names in the source that are neither a channel nor known to be of no use.
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
