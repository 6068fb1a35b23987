"""Tables with a row for each value (time, metric, value, labels …), as databases of metrics export them, made wide."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from telemetry.importing.columns import as_text
from telemetry.importing.files.rows import FileRows
from telemetry.importing.mapping import LongFormat

OTHER_METRIC: Final = "a metric that is no channel"

_PAIR: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_.]*)\s*=~?\s*"?((?:[^",}\\]|\\.)*)"?')


def long_columns(batches: Iterable[FileRows], long: LongFormat, wanted: Callable[[str], bool]) -> list[str]:
    """Return the columns that a long table has once it is wide: its other columns, its labels, its wanted metrics."""
    names: dict[str, None] = {}
    for batch in batches:
        keys, metrics = _keys(batch.table, long)
        names |= dict.fromkeys(keys.columns)
        names |= dict.fromkeys(metric for metric in pd.unique(metrics) if metric is not None and wanted(metric))
    return list(names)


def widen(
    batches: Iterable[FileRows], long: LongFormat, wanted: Callable[[str], bool], left_out: Callable[[str, int], None]
) -> Iterator[FileRows]:
    """Yield rows of all metrics that a thing has at one time in a batch.

    ``left_out``: told each metric that is not wanted, with its rows.
    A metric that a thing has twice at one time gets two rows, which merging compares.
    """
    for batch in batches:
        keys, metrics = _keys(batch.table, long)
        codes, names = pd.factorize(metrics)
        counts = np.bincount(codes[codes >= 0], minlength=len(names))
        is_wanted = np.array([wanted(str(name)) for name in names], bool)
        for name, number in zip(names[~is_wanted], counts[~is_wanted].tolist(), strict=True):
            left_out(str(name), number)
        if (codes < 0).any():
            left_out("", int((codes < 0).sum()))
        chosen = np.flatnonzero(np.append(is_wanted, False)[codes])
        if not len(chosen):
            continue
        keys, codes = keys.iloc[chosen].reset_index(drop=True), codes[chosen]
        thing = keys.groupby(list(keys.columns), sort=False, dropna=False).ngroup()
        turn = pd.Series(codes).groupby([thing, pd.Series(codes)]).cumcount()
        row = pd.DataFrame({"thing": thing, "turn": turn}).groupby(["thing", "turn"], sort=False).ngroup().to_numpy()
        first = np.unique(row, return_index=True)[1]
        values = as_text(batch.table.column(long.value), batch.table.num_rows)[chosen]
        columns = {name: pa.array(keys[name].to_numpy()[first], pa.string()) for name in keys.columns}
        for code in np.unique(codes).tolist():
            wide = np.full(len(first), None, dtype=object)
            wide[row[codes == code]] = values[codes == code]
            columns[str(names[code])] = pa.array(wide, pa.string())
        yield FileRows(batch.numbers[chosen][first], pa.table(columns), batch.disagreeing)


def _keys(table: pa.Table, long: LongFormat) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the columns that tell things apart, with the labels as columns, and the metric of each row."""
    length = table.num_rows
    used = {long.metric, long.value, long.labels}
    keys = {name: as_text(table.column(name), length) for name in table.column_names if name not in used}
    frame = pd.DataFrame(keys, index=range(length), dtype=object)
    if long.labels is not None:
        codes, texts = pd.factorize(as_text(table.column(long.labels), length))
        labels = pd.DataFrame([_labels(text) for text in texts] + [{}]).iloc[codes].reset_index(drop=True)
        for name in labels.columns:
            frame[name] = labels[name].astype(object).where(labels[name].notna(), None)
    return frame, as_text(table.column(long.metric), length)


def _labels(text: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
            return {str(name): str(value) for name, value in content.items()}
        except (ValueError, RecursionError, AttributeError):
            pass
    return dict(_PAIR.findall(text))
