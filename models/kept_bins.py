"""Bin edges that are found once, before the first refit that uses them, and kept for the refits that follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import lightgbm
import numpy as np
import xgboost

from features.errors import InputError
from features.times import duration_ms
from models.config import TrainingSection
from models.ranking import Floats, Ints, mix, seed_of
from models.row_reader import StretchReader
from models.sequence.windows import WindowedMatrix
from models.spans import usable_spans
from models.training_set import Labels, Matrix, Rows, choose_rows

EDGE_ROWS = 50_000
"""Rows that edges are found on at most: 127 quantiles of so many rows are off by a tenth of a bin or so."""

_CHUNK_BYTES = 2**26


class KeptBins:
    """The bin edges of one set of rows, and a stretch of the matrix's rows in these bins.

    LightGBM puts rows into given edges once (``reference``) and takes any of them from there without looking at a value
    again (``subset``), one byte a value. XGBoost has no subset: given edges (``QuantileDMatrix(ref=...)``) save it the
    search for them, not the putting into bins.

    ``window``: first position, and the position after the last, of the rows to hold in bins.
    ``features``: features of a row.
    ``held_bytes``: memory that rows in bins may take; a larger window is not held, and rows are put into the same bins
    at each fit.
    """

    def __init__(
        self,
        read: StretchReader,
        edge_rows: Ints,
        edge_weight: Floats,
        *,
        window: tuple[int, int],
        features: int,
        held_bytes: int,
        threads: int,
    ) -> None:
        self._read = read
        self.edge_rows = edge_rows
        self._edge_weight = edge_weight
        self.window = window
        self.held = (window[1] - window[0]) * features <= held_bytes
        self._features = features
        self._threads = threads
        self._edges: dict[int, lightgbm.Dataset] = {}
        self._binned: dict[int, lightgbm.Dataset] = {}
        self._quantiles: dict[int, xgboost.QuantileDMatrix] = {}
        self._lock = threading.Lock()  # learners are fitted side by side

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Give itself: clones of a learner share its bins."""
        return self

    def holds(self, rows: Ints) -> bool:
        """Tell whether rows, ascending positions in the matrix, are taken from the bins without their features."""
        return self.held and len(rows) > 0 and rows[0] >= self.window[0] and rows[-1] < self.window[1]

    def lightgbm_rows(
        self, X: np.ndarray | None, rows: Ints, label: Ints, weight: Floats, max_bin: int
    ) -> lightgbm.Dataset:
        """Give rows in bins, ready to be fitted on.

        ``X``: their features; looked at only where :meth:`holds` says no; shape (n_rows, n_features).
        ``rows``: their positions in the matrix, ascending; shape (n_rows,).
        ``label``, ``weight``: 0 or 1, and weights; shape (n_rows,).
        ``max_bin``: LightGBM's ``max_bin``.
        Returns: Constructed. The same, bit for bit, whether the rows were held or not.
        """
        with self._lock:
            edges = self._lightgbm_edges(max_bin)
            if self.holds(rows):
                if max_bin not in self._binned:
                    self._binned[max_bin] = self._all_in(edges)
                chosen = self._binned[max_bin].subset((rows - self.window[0]).tolist()).construct()
            else:
                params = self.dataset_settings(max_bin)
                chosen = lightgbm.Dataset(X, label, reference=edges, params=params).construct()
        chosen.set_label(label)
        chosen.set_weight(weight)
        return chosen

    def xgboost_edges(self, max_bin: int) -> xgboost.QuantileDMatrix:
        """Give what XGBoost takes edges from, for its ``max_bin``."""
        with self._lock:
            if max_bin not in self._quantiles:
                self._quantiles[max_bin] = xgboost.QuantileDMatrix(
                    self._read(self.edge_rows), weight=self._edge_weight, max_bin=max_bin, nthread=self._threads
                )
            return self._quantiles[max_bin]

    def dataset_settings(self, max_bin: int) -> dict[str, Any]:
        """Give the settings of LightGBM that its bins depend on, and that a fit on them must repeat."""
        return {
            "max_bin": max_bin,
            # Which features a fit can use depends on its own rows and leaves, not on those that edges were found on.
            "feature_pre_filter": False,
            "bin_construct_sample_cnt": EDGE_ROWS,
            "num_threads": self._threads,
            "verbose": -1,
        }

    def _lightgbm_edges(self, max_bin: int) -> lightgbm.Dataset:
        if max_bin not in self._edges:
            values = self._read(self.edge_rows)
            self._edges[max_bin] = lightgbm.Dataset(
                values, np.zeros(len(values)), params=self.dataset_settings(max_bin)
            ).construct()
        return self._edges[max_bin]

    def _all_in(self, edges: lightgbm.Dataset) -> lightgbm.Dataset:
        first, until = self.window
        stretch = _Stretch(self._read, first, until, max(_CHUNK_BYTES // (4 * self._features), 1))
        return lightgbm.Dataset(
            stretch, np.zeros(until - first), reference=edges, params=edges.get_params()
        ).construct()


class _Stretch(lightgbm.Sequence):
    """Neighbouring rows, which LightGBM reads a batch at a time: the whole is never in memory as numbers."""

    def __init__(self, read: StretchReader, first: int, until: int, batch: int) -> None:
        self._read, self._first, self._until = read, first, until
        self.batch_size = batch

    def __len__(self) -> int:
        return self._until - self._first

    def __getitem__(self, wanted: Any) -> np.ndarray:
        if isinstance(wanted, slice):
            low, high, _ = wanted.indices(len(self))
            return self._read.stretch(self._first + low, self._first + high, len(self))
        return self._read(self._first + np.atleast_1d(wanted))


class BinKeeper:
    """Gives the bins that a refit of a backtest uses, and holds those of one stretch of refits at a time.

    Refits are counted in the schedule's order. The first of each ``training.bins.refits`` finds edges, on the rows that
    a fit of the longest usable span would take at that refit: their labels are complete by then, so nothing that comes
    later can move an edge. They serve it and the refits that follow it.

    ``training``: ``bins``, ``memory``, and what training rows are chosen by.
    ``refits_ms``: the schedule's refits, ascending, in milliseconds since the epoch.
    Raises ``InputError`` if bins are to be kept and the rows hold raw windows.
    """

    def __init__(
        self,
        matrix: Matrix,
        rows: Rows,
        read: StretchReader,
        *,
        training: TrainingSection,
        refits_ms: tuple[int, ...],
        first_ms: int,
        reach_ms: int,
        seed: int,
        threads: int,
    ) -> None:
        self._every = training.bins.refits
        if self._every and isinstance(matrix, WindowedMatrix):
            raise InputError(
                "bins are not kept where a learner reads raw windows",
                "parameter training.bins.refits",
                "Set it to 0, or leave the sequence learners out.",
            )
        self._rows = rows
        self._read = read
        self._features = len(matrix.columns)
        self._training = training
        self._refits = refits_ms if self._every else ()
        self._first_ms, self._reach_ms = first_ms, reach_ms
        self._seed = seed
        self._threads = threads
        self._found: dict[int, KeptBins] = {}

    def at(self, refit_ms: int, labels_at: Callable[[int], Labels]) -> KeptBins | None:
        """Give the bins for a refit; None where none are kept, or no refit of its stretch had both classes yet.

        Returns: the same edges, bit for bit, in whatever order refits are asked for.
        """
        if refit_ms not in self._refits:
            return None
        number = self._refits.index(refit_ms)
        begin = number - number % self._every
        for at in range(begin, number + 1):
            if at not in self._found:
                made = self._made(at, begin, labels_at)
                if made is None:
                    continue
                self._found = {at: made}
            return self._found[at]
        return None

    def _made(self, at: int, begin: int, labels_at: Callable[[int], Labels]) -> KeptBins | None:
        refit_ms = self._refits[at]
        start = self._start(refit_ms)
        if start is None:
            return None
        chosen = choose_rows(
            self._rows,
            labels_at(refit_ms),
            start_ms=start,
            complete_by_ms=refit_ms,
            as_of_ms=refit_ms,
            negative_ratio=self._training.negative_ratio,
            seed=self._seed,
        )
        if not chosen.usable:
            return None
        picked = np.arange(len(chosen.rows))
        if len(picked) > EDGE_ROWS:
            rows = chosen.rows
            priority = mix(mix(self._rows.tie[rows], self._rows.time[rows]), seed_of(self._seed, "edges"))
            picked = np.sort(np.lexsort((rows, priority))[:EDGE_ROWS])
        served = self._refits[at : begin + self._every]
        starts = [each for each in map(self._start, served) if each is not None]
        time = self._rows.time
        used = np.flatnonzero((time >= min(starts)) & (time <= served[-1] - self._reach_ms))
        return KeptBins(
            self._read,
            chosen.rows[picked],
            chosen.weight[picked],
            window=(int(used[0]), int(used[-1]) + 1),
            features=self._features,
            held_bytes=self._training.bytes_held,
            threads=self._threads,
        )

    def _start(self, refit_ms: int) -> int | None:
        """Give the beginning of the longest span that fits at a refit."""
        spans = usable_spans(self._training, refit_ms=refit_ms, first_ms=self._first_ms, reach_ms=self._reach_ms)
        return refit_ms - self._reach_ms - duration_ms(max(spans)) if spans else None
