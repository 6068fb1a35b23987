"""Table reader for Parquet, CSV, JSON and printed tables, in batches that fit into memory."""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import check_regular
from telemetry.importing.batch import Batch
from telemetry.importing.columns import as_text, is_inventory, left_out_of_samples
from telemetry.importing.files.csv_tables import BATCH_ROWS, FileRows, distinct, read_csv, read_header
from telemetry.importing.files.dmon import dmon_columns, is_dmon, read_dmon
from telemetry.importing.files.json_tables import json_columns, read_json
from telemetry.importing.files.printed import fixed_columns, read_fixed
from telemetry.importing.files.series import is_series_export
from telemetry.importing.files.sources import kind_of
from telemetry.importing.mapping import LongFormat
from telemetry.importing.quarantine import BY_MAPPING, Quarantine
from telemetry.packing import read_errors
from telemetry.values.dates import DateOrder
from telemetry.values.names import spellings
from telemetry.values.numbers import Decimal, clock_reason, is_unit, read_numbers, split_header

OTHER_METRIC: Final = "a metric that is no channel"

_CLOCK_REASON: Final = re.compile(r"clocks_(?:event|throttle)_reasons[._](?!active|supported)\w+")
_CLOCK_REASONS: Final = "clocks_event_reasons"
_LINK: Final = re.compile(r"(DCGM_FI_DEV_NVLINK_\w+)_L\d+")

_UNIT_COLUMNS: Final = ("unit", "units")  # of a long table
_PAIR: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_.]*)\s*=~?\s*"?((?:[^",}\\]|\\.)*)"?')


