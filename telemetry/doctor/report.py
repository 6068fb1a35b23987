"""A diagnosis as text for a terminal, and as plain JSON types for programs."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import groupby
from typing import Any

from telemetry.accounting import as_text as account_text
from telemetry.doctor.diagnosis import ChannelState, Diagnosis, group_importance
from telemetry.doctor.observation import ChannelSeen

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
        f"  seen: {_count(look.units, 'GPU')} on {_count(look.nodes, 'node')}{f' ({boards})' if boards else ''}",
    ]
    lines += [f"  {name}: {value}" for name, value in look.facts.items()]
    lines += _channels(diagnosis)
    if look.unknown:
        more = f" and {len(look.unknown) - _SHOWN_UNKNOWN} more" if len(look.unknown) > _SHOWN_UNKNOWN else ""
        lines += ["", f"Not known to predrain: {', '.join(look.unknown[:_SHOWN_UNKNOWN])}{more}"]
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
    lines = ["", "What to do, most important first"]
    for number, todo in enumerate(diagnosis.todos, start=1):
        importance = "" if todo.importance is None else f" [{todo.importance:.1%}]"
        if todo.channels and todo.importance is None and diagnosis.importance is not None and not todo.used:
            importance = " [the model never saw it: its importance is not known]"
        lines.append(f"{number:>3}. {todo.title}{importance}")
        lines += [f"     {step}" for step in todo.steps]
    return lines


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.healthy:
        return "OK: nothing is missing that the model uses."
    by = "the model uses" if diagnosis.importance is not None else "failures are known to announce themselves by"
    parts = []
    if diagnosis.lacking:
        parts.append(f"missing, and {by}: {', '.join(diagnosis.lacking)}")
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
