"""A mapping file for review: what a given one has, a guess for each unknown column, and proposed answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from foundation.yaml import overlaid, read_yaml
from telemetry.dataset.schema import EVENT_TYPES
from telemetry.importing.asking.guesses import Guess
from telemetry.phrases.classifier import classify

_HEADER: Final = """\
# Columns that predrain does not know, with a guess each, and proposed answers to questions. Check every line.
# `null` leaves a column out, which a guess that is not sure does as well: correct the lines with CHECK.
# A column that is no channel of docs/reference/channels.md: declare it in params `channels:`, too.
"""
_IGNORE_OTHERS: Final = "  # ignore_others: true        # leave out every column that is neither known nor mapped"
_METRIC_COLUMNS: Final = ("metric", "metric_name", "__name__", "_field", "metric_id", "series")
_VALUE_COLUMNS: Final = ("value", "_value", "metric_value", "val")


def mapping_content(
    guesses: Sequence[Guess], roles: Iterable[str], mapping: Path | None, *, every_guess: bool
) -> dict[str, Any]:
    """Return the content of a mapping: a given one, and guesses; of those that are not sure ``null``, or the target."""
    content: dict[str, Any] = {} if mapping is None else read_yaml(mapping.read_text(encoding="utf-8")) or {}
    for role in roles:
        section: dict[str, Any] = dict(content.get(role) or {})
        mine = [guess for guess in guesses if guess.role == role]
        long = _long_format(mine) if role == "samples" and "long" not in section else None
        if long is not None:
            section["long"] = long
            mine = [guess for guess in mine if guess.column not in long.values()]
        if mine:
            chosen = [guess for guess in mine if guess.target and (guess.sure or every_guess)]
            targets = {guess.column: guess.target if guess in chosen else None for guess in mine}
            section["columns"] = {**(section.get("columns") or {}), **targets}
            section = overlaid(_settings_of(chosen), section)
        content |= {role: section} if section else {}
    return content


def _settings_of(guesses: Sequence[Guess]) -> dict[str, Any]:
    """Return what guesses need besides the columns: units, and the types of words."""
    content: dict[str, Any] = {}
    units = {guess.unit for guess in guesses if guess.unit}
    if len(units) == 1:
        content["time"] = {"unit": units.pop()}
    kinds = {word: kind for guess in guesses for word in guess.words if (kind := _type_of(word))}
    kinds = {word: kind for word, kind in kinds.items() if word.lower() not in EVENT_TYPES}
    factors = {key: _factors(key, guesses) for key in ("scale", "offset")}
    return content | ({"values": {"type": kinds}} if kinds else {}) | {key: new for key, new in factors.items() if new}


def mapping_text(
    guesses: Sequence[Guess],
    roles: Iterable[str],
    mapping: Path | None,
    answers: Mapping[str, Any] | None = None,
    asked: Sequence[str] = (),
) -> str:
    """Return a mapping file; ``asked``: the questions that the ``answers`` belong to."""
    roles = list(roles)
    content = overlaid(dict(answers or {}), mapping_content(guesses, roles, mapping, every_guess=False))
    lines = [_HEADER.rstrip(), *(f"# CHECK {' '.join(question.split())}" for question in asked)]
    for role in [name for name in roles if content.get(name)]:
        section = dict(content.pop(role))
        of_column = {guess.column: guess for guess in guesses if guess.role == role}
        lines.append(f"{role}:")
        columns = section.pop("columns", None) or {}
        lines += ["  columns:"] * bool(columns)
        for name, target in columns.items():
            comment = _comment(of_column[name]) if name in of_column else ""
            lines.append(f"    {_quoted(name)}: {_quoted(target)}{comment}")
        lines += [f"  {line}" for line in as_yaml({key: value for key, value in section.items() if value})]
        unknown = [word for guess in of_column.values() if guess.sure for word in guess.words if not _type_of(word)]
        if unknown:
            shown = ", ".join(map(_quoted, unknown))
            lines.append(f"  # CHECK: values without a guess are `other`: {shown}; null drops the row")
        lines += [_IGNORE_OTHERS] * bool(of_column)
    return "\n".join([*lines, *as_yaml(content)]) + "\n"


def _comment(guess: Guess) -> str:
    if guess.sure or not guess.target:
        return f"    # {guess.why}"
    factors = ", ".join(f"`{key}: {new}`" for key in ("scale", "offset") if (new := _factors(key, [guess])))
    return f"    # CHECK: {guess.target}? {guess.why}" + (f", with {factors}".replace("'", "") if factors else "")


def _type_of(word: str) -> str | None:
    """Guess the type of an event from a ticket's own word."""
    work = classify(word, "ticket")
    return work.type if work.sure else None


def _long_format(guesses: Sequence[Guess]) -> dict[str, str] | None:
    """Guess the columns of metric and value of a table with a row for each value."""
    columns = {guess.column.lower(): guess.column for guess in guesses}
    metric = next((columns[name] for name in _METRIC_COLUMNS if name in columns), None)
    value = next((columns[name] for name in _VALUE_COLUMNS if name in columns), None)
    return None if metric is None or value is None else {"metric": metric, "value": value}


def _factors(key: str, guesses: Sequence[Guess]) -> dict[str, float]:
    plain = 1.0 if key == "scale" else 0.0
    return {str(g.target): float(f"{getattr(g, key):.10g}") for g in guesses if getattr(g, key) != plain}


def as_yaml(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of some content; none if it is empty."""
    return yaml.safe_dump(dict(content), sort_keys=False).splitlines() if content else []


def _quoted(name: Any) -> str:
    return yaml.safe_dump(name, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
