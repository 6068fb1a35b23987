"""Diagnosis of the channels that a source lacks, those of a model first, with steps to enable them."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Final, Literal

from foundation.text import quantity
from telemetry.accounting import Accounting
from telemetry.accounting import as_text as account_text
from telemetry.dataset.channels import Channel
from telemetry.doctor.groups import ABSENT, LATER_FIELDS, OTHER, Group, counter_line, grouped

SourceKind = Literal["exporter page", "Prometheus", "dataset"]


@dataclass(frozen=True, slots=True)
class ChannelSeen:
    """One channel as observed in a source.

    ``gpus``: number of GPUs (nodes in a fleet without GPUs) with a value.
    ``name``: its name in the source, if different.
    ``null_share``: share of rows without a value; None if only the newest values were read.
    ``sentinels``: number of values that mean "not supported".
    """

    channel: str
    gpus: int
    name: str | None = None
    null_share: float | None = None
    sentinels: int = 0


@dataclass(frozen=True, slots=True)
class TelemetryFinding:
    """A finding other than channels; ``problem``: it degrades the telemetry, rather than being informational."""

    what: str
    do: str = ""
    problem: bool = True


def findings_of(*checks: tuple[object, str, str] | tuple[object, str, str, bool]) -> list[TelemetryFinding]:
    """Return a finding for each true check; checks are (condition, what, do[, problem])."""
    return [TelemetryFinding(*finding) for holds, *finding in checks if holds]


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of a source.

    ``where``: its URL or path, without credentials.
    ``units``: number of GPUs seen (nodes in a fleet without GPUs).
    ``models``: number of GPUs seen by board model; empty if unknown.
    ``xid_events``: whether it reports individual XIDs, not only the latched gauge.
    ``unknown``: names in the source that are neither a channel nor known to be unused.
    ``accounting``: what was read, and how it was used.
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


_AMD: Final = re.compile(r"Instinct|\bMI\d{2,3}[AX]?\b|Radeon|\bAMD\b", re.IGNORECASE)


def absent_on(model: str, channel: str) -> str | None:
    """Return why a board cannot report a channel; None if it can, or if unknown (including all AMD boards).

    ``model``: as in exporters and the inventory, e.g. ``NVIDIA H100 80GB HBM3``.
    """
    if _AMD.search(model):
        return None
    for rule in ABSENT:
        concerns = any(fnmatchcase(channel, pattern) for pattern in rule["channels"])
        if concerns and any(re.search(boards, model, re.IGNORECASE) for boards in rule["boards"].split("| ")):
            return str(rule["reason"])
    return None


def absent_on_all(models: Iterable[str], channel: str) -> str | None:
    """Return why no board of a fleet can report a channel; None if one can, if unknown, or without boards."""
    reasons = {model: absent_on(model, channel) for model in models}
    if None in reasons.values():
        return None
    if len(reasons) > 1 and len(set(reasons.values())) == 1:
        return f"every board here {next(iter(reasons.values()))}"
    return "; ".join(f"{model} {reason}" for model, reason in reasons.items()) or None


Status = Literal["ok", "partial", "empty", "missing", "unsure", "not on this board", "not from here"]
"""Status of a channel: ``partial``: missing for some GPUs or rows; ``empty``: no values; ``unsure``: undecidable."""

FIXABLE: Final[Mapping[Status, str]] = {
    "missing": "missing",
    "empty": "without a value",
    "partial": "incomplete",
}
"""Statuses that can be fixed, and their texts."""

PARTLY_FROM: Final = 0.02  # share of GPUs or rows without the channel

_ADD: Final = "Add to the exporter's counter file (deploy/dcgm-exporter/predrain-counters.csv is the full list):"
_ADD_LATER: Final = "With an exporter built on DCGM 4.6 or later, also add:"


@dataclass(frozen=True, slots=True)
class ChannelState:
    """State of one channel; ``used``: whether the model uses it, None without a model."""

    channel: Channel
    group: Group
    status: Status
    seen: ChannelSeen | None
    used: bool | None
    remark: str = ""

    @property
    def expected(self) -> bool:
        """Whether the model uses it, or, without a model, whether its group is known to precede failures."""
        return self.group.precursor if self.used is None else self.used


@dataclass(frozen=True, slots=True)
class ToDo:
    """A recommendation; ``used``: the model uses one of the channels, or, without a model, they have precursors."""

    title: str
    channels: tuple[str, ...]
    used: bool
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of the doctor; ``model``: a sentence on the model whose channels are required."""

    observation: Observation
    has_model: bool
    model: str
    states: tuple[ChannelState, ...]
    todos: tuple[ToDo, ...]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Channels that the model uses (without a model: known to precede failures) and that the source lacks."""
        return tuple(state.channel.name for state in self.states if state.status in FIXABLE and state.expected)

    @property
    def healthy(self) -> bool:
        """Whether the source has all channels that the model uses, and there are no other problems."""
        return not self.lacking and not any(finding.problem for finding in self.observation.findings)


def diagnose(
    observation: Observation, used: Collection[str] | None, model: str, channels: Mapping[str, Channel]
) -> Diagnosis:
    """Evaluate an observation of a source; ``used``: channels of a model, or None."""
    states: list[ChannelState] = []
    todos: list[ToDo] = []
    for group, members in grouped(channels):
        channel_states = [_state(channel, group, observation, used) for channel in members]
        states += channel_states
        faulty = [state for state in channel_states if state.status in FIXABLE or state.status == "unsure"]
        # Individual XIDs are more informative than the gauge.
        if faulty and not (group.name == "XIDs" and observation.xid_events):
            todos.append(_todo(group, faulty, observation.kind))
    todos += [ToDo(finding.what, (), finding.problem, (finding.do,)) for finding in observation.findings if finding.do]
    todos.sort(key=lambda todo: not todo.used)  # stable: otherwise the order of groups
    return Diagnosis(observation, used is not None, model, tuple(states), tuple(todos))


def _state(channel: Channel, group: Group, observation: Observation, model: Collection[str] | None) -> ChannelState:
    seen = observation.channels.get(channel.name)
    used = None if model is None else channel.name in model
    if seen is not None and seen.gpus:
        remark = _gap(seen, observation)
        return ChannelState(channel, group, "partial" if remark else "ok", seen, used, remark)
    status: Status = "missing" if seen is None else "empty"
    remark = "" if seen is None else "no value"
    if seen is not None and seen.sentinels:
        remark = f"{seen.sentinels:,} values mean 'not supported'"
    if absent := absent_on_all(observation.models, channel.name):
        status, remark = "not on this board", absent
    elif channel.name == "xid_last" and observation.kind == "dataset" and observation.xid_events and not used:
        status, remark = "not from here", "the events contain the XIDs instead"
    elif observation.kind != "dataset":
        if elsewhere := _not_from_exporters(channel, group, observation):
            status, remark = "not from here", elsewhere
        elif channel.name == "xid_last":
            remark = "each XID is reported instead" if observation.xid_events else "exported after the first XID only"
            status = "unsure"
    return ChannelState(channel, group, status, seen, used, remark)


def _gap(seen: ChannelSeen, observation: Observation) -> str:
    """Describe the GPUs or rows without a channel, among boards that can report it; empty if there are hardly any."""
    unable = sum(count for model, count in observation.models.items() if absent_on(model, seen.channel))
    able_share = 1.0 - unable / (sum(observation.models.values()) or 1)
    expected = round(observation.units * able_share)
    if expected and 1.0 - seen.gpus / expected >= PARTLY_FROM:
        return f"{seen.gpus:,} of {expected:,} GPUs"
    nulls = 1.0 - (1.0 - (seen.null_share or 0.0)) / able_share if able_share else 0.0
    return f"{nulls:.0%} of the rows without a value" if nulls >= PARTLY_FROM else ""


def _not_from_exporters(channel: Channel, group: Group, observation: Observation) -> str:
    if group.name == "scraping":
        return "measured by `predrain collect exporters`"
    if group is not OTHER and observation.facts.get("exporter") == "AMD" and not channel.amd:
        return "AMD's exporter has no such metric"
    return "" if group is OTHER or channel.dcgm_names or channel.amd else "no exporter has it"


def _todo(group: Group, faulty: list[ChannelState], kind: SourceKind) -> ToDo:
    by_status: dict[str, list[str]] = {}
    for state in faulty:
        by_status.setdefault(FIXABLE.get(state.status, "not seen"), []).append(state.channel.name)
    title = "; ".join(f"{', '.join(names)} {status}" for status, names in by_status.items())
    names = tuple(state.channel.name for state in faulty)
    used = any(state.expected for state in faulty)
    return ToDo(f"{group.name}: {title}", names, used, tuple(_steps(group, faulty, kind)))


def _steps(group: Group, faulty: Sequence[ChannelState], kind: SourceKind) -> Iterator[str]:
    if group.name == "scraping":
        yield "Scrape the exporters with `predrain collect exporters`, which measures it."
        return
    missing = [state.channel for state in faulty if state.status in ("missing", "unsure")]
    incomplete = [state.channel.name for state in faulty if state.status in ("empty", "partial")]
    if group.name == "XIDs" and missing:
        yield "Follow the kernel log: `predrain collect kernel-log --source journal --dataset DATASET` on each node."
    lines = [(channel, counter_line(channel)) for channel in missing]
    switched: dict[str, list[str]] = {_ADD: [], _ADD_LATER: []}
    for channel, line in lines:
        if line is not None:
            switched[_ADD_LATER if LATER_FIELDS.intersection(channel.dcgm_names) else _ADD].append(f"    {line}")
    for title, added in switched.items():
        yield from (title, *added) if added else ()
    if kind == "dataset" and any(switched.values()):
        yield "Collect again: `predrain collect prometheus` for history, `predrain collect exporters` for new samples."
    unexported = [channel.name for channel, line in lines if line is None]
    if unexported:
        yield f"No exporter has {', '.join(unexported)}: map your own metrics (--mapping), or ignore it."
    if incomplete:
        yield (
            f"Some or all GPUs do not report {', '.join(incomplete)}: compare nodes with and without it "
            "(counter file, driver, ECC, MIG)."
        )
    if (any(switched.values()) or incomplete) and group.condition:
        yield group.condition


_HEAD = ("channel", "status", "GPUs", "remark")
_MAX_UNKNOWN_SHOWN = 12


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text, each line with a newline; a star marks channels that the model uses."""
    source = diagnosis.observation
    boards = ", ".join(f"{count:,} {model}" for model, count in source.models.items())
    lines = [
        f"{source.kind} {source.where}",
        f"  found: {quantity(source.units, 'GPU')} on {quantity(source.nodes, 'node')}" + f" ({boards})" * bool(boards),
    ]
    lines += [f"  {name}: {value}" for name, value in source.facts.items()]
    lines += _channels(diagnosis)
    if source.unknown:
        further = (
            f" and {len(source.unknown) - _MAX_UNKNOWN_SHOWN} more" if len(source.unknown) > _MAX_UNKNOWN_SHOWN else ""
        )
        lines += ["", f"Unknown metrics: {', '.join(source.unknown[:_MAX_UNKNOWN_SHOWN])}{further}"]
    if source.findings:
        lines += ["", "Other findings"]
        findings = sorted(source.findings, key=lambda finding: not finding.problem)
        lines += [f"  {'!' if finding.problem else '-'} {finding.what}" for finding in findings]
    lines += ["", diagnosis.model, *_to_do(diagnosis), "", _verdict(diagnosis)]
    account = account_text(source.accounting)
    return "\n".join(lines) + "\n" + (f"\n{account}" if account else "")


