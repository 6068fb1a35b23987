"""A diagnosis as plain JSON types, for programs."""

from __future__ import annotations

from typing import Any

from telemetry.doctor.diagnosis import ChannelState, Diagnosis
from telemetry.doctor.groups import group_of


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
