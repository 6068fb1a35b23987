"""Channels that a source lacks, weighted by what a model uses, and the steps that enable them; as text or JSON."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Final, Literal

from telemetry.accounting import Accounting
from telemetry.accounting import as_text as account_text
from telemetry.dataset.channels import Channel
from telemetry.doctor.groups import ABSENT, LATER_FIELDS, OTHER, Group, counter_line, grouped
from telemetry.doctor.importance import XIDS, Importance

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


_AMD: Final = re.compile(r"Instinct|\bMI\d{2,3}[AX]?\b|Radeon|\bAMD\b", re.IGNORECASE)


def absent_on(model: str, channel: str) -> str | None:
    """Return why a board cannot report a channel; None if it can, or it is not known (AMD's boards among them).

    ``model``: as exporters and the inventory name it, such as ``NVIDIA H100 80GB HBM3``.
    """
    if _AMD.search(model):
        return None
    for rule in ABSENT:
        concerns = any(fnmatchcase(channel, pattern) for pattern in rule["channels"])
        if concerns and any(re.search(boards, model, re.IGNORECASE) for boards in rule["boards"].split("| ")):
            return str(rule["reason"])
    return None


def absent_on_all(models: Iterable[str], channel: str) -> str | None:
    """Return why no board of a fleet can report a channel; None if one can, or it is not known, or there are none."""
    reasons = {model: absent_on(model, channel) for model in models}
    if None in reasons.values():
        return None
    if len(reasons) > 1 and len(set(reasons.values())) == 1:
        return f"every board here {next(iter(reasons.values()))}"
    return "; ".join(f"{model} {reason}" for model, reason in reasons.items()) or None


Status = Literal["ok", "partial", "empty", "missing", "unsure", "not on this board", "not from here"]
"""State of a channel: ``partial`` lacks GPUs or values, ``empty`` exists without a value, ``unsure`` is undecided."""

BAD: Final[Mapping[Status, str]] = {
    "missing": "missing",
    "empty": "without a value",
    "partial": "incomplete",
}
"""The statuses that something can be done about, as texts show them."""

PARTLY_FROM: Final = 0.02
"""A channel that this share of the GPUs or of the rows lacks is partly available."""


_ADD: Final = "Add to the exporter's counter file (deploy/dcgm-exporter/predrain-counters.csv is the full list):"
_ADD_LATER: Final = "With an exporter built on DCGM 4.6 or later, also add:"


@dataclass(frozen=True, slots=True)
class ChannelState:
    """State of one channel.

    ``used``: whether the model uses it; None if no model is known.
    ``importance``: its share of what the model goes by; None if unknown.
    """

    channel: Channel
    group: Group
    status: Status
    seen: ChannelSeen | None
    used: bool | None
    importance: float | None
    remark: str = ""

    @property
    def expected(self) -> bool:
        """Whether the model, or without one the list of groups with precursors, goes by it."""
        return self.group.precursor if self.used is None else self.used


@dataclass(frozen=True, slots=True)
class ToDo:
    """One thing to do; ``used``: the model (or, without one, the list of precursors) goes by one of the channels."""

    title: str
    channels: tuple[str, ...]
    importance: float | None
    used: bool
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of the doctor; ``importance_source``: a sentence on where the importance of channels is from."""

    observation: Observation
    importance: Importance | None
    importance_source: str
    states: tuple[ChannelState, ...]
    todos: tuple[ToDo, ...]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Channels that the model uses (without a model: of groups with precursors) and the source does not have."""
        return tuple(state.channel.name for state in self.states if state.status in BAD and state.expected)

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing that the model uses, and nothing else spoils the telemetry."""
        return not self.lacking and not any(finding.problem for finding in self.observation.findings)


def diagnose(
    observation: Observation, importance: Importance | None, importance_source: str, channels: Mapping[str, Channel]
) -> Diagnosis:
    """Evaluate what a look at a source showed."""
    states: list[ChannelState] = []
    todos: list[ToDo] = []
    for group, members in grouped(channels):
        channel_states = [_state(channel, group, observation, importance) for channel in members]
        states += channel_states
        bad = [state for state in channel_states if state.status in BAD or state.status == "unsure"]
        # Single XIDs say more than their gauge.
        if bad and not (group.name == "XIDs" and observation.xid_events):
            todos.append(_todo(group, bad, observation.kind, importance))
    todos += [
        ToDo(finding.what, (), None, finding.problem, (finding.do,)) for finding in observation.findings if finding.do
    ]
    todos.sort(key=lambda todo: (not todo.used, -(todo.importance or 0.0)))  # stable: else the groups' own order
    return Diagnosis(observation, importance, importance_source, tuple(states), tuple(todos))


def _state(channel: Channel, group: Group, observation: Observation, importance: Importance | None) -> ChannelState:
    seen = observation.channels.get(channel.name)
    used = None if importance is None else channel.name in importance.used
    share = None if importance is None else importance.of([channel.name])
    if seen is not None and seen.gpus:
        remark = _gap(seen, observation)
        return ChannelState(channel, group, "partial" if remark else "ok", seen, used, share, remark)
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
    return ChannelState(channel, group, status, seen, used, share, remark)


def _gap(seen: ChannelSeen, observation: Observation) -> str:
    """Return which GPUs or rows lack a channel, of boards that can report it; an empty text if hardly any do."""
    unable = sum(count for model, count in observation.models.items() if absent_on(model, seen.channel))
    able = 1.0 - unable / (sum(observation.models.values()) or 1)
    expected = round(observation.units * able)
    if expected and 1.0 - seen.gpus / expected >= PARTLY_FROM:
        return f"{seen.gpus:,} of {expected:,} GPUs"
    nulls = 1.0 - (1.0 - (seen.null_share or 0.0)) / able if able else 0.0
    return f"{nulls:.0%} of the rows without a value" if nulls >= PARTLY_FROM else ""


def _not_from_exporters(channel: Channel, group: Group, observation: Observation) -> str:
    if group.name == "scraping":
        return "measured by `predrain collect exporters`"
    if group is not OTHER and observation.facts.get("exporter") == "AMD" and not channel.amd:
        return "AMD's exporter has no such metric"
    return "" if group is OTHER or channel.dcgm_names or channel.amd else "no exporter has it"


def _todo(group: Group, bad: list[ChannelState], kind: SourceKind, importance: Importance | None) -> ToDo:
    by_status: dict[str, list[str]] = {}
    for state in bad:
        by_status.setdefault(BAD.get(state.status, "not seen"), []).append(state.channel.name)
    title = "; ".join(f"{', '.join(names)} {status}" for status, names in by_status.items())
    names = tuple(state.channel.name for state in bad)
    share, used = group_importance(group, names, importance), any(state.expected for state in bad)
    return ToDo(f"{group.name}: {title}", names, share, used, tuple(_steps(group, bad, kind)))


def group_importance(group: Group, names: Iterable[str], importance: Importance | None) -> float | None:
    """Return the importance of channels of a group together with that of its events; None if it is not known."""
    if importance is None:
        return None
    share = importance.of(names)
    if group.name == "XIDs" and XIDS in importance.shares:
        return (share or 0.0) + importance.shares[XIDS]
    return share


def _steps(group: Group, bad: Sequence[ChannelState], kind: SourceKind) -> Iterator[str]:
    """Yield the steps that bring channels of a group, one line each."""
    if group.name == "scraping":
        yield "Scrape the exporters with `predrain collect exporters`, which measures it."
        return
    missing = [state.channel for state in bad if state.status in ("missing", "unsure")]
    incomplete = [state.channel.name for state in bad if state.status in ("empty", "partial")]
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
    own = [channel.name for channel, line in lines if line is None]
    if own:
        yield f"No exporter has {', '.join(own)}: map your own metrics (--mapping), or ignore it."
    if incomplete:
        yield (
            f"Some or all GPUs do not report {', '.join(incomplete)}: compare nodes with and without it "
            "(counter file, driver, ECC, MIG)."
        )
    if (any(switched.values()) or incomplete) and group.condition:
        yield group.condition


_HEAD = ("channel", "status", "GPUs", "importance", "remark")
_SHOWN_UNKNOWN = 12


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text, lines ending with a newline.

    ``importance`` is the channel's share of what the model goes by, ``-`` where the model never saw it, ``?`` where it
    is not known. A star marks channels that the model uses.
    """
    look = diagnosis.observation
    boards = ", ".join(f"{count:,} {model}" for model, count in look.models.items())
    lines = [
        f"{look.kind} {look.where}",
        f"  found: {_count(look.units, 'GPU')} on {_count(look.nodes, 'node')}{f' ({boards})' if boards else ''}",
    ]
    lines += [f"  {name}: {value}" for name, value in look.facts.items()]
    lines += _channels(diagnosis)
    if look.unknown:
        more = f" and {len(look.unknown) - _SHOWN_UNKNOWN} more" if len(look.unknown) > _SHOWN_UNKNOWN else ""
        lines += ["", f"Unknown metrics: {', '.join(look.unknown[:_SHOWN_UNKNOWN])}{more}"]
    if look.findings:
        lines += ["", "Other findings"]
        findings = sorted(look.findings, key=lambda finding: not finding.problem)
        lines += [f"  {'!' if finding.problem else '-'} {finding.what}" for finding in findings]
    lines += ["", diagnosis.importance_source, *_to_do(diagnosis), "", _verdict(diagnosis)]
    account = account_text(look.accounting)
    return "\n".join(lines) + "\n" + (f"\n{account}" if account else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _channels(diagnosis: Diagnosis) -> list[str]:
    rows = [(state, _cells(state, diagnosis)) for state in diagnosis.states]
    widths = [max(map(len, column)) for column in zip(_HEAD, *(cells for _, cells in rows), strict=True)]
    lines = ["", "  " + _aligned(_HEAD, widths)]
    for group, members in groupby(rows, key=lambda row: row[0].group):
        group_rows = list(members)
        share = group_importance(group, [state.channel.name for state, _ in group_rows], diagnosis.importance)
        with_events = ", the history of XIDs included" if group.name == "XIDs" else ""
        lines.append(group.name if share is None else f"{group.name} [{share:.1%}{with_events}]")
        lines += ["  " + _aligned(cells, widths) for _, cells in group_rows]
    return lines


def _cells(state: ChannelState, diagnosis: Diagnosis) -> tuple[str, ...]:
    unknown = diagnosis.importance is None or (state.used and not diagnosis.importance.shares)
    importance = "?" if unknown else "-"
    if state.importance is not None:
        importance = f"{state.importance:.1%}"
    gpus = "" if state.seen is None else f"{state.seen.gpus:,}"
    return (state.channel.name + "*" * bool(state.used), state.status, gpus, importance, state.remark)


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _to_do(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.todos:
        return []
    lines = ["", "Recommendations, most important first"]
    for number, todo in enumerate(diagnosis.todos, start=1):
        importance = "" if todo.importance is None else f" [{todo.importance:.1%}]"
        if todo.channels and todo.importance is None and diagnosis.importance is not None and not todo.used:
            importance = " [not in the model's training data: importance unknown]"
        lines.append(f"{number:>3}. {todo.title}{importance}")
        lines += [f"     {step}" for step in todo.steps]
    return lines


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.healthy:
        return "OK: the source has all channels that the model uses."
    by = "that the model uses" if diagnosis.importance is not None else "with known precursors of failures"
    parts = []
    if diagnosis.lacking:
        parts.append(f"missing channels {by}: {', '.join(diagnosis.lacking)}")
    problems = sum(finding.problem for finding in diagnosis.observation.findings)
    if problems:
        parts.append(f"{_count(problems, 'other problem')} found")
    return f"Not OK: {'; '.join(parts)}."


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain JSON types."""
    source, importance = diagnosis.observation, diagnosis.importance
    left_apart = ("channels", "findings", "accounting")
    look = {field.name: getattr(source, field.name) for field in fields(source) if field.name not in left_apart}
    return {
        "healthy": diagnosis.healthy,
        "lacking": list(diagnosis.lacking),
        "source": look | {"at": source.at.isoformat()},
        "importance": None if importance is None else asdict(importance) | {"used": sorted(importance.used)},
        "importance_source": diagnosis.importance_source,
        "channels": {
            state.channel.name: {
                "group": state.group.name,
                "status": state.status,
                "remark": state.remark,
                "used": state.used,
                "importance": state.importance,
                **asdict(state.seen or ChannelSeen(state.channel.name, 0)),
            }
            for state in diagnosis.states
        },
        "findings": [asdict(finding) for finding in source.findings],
        "accounting": source.accounting.as_dict(),
        "todo": [asdict(todo) for todo in diagnosis.todos],
    }