def _channels(diagnosis: Diagnosis) -> list[str]:
    rows = [(state, _cells(state)) for state in diagnosis.states]
    widths = [max(map(len, column)) for column in zip(_HEAD, *(cells for _, cells in rows), strict=True)]
    lines = ["", "  " + _aligned(_HEAD, widths)]
    for group, members in groupby(rows, key=lambda row: row[0].group):
        lines += [group.name, *("  " + _aligned(cells, widths) for _, cells in members)]
    return lines


def _cells(state: ChannelState) -> tuple[str, ...]:
    gpus = "" if state.seen is None else f"{state.seen.gpus:,}"
    return (state.channel.name + "*" * bool(state.used), state.status, gpus, state.remark)


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _to_do(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.todos:
        return []
    lines = ["", "Recommendations, required channels first"]
    for number, todo in enumerate(diagnosis.todos, start=1):
        lines.append(f"{number:>3}. {todo.title}")
        lines += [f"     {step}" for step in todo.steps]
    return lines


def _verdict(diagnosis: Diagnosis) -> str:
    relevance = "that the model uses" if diagnosis.has_model else "known to precede failures"
    if diagnosis.healthy:
        return f"OK: the source has all channels {relevance}."
    parts = []
    if diagnosis.lacking:
        parts.append(f"missing channels {relevance}: {', '.join(diagnosis.lacking)}")
    problems = sum(finding.problem for finding in diagnosis.observation.findings)
    if problems:
        parts.append(f"{quantity(problems, 'other problem')} found")
    return f"Not OK: {'; '.join(parts)}."


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain JSON types."""
    source = diagnosis.observation
    left_apart = ("channels", "findings", "accounting")
    source_fields = {
        field.name: getattr(source, field.name) for field in fields(source) if field.name not in left_apart
    }
    return {
        "healthy": diagnosis.healthy,
        "lacking": list(diagnosis.lacking),
        "source": source_fields | {"at": source.at.isoformat()},
        "model": diagnosis.model,
        "channels": {
            state.channel.name: {
                "group": state.group.name,
                "status": state.status,
                "remark": state.remark,
                "used": state.used,
                **asdict(state.seen or ChannelSeen(state.channel.name, 0)),
            }
            for state in diagnosis.states
        },
        "findings": [asdict(finding) for finding in source.findings],
        "accounting": source.accounting.as_dict(),
        "todo": [asdict(todo) for todo in diagnosis.todos],
    }
