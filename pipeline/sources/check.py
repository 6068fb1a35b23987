"""What an import would ask about a fleet's files: all questions at once, before anything long begins.

Each table is imported by itself into a scratch folder. Where an error proposes lines of a mapping, it becomes a
question, the lines are taken for the moment, and the table is imported again: one question does not hide the next.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pydantic import ValidationError

from foundation.errors import InputError
from foundation.files import write_bytes
from foundation.yaml import read_yaml
from pipeline.params import Params
from telemetry.dataset.channels import resolve_channels
from telemetry.importing.importer import DEFAULT_MAX_LOSS, import_dataset
from telemetry.importing.ingest import ImportResult
from telemetry.importing.mapping import ImportMapping, load_mapping
from telemetry.importing.quarantine import Quarantine, advice
from telemetry.importing.questions import Question as ColumnQuestion
from telemetry.importing.questions import find_questions, question_lines
from telemetry.importing.reading import expand_sources, is_kernel_log, read_batches
from telemetry.importing.sampling import STEPS
from telemetry.importing.suggestion import Guess, mapping_text, named, suggest

Tables = Mapping[str, Sequence[Path]]
"""Files and folders by section of the mapping: ``samples``, ``events``, ``inventory``, ``jobs``."""

_HEAD_ROWS: Final = 20_000
_HEAD_FILES: Final = 5
_MOST_QUESTIONS: Final = 8
"""Questions about one file; after them the file itself is wrong."""

_UPPER: Final = frozenset({"UTC", "GMT"})
_BACKTICKS: Final = re.compile(r"`([^`]+)`")
_UNSURE: Final = re.compile(r"^(    .+): null    # CHECK: (\w+)\?", re.MULTILINE)
_ELSEWHERE: Final = frozenset({"unknown node", "unknown gpu", "before installation", "after removal"})
"""Reasons that the whole telemetry decides: GPUs and stays are known only when it is there."""

_ALL_ELSEWHERE: Final = 0.9
_FEWEST: Final = 10


@dataclass(frozen=True, slots=True)
class Question:
    """Something that only the user can answer.

    ``answer``: lines of the mapping that would answer it, as a proposal; empty if the file itself has to change.
    """

    section: str
    what: str
    where: str
    do: str
    answer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """What is open about some files: columns with a guess each, and questions."""

    tables: Tables
    mapping: Path | None
    guesses: Sequence[Guess]
    columns: Sequence[ColumnQuestion]
    questions: Sequence[Question]

    @property
    def is_clear(self) -> bool:
        """Whether an import has nothing to ask; of an inventory unknown columns are facts of its own."""
        return not self.questions and not self.columns and all(guess.role == "inventory" for guess in self.guesses)

    def mapping_text(self) -> str:
        """Return a mapping to check: the one given, a guess for each unknown column, and a proposal for each answer."""
        lines = mapping_text(self.guesses, self.tables, self.mapping, question_lines(self.columns)).splitlines()
        for section, answer in self.answers.items():
            if f"{section}:" not in lines:
                lines.append(f"{_flow({section: answer})}    # CHECK")
                continue
            for key, value in answer.items():
                if not any(line.startswith(f"  {key}:") for line in _section(lines, section)):
                    lines.insert(lines.index(f"{section}:") + 1, f"  {_flow({key: value})}    # CHECK")
        return "\n".join(lines) + "\n"

    @property
    def answers(self) -> dict[str, Any]:
        """Proposed answers to all questions, by section of the mapping."""
        answers: dict[str, Any] = {}
        for question in self.questions:
            answers = _merged(answers, question.answer)
        return answers

    def report(self, written: Path) -> str:
        """Return the questions as text; ``written``: where the mapping to check is."""
        lines = []
        for role in self.tables:
            mine = [guess for guess in self.guesses if guess.role == role]
            if mine:
                unsure = [guess for guess in mine if not guess.sure]
                decide = f" To decide: {named(unsure)}." if unsure else ""
                lines.append(f"{role}: {len(mine)} columns are not known: guesses are in {written}.{decide}")
        asked = question_lines(self.columns)
        lines += [line.removeprefix("# ") for line in asked if line.startswith("#")]
        for question in self.questions:
            lines.append(f"{question.section}: {question.what} ({question.where}). {question.do}")
        text = "".join(f"predrain: {line}\n" for line in lines)
        proposed = [line for line in asked if not line.startswith("#")]
        proposed += [_flow({section: answer}) for section, answer in self.answers.items()]
        if proposed:
            text += f"predrain: proposed in {written}, to be corrected:\n" + "".join(f"  {line}\n" for line in proposed)
        return text + f"predrain: check {written}, then run the same command with --mapping {written}\n"


def check_sources(
    tables: Tables, mapping: Path | None, params: Params, *, known: pd.DataFrame | None, now: datetime | None = None
) -> SourceCheck:
    """Find out what an import would ask about files, by their columns and a trial of each table.

    ``known``: inventory of the GPUs whose telemetry comes from elsewhere; None where the files hold samples.
    """
    now = now or datetime.now(UTC)
    channels = resolve_channels(params.channels)
    rules = load_mapping(mapping)
    guesses = suggest(tables, rules, channels)
    columns = find_questions(tables, rules, channels, guesses)
    text = mapping_text(guesses, tables, mapping, question_lines(columns))
    missing = frozenset(question.file for question in columns if question.what == "missing")
    with tempfile.TemporaryDirectory(prefix="predrain-check-") as name:
        trial = _Trial(Path(name), params, _provisional(text, mapping), now, known, missing)
        questions = list(trial.questions(tables))
    return SourceCheck(tables, mapping, guesses, columns, questions)


@dataclass(slots=True)
class _Trial:
    """Imports of single tables; ``content``: the mapping, with each answer that was proposed so far."""

    folder: Path
    params: Params
    content: dict[str, Any]
    now: datetime
    known: pd.DataFrame | None
    incomplete: frozenset[Path] = frozenset()
    inventory: Path | None = None
    heads: list[Path] = field(default_factory=list)
    number: int = 0

    def questions(self, tables: Tables) -> Iterator[Question]:
        """Try the samples first: without them nothing else can be placed."""
        if self.known is not None:
            self.inventory = self.folder / "known.parquet"
            self.known.to_parquet(self.inventory, index=False)
        else:
            self.inventory = next(iter(tables.get("inventory", ())), None)
            self.heads = [*self._heads(tables.get("samples", ()))]
            is_clear = yield from self._ask("samples", next(iter(tables.get("samples", ())), Path()))
            if not is_clear:
                return
        for role in ("events", "jobs"):
            for file in expand_sources(tuple(tables.get(role, ())), role):
                if file in self.incomplete:
                    continue
                section = "kernel_log" if role == "events" and is_kernel_log(file) else role
                given: dict[str, Any] = {"events": [file]} if role == "events" else {"jobs": file}
                yield from self._ask(section, file, **given)

    def _heads(self, samples: Sequence[Path]) -> Iterator[Path]:
        for file in expand_sources(tuple(samples), "samples")[:_HEAD_FILES] if samples else ():
            batch = next(iter(read_batches(file, "samples", Quarantine())), None)
            if batch is not None:
                head = self.folder / f"head-{len(list(self.folder.iterdir()))}-{file.name}.parquet"
                pq.write_table(_plain(batch.table.slice(0, _HEAD_ROWS)), head)
                yield head

    def _import(self, **given: Any) -> ImportResult:
        self.number += 1
        mapping = self.folder / "mapping.yaml"
        span = [datetime(1990, 1, 1, tzinfo=UTC), self.now]  # so that a table without usable rows is no error
        mapping.write_text(yaml.safe_dump({"span": span} | self.content, sort_keys=False), encoding="utf-8")
        return import_dataset(
            self.folder / f"trial-{self.number}",
            inventory=self.inventory,
            samples=self.heads,
            mapping=mapping,
            step=self.params.telemetry.step or STEPS[0],
            channels=resolve_channels(self.params.channels),
            dedupe=self.params.events.dedupe,
            delay=self.params.features.delay,
            max_loss=1.0,
            now=self.now,
            **given,
        )

    def _ask(self, section: str, file: Path, **given: Any) -> Generator[Question, None, bool]:
        """Ask what a table leaves open; return whether it can be imported once that is answered."""
        for _ in range(_MOST_QUESTIONS):
            try:
                result = self._import(**given)
            except InputError as error:
                answer = _answer_in(error.do, section, file, self.now)
                merged = _merged(self.content, answer)
                is_answer = merged != self.content and _is_valid(merged)
                where = error.where.replace(f"{self.folder}/", "")
                yield Question(section, error.what, where, error.do, answer if is_answer else {})
                if not is_answer:
                    return False
                self.content = merged
            else:
                yield from _losses(section, file, result)
                return True
        return False


def _losses(section: str, file: Path, result: ImportResult) -> Iterator[Question]:
    """Ask about rows of a table that many would be lost of; what is left out on purpose is no loss."""
    account = result.accounting.tables["events" if section == "kernel_log" else section]
    losses = {reason: number for reason, number in account.left_out.items() if advice(reason) != advice("")}
    for share, is_placing in ((DEFAULT_MAX_LOSS, False), (_ALL_ELSEWHERE, True)):
        lost = Counter({reason: number for reason, number in losses.items() if (reason in _ELSEWHERE) is is_placing})
        if lost.total() >= _FEWEST and lost.total() > share * account.read:
            reason, most = lost.most_common(1)[0]
            what = f"{lost.total():,} of {account.read:,} rows cannot be used, {most:,} of them for {reason!r}"
            yield Question(section, f"{what}, such as {account.examples.get(reason)}", str(file), advice(reason))


def _answer_in(do: str, section: str, file: Path, now: datetime) -> dict[str, Any]:
    """Return the lines of a mapping that the advice of an error proposes in backticks."""
    for text in _BACKTICKS.findall(do):
        try:
            content = read_yaml(text)
        except (yaml.YAMLError, ValueError, InputError):
            continue
        if isinstance(content, dict) and not _has_placeholder(content):
            fragment = content if content.keys() <= ImportMapping.model_fields.keys() else {section: content}
            return {key: _filled(value, file, now) for key, value in fragment.items()}
    return {}


def _has_placeholder(content: Any) -> bool:
    """Whether a proposal says NAME, SOURCE or the like, which nothing but the user can fill in."""
    if isinstance(content, dict):
        return any(_has_placeholder(part) for pair in content.items() for part in pair)
    return isinstance(content, str) and content.isupper() and content not in _UPPER


def _filled(value: Any, file: Path, now: datetime) -> Any:
    """Fill the gaps of a proposal: the moment after the last line of a log is at most that of its last change."""
    if isinstance(value, dict):
        return {key: _filled(inner, file, now) for key, inner in value.items()}
    if value not in ("…", "..."):
        return value
    changed = datetime.fromtimestamp(file.stat().st_mtime, UTC) if file.is_file() else now
    return min(changed + timedelta(minutes=1), now).replace(microsecond=0)


def _provisional(text: str, mapping: Path | None) -> dict[str, Any]:
    """Return the content of a mapping that takes every guess, also those that are not sure."""
    for candidate in (_UNSURE.sub(r"\1: \2    # CHECK", text), text):
        try:
            content = read_yaml(candidate)
        except (yaml.YAMLError, ValueError, InputError):
            continue
        if content is None or (isinstance(content, dict) and _is_valid(content)):
            return content or {}
    return {} if mapping is None else read_yaml(mapping.read_text(encoding="utf-8")) or {}


def _is_valid(content: Mapping[str, Any]) -> bool:
    try:
        ImportMapping.model_validate(content)
    except ValidationError:
        return False
    return True


def _merged(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return deepcopy(over)
    return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}


def _section(lines: Sequence[str], section: str) -> list[str]:
    """Return the lines of a section of a mapping."""
    if f"{section}:" not in lines:
        return []
    begin = lines.index(f"{section}:") + 1
    rest = list(lines[begin:])
    return rest[: next((place for place, line in enumerate(rest) if line[:1] not in (" ", "#", "")), len(rest))]


def _flow(content: Any) -> str:
    """Write a fragment of a mapping on one line, without the outer braces."""
    plain = json.loads(json.dumps(content, default=lambda value: value.isoformat()))
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False).strip()[1:-1]


def _plain(table: pa.Table) -> pa.Table:
    """Return a table that Parquet can hold: columns of nothing are columns of empty text."""
    for place, kind in enumerate(table.schema.types):
        if pa.types.is_null(kind):
            table = table.set_column(place, table.column_names[place], table.column(place).cast(pa.string()))
    return table


def write_questions(check: SourceCheck, out: Path) -> Path:
    """Write the mapping to check into a folder, never over another file; return its path."""
    names = ["mapping.yaml", *(f"mapping-{number}.yaml" for number in range(2, 1000))]
    path = next(out / name for name in names if not (out / name).exists())
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(path, check.mapping_text().encode())
    return path
