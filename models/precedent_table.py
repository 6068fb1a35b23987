"""Precedents in words, and laid out as a table that says how often they were right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from features.times import instants, milliseconds
from features.vocabulary import amount, describe
from features.wording import CLASS_WORDS, decimal, percent
from models.precedents import Precedent, PrecedentLibrary, Precedents
from models.training_set import Matrix

LIKENESSES: Final = 2
"""Things told that an alert and its precedent have in common, at most."""

_MS_PER_HOUR = 3_600_000

COLUMNS: Final = (
    "fold", "decision_time", "unit", "place", "precedent_unit", "precedent_time", "precedent_start",
    "precedent_class", "likeness", "alike", "incidents_as_close", "incidents", "healthy_as_close", "healthy",
    "label", "failure_class", "chance", "commonest", "text", "worth",
)  # fmt: skip
"""Columns of :func:`precedent_frame`."""


def tell_precedent(
    library: PrecedentLibrary, precedent: Precedent, row: np.ndarray, reasons: Sequence[str], unit: str
) -> str:
    """Say what past incident an alert looks like, and in what.

    ``row``: the alert's features; shape (n_features,).
    ``unit``: the alert's unit.
    Returns: a sentence without a full stop.
    """
    at = {column.name: number for number, column in enumerate(library.columns)}
    there = library.incidents[precedent.at]
    same = [at[name] for name in reasons if name in at and library.agrees(row, precedent.at, at[name])][:LIKENESSES]
    model = [
        column.categories[int(there[number])]
        for number, column in enumerate(library.columns)
        if column.group == "static"
        and column.channel == "model"
        and not np.isnan(there[number])
        and 0 <= int(there[number]) < len(column.categories)
    ]
    who = "the same unit" if precedent.unit == unit else precedent.unit
    when = instants(np.array([precedent.decision_ms]))[0].strftime("%Y-%m-%d %H:%M")
    hours = (precedent.start_ms - precedent.decision_ms) / _MS_PER_HOUR
    text = f"{percent(1 - precedent.distance)} like {who}{''.join(f' ({name})' for name in model[:1])} on {when} UTC"
    failure = CLASS_WORDS.get(precedent.failure_class, CLASS_WORDS["other"])
    text += f", {decimal(hours)} h before {failure}"
    if not same:
        return f"{text}: alike in what counted less"
    common = []
    for each in same:
        column = library.columns[each]
        common.append(f"{describe(column, float(row[each]))} (then {amount(column, float(there[each]))})")
    return f"{text}: now as then {' and '.join(common)}"


def tell_worth(found: Precedents) -> str:
    """Say what the likeness is worth: how often incidents come as close, and how often healthy rows do."""
    if not found.found:
        return (
            "no incident is known yet to compare with"
            if not found.incidents
            else "nothing that raised the score can be compared with the past"
        )
    counted = (
        f"{found.incidents_as_close:,} of {found.incidents:,} past incidents "
        f"({percent(found.incidents_as_close / found.incidents)}) and {found.healthy_as_close:,} of {found.healthy:,} "
        f"healthy rows ({percent(found.healthy_as_close / max(found.healthy, 1))}) come as close"
    )
    return counted if found.alike else f"nothing in the past looked like this: {counted}"


def precedent_facts(
    library: PrecedentLibrary, found: Precedents, row: np.ndarray, reasons: Sequence[str], unit: str
) -> dict[str, Any]:
    """Give what was found for an alert as JSON-able facts: ``found``, counts, ``alike``, ``texts`` and ``worth``."""
    told = found.found if found.alike else ()
    return {
        "found": [
            {
                "unit": each.unit,
                "decision_ms": each.decision_ms,
                "start_ms": each.start_ms,
                "failure_class": each.failure_class,
                "distance": each.distance,
            }
            for each in found.found
        ],
        "alike": found.alike,
        "incidents_as_close": found.incidents_as_close,
        "incidents": found.incidents,
        "healthy_as_close": found.healthy_as_close,
        "healthy": found.healthy,
        "texts": [tell_precedent(library, each, row, reasons, unit) for each in told],
        "worth": tell_worth(found),
    }


def precedent_frame(matrix: Matrix, folds: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Lay the precedents of all explained alerts out as a table, beside what followed.

    ``folds``: facts of the folds in order: ``reasons`` as ``explain_rows`` gives them, and
    ``library``, the number of incidents of each class that were known.
    Returns: one row for each precedent, nearest first, and one of ``place`` 0 for an alert that has none: ``fold``
    (int32), ``decision_time``, ``unit``, ``place`` (int32), ``precedent_unit``, ``precedent_time``,
    ``precedent_start``, ``precedent_class``, ``likeness`` (1 - distance), ``alike``, ``incidents_as_close``,
    ``incidents``, ``healthy_as_close``, ``healthy`` (int32), ``label`` (float64; NaN: not known) and ``failure_class``
    of what followed, ``chance`` (share of that class in the library: how often an incident drawn from it would have
    agreed) and ``commonest`` (1.0 if it is the library's commonest class); both NaN where no incident followed;
    ``text`` and ``worth`` in words.
    """
    labels: pd.DataFrame = matrix.labels(None)
    label = labels["label"].astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan)
    time, unit = milliseconds(matrix.rows["decision_time"]), matrix.rows["unit"]
    records: list[dict[str, Any]] = []
    for number, facts in enumerate(folds):
        counts: dict[str, int] = facts.get("library") or {}
        known = sum(counts.values())
        commonest = max(sorted(counts), key=lambda name: counts[name]) if counts else None
        for told in facts["reasons"]:
            if "precedents" not in told:
                continue
            row, own = told["row"], told["precedents"]
            followed = str(labels["failure_class"].iloc[row]) if label[row] == 1 else None
            shared = {
                "fold": number,
                "decision_ms": int(time[row]),
                "unit": str(unit.iloc[row]),
                "alike": own["alike"],
                **{name: own[name] for name in ("incidents_as_close", "incidents", "healthy_as_close", "healthy")},
                "label": float(label[row]),
                "failure_class": followed,
                "chance": counts.get(followed, 0) / known if followed is not None and known else np.nan,
                "commonest": float(followed == commonest) if followed is not None and known else np.nan,
                "worth": own["worth"],
            }
            texts = [*own["texts"], *[""] * len(own["found"])]
            for place, each in enumerate(own["found"], start=1):
                records.append(
                    shared
                    | {
                        "place": place,
                        "precedent_unit": each["unit"],
                        "precedent_ms": each["decision_ms"],
                        "start_ms": each["start_ms"],
                        "precedent_class": each["failure_class"],
                        "likeness": 1 - each["distance"],
                        "text": texts[place - 1],
                    }
                )
            if not own["found"]:
                empty = {"precedent_unit": None, "precedent_ms": -1, "start_ms": -1, "precedent_class": None}
                records.append(shared | empty | {"place": 0, "likeness": np.nan, "text": ""})
    return _typed(records)


def _typed(records: list[dict[str, Any]]) -> pd.DataFrame:
    def taken(name: str) -> list[Any]:
        return [each[name] for each in records]

    def at(name: str) -> Any:
        ms = np.array(taken(name), dtype=np.int64)
        return instants(ms).where(ms >= 0)

    whole = ("fold", "place", "incidents_as_close", "incidents", "healthy_as_close", "healthy")
    words = ("unit", "precedent_unit", "precedent_class", "failure_class", "text", "worth")
    columns: dict[str, Any] = {name: np.array(taken(name), dtype=np.int32) for name in whole}
    columns |= {name: pd.array(taken(name), dtype="str") for name in words}
    columns |= {name: np.array(taken(name), dtype=np.float64) for name in ("likeness", "label", "chance", "commonest")}
    columns |= {"alike": np.array(taken("alike"), dtype=bool)}
    columns |= {
        "decision_time": at("decision_ms"),
        "precedent_time": at("precedent_ms"),
        "precedent_start": at("start_ms"),
    }
    return pd.DataFrame(columns)[list(COLUMNS)]
