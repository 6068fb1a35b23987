"""A diagnosis as text for a terminal, and as plain JSON types for programs."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from telemetry.doctor.diagnosis import ChannelState, Diagnosis, worth_of
from telemetry.doctor.groups import group_of
from telemetry.doctor.observation import Finding

_HEAD = ("channel", "status", "GPUs", "worth", "remark")
_SHOWN_UNKNOWN = 12


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text, lines ending with a newline.

    ``worth`` is the channel's share of what the model goes by (the text says of what, and of which model), ``-`` where
    the model never saw it, ``?`` where no model is known. A star marks channels that the model uses.
    """
    look = diagnosis.observation
    lines = [f"{look.kind} {look.where}", f"  seen: {_seen(diagnosis)}"]
    lines += [f"  {what}: {told}" for what, told in look.facts.items()]
    lines += _channels(diagnosis)
    if look.unknown:
        more = f" and {len(look.unknown) - _SHOWN_UNKNOWN} more" if len(look.unknown) > _SHOWN_UNKNOWN else ""
        lines += ["", f"Not known to predrain: {', '.join(look.unknown[:_SHOWN_UNKNOWN])}{more}"]
    if look.findings:
        lines += ["", "Found besides"]
        lines += [f"  {'!' if each.problem else '-'} {each.what}" for each in sorted(look.findings, key=_is_note)]
    lines += ["", diagnosis.worth_said] if look.judged else []
    lines += _to_do(diagnosis)
    lines += ["", _verdict(diagnosis)]
    return "\n".join(lines) + "\n"


def _is_note(finding: Finding) -> bool:
    return not finding.problem


def _seen(diagnosis: Diagnosis) -> str:
    look = diagnosis.observation
    units = f"{look.units:,} GPU{'' if look.units == 1 else 's'}"
    nodes = f"{look.nodes:,} node{'' if look.nodes == 1 else 's'}"
    return f"{units} on {nodes}{_models(diagnosis)}"


def _models(diagnosis: Diagnosis) -> str:
    told = ", ".join(f"{count:,} {model}" for model, count in diagnosis.observation.models.items())
    return f" ({told})" if told else ""


def _channels(diagnosis: Diagnosis) -> list[str]:
    rows = [(each, _cells(each, diagnosis)) for each in diagnosis.states]
    if not rows:
        return []
    widths = [max(len(cells[at]) for cells in (_HEAD, *(cells for _, cells in rows))) for at in range(len(_HEAD) - 1)]
    lines = ["", "  " + _aligned(_HEAD, widths)]
    for group, members in groupby(rows, key=lambda row: group_of(row[0].channel.name)):
        mine = list(members)
        worth = worth_of(group, [state.channel.name for state, _ in mine], diagnosis.worth)
        with_events = ", the history of XIDs included" if group.name == "XIDs" else ""
        lines.append(group.name if worth is None else f"{group.name} [{worth:.1%}{with_events}]")
        lines += ["  " + _aligned(cells, widths) for _, cells in mine]
    return lines


def _cells(state: ChannelState, diagnosis: Diagnosis) -> tuple[str, ...]:
    seen = state.seen
    remarks = [state.remark] if state.remark else []
    if seen is not None and seen.constant and seen.gpus:
        remarks.append("constant")
    if seen is not None and seen.age_s is not None and state.status == "ok" and diagnosis.observation.kind != "dataset":
        remarks.append(f"{seen.age_s:,.0f} s old")
    if state.worth is not None:
        worth = f"{state.worth:.1%}"
    else:
        worth = "?" if diagnosis.worth is None or (state.used and not diagnosis.worth.shares) else "-"
    star = "*" if state.used else ""
    gpus = "" if seen is None else f"{seen.gpus:,}"
    return (state.channel.name + star, state.status, gpus, worth, "; ".join(remarks))


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, cells[-1]]).rstrip()


def _to_do(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.todos:
        return []
    lines = ["", "What to do, in order of worth"]
    for number, todo in enumerate(diagnosis.todos, start=1):
        worth = "" if todo.worth is None else f" [{todo.worth:.1%}]"
        if todo.channels and todo.worth is None and diagnosis.worth is not None and not todo.used:
            worth = " [the model never saw it: its worth is not known]"
        lines.append(f"{number:>3}. {todo.title}{worth}")
        lines += [f"     {step}" for step in todo.steps]
    return lines


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.healthy:
        return "All fine: nothing is missing that the model uses." if diagnosis.observation.judged else "All fine."
    by = "the model uses" if diagnosis.worth is not None else "failures are known to announce themselves by"
    parts = []
    if diagnosis.lacking:
        parts.append(f"missing, and {by}: {', '.join(diagnosis.lacking)}")
    problems = sum(each.problem for each in diagnosis.observation.findings)
    if problems:
        parts.append(f"{problems} {'thing' if problems == 1 else 'things'} found besides")
    return f"Not fine: {'; '.join(parts)}."


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain JSON types.

    Returns: ``healthy``, ``lacking``, ``source`` (kind, where, at, units, nodes, models, facts, unknown), ``worth``
    (measure, where, model, used, shares; or null), ``worth_said``, ``channels`` by name, ``findings``, and ``todo`` in
    order of worth.
    """
    look, worth = diagnosis.observation, diagnosis.worth
    return {
        "healthy": diagnosis.healthy,
        "lacking": list(diagnosis.lacking),
        "source": {
            "kind": look.kind,
            "where": look.where,
            "at": look.at.isoformat(),
            "units": look.units,
            "nodes": look.nodes,
            "models": dict(look.models),
            "xid_events": look.xid_events,
            "facts": dict(look.facts),
            "unknown": list(look.unknown),
        },
        "worth": None
        if worth is None
        else {
            "measure": worth.measure,
            "where": worth.where,
            "model": worth.model,
            "used": sorted(worth.used),
            "shares": dict(worth.shares),
        },
        "worth_said": diagnosis.worth_said,
        "channels": {each.channel.name: _state_as_dict(each) for each in diagnosis.states},
        "findings": [{"what": each.what, "do": each.do, "problem": each.problem} for each in look.findings],
        "todo": [
            {
                "title": each.title,
                "channels": list(each.channels),
                "worth": each.worth,
                "used": each.used,
                "steps": list(each.steps),
            }
            for each in diagnosis.todos
        ],
    }


def _state_as_dict(state: ChannelState) -> dict[str, Any]:
    seen = state.seen
    return {
        "group": group_of(state.channel.name).name,
        "status": state.status,
        "remark": state.remark,
        "used": state.used,
        "worth": state.worth,
        "gpus": 0 if seen is None else seen.gpus,
        "name": None if seen is None else seen.name,
        "null_share": None if seen is None else seen.null_share,
        "constant": None if seen is None else seen.constant,
        "sentinels": 0 if seen is None else seen.sentinels,
        "age_s": None if seen is None else seen.age_s,
    }
