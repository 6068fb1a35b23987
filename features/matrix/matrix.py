"""The feature matrix on disk: a folder with rows, feature values, and everything needed to label them.

::

    MATRIX/
      part-TIME.parquet    keys and float32 features of a span of decision times
      events.parquet       the dataset's events and inventory, so that labels as of any
      inventory.parquet    time need this folder alone
      sequences.npy        raw windows, if features.sequence is set
      built-from.json      fingerprint of its samples, so that a longer dataset can extend it
      matrix.json          columns, settings, provenance; written last
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from features.labels.incidents import counted, find_incidents
from features.labels.labelling import label_rows, unit_positions
from features.matrix.meta import ACTED_ON, EVENTS_NAME, INVENTORY_NAME, ROW_COLUMNS, MatrixConfig, MatrixMeta, read_meta
from features.matrix.parts import read_file
from features.matrix.sequences import Sequences, open_sequences
from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from foundation.files import recover_folder
from foundation.times import milliseconds
from telemetry.dataset.schema import Unit

_TILE = 4096


class FeatureMatrix:
    """A feature matrix on disk; see :func:`~features.matrix.building.build_matrix` and :meth:`open`."""

    def __init__(self, path: Path, meta: MatrixMeta) -> None:
        self.path = path
        self.meta = meta
        self._incidents: dict[datetime | None, pd.DataFrame] = {}

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a matrix; ``InputError`` if there is none or it is damaged."""
        path = Path(path)
        recover_folder(path)
        return cls(path, read_meta(path))

    @property
    def config(self) -> MatrixConfig:
        """Settings that the matrix was built with."""
        return self.meta.config

    @property
    def columns(self) -> list[FeatureColumn]:
        """Feature columns, in the order of :meth:`values`."""
        return list(self.config.columns)

    @property
    def digest(self) -> str:
        """SHA-256 of dataset content, settings and the code of this package."""
        return self.meta.digest

    @property
    def span(self) -> tuple[datetime, datetime]:
        """First and last instant in the dataset, aware UTC."""
        return self.config.span

    @property
    def step(self) -> timedelta:
        """Nominal sample interval of the dataset."""
        return self.config.step

    @property
    def unit(self) -> Unit:
        """Subject of a row: ``gpu`` or ``node``."""
        return self.config.unit

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Row keys, sorted by (decision_time, augmented, unit).

        Columns ``decision_time``, ``node``, ``gpu`` (null where the unit is the node), ``unit`` (names as sorted
        categories), ``augmented`` (True for training rows off the decision grid) and ``established_at`` (when the row
        was first known to exist: the decision time on the grid; a training set as of R uses only rows established by
        R). If ``labels.acts_on`` is ``unit``, also ``acted_on``, the unit.
        """
        parts = [read_file(self.path / part.file, columns=list(ROW_COLUMNS)) for part in self.meta.parts]
        # dictionaries differ between parts; as text, the names of a large fleet would take a gigabyte
        frame: pd.DataFrame = pa.concat_tables(parts).unify_dictionaries().to_pandas()
        del parts
        for name in ("node", "gpu", "unit"):
            named = frame[name].astype("category").cat
            frame[name] = named.reorder_categories(named.categories.sort_values())
        if self.config.labels.acts_on == "unit":
            frame[ACTED_ON] = frame["unit"]
        pa.default_memory_pool().release_unused()  # otherwise many freed pages stay with the C library
        return frame

    @cached_property
    def events(self) -> pd.DataFrame:
        """Events of the dataset."""
        events: pd.DataFrame = read_file(self.path / EVENTS_NAME).to_pandas()
        return events

    @cached_property
    def inventory(self) -> pd.DataFrame:
        """Inventory of the dataset."""
        inventory: pd.DataFrame = read_file(self.path / INVENTORY_NAME).to_pandas()
        return inventory

    def values(
        self, row_indices: npt.NDArray[np.integer] | Sequence[int] | None = None, columns: Sequence[str] | None = None
    ) -> npt.NDArray[np.float32]:
        """Read values (NaN: unknown), shape (rows, columns); files without a requested row are not read.

        ``row_indices``: positions in :attr:`rows`, in any order, repeats allowed; default: all.
        ``columns``: column names, in the requested order; default: all.
        Raises ``KeyError`` or ``IndexError`` if a column or row is not in the matrix.
        """
        known = [column.name for column in self.config.columns]
        names = known if columns is None else list(columns)
        for name in names:
            if name not in set(known):
                raise KeyError(f"the matrix has no column {name!r}")
        total = self.meta.counts["rows"]
        indices = None if row_indices is None else np.asarray(row_indices, dtype=np.int64)
        if indices is not None and indices.size and not (indices.min() >= 0 and indices.max() < total):
            raise IndexError(f"row indices must lie in 0 .. {total - 1}")
        order = None if indices is None else np.argsort(indices, kind="stable")
        sorted_wanted = None if indices is None or order is None else indices[order]
        out = np.empty((total if indices is None else indices.size, len(names)), dtype=np.float32)
        begin = 0
        for part in self.meta.parts:
            end = begin + part.rows
            if sorted_wanted is None or order is None:
                _read_part(self.path / part.file, names, None, out[begin:end])
            else:
                low, high = np.searchsorted(sorted_wanted, [begin, end])
                if high > low:
                    values = np.empty((int(high - low), len(names)), dtype=np.float32)
                    _read_part(self.path / part.file, names, sorted_wanted[low:high] - begin, values)
                    out[order[low:high]] = values
            begin = end
        return out

    @cached_property
    def sequences(self) -> Sequences | None:
        """Raw windows; None if the matrix was built without ``features.sequence``.

        Raises ``InputError`` if their file is missing or damaged.
        """
        if not self.config.features.sequence.channels:
            return None
        return open_sequences(self.path, self.config, self.inventory)

    @cached_property
    def _unit_positions(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.object_]]:
        return unit_positions(self.rows)

    @cached_property
    def _row_pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert self.sequences is not None
        rows = self.rows
        pair = self.sequences.pairs(rows["node"].tolist(), rows["unit"].tolist())
        return pair, milliseconds(rows["decision_time"], "decision_time")

    def windows(self, row_indices: npt.NDArray[np.integer] | Sequence[int] | None = None) -> npt.NDArray[np.float32]:
        """Read the raw windows of rows: oldest step first; shape (rows, steps, channels).

        Raises ``InputError`` if the matrix has none (``features.sequence`` was off) or they cannot be read.
        """
        if self.sequences is None:
            raise InputError(
                "the matrix has no raw windows",
                f"matrix {self.path}, parameter features.sequence.channels",
                "Set it to 'auto' and run the features stage again.",
            )
        pair, time = self._row_pairs
        chosen = slice(None) if row_indices is None else np.asarray(row_indices, dtype=np.int64)
        return self.sequences.windows(pair[chosen], time[chosen])

    def incidents(self, as_of: datetime | None = None) -> pd.DataFrame:
        """Find the incidents as known at ``as_of`` (None: with everything the dataset knows).

        Excludes those that started in planned maintenance, see :meth:`all_incidents`.
        """
        return counted(self.all_incidents(as_of))

    def all_incidents(self, as_of: datetime | None = None) -> pd.DataFrame:
        """Find the incidents, including those that started in planned maintenance."""
        if as_of not in self._incidents:
            self._incidents[as_of] = find_incidents(
                self.events, self.inventory, self.config.labels, as_of=as_of, data_end=self.span[1]
            )
        return self._incidents[as_of].copy()

    def labels(
        self,
        as_of: datetime | None = None,
        *,
        horizon: timedelta | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> pd.DataFrame:
        """Label the rows, aligned with them; see :func:`features.labels.labelling.label_rows`.

        ``as_of``: None: with everything the dataset knows.
        ``horizon``: overrides ``labels.horizon``.
        """
        position, names = self._unit_positions
        return label_rows(
            self.rows if rows is None else self.rows.iloc[rows],
            self.all_incidents(as_of),
            self.inventory,
            self.config.labels if horizon is None else self.config.labels.model_copy(update={"horizon": horizon}),
            data_end=self.span[1],
            as_of=as_of,
            events=self.events,
            units=(position if rows is None else position[rows], names),
        )


def _read_part(
    path: Path, names: Sequence[str], chosen: npt.NDArray[np.int64] | None, out: npt.NDArray[np.float32]
) -> None:
    distinct = list(dict.fromkeys(names))
    table = read_file(path, columns=distinct)
    arrays = {name: table.column(name).to_numpy() for name in distinct}
    for begin in range(0, out.shape[0], _TILE):
        end = min(begin + _TILE, out.shape[0])
        for j, name in enumerate(names):
            source = arrays[name]
            out[begin:end, j] = source[begin:end] if chosen is None else source[chosen[begin:end]]
