"""Unusable rows and values: counted by reason, kept with their content, and checked against the loss budget.

A :class:`Quarantine` is also the accounting of a run: quarantined rows count as left out for the same reason.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import disk_errors
from telemetry.accounting import EXAMPLE_LENGTH, Accounting

QUARANTINE: Final = pa.schema(
    [
        pa.field("reason", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64()),
        pa.field("detail", pa.string()),
        pa.field("content", pa.string(), nullable=False),
    ]
)
"""quarantine/*.parquet: ``row`` counts from 1 after the header, ``content`` is the row as JSON or as read."""

BY_MAPPING: Final = "left out by the mapping"
"""Reason for rows dropped deliberately by the mapping; they do not count as lost."""

VALUES: Final = " values"
"""Suffix of the tables that count values instead of rows (``sample values``)."""

_FLUSH_ROWS = 50_000
_EXAMPLES = 3
_MAX_CONTENT = 1 << 16

MIN_LOST: Final = 10
"""Losing fewer rows or values than this never exceeds the budget, unless they are most of a file's rows."""

_NAMES: Final = (
    "Name nodes and GPUs as the inventory does, add the missing ones to it, or import without --inventory where "
    "samples name node and GPU."
)
_PERIOD: Final = "Correct installed_at and removed_at of these units in the inventory."
_INSTANTS: Final = (
    'State the format in the mapping: `time: {format: "%d.%m.%Y %H:%M:%S", timezone: UTC}` in the section of the table.'
)
_VALUES: Final = "Correct the mapping of the column (`scale:`, `values:`), or map it to null."
NUMBER_AS_TYPE: Final = "event type is a number"
_ADVICE: Final[Mapping[str, str]] = {
    "unknown node": _NAMES,
    "unknown gpu": _NAMES,
    "missing node and gpu": "Map the columns that name node and GPU.",
    "missing node": "Map the column that names the node.",
    "missing gpu": "Map the column that names the GPU.",
    "before installation": _PERIOD,
    "after removal": _PERIOD,
    "on another node than the inventory says": "Correct the inventory: the rows contradict it.",
    "unreadable timestamp": _INSTANTS,
    "missing timestamp": "Map the column of the instants.",
    "ambiguous local time": "Export the instants in UTC or with their offset.",
    "local time that the clock change skips": "Correct the time zone, or export the instants with their offset.",
    "timestamp out of range": "Give instants between 1990 and 2099; numbers of another unit need `time: {unit: ms}`.",
    "an impossible clock": "Correct the clock or the time zone: these instants are in the future.",
    NUMBER_AS_TYPE: "Map the numbers to event types: `values: {type: {1: failure, 0: null}}`; null drops a row.",
    "xid event without a code": "Map the column of the XID numbers to `code`.",
    "not a number": _VALUES,
    "not an integer": _VALUES,
    "value out of range": _VALUES,
    "malformed row": "Correct the file: these rows do not have the fields of its header.",
    "lines inside one value": "Correct the file: a quote is not closed.",
    "conflicting duplicate sample": "Remove one of the sources: they give different values for one unit and time.",
    "stale: a counter went back to an earlier value": "Read each GPU from one exporter: another is frozen or lags.",
}


def advice(reason: str) -> str:
    """Return what to do about rows left out for a reason."""
    for known in (reason, *(name for name in _ADVICE if reason.startswith(f"{name} in "))):
        if known in _ADVICE:
            return _ADVICE[known]
    return "Correct the file or the mapping."


@dataclass(slots=True)
class _Loss:
    """Losses among a file's rows or a column's values; ``present``: how many should have been usable."""

    present: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return self.reasons.total()

    @property
    def share(self) -> float:
        return self.lost / max(self.present, self.lost, 1)

    def __str__(self) -> str:
        return (
            f"{self.lost:,} of {self.present:,} lost ({self.share:.0%}), most for "
            f"{self.reasons.most_common(1)[0][0]!r}, such as {'; '.join(self.examples)}"
        )


def _rows_of(file: Path) -> str:
    return f"file {file}, rows"


class Quarantine(Accounting):
    """Accounts for rows, and collects unusable ones into a Parquet file of the dataset being built.

    ``max_loss``: maximum share of a file's rows, or of a column's values, that may be lost; None: no limit.
    ``counts``: quarantined rows and values by reason.
    """

    def __init__(self, max_loss: float | None = None) -> None:
        super().__init__()
        self._path: Path | None = None
        self.max_loss = max_loss
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[tuple[object, ...]] = []  # as in QUARANTINE
        self._losses: defaultdict[tuple[str, str], _Loss] = defaultdict(_Loss)
        self.counts: Counter[str] = Counter()

    def read_rows(self, table: str, file: Path, number: int) -> None:
        """Count rows read from a file, usable or not."""
        self.read(table, number)
        self._losses[table, _rows_of(file)].present += number

    def leave_out(
        self, table: str, file: Path, reason: str, number: int, example: object = None, *, lost: bool = False
    ) -> None:
        """Count rows left out without keeping them; unless ``lost``, they do not count towards the loss budget."""
        self.left_out(table, reason, number, example)
        if lost:
            self._lose(table, _rows_of(file), reason, number, str(example))
        else:
            self._losses[table, _rows_of(file)].present -= number

    def values(self, table: str, column: str, usable: int, problems: Mapping[str, tuple[int, str]]) -> None:
        """Count the values of a column; ``problems``: number of unusable values and an example, by reason."""
        name, scope = table.removesuffix("s") + VALUES, f"column {column}, values"
        self.used(name, usable)
        self.read(name, usable + sum(number for number, _ in problems.values()))
        self._losses[table, scope].present += usable + sum(number for number, _ in problems.values())
        for reason, (number, example) in problems.items():
            self.left_out(name, reason, number, example)
            self._lose(table, scope, reason, number, example)

    def _lose(self, table: str, scope: str, reason: str, number: int, example: str) -> None:
        if number:
            loss = self._losses[table, scope]
            loss.reasons[reason] += number
            loss.examples += [example] if len(loss.examples) < _EXAMPLES else []

    def example(self, reason: str) -> str:
        """Return an example of a row or value left out for a reason; empty if there is none."""
        return next((account.examples[reason] for account in self.tables.values() if reason in account.examples), "")

    def check_loss(self, table: str) -> None:
        """Stop an import that exceeds the loss budget.

        Raises ``InputError`` if more than ``max_loss`` of a file's rows or a column's values are lost, and they are at
        least :data:`MIN_LOST` or most of the file's rows; the message names all such files and columns.
        """
        if self.max_loss is None:
            return
        excessive = {
            scope: loss
            for (of_table, scope), loss in self._losses.items()
            if of_table == table
            and loss.share > self.max_loss
            and (loss.lost >= MIN_LOST or (loss.lost > 1 and scope.endswith("rows") and 2 * loss.lost > loss.present))
        }
        if excessive:
            reasons = dict.fromkeys(loss.reasons.most_common(1)[0][0] for loss in excessive.values())
            lost = " | ".join(f"{scope}: {loss}" for scope, loss in excessive.items())
            hints = " ".join(dict.fromkeys(advice(reason) for reason in reasons))
            raise InputError(
                f"too much of the {table} would be lost: {lost}",
                table,
                f"{hints} To accept a loss of more than {self.max_loss:.0%}: `--max-loss`.",
            )

    def set_aside(
        self,
        reason: str,
        table: str,
        file: Path,
        row: int | None,
        content: str,
        detail: str | None = None,
        *,
        rows: int = 1,
        lost: bool = True,
    ) -> None:
        """Quarantine a row.

        ``row``: row number in the source, from 1 after the header.
        ``rows``: number of rows left out: 0 if only a value is, more than 1 if the row has swallowed others.
        ``lost``: whether they count towards the loss budget.
        """
        place = file.name if row is None else f"{file.name}, row {row}"
        example = f"{place}: {detail or content}"[:EXAMPLE_LENGTH]
        self.counts[reason] += 1
        if table in self.tables:
            self.tables[table].examples.setdefault(reason, example)
        if rows and lost:
            self.left_out(table, reason, rows, example)
            self._lose(table, _rows_of(file), reason, rows, f"row {row}: {detail or content}"[:120])
        elif rows:
            self.leave_out(table, file, reason, rows, example)
        self._rows.append(tuple(map(_storable, (reason, table, file.name, row, detail, content))))
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()

    def set_aside_frame(
        self, reason: str, table: str, file: Path, frame: pd.DataFrame, *, rows: int = 1, lost: bool = True
    ) -> None:
        """Quarantine the rows of a frame; their row numbers are no longer known."""
        for record in frame.to_dict("records"):
            content = {str(name): value for name, value in record.items() if not pd.isna(value)}
            self.set_aside(reason, table, file, None, row_text(content), rows=rows, lost=lost)

    @contextmanager
    def stored_in(self, folder: Path) -> Iterator[None]:
        """Write rows, including those already quarantined, to a folder that is created with the first of them."""
        self._path = folder / _new_name(folder)
        try:
            yield
        except BaseException:
            # The folder is discarded; a full disk must not mask the original error.
            with suppress(OSError):
                self._close()
            raise
        with disk_errors(self._path):
            self._flush()
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        if not self._rows or self._path is None:
            return
        rows, self._rows = self._rows, []
        with disk_errors(self._path):
            if self._writer is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = pq.ParquetWriter(self._path, QUARANTINE, compression="zstd")
            columns = [list(values) for values in zip(*rows, strict=True)]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=QUARANTINE))


def _storable(value: object) -> object:
    """Make text storable in Arrow: without lone surrogates, and truncated."""
    return value.encode("utf-8", "replace").decode()[:_MAX_CONTENT] if isinstance(value, str) else value


def row_text(record: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON; values that JSON cannot represent become text."""
    return json.dumps(record, ensure_ascii=False, default=str)


def _new_name(folder: Path) -> str:
    """Return an unused file name: earlier imports' files are kept, and some of them may have been deleted."""
    number = len(list(folder.glob("*.parquet"))) + 1
    while (folder / f"import-{number:04d}.parquet").exists():
        number += 1
    return f"import-{number:04d}.parquet"
