"""Ambiguities in the first rows of tables: unknown or missing columns, time zones, day-month order.

A mapping file proposes answers for review, with a guess for each unknown column.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import yaml

from foundation.errors import InputError
from foundation.files import read_text
from foundation.yaml import overlaid, read_yaml
from telemetry.dataset.channels import Channel
from telemetry.dataset.event import EVENT_TYPES
from telemetry.importing.batch import time_of_column
from telemetry.importing.columns import ELAPSED, GPU_PLACE, KEY_ALIASES, refuse_absent, targets_of
from telemetry.importing.files.sources import expand_sources, is_kernel_log
from telemetry.importing.files.tables import column_names, read_batches
from telemetry.importing.instants import MISSING, NAIVE, UndecidedOrderError, order_shown, parse_instants
from telemetry.importing.mapping import ImportMapping, TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.suggestion.guesses import INSTANTS, Guess, known_columns, long_format, named, suggest
from telemetry.importing.tickets import names_xids
from telemetry.phrases import classify
from telemetry.values.names import spellings

_HEADER: Final = """\
# Columns that predrain does not know, with a guess each, and proposed answers to questions. Check every line.
# `null` leaves a column out, which a guess that is not sure does as well: correct the lines with CHECK.
# A column that is no channel of docs/reference/channels.md: declare it in params `channels:`, too.
"""
_IGNORE_OTHERS: Final = "  # ignore_others: true        # leave out every column that is neither known nor mapped"


def mapping_content(
    guesses: Sequence[Guess], roles: Iterable[str], mapping: Path | None, *, every_guess: bool
) -> dict[str, Any]:
    """Merge guesses into a mapping; with ``every_guess`` also unsure ones, which are ``null`` otherwise."""
    content: dict[str, Any] = {} if mapping is None else read_yaml(read_text(mapping)) or {}
    for role in roles:
        section: dict[str, Any] = dict(content.get(role) or {})
        of_role = [guess for guess in guesses if guess.role == role]
        long = _long_columns(of_role) if role == "samples" and "long" not in section else {}
        if long:
            section["long"] = long
            of_role = [guess for guess in of_role if guess.column not in long.values()]
        if of_role:
            chosen = [guess for guess in of_role if guess.target and (guess.sure or every_guess)]
            targets = {guess.column: guess.target if guess in chosen else None for guess in of_role}
            section["columns"] = {**(section.get("columns") or {}), **targets}
            section = overlaid(_settings_of(chosen), section)
        content |= {role: section} if section else {}
    return content


def _settings_of(guesses: Sequence[Guess]) -> dict[str, Any]:
    """Return the mapping settings implied by guesses: time unit, event types, scale and offset."""
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
    review: Sequence[str] = (),
) -> str:
    """Return the text of a mapping file; ``review``: questions answered by ``answers``."""
    roles = list(roles)
    content = overlaid(mapping_content(guesses, roles, mapping, every_guess=False), dict(answers or {}))
    lines = [_HEADER.rstrip(), *(f"# CHECK {' '.join(question.split())}" for question in review)]
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
            values = ", ".join(map(_quoted, unknown))
            lines.append(f"  # CHECK: values without a guess are `other`: {values}; null drops the row")
        lines += [_IGNORE_OTHERS] * bool(of_column)
    return "\n".join([*lines, *as_yaml(content)]) + "\n"


def _comment(guess: Guess) -> str:
    if guess.sure or not guess.target:
        return f"    # {guess.why}"
    factors = ", ".join(f"`{key}: {new}`" for key in ("scale", "offset") if (new := _factors(key, [guess])))
    return f"    # CHECK: {guess.target}? {guess.why}" + (f", with {factors}".replace("'", "") if factors else "")


def _type_of(word: str) -> str | None:
    """Guess an event type from a ticket's wording."""
    work = classify(word, "ticket")
    return work.type if work.sure else None


def _long_columns(guesses: Sequence[Guess]) -> dict[str, str]:
    long = long_format(guess.column for guess in guesses)
    return {} if long is None else {"metric": long.metric, "value": long.value}


def _factors(key: str, guesses: Sequence[Guess]) -> dict[str, float]:
    plain = 1.0 if key == "scale" else 0.0
    return {str(g.target): float(f"{getattr(g, key):.10g}") for g in guesses if getattr(g, key) != plain}


