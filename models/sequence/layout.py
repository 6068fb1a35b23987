"""Rows with a flattened raw window after their features, and preprocessing for networks.

All learners share one array of rows: sequence learners extract the window and the static features, scale them and mask
unknown values; other learners are wrapped to use the columns before the window. Ensembles, calibration, scoring and
explanation are unaffected. Runs without sequence learners use the matrix's rows unchanged.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from models.config import SEQUENCE
from models.rows.training_set import Matrix

NEEDED = ("torch", "safetensors")
"""Packages of the extra ``sequence``."""

NEEDS_IT = "parameter models.learners, or the learners of the bundle"


def versions() -> dict[str, str]:
    """Return the versions of the extra's packages, without the local label of a wheel (``+cpu``)."""
    return {package: importlib.metadata.version(package).split("+")[0] for package in NEEDED}


def require_torch(name: str) -> None:
    """Require PyTorch.

    Raises ``InputError`` if PyTorch or safetensors is not installed or fails to load.
    """
    absent = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if absent:
        raise InputError(
            f"the learner {name} needs {' and '.join(absent)}, which predrain does not install by default",
            NEEDS_IT,
            "Run: pip install 'predrain[sequence]'. To avoid gigabytes of CUDA libraries, first run: "
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu, which is PyTorch's own index "
            "of CPU builds.",
        )
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # incomplete, or of another platform
            raise InputError(
                f"the learner {name} needs {package}, which is installed but cannot be loaded: {error}",
                NEEDS_IT,
                f"Reinstall it: pip install --force-reinstall {package}.",
            ) from error


STEP_STATISTICS = ("step_mean", "step_rise")
"""Statistics of the columns of a flattened raw window; see :mod:`features.matrix.sequences`."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Positions of window and static features in a row.

    ``begin``: first column of the flattened window, ordered by step (oldest first), then channel.
    ``statics``: columns that are repeated at every step.
    ``categories``: number of categories of each of ``statics``; 0: numeric.
    """

    begin: int
    steps: int
    channels: int
    statics: tuple[int, ...] = ()
    categories: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Minimum number of columns of a row."""
        return max([self.begin + self.steps * self.channels, *(column + 1 for column in self.statics)])

    def split(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return windows, shape (n, steps, channels), and static features, shape (n, statics), of rows.

        Raises ``ValueError`` if the rows are narrower than the layout.
        """
        if X.shape[1] < self.width:
            raise ValueError(f"rows of {X.shape[1]} features cannot hold a layout of {self.width} columns")
        window = X[:, self.begin : self.begin + self.steps * self.channels]
        return window.reshape(len(X), self.steps, self.channels), X[:, list(self.statics)]


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """The raw window among the columns of a run or bundle.

    ``tabular``: number of columns before the window, which tabular learners use.
    """

    tabular: int
    channels: tuple[str, ...]
    window: timedelta
    step: timedelta
    layout: SequenceLayout

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        return {
            "channels": list(self.channels),
            "window_seconds": self.window.total_seconds(),
            "step_seconds": self.step.total_seconds(),
            "tabular_features": self.tabular,
        }


def window_of(columns: Sequence[FeatureColumn]) -> WindowFacts | None:
    """Find the raw window among columns; None if there is none."""
    spans = [column.window for column in columns if column.statistic in STEP_STATISTICS and column.window is not None]
    if not spans:
        return None
    begin = len(columns) - len(spans)
    newest = min(spans)
    channels = tuple(str(column.channel) for column in columns[begin:] if column.window == newest)
    statics = tuple(i for i, column in enumerate(columns[:begin]) if column.group == "static")
    layout = SequenceLayout(
        begin,
        len(spans) // len(channels),
        len(channels),
        statics,
        tuple(len(columns[static].categories) for static in statics),
    )
    return WindowFacts(begin, channels, max(spans), newest, layout)


_IQR_TO_SIGMA = 1.349
"""Ratio of interquartile range to standard deviation of a normal distribution."""

_ROWS = 20_000
"""Maximum rows for quantiles, evenly spaced: more would change them by less than clipping hides."""

