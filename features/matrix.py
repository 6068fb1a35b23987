"""The feature matrix as an artefact: a folder that holds rows, values, and all that its labels need.

::

    MATRIX/
      part-TIME.parquet    keys and float32 features of a stretch of decision times
      events.parquet       the dataset's events and inventory, so that labels as of any time can be
      inventory.parquet    told from this folder alone
      sequences.npy, .json raw windows, where features.sequence asks for them
      built-from.json      what its samples were, so that a longer dataset extends it
      matrix.json          columns, settings, provenance; written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from features.config import DecisionSection, FeatureSection, LabelSection
from features.errors import InputError
from features.incidents import find_incidents
from features.labels import label_rows, unit_positions
from features.sequences import Sequences, open_sequences
from features.service import UnitKind, milliseconds
from features.vocabulary import FeatureColumn
from telemetry.atomic import recover_folder
from telemetry.channel import Channel, channel_as_dict, channel_from_dict

MATRIX_SCHEMA_VERSION = 2
"""Version of the folder's layout."""

META_NAME = "matrix.json"
"""Name of the file that makes a folder a whole matrix."""

EVENTS_NAME, INVENTORY_NAME = "events.parquet", "inventory.parquet"
"""Names of the files with the dataset's events and inventory."""

ROW_COLUMNS = ("decision_time", "node", "gpu", "unit", "augmented", "established_at")
"""Key columns of the rows."""

_TILE = 4096


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """What a matrix was made with: enough to compute a live row with the same columns.

    Parameters
    ----------
    decision, labels, features : sections of the parameters
    augmentation, negative_ratio : int
        ``training.augmentation`` and ``training.negative_ratio``, which decide the augmented rows.
    seed : int
    unit : str
        ``gpu`` or ``node``.
    step : timedelta
        The dataset's nominal sample interval.
    span : tuple of datetime
        First and last instant of anything in the dataset, aware UTC.
    channels : mapping of str to Channel
        The dataset's channels, roll-ups included.
    columns : tuple of FeatureColumn
        The columns, in order; categorical ones hold their table of codes.
    dataset_digest : str
    sources : tuple of dict
        Where the dataset came from, as its dataset.json says; a simulated fleet says so here.
    """

    decision: DecisionSection
    labels: LabelSection
    features: FeatureSection
    augmentation: int
    negative_ratio: int
    seed: int
    unit: UnitKind
    step: timedelta
    span: tuple[datetime, datetime]
    channels: Mapping[str, Channel]
    columns: tuple[FeatureColumn, ...]
    dataset_digest: str
    sources: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give the configuration as a JSON object."""
        return {
            "dataset_digest": self.dataset_digest,
            "sources": [dict(source) for source in self.sources],
            "unit": self.unit,
            "step_seconds": self.step.total_seconds(),
            "span": [instant.astimezone(UTC).isoformat() for instant in self.span],
            "decision": self.decision.model_dump(mode="json"),
            "labels": self.labels.model_dump(mode="json"),
            "features": self.features.model_dump(mode="json"),
            "training": {"augmentation": self.augmentation, "negative_ratio": self.negative_ratio},
            "seed": self.seed,
            "channels": [channel_as_dict(channel) for channel in self.channels.values()],
            "columns": [column.to_json() for column in self.columns],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MatrixConfig:
        """Read what :meth:`to_json` wrote."""
        channels = [channel_from_dict(each) for each in content["channels"]]
        first, last = (datetime.fromisoformat(each) for each in content["span"])
        return cls(
            decision=DecisionSection.model_validate(content["decision"]),
            labels=LabelSection.model_validate(content["labels"]),
            features=FeatureSection.model_validate(content["features"]),
            augmentation=content["training"]["augmentation"],
            negative_ratio=content["training"]["negative_ratio"],
            seed=content["seed"],
            unit=content["unit"],
            step=timedelta(seconds=content["step_seconds"]),
            span=(first, last),
            channels={channel.name: channel for channel in channels},
            columns=tuple(FeatureColumn.from_json(each) for each in content["columns"]),
            dataset_digest=content["dataset_digest"],
            sources=tuple(content["sources"]),
        )


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A file of rows.

    Parameters
    ----------
    file : str
        Named by the time of the decision grid at which its rows begin, see :func:`features.slabs.part_name`.
    rows, augmented : int
        Rows, and how many of them are augmented.
    established : datetime
        When the last of them was established, aware.
    """

    file: str
    rows: int
    augmented: int
    established: datetime