def long_columns(batches: Iterable[FileRows], long: LongFormat, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the columns of a long table pivoted to wide: keys, labels and wanted metrics."""
    names: dict[str, None] = {}
    for batch in batches:
        keys, metrics, _ = _keys(batch.table, long)
        names |= dict.fromkeys(keys.columns)
        names |= dict.fromkeys(metric for metric in pd.unique(metrics) if metric is not None and is_wanted(metric))
    return list(names)


def widen(
    batches: Iterable[FileRows], long: LongFormat, accepts: Callable[[str], bool], left_out: Callable[[str, int], None]
) -> Iterator[FileRows]:
    """Pivot long to wide: a row has all metrics with the same keys within a batch.

    ``left_out``: called with each unwanted metric and its number of rows.
    A metric that occurs twice with the same keys yields two rows, compared when merging.
    """
    for batch in batches:
        keys, metrics, disagreeing = _keys(batch.table, long)
        codes, names = pd.factorize(metrics)
        counts = np.bincount(codes[codes >= 0], minlength=len(names))
        is_wanted = np.array([accepts(str(name)) for name in names], bool)
        for name, number in zip(names[~is_wanted], counts[~is_wanted].tolist(), strict=True):
            left_out(str(name), number)
        if (codes < 0).any():
            left_out("", int((codes < 0).sum()))
        chosen = np.flatnonzero(np.append(is_wanted, False)[codes])
        if not len(chosen):
            continue
        keys, codes = keys.iloc[chosen].reset_index(drop=True), codes[chosen]
        group = keys.groupby(list(keys.columns), sort=False, dropna=False).ngroup()
        repeat = pd.Series(codes).groupby([group, pd.Series(codes)]).cumcount()
        row = pd.DataFrame({"thing": group, "turn": repeat}).groupby(["thing", "turn"], sort=False).ngroup().to_numpy()
        first = np.unique(row, return_index=True)[1]
        values = as_text(batch.table.column(long.value), batch.table.num_rows)[chosen]
        for unit in (name for name in keys.columns if name.lower() in _UNIT_COLUMNS):
            known = np.array([word is not None and is_unit(word) for word in keys[unit]], bool)
            is_value = known & (values != None)  # noqa: E711
            values[is_value] = values[is_value] + " " + keys[unit].to_numpy()[is_value]
        columns = {name: pa.array(keys[name].to_numpy()[first], pa.string()) for name in keys.columns}
        for code in np.unique(codes).tolist():
            wide = np.full(len(first), None, dtype=object)
            wide[row[codes == code]] = values[codes == code]
            columns[str(names[code])] = pa.array(wide, pa.string())
        yield FileRows(batch.numbers[chosen][first], pa.table(columns), batch.disagreeing | disagreeing)


def _keys(table: pa.Table, long: LongFormat) -> tuple[pd.DataFrame, np.ndarray, dict[str, str]]:
    """Return key columns (with labels), the metric of each row, and differing columns as in :func:`distinct`."""
    length = table.num_rows
    names = [name for name in table.column_names if name not in {long.metric, long.value, long.labels}]
    keys = [as_text(table.column(name), length) for name in names]
    if long.labels is not None:
        codes, texts = pd.factorize(as_text(table.column(long.labels), length))
        labels = pd.DataFrame([_labels(text) for text in texts] + [{}]).iloc[codes]
        names.extend(labels.columns)
        keys += [labels[name].to_numpy(object) for name in labels.columns]
    content, disagreeing = distinct(names, [pa.array(column, pa.string(), from_pandas=True) for column in keys])
    frame = content.to_pandas().astype(object)
    return frame.where(frame.notna(), None), as_text(table.column(long.metric), length), disagreeing


def _labels(text: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
            return {str(name): str(value) for name, value in content.items()}
        except (ValueError, RecursionError, AttributeError):
            pass
    return dict(_PAIR.findall(text))


def _combined(names: list[str]) -> dict[str, dict[str, int]]:
    """Return the columns to add, and for each the columns that it combines with their bit (0: values are summed).

    The bit mask of nvidia-smi's clock event reasons, and the totals of NVLink links, unless the table has them.
    """
    combined: dict[str, dict[str, int]] = {}
    lowered = {name.lower() for name in names}
    for name in names:
        if (link := _LINK.fullmatch(name)) is not None and f"{link[1]}_TOTAL".lower() not in lowered:
            combined.setdefault(f"{link[1]}_TOTAL", {})[name] = 0
    has_mask = any(re.fullmatch(r"clocks_(?:event|throttle)_reasons(?:[._]active)?", name) for name in names)
    reasons = {name: bit for name in names if _CLOCK_REASON.fullmatch(name) and (bit := clock_reason(name))}
    return combined if has_mask or not reasons else combined | {_CLOCK_REASONS: reasons}


def link_columns(total: str, names: Iterable[str]) -> list[str]:
    """Return the columns of single NVLinks whose sum is ``total``."""
    return [name for name in names if (link := _LINK.fullmatch(name)) is not None and f"{link[1]}_TOTAL" == total]


def _with_combined(batches: Iterable[FileRows]) -> Iterator[FileRows]:
    """Add the combined columns; missing and unsupported parts are 0."""
    for rows in batches:
        table = rows.table
        for target, parts in _combined(table.column_names).items():
            total, is_known = np.zeros(table.num_rows), np.zeros(table.num_rows, np.bool_)
            unreadable: list[tuple[pa.Array, pa.ChunkedArray]] = []
            for name, bit in parts.items():
                numbers = read_numbers(table.column(name), "bool" if bit else "errors")
                values = np.nan_to_num(numbers.values)
                total += bit * (values > 0) if bit else values
                is_known |= ~np.isnan(numbers.values)
                if numbers.unreadable.any():
                    unreadable.append((pa.array(numbers.unreadable), table.column(name).cast(pa.string())))
            if not is_known.any() and not unreadable:
                continue
            texts = pa.chunked_array([pa.array(total, mask=~is_known).cast(pa.string())])
            for is_wrong, column in unreadable:
                texts = pc.if_else(is_wrong, column, texts)
            table = table.append_column(target, texts)
        yield rows._replace(table=table)


def count_unused(batch: Batch, channel_names: Container[str]) -> None:
    """Count the values of columns that are not read: a user may know better."""
    read = {*batch.columns.values()}
    # The table has the combined columns already.
    combined = _combined([name for name in batch.table.column_names if name not in read])
    read |= {name for parts in combined.values() for name in parts}
    for name in batch.table.column_names:
        number = len(batch.table) - batch.table.column(name).null_count
        is_unit_of_value = batch.mapping.long is not None and name.lower() in _UNIT_COLUMNS
        if name in read or is_inventory(name) or is_unit_of_value or not number:
            continue
        reason = "known, and not used" if left_out_of_samples(name) else BY_MAPPING
        if any(form in channel_names for form in spellings(split_header(name)[0])):
            reason = "another column has the channel"
        batch.quarantine.read("sample values", number)
        batch.quarantine.left_out("sample values", f"column {name!r}: {reason}", number)


def read_batches(
    path: Path,
    table: str,
    quarantine: Quarantine,
    long: LongFormat | None = None,
    is_wanted: Callable[[str], bool] = lambda _name: True,
) -> Iterator[Batch]:
    """Read a source file in batches that fit into memory.

    ``path``: ``.parquet``, ``.csv``, ``.tsv``, ``.json`` (a list of objects), ``.jsonl``, a fixed-width table with a
    line of dashes, or for samples dmon output; text may be compressed (``.csv.gz``). Nested JSON objects become
    columns named ``outer.inner``.
    ``long``: set for a table in long format; ``is_wanted`` selects the metrics that become columns.
    Raises ``InputError`` if the format is unknown or the file is damaged or cannot be decoded.
    """
    kind = table_kind(path, table)
    known_orders: dict[str, DateOrder] = {}

    def leave_out(metric: str, number: int) -> None:
        quarantine.read_rows(table, path, number)
        quarantine.leave_out(table, path, OTHER_METRIC, number, metric)

    with read_errors(path):
        decimal, batches = _rows_of(path, kind, table, quarantine)
        if table == "samples":
            batches = _with_combined(batches)
        if long is not None:
            batches = widen(batches, long, is_wanted, leave_out)
        for rows, content, disagreeing in batches:
            quarantine.read_rows(table, path, len(rows))
            batch = Batch(
                path, table, rows, content, quarantine, decimal=decimal, disagreeing=disagreeing, orders=known_orders
            )
            if kind == "parquet":  # text formats are checked during parsing
                batch.refuse_unstorable()
            yield batch


def column_names(
    path: Path,
    table: str = "samples",
    long: LongFormat | None = None,
    is_wanted: Callable[[str], bool] = lambda _name: True,
) -> list[str]:
    """Return the columns of a file; JSON and long tables are read completely."""
    kind = table_kind(path, table)
    with read_errors(path):
        if long is not None:
            for name in (long.metric, long.value):
                if name not in (names := column_names(path, table)):
                    problem = f"the mapping names a missing column {name!r}"
                    raise InputError(problem, f"{path}, mapping, long", f"The columns are {names}.")
            return long_columns(_rows_of(path, kind, table, Quarantine())[1], long, is_wanted)
        names = _names_of(path, kind, table)
        return [*names, *_combined(names)] if table == "samples" else names


def _names_of(path: Path, kind: str, table: str) -> list[str]:
    if kind == "parquet":
        return list(dict.fromkeys(map(str.strip, pq.read_schema(path).names)))
    if kind == "dmon":
        return dmon_columns(path)
    if (fixed := fixed_columns(path)) is not None and kind == "fixed":
        return list(dict.fromkeys(fixed.names))
    return read_header(path).columns if kind == "csv" else json_columns(path, table)


def table_kind(path: Path, table: str) -> str:
    """Return ``parquet``, ``csv``, ``json``, ``dmon`` or ``fixed``; raise ``InputError`` for another format."""
    kind = kind_of(path)
    if table != "events" and path.suffix.lower() in (".txt", ".log", ".xml"):  # for events these are kernel logs
        kind = "csv"
    if path.exists():
        check_regular(path)
        with read_errors(path):
            if kind in ("csv", "other") and table == "samples" and is_dmon(path):
                return "dmon"
            if kind in ("csv", "other") and fixed_columns(path) is not None:
                return "fixed"
            if kind in ("csv", "json") and table == "samples" and is_series_export(path):
                raise InputError(
                    "this is an export of time series, which name GPUs and nodes by labels",
                    str(path),
                    f"Run `predrain collect openmetrics {path.name} --dataset DIR`, then `predrain collect compact`.",
                )
    if kind == "other":
        problem = f"{path.suffix or path.name!r} files cannot be read as {table}"
        raise InputError(problem, str(path), "Give Parquet, CSV, TSV or JSON.")
    return kind


def _rows_of(path: Path, kind: str, table: str, quarantine: Quarantine) -> tuple[Decimal, Iterator[FileRows]]:
    """Return the decimal separator that a file implies, and its rows."""
    if kind == "csv":
        header = read_header(path)
        return "," if header.separator == ";" else ".", read_csv(path, header, table, quarantine)
    if kind == "parquet":
        return ".", _read_parquet(path)
    return ".", {"dmon": read_dmon, "fixed": read_fixed, "json": read_json}[kind](path, table, quarantine)


def _read_parquet(path: Path) -> Iterator[FileRows]:
    first = 1
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            table, disagreeing = distinct(batch.schema.names, batch.columns)
            for place, name in enumerate(table.column_names):
                if pa.types.is_string_view(table.schema.types[place]):  # few Arrow kernels support string views
                    table = table.set_column(place, name, table.column(place).cast(pa.string()))
            yield FileRows(np.arange(first, first + batch.num_rows), table, disagreeing)
            first += batch.num_rows
        if file.metadata.num_rows == 0:
            empty = file.schema_arrow.empty_table()
            yield FileRows(np.empty(0, np.int64), *distinct(empty.column_names, empty.columns))
