"""What only the owner of some tables can tell: unknown columns, zones, orders of day and month, missing columns.

All tables are looked at before anything is read, so that everything is asked at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from telemetry.dataset.channels import Channel
from telemetry.importing.columns import refuse_absent, targets_of
from telemetry.importing.instants import MISSING, NAIVE, UndecidedOrderError, order_shown, parse_instants
from telemetry.importing.mapping import ImportMapping, TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import column_names, expand_sources, is_kernel_log, read_batches, time_of_column
from telemetry.importing.suggestion import INSTANTS, Guess, known_columns, named, suggest

_REQUIRED: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "samples": (("timestamp",), ("gpu", "node")),
    "events": (("timestamp",), ("type",), ("node", "gpu", "serial")),
    "inventory": (("node",),),
    "jobs": (("job",), ("node",), ("started_at",)),
}


_FIRST_ROWS: Final = 20_000
_FILES_ALIKE: Final = 3


@dataclass(frozen=True, slots=True)
class Question:
    """What a table leaves open: the zone of a column's instants, the order of their dates, or a required column."""

    role: str
    file: Path
    column: str
    what: Literal["timezone", "order", "missing"]
    example: str = ""


def find_questions(
    given: Mapping[str, Sequence[Path]],
    mapping: ImportMapping,
    channels: Mapping[str, Channel],
    guesses: Sequence[Guess],
) -> list[Question]:
    """Return what the tables leave open, if columns are what is guessed; the first rows of each file decide."""
    questions: list[Question] = []
    for role, paths in given.items():
        section: TableMapping = getattr(mapping, role)
        guessed = {guess.column: guess.target for guess in guesses if guess.role == role and guess.target}
        known, aliases, _ = known_columns(role, channels)
        alike: Counter[tuple[str, ...]] = Counter()
        for file in expand_sources(tuple(paths), role):
            if role == "events" and is_kernel_log(file):
                continue
            names = column_names(file, role)
            sources = targets_of(names, section, known, aliases)
            sources |= {target: name for name in names if (target := guessed.get(name)) is not None}
            present = {*sources, *section.constants}
            questions += [
                Question(role, file, " or ".join(choice), "missing")
                for choice in _REQUIRED[role]
                if present.isdisjoint(choice) and section.long is None and not getattr(section, "parts", None)
            ]
            if alike[tuple(names)] < _FILES_ALIKE:  # files of one kind answer alike, and there may be thousands
                questions += _of_instants(role, file, section, sources)
            alike[tuple(names)] += 1
    return list(dict.fromkeys(questions))


def _of_instants(role: str, file: Path, section: TableMapping, sources: Mapping[str, str]) -> list[Question]:
    wanted = {sources[target] for target in INSTANTS if target in sources and target not in section.constants}
    batch = next(iter(read_batches(file, role, Quarantine())), None) if wanted else None
    questions = []
    for column in sorted(wanted) if batch is not None and batch.table.num_rows else ():
        values = (
            batch.table.column(column).slice(0, _FIRST_ROWS) if batch is not None else pa.chunked_array([pa.array([])])
        )
        time = time_of_column(section.time, column)
        try:
            parsed = parse_instants(values, time, column)
        except UndecidedOrderError as error:
            order = order_shown(batch.table.column(other) for other in wanted) if batch is not None else None
            if order is None:
                questions.append(Question(role, file, column, "order", error.what.split("'")[1]))
                continue
            parsed = parse_instants(values, time, column, order=order)
        except InputError:  # which the reader reports
            continue
        reported = parsed.status[parsed.status != MISSING]
        if len(reported) and bool((reported == NAIVE).all()):
            first = int(np.flatnonzero(parsed.status == NAIVE)[0])
            questions.append(Question(role, file, column, "timezone", str(values[first].as_py())))
    return questions


def check_tables(given: Mapping[str, Sequence[Path]], mapping: ImportMapping, channels: Mapping[str, Channel]) -> None:
    """Raise ``InputError`` with everything that the tables leave open, or a mapped column that none of a role's has."""
    for role, paths in given.items():
        section: TableMapping = getattr(mapping, role)
        files = expand_sources(tuple(paths), role)
        tables = [path for path in files if role != "events" or not is_kernel_log(path)]
        names = {name for path in tables for name in column_names(path, role)}
        if tables and section.long is None:
            names |= {name for pattern in getattr(section, "parts", {}).values() for name in pattern.groupindex}
            refuse_absent(section, sorted(names), ", ".join(str(path) for path in tables))
    guesses = suggest(given, mapping, channels)
    unknown = [guess for guess in guesses if guess.role != "inventory"]
    questions = find_questions(given, mapping, channels, guesses)
    zones = [question for question in questions if question.what == "timezone"]
    orders = [question for question in questions if question.what == "order"]
    missing = [question for question in questions if question.what == "missing"]
    if not (unknown or zones or orders):
        return  # a missing column is named by the reader, which knows its other columns
    problems, lines = [], []
    if unknown:
        problems.append(f"{len(unknown)} unknown column{'s' if len(unknown) > 1 else ''}: {named(unknown)}")
    if missing:
        problems.append("no column for " + ", ".join(f"{entry.column!r} in {entry.file.name}" for entry in missing))
    if zones:
        problems.append(f"timestamps are naive (without a time zone), such as {_shown(zones)}")
        lines.append("`timezone: UTC`, with the zone that they were written in")
    if orders:
        problems.append(f"dates can be read in two ways, such as {_shown(orders)}")
        lines += [f"`{role}: {{time: {{order: dmy}}}}` or `mdy`" for role in dict.fromkeys(q.role for q in orders)]
    where = [f"{guess.file}" for guess in unknown] + [f"{q.file}, column {q.column!r}" for q in (*zones, *orders)]
    advice = (
        "Write a mapping to check with `--suggest-mapping mapping.yaml` instead of `--out`, then give `--mapping "
        "mapping.yaml`. `null` in it leaves a column out, `ignore_others: true` all that are not mapped. Channels "
        "of your own are declared in params `channels:`."
    )
    give = f"Give in the mapping: {'; '.join(lines)}." if lines else ""
    raise InputError(
        "; ".join(problems), ", ".join(dict.fromkeys(where)), f"{give} {advice if unknown else ''}".strip()
    )


def _shown(questions: Sequence[Question]) -> str:
    return ", ".join(f"{entry.example!r} ({entry.file.name}, {entry.column!r})" for entry in questions[:5])


def question_lines(questions: Sequence[Question]) -> list[str]:
    """Return lines of a mapping file for what is asked; a guess stands where there must be a value."""
    lines = []
    zones = [entry for entry in questions if entry.what == "timezone"]
    if zones:
        lines += [
            f"# CHECK: no zone in {_shown(zones)}. Write the zone of these tables, such as Europe/Berlin.",
            "timezone: UTC",
        ]
    for entry in questions:
        if entry.what == "order":
            lines.append(
                f"# CHECK: {entry.example!r} ({entry.file.name}): day first is `order: dmy`, month first `mdy`."
            )
        if entry.what == "missing":
            lines.append(
                f"# MISSING: {entry.file.name} has no column for {entry.column!r}. Map one, or give a constant: "
                f"`{entry.role}: {{constants: {{{entry.column.split()[0]}: …}}}}`."
            )
    return lines
