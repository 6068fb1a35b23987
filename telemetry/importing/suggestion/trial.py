"""Finds further questions by a trial import of each table (the first rows of samples) into a scratch folder.

An error that proposes mapping lines becomes a question. The table is then imported again with these lines, so that one
error does not mask the next.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
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
from foundation.yaml import overlaid, read_yaml
from telemetry.dataset.channels import Channel
from telemetry.importing.files.sources import expand_sources, is_kernel_log
from telemetry.importing.files.tables import read_batches
from telemetry.importing.importer import DEFAULT_MAX_LOSS
from telemetry.importing.ingest import ImportResult
from telemetry.importing.mapping import ImportMapping, load_mapping
from telemetry.importing.quarantine import Quarantine, advice
from telemetry.importing.suggestion.questions import Inquiry, Question, Tables, find_questions, mapping_content

_HEAD_ROWS: Final = 20_000
_HEAD_FILES: Final = 5
_MAX_QUESTIONS: Final = 8
"""Maximum number of questions per file; beyond it the file itself is broken."""

_UPPER: Final = frozenset({"UTC", "GMT"})
_BACKTICKS: Final = re.compile(r"`([^`]+)`")
_PLACING_REASONS: Final = frozenset({"unknown node", "unknown gpu", "before installation", "after removal"})
"""Reasons that depend on the complete telemetry, which a trial does not read."""

_ALL_ELSEWHERE: Final = 0.9
_MIN_LOST_ROWS: Final = 10


def inquire(
    tables: Tables,
    mapping: Path | None,
    channels: Mapping[str, Channel],
    importing: Callable[..., ImportResult],
    *,
    known: pd.DataFrame | None = None,
) -> Inquiry:
    """Collect all questions that an import of the tables would raise.

    ``importing``: :func:`telemetry.importing.importer.import_dataset` with all settings bound.
    ``known``: inventory of GPUs whose telemetry is already available; None if ``tables`` has the samples.
    """
    guesses, questions = find_questions(tables, load_mapping(mapping), channels)
    first_inquiry = Inquiry(tables, mapping, guesses, questions)
    provisional = overlaid(mapping_content(guesses, tables, mapping, every_guess=True), first_inquiry.answers)
    if not _is_valid(provisional):
        provisional = mapping_content([], tables, mapping, every_guess=False)
    incomplete = frozenset(question.location for question in questions if question.missing and not question.answer)
    with tempfile.TemporaryDirectory(prefix="predrain-check-") as name:
        trial = _Trial(Path(name), importing, provisional, datetime.now(UTC), known, incomplete)
        questions += trial.questions(tables)
    return Inquiry(tables, mapping, guesses, questions)


@dataclass(slots=True)
class _Trial:
    """Trial imports, one table at a time; ``content``: the mapping with all answers proposed so far."""

    folder: Path
    importing: Callable[..., ImportResult]
    content: dict[str, Any]
    now: datetime
    known: pd.DataFrame | None
    incomplete: frozenset[str]
    inventory: Path | None = None
    heads: list[Path] = field(default_factory=list)
    number: int = 0

    def questions(self, tables: Tables) -> Iterator[Question]:
        """Import samples first: events and jobs cannot be assigned to GPUs without them."""
        if self.known is not None:
            self.inventory = self.folder / "known.parquet"
            self.known.to_parquet(self.inventory, index=False)
        else:
            self.inventory = next(iter(tables.get("inventory", ())), None)
            samples = tables.get("samples", ())
            self.heads = [*self._heads(expand_sources(tuple(samples), "samples") if samples else [])]
            is_clear = yield from self._ask("samples", next(iter(samples), Path()))
            if not is_clear:
                return
        for role in ("events", "jobs"):
            for file in expand_sources(tuple(tables.get(role, ())), role):
                if str(file) in self.incomplete:
                    continue
                section = "kernel_log" if role == "events" and is_kernel_log(file) else role
                argument: dict[str, Any] = {"events": [file]} if role == "events" else {"jobs": file}
                yield from self._ask(section, file, **argument)

    def _heads(self, files: list[Path]) -> Iterator[Path]:
        for number, file in enumerate(files[:_HEAD_FILES]):
            batch = next(iter(read_batches(file, "samples", Quarantine())), None)
            if batch is not None:
                head = self.folder / f"head-{number}-{file.name}.parquet"
                pq.write_table(_storable(batch.table.slice(0, _HEAD_ROWS)), head)
                yield head

    def _import(self, **arguments: Any) -> ImportResult:
        self.number += 1
        mapping = self.folder / "mapping.yaml"
        span = [datetime(1990, 1, 1, tzinfo=UTC), self.now]  # avoids an error for a table without usable rows
        mapping.write_text(yaml.safe_dump({"span": span} | self.content, sort_keys=False), encoding="utf-8")
        out, files = self.folder / f"trial-{self.number}", {"inventory": self.inventory, "samples": self.heads}
        return self.importing(out, **files, mapping=mapping, max_loss=1.0, now=self.now, **arguments)

    def _ask(self, section: str, file: Path, **arguments: Any) -> Generator[Question, None, bool]:
        """Yield questions about a table; return whether it can be imported with the answers."""
        for _ in range(_MAX_QUESTIONS):
            try:
                result = self._import(**arguments)
            except InputError as error:
                answer = _answer_in(error.advice, section, file, self.now)
                content = overlaid(self.content, answer)
                is_answer = content != self.content and _is_valid(content)
                location = error.location.replace(f"{self.folder}/", "")
                yield Question(section, error.problem, location, error.advice, answer if is_answer else {})
                if not is_answer:
                    return False
                self.content = content
            else:
                yield from _losses(section, file, result)
                return True
        return False


def _losses(section: str, file: Path, result: ImportResult) -> Iterator[Question]:
    """Yield a question if many rows of a table would be lost; rows left out on purpose do not count."""
    account = result.accounting.tables["events" if section == "kernel_log" else section]
    losses = {reason: number for reason, number in account.left_out.items() if advice(reason) != advice("")}
    for share, is_placing in ((DEFAULT_MAX_LOSS, False), (_ALL_ELSEWHERE, True)):
        lost = Counter(
            {reason: number for reason, number in losses.items() if (reason in _PLACING_REASONS) is is_placing}
        )
        if lost.total() >= _MIN_LOST_ROWS and lost.total() > share * account.read:
            reason, largest = lost.most_common(1)[0]
            problem = f"{lost.total():,} of {account.read:,} rows cannot be used, {largest:,} of them for {reason!r}"
            yield Question(section, f"{problem}, such as {account.examples.get(reason)}", str(file), advice(reason))


def _answer_in(advice: str, section: str, file: Path, now: datetime) -> dict[str, Any]:
    """Return the mapping content that an error's advice proposes in backticks."""
    for text in _BACKTICKS.findall(advice):
        try:
            content = read_yaml(text)
        except (yaml.YAMLError, ValueError, InputError):
            continue
        if isinstance(content, dict) and not _has_placeholder(content):
            fragment = content if content.keys() <= ImportMapping.model_fields.keys() else {section: content}
            return {key: _filled(value, file, now) for key, value in fragment.items()}
    return {}