CLIP = 5.0
"""Clipping limit of scaled values, in (robust) standard deviations."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SequenceScaler:
    """Robust center and scale of each channel and each numeric static feature.

    ``center``, ``scale``: median, and interquartile range over 1.349 (the standard deviation if that is 0; 1 if both
    are), over all steps of the training rows; shape (channels,).
    ``static_center``, ``static_scale``: the same for static features; 0 and 1 for codes; shape (statics,).
    """

    layout: SequenceLayout
    center: Float32Array
    scale: Float32Array
    static_center: Float32Array
    static_scale: Float32Array

    @classmethod
    def fit(cls, X: np.ndarray, layout: SequenceLayout) -> Self:
        """Fit center and scale on training rows, shape (n, features); NaN: unknown."""
        sample = X[:: -(-len(X) // _ROWS)]
        window, static = layout.split(sample)
        center, scale = _robust(window.reshape(-1, layout.channels))
        static_center, static_scale = _robust(static)
        codes = np.array(layout.categories, dtype=np.int64) > 0
        static_center[codes], static_scale[codes] = 0, 1
        return cls(layout, center, scale, static_center, static_scale)

    @property
    def static_width(self) -> int:
        """Network inputs of the static features: value and mask of a number, one-hot for a code."""
        return sum(count or 2 for count in self.layout.categories)

    def transform(self, X: np.ndarray) -> tuple[Float32Array, Float32Array]:
        """Scale rows: windows, shape (n, steps, 2 * channels), and static features, shape (n, static_width).

        Values of a window (0 where unknown), then masks; values and masks of numbers, one-hot codes (all 0: unknown).
        """
        window, static = self.layout.split(np.asarray(X, dtype=np.float32))
        return _masked((window - self.center) / self.scale), self._static(static)

    def _static(self, static: np.ndarray) -> Float32Array:
        parts = [np.zeros((len(static), 0), dtype=np.float32)]
        for i, count in enumerate(self.layout.categories):
            values = static[:, i]
            if count:
                codes = np.where(np.isnan(values), -1, values).astype(np.int64)
                parts.append((codes[:, np.newaxis] == np.arange(count)).astype(np.float32))
            else:
                parts.append(_masked(((values - self.static_center[i]) / self.static_scale[i])[:, np.newaxis]))
        return np.concatenate(parts, axis=1)


def _masked(scaled: np.ndarray) -> Float32Array:
    known = ~np.isnan(scaled)
    values = np.where(known, np.clip(scaled, -CLIP, CLIP), 0)
    return np.concatenate([values, known], axis=-1, dtype=np.float32)


def _robust(values: np.ndarray) -> tuple[Float32Array, Float32Array]:
    center = np.zeros(values.shape[1])
    scale = np.ones(values.shape[1])
    for i in range(values.shape[1]):
        known = values[:, i].astype(np.float64)
        known = known[np.isfinite(known)]
        if known.size == 0:
            continue
        low, center[i], high = np.quantile(known, [0.25, 0.5, 0.75])
        spread, deviation = (high - low) / _IQR_TO_SIGMA, known.std()
        scale[i] = spread if spread > 1e-9 else deviation if deviation > 1e-9 else 1.0
    return center.astype(np.float32), scale.astype(np.float32)


def with_windows(matrix: Matrix, learners: Iterable[str]) -> Matrix:
    """Return the matrix, or one whose rows include the raw windows if one of the learners needs them.

    Raises ``InputError`` if a sequence learner is requested and PyTorch is not installed, or the matrix has no raw
    windows.
    """
    sequence_learners = sorted(set(SEQUENCE) & set(learners))
    if not sequence_learners or isinstance(matrix, WindowedMatrix):
        return matrix
    require_torch(sequence_learners[0])
    if getattr(matrix, "sequences", None) is None:
        raise InputError(
            f"the learner {sequence_learners[0]} reads raw windows, and the feature matrix has none",
            "parameter features.sequence.channels",
            "Set it to 'auto' (as params/paper.yaml does) and compute the features again.",
        )
    return WindowedMatrix(matrix)


class WindowedMatrix:
    """A matrix whose rows include the flattened raw window after their features; otherwise delegates to ``matrix``."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self._columns = (*matrix.columns, *matrix.sequences.plan.columns)
        facts = window_of(self._columns)
        assert facts is not None
        self.facts: WindowFacts = facts

    @property
    def columns(self) -> Sequence[FeatureColumn]:
        """The features, then the columns of the window."""
        return self._columns

    @property
    def digest(self) -> str:
        """Digest of the matrix and of the PyTorch version, which affects the bits of scores."""
        read_by = json.dumps([self._matrix.digest, versions()], sort_keys=True)
        return hashlib.sha256(read_by.encode()).hexdigest()

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Read features and windows of rows, float32, shape (n_rows, columns); NaN: unknown."""
        tabular = self._matrix.values(row_indices)
        window = self._matrix.windows(row_indices)
        return np.concatenate([tabular, window.reshape(len(window), -1)], axis=1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet, for example during a copy
            raise AttributeError(name)
        return getattr(self._matrix, name)


def tabular_columns(matrix: Matrix) -> tuple[FeatureColumn, ...]:
    """Return the columns before the window."""
    columns = tuple(matrix.columns)
    return columns[: matrix.facts.tabular] if isinstance(matrix, WindowedMatrix) else columns


def tabular_values(matrix: Matrix, values: Any) -> Any:
    """Wrap a row reader to return only the columns before the window."""
    if not isinstance(matrix, WindowedMatrix):
        return values
    tabular = matrix.facts.tabular
    return lambda rows: values(rows)[:, :tabular]