def as_yaml(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of a YAML document; empty if there is no content."""
    return yaml.safe_dump(dict(content), sort_keys=False).splitlines() if content else []


def _quoted(name: Any) -> str:
    style = '"' if "\n" in str(name) else None  # on one line
    text = yaml.safe_dump(name, default_style=style, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


Tables = Mapping[str, Sequence[Path]]
"""Files and folders by mapping section: ``samples``, ``events``, ``inventory``, ``jobs``."""

_REQUIRED: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "samples": (("timestamp",), ("gpu", "node")),
    "events": (("timestamp",), ("type",), ("node", "gpu", "serial")),
    "inventory": (("node",),),
    "jobs": (("job",), ("node",), ("started_at", ELAPSED)),
}
_FIRST_ROWS: Final = 20_000
_FILES_ALIKE: Final = 3
_MAX_EXAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the owner of the tables.

    ``section``: mapping section. ``problem``, ``location``, ``advice``: as in ``InputError``.
    ``answer``: proposed mapping content; empty without a proposal.
    ``missing``: required column that is missing in the file ``location``.
    """

    section: str
    problem: str
    location: str
    advice: str
    answer: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.section}: {self.problem} ({self.location}). {self.advice}"


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Open questions and guesses about tables; ``mapping``: the mapping given by the user."""

    tables: Tables
    mapping: Path | None
    guesses: Sequence[Guess]
    questions: Sequence[Question]

    @property
    def is_clear(self) -> bool:
        """Whether an import has no open questions; unknown inventory columns are kept as attributes."""
        return not self.questions and all(guess.role == "inventory" for guess in self.guesses)

    @property
    def answers(self) -> dict[str, Any]:
        """Proposed answers, merged."""
        return reduce(overlaid, (question.answer for question in self.questions), dict[str, Any]())

    def mapping_text(self) -> str:
        """Return a mapping for review: the given one plus guesses for unknown columns and proposed answers."""
        return mapping_text(self.guesses, self.tables, self.mapping, self.answers, [str(q) for q in self.questions])

    def report(self, written: Path) -> str:
        """Return the questions as text; ``written``: path of the mapping for review."""
        lines = []
        for role in self.tables:
            of_role = [guess for guess in self.guesses if guess.role == role]
            long = _long_columns(of_role).values() if role == "samples" else ()
            unsure = [guess for guess in of_role if not guess.sure and guess.column not in long]
            decide = f" To decide: {named(unsure)}." if unsure else ""
            lines += [f"{role}: {len(of_role)} columns are unknown: guesses are in {written}.{decide}"] * bool(of_role)
        text = "".join(f"predrain: {line}\n" for line in [*lines, *map(str, self.questions)])
        if self.answers:
            proposed = "".join(f"  {line}\n" for line in as_yaml(self.answers))
            text += f"predrain: proposed in {written}, to be corrected:\n{proposed}"
        return text + f"predrain: check {written}, then run the same command with --mapping {written}\n"


def find_questions(
    tables: Tables, mapping: ImportMapping, channels: Mapping[str, Channel]
) -> tuple[list[Guess], list[Question]]:
    """Guess unknown columns, and return the questions that remain if the guesses are right."""
    guesses = suggest(tables, mapping, channels)
    naive: list[str] = []
    undecided: dict[str, list[str]] = {}
    missing: list[Question] = []
    by_serial: dict[str, Question] = {}
    for role, paths in tables.items():
        section: TableMapping = getattr(mapping, role)
        guessed = {guess.column: guess.target for guess in guesses if guess.role == role and guess.target}
        alike: Counter[tuple[str, ...]] = Counter()
        for file in _tables_among(paths, role):
            names = column_names(file, role)
            known, aliases, _ = known_columns(role, channels, names, section)
            sources = targets_of(names, section, known, aliases)
            sources |= {target: name for name in names if (target := guessed.get(name)) is not None}
            if section.long is None and not getattr(section, "parts", None):
                unsure = {guess.target for guess in guesses if guess.role == role and not guess.sure}
                texts = [guess.column for guess in guesses if guess.target == "type" and not guess.words]
                text = ("type", texts[0]) if texts else ("detail", sources.get("detail", ""))
                missing += _missing(role, file, {*sources, *section.constants} - unsure, text, sources.get("code", ""))
            if role == "samples" and not tables.get("inventory") and sources.keys().isdisjoint(("gpu", *GPU_PLACE)):
                by_serial |= _serial_number(file, names, section)
            if alike[tuple(names)] < _FILES_ALIKE:  # a few files with the same columns are enough
                for column, setting, example in _open_instants(role, file, section, sources):
                    quoted = f"{example!r} ({file.name}, column {column!r})"
                    (naive if setting == "timezone" else undecided.setdefault(role, [])).append(quoted)
            alike[tuple(names)] += 1
    questions = [
        Question(
            role,
            f"dates can be read in two ways, such as {', '.join(examples[:_MAX_EXAMPLES])}",
            role,
            f"Give `{role}: {{time: {{order: dmy}}}}` (day first) or `mdy` (month first).",
            {role: {"time": {"order": "dmy"}}},
        )
        for role, examples in undecided.items()
    ]
    if naive:
        problem = f"timestamps are naive (without a time zone), such as {', '.join(naive[:_MAX_EXAMPLES])}"
        advice = "Give `timezone: UTC`, with the zone that they were written in."
        questions.insert(0, Question("timezone", problem, "all tables", advice, {"timezone": "UTC"}))
    return guesses, [*questions, *by_serial.values(), *missing]


def _tables_among(paths: Sequence[Path], role: str) -> list[Path]:
    return [file for file in expand_sources(tuple(paths), role) if role != "events" or not is_kernel_log(file)]


def _missing(role: str, file: Path, present: set[str], text: tuple[str, str], code: str) -> Iterator[Question]:
    """Yield a question for each missing column.

    ``text``: what the column with the text is, and its name or ''. ``code``: name of the column with codes, or ''.
    """
    target, column = text
    for choice in _REQUIRED[role]:
        if present.isdisjoint(choice):
            name, answer = " or ".join(choice), dict[str, Any]()
            advice = f"Map one, or give a constant: `{role}: {{constants: {{{choice[0]}: …}}}}`."
            if column and role == "events" and "node" in choice:
                advice += f" If {column!r} names the node, map it to `[{target}, node]`."
                answer = {role: {"columns": {column: [target, "node"]}}}
            elif choice == ("type",) and names_xids(code):
                answer = {role: {"constants": {"type": "xid"}}}
            yield Question(role, f"no column for {name!r}", str(file), advice, answer, missing=name)


def _serial_number(file: Path, names: Sequence[str], section: TableMapping) -> dict[str, Question]:
    """Return the question whether GPUs are named by their serial number, if there is such a column, by its name."""
    free = [name for name in names if name not in section.columns]
    is_serial = (any(KEY_ALIASES.get(key, key) == "serial" for key in spellings(name)) for name in free)
    column = next(compress(free, is_serial), None)
    if column is None:
        return {}
    problem = "GPUs are named by serial number alone"
    advice = f"Map {column!r} to `gpu`, or to null if it is the node's."
    return {column: Question("samples", problem, str(file), advice, {"samples": {"columns": {column: "gpu"}}})}


def _open_instants(
    role: str, file: Path, section: TableMapping, sources: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield columns with naive or ambiguous dates: the column, ``timezone`` or ``order``, and an example."""
    columns = {sources[target] for target in INSTANTS if target in sources and target not in section.constants}
    batch = next(iter(read_batches(file, role, Quarantine())), None) if columns else None
    if batch is None or not batch.table.num_rows:
        return
    for column in sorted(columns):
        values: pa.ChunkedArray = batch.table.column(column).slice(0, _FIRST_ROWS)
        time = time_of_column(section.time, column)
        try:
            parsed = parse_instants(values, time, column)
        except UndecidedOrderError as error:
            order = order_shown(batch.table.column(other) for other in columns)
            if order is None:
                yield column, "order", error.text
            parsed = parse_instants(values, time, column, order=order or "dmy")
        except InputError:  # reported by the reader
            continue
        reported = parsed.status[parsed.status != MISSING]
        if len(reported) and bool((reported == NAIVE).all()):
            yield column, "timezone", str(values[int(np.flatnonzero(parsed.status == NAIVE)[0])].as_py())


