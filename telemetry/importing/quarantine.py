"""Rows that cannot be used: kept with the reason, their source and their content."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import disk_errors

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
"""quarantine/*.parquet: ``row`` counts from 1 without the header, ``content`` is the row as JSON or as read."""

_FLUSH_ROWS = 50_000
_EXAMPLES = 3

FEWEST_LOST: Final = 10
"""A loss of fewer rows or values than this stops no import, whatever its share."""


@dataclass(slots=True)
class _Loss:
    """Of the rows of a file, or the values of a channel: how many there are, and why some are lost."""

    present: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        lost = self.reasons.total()
        return lost / max(self.present, lost, 1)

    def __str__(self) -> str:
        return (
            f"{self.reasons.total():,} of {self.present:,} lost ({self.share:.0%}), most for "
            f"{self.reasons.most_common(1)[0][0]!r}, such as {'; '.join(self.examples)}"
        )


def rows_of(file: Path) -> str:
    """Name a file's rows, to count them."""
    return f"file {file}, rows"


class Quarantine:
    """Collects unusable rows into one Parquet file of the dataset being built, and counts what an import loses.

    ``folder``: the dataset's ``quarantine`` folder, made with the first row; None keeps the counts only.
    ``max_loss``: share of a file's rows, or of a channel's values, that may be lost; None: any.
    """

    def __init__(self, folder: Path | None, max_loss: float | None = None) -> None:
        self._path = None if folder is None else folder / _new_name(folder)
        self._max_loss = max_loss
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[tuple[str, str, str, int | None, str | None, str]] = []
        self._losses: defaultdict[tuple[str, str], _Loss] = defaultdict(_Loss)
        self.counts: Counter[str] = Counter()
        self.left_out = 0
        self.examples: dict[str, str] = {}

    def count_present(self, table: str, what: str, number: int) -> None:
        """Count the rows of a file, or the values of a channel, usable or not."""
        self._losses[table, what].present += number

    def count_left_out(self, table: str, file: Path, number: int) -> None:
        """Count rows that the mapping leaves out: they are none of the file's, so that they dilute no loss."""
        self.left_out += number
        self.count_present(table, rows_of(file), -number)

    def count_lost(self, table: str, what: str, reason: str, number: int, example: str) -> None:
        """Count rows or values that are lost."""
        if number:
            loss = self._losses[table, what]
            loss.reasons[reason] += number
            loss.examples += [example] if len(loss.examples) < _EXAMPLES else []

    def check_loss(self, table: str) -> None:
        """Stop an import that loses more than it may.

        Raises ``InputError`` if of a file's rows, or of a channel's values, more than ``max_loss`` and at least
        :data:`FEWEST_LOST` are lost; the message names all such files and channels.
        """
        if self._max_loss is None:
            return
        over = [
            f"{what}: {loss}"
            for (of_table, what), loss in self._losses.items()
            if of_table == table and loss.reasons.total() >= FEWEST_LOST and loss.share > self._max_loss
        ]
        if over:
            raise InputError(
                f"too much of the {table} would be lost: " + " | ".join(over),
                table,
                "Correct the files or the mapping (`scale:`, where a column is in another unit), or allow a loss of "
                f"more than {self._max_loss:.0%} with `predrain import --max-loss`.",
            )

    def add(
        self,
        reason: str,
        table: str,
        file: Path,
        row: int | None,
        content: str,
        detail: str | None = None,
        lost_rows: int = 1,
    ) -> None:
        """Set one row aside.

        ``row``: row of the source, from 1, the header not counted.
        ``content``: the row.
        ``lost_rows``: rows that are lost with it: 0 where only a value is, more where it has swallowed others.
        """
        self.counts[reason] += 1
        self.count_lost(table, rows_of(file), reason, lost_rows, f"row {row}: {detail or content}"[:120])
        self.examples.setdefault(reason, f"{file.name}, row {row}: {detail or content}"[:300])
        self._rows.append((reason, table, file.name, row, detail, content))
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()

    def add_frame(self, reason: str, table: str, file: Path, frame: pd.DataFrame, lost_rows: int = 1) -> None:
        """Set aside the rows of a frame; their place in the file is not known any more."""
        for record in frame.to_dict("records"):
            content = {str(name): value for name, value in record.items() if not pd.isna(value)}
            self.add(reason, table, file, None, row_text(content), lost_rows=lost_rows)

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        if self._writer is not None and self._path is not None:
            # After an error the folder is discarded; a full disk must not hide that error.
            with disk_errors(self._path) if error is None else suppress(OSError):
                self._writer.close()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows or self._path is None:
            return
        with disk_errors(self._path):
            if self._writer is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = pq.ParquetWriter(self._path, QUARANTINE, compression="zstd")
            columns = [list(values) for values in zip(*rows, strict=True)]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=QUARANTINE))


def row_text(record: Mapping[str, Any]) -> str:
    """Write a row as one line of JSON; values that JSON does not know are written as text."""
    return json.dumps(record, ensure_ascii=False, default=str)


def _new_name(folder: Path) -> str:
    """Return a name that is free, so that the rows of earlier imports stay; some of them may have been removed."""
    number = len(list(folder.glob("*.parquet"))) + 1
    while (folder / f"import-{number:04d}.parquet").exists():
        number += 1
    return f"import-{number:04d}.parquet"