@dataclass(frozen=True, slots=True)
class MatrixMeta:
    """The content of matrix.json.

    Parameters
    ----------
    digest : str
        SHA-256 over what the matrix is a function of: the dataset's content, the settings and this room's code.
    config : MatrixConfig
    counts : dict of str to int
        ``rows``, ``augmented`` and ``features``.
    parts : tuple of MatrixPart
        Files in order of time.
    """

    digest: str
    config: MatrixConfig
    counts: dict[str, int]
    parts: tuple[MatrixPart, ...] = field(default=())

    def encode(self) -> bytes:
        """Return the bytes of matrix.json."""
        content = {
            "schema_version": MATRIX_SCHEMA_VERSION,
            "digest": self.digest,
            "counts": self.counts,
            "parts": [{**asdict(part), "established": part.established.isoformat()} for part in self.parts],
            **self.config.to_json(),
        }
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_meta(path: Path) -> MatrixMeta:
    """Read matrix.json of the matrix at ``path``.

    Raises
    ------
    InputError
        If there is no matrix, or its matrix.json cannot be used.
    """
    file = path / META_NAME
    again = "Run the features stage again: `predrain features` or `dvc repro features`."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["schema_version"]
        if version == MATRIX_SCHEMA_VERSION:
            parts = tuple(
                MatrixPart(**{**part, "established": datetime.fromisoformat(part["established"])})
                for part in content["parts"]
            )
            return MatrixMeta(content["digest"], MatrixConfig.from_json(content), content["counts"], parts)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("not a feature matrix: it has no matrix.json", str(path), again) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"matrix.json is damaged: {error}", str(file), again) from error
    raise InputError(
        f"the matrix has schema version {version}, this predrain reads {MATRIX_SCHEMA_VERSION}", str(file), again
    )