def refuse_open(tables: Tables, mapping: ImportMapping, channels: Mapping[str, Channel]) -> None:
    """Raise ``InputError`` with all open questions, or for a mapped column that is missing in all files of a role."""
    for role, paths in tables.items():
        section: TableMapping = getattr(mapping, role)
        files = _tables_among(paths, role)
        if files and section.long is None:
            names = {name for path in files for name in column_names(path, role)}
            names |= {name for pattern in getattr(section, "parts", {}).values() for name in pattern.groupindex}
            refuse_absent(section, sorted(names), ", ".join(map(str, files)))
    guesses, questions = find_questions(tables, mapping, channels)
    unknown = [guess for guess in guesses if guess.role != "inventory"]
    if not unknown and all(question.missing for question in questions):
        return  # the reader reports a missing column, along with those present
    problems = [
        f"{question.problem} in {question.location}" if question.missing else question.problem for question in questions
    ]
    advice = [question.advice for question in questions if question.answer]
    if unknown:
        problems.insert(0, f"{len(unknown)} unknown column{'s' if len(unknown) > 1 else ''}: {named(unknown)}")
        advice.append(
            "Write a mapping to check with `--suggest-mapping mapping.yaml` instead of `--out`, then give `--mapping "
            "mapping.yaml`. `null` in it leaves a column out, `ignore_others: true` all that are not mapped. Channels "
            "of your own are declared in params `channels:`."
        )
    location = [str(guess.file) for guess in unknown] + [question.location for question in questions]
    raise InputError("; ".join(problems), ", ".join(dict.fromkeys(location)), " ".join(advice))