def _has_placeholder(content: Any) -> bool:
    """Whether a proposal contains a placeholder like NAME or SOURCE for the user to fill in."""
    if isinstance(content, dict):
        return any(_has_placeholder(part) for pair in content.items() for part in pair)
    return isinstance(content, str) and content.isupper() and content not in _UPPER


def _filled(value: Any, file: Path, now: datetime) -> Any:
    """Replace ``…`` by a time after the last line of a log: its modification time plus a minute, at most now."""
    if isinstance(value, dict):
        return {key: _filled(inner, file, now) for key, inner in value.items()}
    if value not in ("…", "..."):
        return value
    changed = datetime.fromtimestamp(file.stat().st_mtime, UTC) if file.is_file() else now
    return min(changed + timedelta(minutes=1), now).replace(microsecond=0)


def _is_valid(content: Mapping[str, Any]) -> bool:
    try:
        ImportMapping.model_validate(content)
    except ValidationError:
        return False
    return True


def _storable(table: pa.Table) -> pa.Table:
    """Convert columns of type null to text, which Parquet can store."""
    for place, kind in enumerate(table.schema.types):
        if pa.types.is_null(kind):
            table = table.set_column(place, table.column_names[place], table.column(place).cast(pa.string()))
    return table


def write_inquiry(inquiry: Inquiry, out: Path) -> Path:
    """Write the mapping for review to a new file in a folder; return its path."""
    names = ["mapping.yaml", *(f"mapping-{number}.yaml" for number in range(2, 1000))]
    path = next(out / name for name in names if not (out / name).exists())
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(path, inquiry.mapping_text().encode())
    return path
