"""Guesses the meaning of unknown columns from name, unit and values."""

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foundation.errors import InputError
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.event import EVENT_TYPES
from telemetry.dataset.schema import EVENT_RUNS, INVENTORY, JOB_OPTIONS, JOBS
from telemetry.importing.columns import (
    COLUMN_NAMES,
    ELAPSED,
    KEY_ALIASES,
    SAMPLE_KEYS,
    as_text,
    left_out_of_samples,
    names_of_jobs,
    nothing_left_out,
    source_names,
    split_words,
    targets_of,
    unknown_columns,
    words_of,
)
from telemetry.importing.files.sources import expand_sources, is_kernel_log
from telemetry.importing.files.tables import column_names, read_batches
from telemetry.importing.instants import MISSING, NAIVE, OK, inferred_unit, parse_instants
from telemetry.importing.mapping import ImportMapping, LongFormat, TableMapping, TimeFormat
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.tickets import TICKET_COLUMNS
from telemetry.phrases import classify
from telemetry.values.numbers import ANY_UNIT, read_numbers, words_for

_SURE_SCORE: Final = 0.8
_LIKELY: Final = 0.5
_FITS: Final = 0.95
INSTANTS: Final = (
    "timestamp",
    "known_at",
    "resolved_at",
    "replaced_at",
    "installed_at",
    "removed_at",
    "started_at",
    "ended_at",
    "checkpointed_at",
)
_UUID: Final = re.compile(r"(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_FEW_VALUES: Final = 8
_METRIC_COLUMNS: Final = ("metric", "metric_name", "__name__", "_field", "metric_id", "series")
_VALUE_COLUMNS: Final = ("value", "_value", "metric_value", "val")
_MIN_INSTANT: Final = 10_000
# Smaller numbers are not timestamps in any unit: `resolved` may be a boolean.
_BY_VALUE: Final = "values are instants"
_WORDS: Final = {word: meant for meant, words in COLUMN_NAMES["words"].items() for word in words}

_FIELD: Final = re.compile(r"(?:dcgm|field|fi|id)+[ _.-]*(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess for an unknown column.

    ``file``: the first file that has the column.
    ``target``: column of the dataset; None without a similar one, or for text that no channel accepts.
    ``score``: confidence from 0 to 1; if :attr:`sure`, only the unit may need review.
    ``why``: evidence.
    ``scale``, ``offset``: conversion from the source's unit to the channel's.
    ``unit``: unit of numeric timestamps.
    ``words``: distinct values of a column that may hold event types.
    """

    role: str
    file: Path
    column: str
    target: str | None
    score: float
    why: str
    scale: float = 1.0
    offset: float = 0.0
    unit: str | None = None
    words: tuple[str, ...] = ()

    @property
    def sure(self) -> bool:
        """Whether the guess needs no confirmation."""
        return self.score >= _SURE_SCORE


def named(guesses: Sequence[Guess]) -> str:
    """List columns with their guesses; a question mark follows unsure ones."""
    return ", ".join(f"{guess.column!r} ({guess.target or 'no guess'}{'' if guess.sure else '?'})" for guess in guesses)


def suggest(
    files: Mapping[str, Sequence[Path]], mapping: ImportMapping, channels: Mapping[str, Channel]
) -> list[Guess]:
    """Guess the unknown columns that an import would reject, and those of an inventory that may be required ones.

    ``files``: files and folders by role (``samples``, ``events``, ``inventory``, ``jobs``); kernel logs are skipped.
    Targets are unique per role, and never a column that the file already has.
    """
    guesses: list[Guess] = []
    for role, paths in files.items():
        columns: dict[str, tuple[Path, pa.ChunkedArray]] = {}
        claimed: dict[str, set[str]] = {}
        metrics: dict[str, tuple[Path, pa.ChunkedArray]] = {}
        for file in expand_sources(tuple(paths), role):
            if role != "events" or not is_kernel_log(file):
                unknown, known = _columns_of(file, role, getattr(mapping, role), channels)
                for name in unknown:
                    claimed.setdefault(name, set()).update(known)
                new = [name for name in unknown if name not in columns]
                long = long_format(new) if role == "samples" else None
                batch = next(iter(read_batches(file, role, Quarantine())), None) if new else None
                if batch is not None and role == "events":
                    kinds = _kinds_of_tickets(batch.table, mapping.events)
                    new += kinds
                    claimed |= {name: claimed.get(name, known) - {"type"} for name in new if kinds}
                columns |= {} if batch is None else {name: (file, batch.table.column(name)) for name in new}
                if long is not None:
                    metrics |= _metrics_of(file, long, mapping.samples, channels)
        guesses += _assign(role, columns, claimed, channels if role == "samples" else {})
        guesses += [guess for guess in _assign(role, metrics, defaultdict(set), channels) if guess.target]
    return guesses


def long_format(names: Iterable[str]) -> LongFormat | None:
    """Guess the metric and value columns of a table in long format; None if it is not one."""
    columns = {name.lower(): name for name in names}
    metric = next((columns[name] for name in _METRIC_COLUMNS if name in columns), None)
    value = next((columns[name] for name in _VALUE_COLUMNS if name in columns), None)
    return None if metric is None or value is None else LongFormat(metric=metric, value=value)


def _metrics_of(
    file: Path, long: LongFormat, mapping: TableMapping, channels: Mapping[str, Channel]
) -> dict[str, tuple[Path, pa.ChunkedArray]]:
    """Return the unknown metrics of a long table with their first values."""
    batch = next(iter(read_batches(file, "samples", Quarantine(), long)), None)
    metrics = [] if batch is None else [name for name in batch.table.column_names if name not in column_names(file)]
    unknown = unknown_columns(metrics, mapping, *known_columns("samples", channels, metrics, mapping))
    return {} if batch is None else {name: (file, batch.table.column(name)) for name in unknown}


def known_columns(
    role: str, channels: Mapping[str, Channel], columns: Sequence[str], mapping: TableMapping
) -> tuple[list[str], Mapping[str, str], Callable[[str], bool]]:
    """Return the dataset columns of a role, their aliases, and a predicate for ignored columns.

    ``columns``: columns of the table.
    """
    if role == "samples":
        names = [*SAMPLE_KEYS, *with_rollups(channels), "sample_count"]
        return names, {**source_names(channels), **KEY_ALIASES}, left_out_of_samples
    known = {
        "inventory": [*INVENTORY.names, "parent", "mig_instance", "seen_at"],
        "events": [*EVENT_RUNS.names, *TICKET_COLUMNS],
        "jobs": [*JOBS.names, *JOB_OPTIONS, ELAPSED],
    }
    if role == "jobs":
        return known[role], *names_of_jobs(columns, mapping)
    return known[role], KEY_ALIASES, nothing_left_out


def _columns_of(
    file: Path, role: str, mapping: TableMapping, channels: Mapping[str, Channel]
) -> tuple[list[str], set[str]]:
    names = column_names(file, role)
    known, aliases, ignored = known_columns(role, channels, names, mapping)
    unknown = unknown_columns(names, mapping, known, aliases, ignored)
    if mapping.long is not None:  # its columns are labels, few of them relevant
        unknown = []
    mapped = set(targets_of(names, mapping, known, aliases)) | set(mapping.constants)
    if role == "inventory":  # unknown columns are attributes, unless a required column is missing
        lacking = [name for name in ("node", "gpu", "installed_at") if name not in mapped]
        unknown = [name for name in unknown if _key_of(name, role)[0] in (lacking if lacking else ())]
    return unknown, mapped


def _assign(
    role: str,
    columns: Mapping[str, tuple[Path, pa.ChunkedArray]],
    known: Mapping[str, set[str]],
    channels: Mapping[str, Channel],
) -> list[Guess]:
    """Assign each column its best target, by descending score; ``known``: targets already present, by column."""
    candidates = [
        guess for name, (file, column) in columns.items() for guess in _guesses(role, file, name, column, channels)
    ]
    if len({guess.column for guess in candidates if guess.why == _BY_VALUE}) > 1:
        # With several timestamp columns, only a name can identify the event time.
        candidates = [replace(guess, score=_LIKELY) if guess.why == _BY_VALUE else guess for guess in candidates]
    best: dict[str, Guess] = {}
    claimed: set[str] = set()
    for guess in sorted(candidates, key=lambda guess: -guess.score):
        if guess.target not in claimed | known[guess.column] and guess.column not in best:
            best[guess.column] = guess
            claimed = claimed | {str(guess.target)}
    if role == "events":
        best = _as_tickets(best, set().union(*known.values()))
    return [
        best.get(name) or Guess(role, file, name, None, *_no_guess(role, column))
        for name, (file, column) in columns.items()
    ]


def _kinds_of_tickets(table: pa.Table, mapping: TableMapping) -> list[str]:
    """Return the type column if it says nothing about hardware, as with `Incident` and `Question`."""
    names = [name for name in table.column_names if name.lower() == "type" and name not in mapping.columns]
    words = [word for name in names for word in as_text(table.column(name), table.num_rows) if word]
    return [] if any(word in EVENT_TYPES or classify(word, "ticket").sure for word in {*words}) else names


def _as_tickets(best: Mapping[str, Guess], known: set[str]) -> dict[str, Guess]:
    """Map ticket fields to event fields: creation time to ``timestamp``, text to ``type``.

    A ticket type like `Bug` or `Task` says nothing about hardware, but the text does.
    """
    of_target = {str(guess.target): guess for guess in best.values()}
    opening, text, kind = (of_target.get(target) for target in ("known_at", "detail", "type"))
    as_ticket = dict(best)
    by_value = of_target.get("timestamp")
    if opening and "timestamp" not in known and (by_value is None or by_value.why == _BY_VALUE or not by_value.sure):
        if by_value is not None:
            del as_ticket[by_value.column]
        as_ticket[opening.column] = replace(opening, target="timestamp", why=f"{opening.why}: when it was opened")
    if text and "type" not in known and (kind is None or not any(classify(word, "ticket").sure for word in kind.words)):
        if kind is not None:
            del as_ticket[kind.column]
        as_ticket[text.column] = replace(text, target="type", why=f"{text.why}: its words are classified", words=())
    return as_ticket


def _no_guess(role: str, column: pa.ChunkedArray) -> tuple[float, str]:
    values, text = _numbers(column)
    if role != "samples":
        return 1.0, "not needed"
    if text and not len(values):
        return 1.0, f"text such as {text[0][:30]!r}, which no channel takes"
    return 0.0, f"values {_range(values)}, {_kind(values)}" if len(values) else "no values"


def _kind(values: npt.NDArray[np.float64]) -> str:
    """Describe the likely channel kind of values, which are in file order."""
    steps, distinct = np.diff(values), np.unique(values)
    integral = bool((values == np.floor(values)).all())
    if (steps > 0).sum() >= 3 and (steps < 0).sum() <= len(values) // 50:
        return "which rarely decrease: a counter?"
    if not integral or len(distinct) > _FEW_VALUES or len(values) < 3 * len(distinct):
        return "a gauge?"
    bits = distinct[distinct > 0].astype(np.int64) if distinct[0] >= 0 and distinct[-1] < 2**53 else np.empty(0, int)
    return "single bits: flags?" if len(bits) > 1 and not (bits & (bits - 1)).any() else "few of them: an enum?"


def _guesses(role: str, file: Path, name: str, column: pa.ChunkedArray, channels: Mapping[str, Channel]) -> list[Guess]:
    target, score = _key_of(name, role)
    values, text = _numbers(column)
    guesses = []
    if target:
        why = "by its name" + (f", values {_range(values)}" if len(values) else "")
        is_instant = target in INSTANTS
        if is_instant and (len(text) or (len(values) and values.max() < _MIN_INSTANT)) and not _are_dates(text):
            return []
        unit = inferred_unit(values) if is_instant else None
        unit = None if unit == "excel" else unit
        words = tuple(sorted({*as_text(column, len(column))} - {None})) if target in ("type", "detail") else ()
        if target == "detail" and not words:
            return []
        guesses.append(Guess(role, file, name, target, score, why, unit=unit, words=words))
    is_temporal = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    is_time = role in ("samples", "events") and target is None and not words_of(name) & {*COLUMN_NAMES["no_times"]}
    if is_time and (is_temporal or (text and _are_dates(text))):
        guesses.append(Guess(role, file, name, "timestamp", _SURE_SCORE, _BY_VALUE))
    if text and all(_UUID.fullmatch(word) for word in text):
        guesses.append(Guess(role, file, name, "gpu", 0.95, f"values are UUIDs such as {text[0]}"))
    if len(values) or not text:
        guesses += [guess for channel in channels.values() if (guess := _channel_guess(file, name, values, channel))]
    ranked = sorted(guesses, key=lambda guess: -guess.score)
    if len(ranked) > 1 and ranked[0].sure and ranked[0].score - ranked[1].score < 0.05:
        ranked[0] = replace(ranked[0], score=_SURE_SCORE - 0.01, why=f"{ranked[0].why}, or {ranked[1].target}")
    return ranked


def _key_of(name: str, role: str) -> tuple[str | None, float]:
    forms = words_of(name)
    scores = {
        target: max(
            1.0 - rank / 1e4 if words == known else difflib.SequenceMatcher(None, words, known).ratio() * 0.85
            for rank, known in enumerate(names)  # in order of preference: `resolved` before `closed`
            for words in forms
        )
        for target, names in COLUMN_NAMES["keys"][role].items()
    }
    target = max(scores, key=lambda key: scores[key])
    return (target, scores[target]) if scores[target] >= 0.7 else (None, 0.0)


def _channel_guess(file: Path, name: str, values: npt.NDArray[np.float64], channel: Channel) -> Guess | None:
    known = _FIELD.fullmatch(name.strip())
    score = 1.0 if known and channel.dcgm_id == int(known[1]) else _likeness(name, channel)
    if score < _LIKELY:
        return None
    units = words_for(channel.unit)
    words = [word.lower().replace("%", "pct") for word in re.findall(r"[A-Za-z]+|%", name)]
    rates = [f"{size}/{time}" for size, time in pairwise(["", *words])]  # gb_s
    unit = next((word for word in (*reversed(rates), *reversed(words)) if word in units), None)
    scale, offset = units[unit] if unit else (1.0, 0.0)
    why = "by its name" + (f", from {unit}" if (scale, offset) != (1.0, 0.0) else "")
    if len(values) and _share(values * scale + offset, channel) < _FITS:
        fitting = {
            u: factors for u, factors in units.items() if _share(values * factors[0] + factors[1], channel) >= _FITS
        }
        if unit or not fitting:
            score = min(score, _LIKELY) / 2
            why += f", but values {_range(values)} are no {channel.unit}"
        else:
            unit, (scale, offset) = next(iter(fitting.items()))
            score = min(score, _SURE_SCORE - 0.01)
            why += f"; values {_range(values)} look like {unit}"
    elif len(values):
        why += f", values {_range(values)}"
        if channel.unit == "%" and unit is None and values.max() <= 1 and bool((values % 1 > 0).any()):
            scale, score = 100.0, min(score, _SURE_SCORE - 0.01)
            why += ", which look like shares of 1"
    return Guess("samples", file, name, channel.name, score, why, scale, offset) if score > _LIKELY / 4 else None


def _likeness(name: str, channel: Channel) -> float:
    """Return the similarity (0 to 1) between a column name and the closest name of a channel."""
    words, best = _meaning(name, channel), 0.0
    for known in (channel.name, *channel.dcgm_names, *channel.amd):
        other = _meaning(known, channel)
        if words and other:
            same = len(words & other) / len(words | other)
            spelled = difflib.SequenceMatcher(None, " ".join(sorted(words)), " ".join(sorted(other))).ratio()
            best = max(best, same, spelled * 0.9 if spelled > 0.85 else 0.0)
    return best


def _meaning(name: str, channel: Channel) -> frozenset[str]:
    words = [_WORDS.get(word, word) for word in split_words(name)]
    units = words_for(channel.unit)
    ignored = COLUMN_NAMES["says_nothing"]
    telling = {word for word in words if word not in ignored and not (word in units and len(words) > 1)}
    return frozenset(telling or words)


def _numbers(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.float64], list[str]]:
    """Return the finite numbers in a column, and examples of text that is not a number."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return np.empty(0), []
    part = column.slice(0, 20_000)
    if pa.types.is_nested(part.type):
        return np.empty(0), [str(part.type)]
    numbers = read_numbers(part, ANY_UNIT)
    values = numbers.values[np.isfinite(numbers.values)]
    return values, [text for text in as_text(part.filter(pa.array(numbers.unreadable)).slice(0, 20), 20) if text]


def _share(values: npt.NDArray[np.float64], channel: Channel) -> float:
    low = -np.inf if channel.low is None else channel.low
    high = np.inf if channel.high is None else channel.high
    return float(((values >= low) & (values <= high)).mean())


def _range(values: npt.NDArray[np.float64]) -> str:
    return f"{values.min():g} to {values.max():g}" if len(values) else "none"


def _are_dates(texts: Sequence[str]) -> bool:
    try:
        parsed = parse_instants(pa.chunked_array([pa.array(texts, pa.string())]), TimeFormat(), "")
    except InputError:  # ambiguous day-month order: still dates
        return True
    are_read = (parsed.status == OK) | (parsed.status == NAIVE)
    return bool(2 * are_read.sum() > (parsed.status != MISSING).sum())