class FeatureMatrix:
    """A feature matrix on disk; make it with :func:`features.building.build_matrix`, open it with :meth:`open`.

    Parameters
    ----------
    path : Path
        The matrix's folder.
    meta : MatrixMeta
        What its matrix.json says.
    """

    def __init__(self, path: Path, meta: MatrixMeta) -> None:
        self.path = path
        self.meta = meta

    @classmethod
    def open(cls, path: Path) -> FeatureMatrix:
        """Open the matrix at ``path``; a swap that a killed writer left half done is undone first.

        Raises
        ------
        InputError
            If there is no matrix at ``path``, or it is damaged.
        """
        path = Path(path)
        recover_folder(path)
        return cls(path, read_meta(path))

    @property
    def config(self) -> MatrixConfig:
        """The settings it was made with."""
        return self.meta.config

    @property
    def columns(self) -> list[FeatureColumn]:
        """The feature columns, in the order of :meth:`values`."""
        return list(self.config.columns)

    @property
    def digest(self) -> str:
        """SHA-256 over the dataset's content, the settings and the code of this room, as hexadecimal text."""
        return self.meta.digest

    @property
    def span(self) -> tuple[datetime, datetime]:
        """First and last instant of anything in the dataset, aware UTC."""
        return self.config.span

    @property
    def step(self) -> timedelta:
        """The dataset's nominal sample interval."""
        return self.config.step

    @property
    def unit(self) -> UnitKind:
        """What a row is about: ``gpu`` or ``node``."""
        return self.config.unit

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The rows' keys, sorted by (decision_time, augmented, unit).

        Columns ``decision_time``, ``node``, ``gpu`` (null where the unit is the node), ``unit``, ``augmented`` (True
        for training rows off the decision grid) and ``established_at`` (when the row was first known to exist: the
        decision time on the grid; a training set as of R takes only rows established by R).
        """
        parts = [pq.read_table(self.path / part.file, columns=list(ROW_COLUMNS)) for part in self.meta.parts]
        table = pa.concat_tables(parts)
        for name in ("node", "gpu", "unit"):
            # each part has codes of its own: as categories they would meet as Python objects, ten times as large
            table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.large_string()))
        frame: pd.DataFrame = table.to_pandas()
        return frame

    @cached_property
    def events(self) -> pd.DataFrame:
        """The dataset's events."""
        return pq.read_table(self.path / EVENTS_NAME).to_pandas()

    @cached_property
    def inventory(self) -> pd.DataFrame:
        """The dataset's inventory."""
        return pq.read_table(self.path / INVENTORY_NAME).to_pandas()

    def values(
        self,
        row_indices: npt.NDArray[np.integer] | Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Read values.

        Parameters
        ----------
        row_indices : sequence of int, optional
            Positions in :attr:`rows`, in any order, repeats allowed; default: all. Files without any are not read.
        columns : sequence of str, optional
            Names of the columns to read, in the order wanted; default: all.

        Returns
        -------
        float32 array, shape (rows, columns), C order
            NaN where a value is unknown.

        Raises
        ------
        KeyError
            If a column is not in the matrix.
        IndexError
            If a row index is outside the matrix.
        """
        known = [column.name for column in self.config.columns]
        names = known if columns is None else list(columns)
        for name in names:
            if name not in set(known):
                raise KeyError(f"the matrix has no column {name!r}")
        total = self.meta.counts["rows"]
        wanted = None if row_indices is None else np.asarray(row_indices, dtype=np.int64)
        if wanted is not None and wanted.size and not (wanted.min() >= 0 and wanted.max() < total):
            raise IndexError(f"row indices must lie in 0 .. {total - 1}")
        order = None if wanted is None else np.argsort(wanted, kind="stable")
        sorted_wanted = None if wanted is None or order is None else wanted[order]
        out = np.empty((total if wanted is None else wanted.size, len(names)), dtype=np.float32)
        begin = 0
        for each in self.meta.parts:
            end = begin + each.rows
            if sorted_wanted is None or order is None:
                _read_part(self.path / each.file, names, None, out[begin:end])
            else:
                low, high = np.searchsorted(sorted_wanted, [begin, end])
                if high > low:
                    part = np.empty((int(high - low), len(names)), dtype=np.float32)
                    _read_part(self.path / each.file, names, sorted_wanted[low:high] - begin, part)
                    out[order[low:high]] = part
            begin = end
        return out

    @cached_property
    def sequences(self) -> Sequences | None:
        """The raw windows, where ``features.sequence`` asked for them when the matrix was built; else None.

        Raises
        ------
        InputError
            If their files are missing, damaged, or another matrix's.
        """
        features = self.config.features
        if not features.sequence.channels:
            return None
        return open_sequences(
            self.path,
            features.sequence,
            self.config.channels,
            self.inventory,
            delay=features.delay,
            digest=self.digest,
        )

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
        """Read the raw windows of rows.

        Parameters
        ----------
        row_indices : sequence of int, optional
            Positions in :attr:`rows`, in any order, repeats allowed; default: all.

        Returns
        -------
        float32 array, shape (rows, steps, channels)
            Oldest step first; NaN where nothing was known.

        Raises
        ------
        InputError
            If the matrix has none (``features.sequence`` was off) or they cannot be read.
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
        """Find the incidents, as they were known at ``as_of`` (None: by everything the dataset knows).

        See :func:`features.incidents.find_incidents`.
        """
        return find_incidents(self.events, self.inventory, self.config.labels, as_of=as_of, data_end=self.span[1])

    def labels(self, as_of: datetime | None = None, *, horizon: timedelta | None = None) -> pd.DataFrame:
        """Label the rows, as could be told at ``as_of`` (None: by everything the dataset knows).

        Parameters
        ----------
        as_of : datetime, optional
            When; aware.
        horizon : timedelta, optional
            Another horizon than ``labels.horizon``.

        Returns
        -------
        DataFrame
            Aligned with :attr:`rows`; see :func:`features.labels.label_rows`.
        """
        return label_rows(
            self.rows,
            self.incidents(as_of),
            self.inventory,
            self.config.labels if horizon is None else self.config.labels.model_copy(update={"horizon": horizon}),
            data_end=self.span[1],
            as_of=as_of,
            events=self.events,
            units=self._unit_positions,
        )


def _read_part(
    path: Path, names: Sequence[str], chosen: npt.NDArray[np.int64] | None, out: npt.NDArray[np.float32]
) -> None:
    distinct = list(dict.fromkeys(names))
    table = pq.read_table(path, columns=distinct)
    arrays = {name: table.column(name).to_numpy() for name in distinct}
    for begin in range(0, out.shape[0], _TILE):
        end = min(begin + _TILE, out.shape[0])
        for j, name in enumerate(names):
            source = arrays[name]
            out[begin:end, j] = source[begin:end] if chosen is None else source[chosen[begin:end]]
