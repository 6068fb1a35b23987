"""Rows that cannot be used: kept with the reason, where they came from and what they said."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.atomic import disk_errors

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


class Quarantine:
    """Collects unusable rows into one Parquet file of the dataset being built.

    ``folder``: the dataset's ``quarantine`` folder, made with the first row; None keeps the counts only.
    ``name``: name of the file in it, new for each import, so that earlier imports' rows stay.
    """

    def __init__(self, folder: Path | None, name: str = "rows.parquet") -> None:
        self._path = None if folder is None else folder / name
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[tuple[str, str, str, int | None, str | None, str]] = []
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, reason: str, table: str, file: str, row: int | None, content: str, detail: str | None = None) -> None:
        """Set one row aside.

        ``file``: name of the source file, without its folder.
        ``row``: row of the source, from 1, the header not counted.
        ``content``: the row.
        """
        self.counts[reason] += 1
        self.examples.setdefault(reason, f"{file}, row {row}: {detail or content}"[:300])
        self._rows.append((reason, table, file, row, detail, content))
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()

    def add_rows(
        self,
        reason: str,
        table: str,
        file: str,
        chosen: npt.NDArray[np.bool_],
        rows: npt.NDArray[np.int64],
        content: pa.Table,
        details: Sequence[Any] | None = None,
    ) -> None:
        """Set the chosen rows of a source's batch aside.

        ``reason``, ``table``, ``file``: as in :meth:`add`.
        ``chosen``: shape (n_rows,).
        ``rows``: row numbers of the batch; shape (n_rows,).
        ``details``: one offending value for each chosen row.
        """
        indices = np.flatnonzero(chosen)
        for start in range(0, len(indices), _FLUSH_ROWS):
            part = indices[start : start + _FLUSH_ROWS]
            records = content.take(pa.array(part)).to_pylist()
            for number, (index, record) in enumerate(zip(part, records, strict=True)):
                detail = None if details is None else str(details[start + number])
                self.add(reason, table, file, int(rows[index]), row_text(record), detail)

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        if self._writer is not None and self._path is not None:
            with disk_errors(self._path):
                self._writer.close()
            self._writer = None

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._writer is not None:
            # The whole folder is about to be discarded; a full disk must not hide the first error.
            try:
                self._writer.close()
            except OSError:
                self._writer = None

    def _flush(self) -> None:
        if not self._rows or self._path is None:
            self._rows = []
            return
        columns = [
            pa.array(values, field.type)
            for values, field in zip(zip(*self._rows, strict=True), QUARANTINE, strict=True)
        ]
        with disk_errors(self._path):
            if self._writer is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = pq.ParquetWriter(self._path, QUARANTINE, compression="zstd")
            self._writer.write_table(pa.Table.from_arrays(columns, schema=QUARANTINE))
        self._rows = []


def row_text(record: Mapping[str, Any]) -> str:
    """Write a row as one line of JSON; values that JSON does not know are written as text."""
    return json.dumps(record, ensure_ascii=False, default=str)
