"""Who fits learners on the rows that were chosen: this process, or others that read the rows for themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from models.cascade import CascadeEnsemble
from models.fit_facts import FitFacts
from models.learners import fit_learners
from models.on_bins import wants_features
from models.ranking import Floats, Hashes, Ints
from models.row_reader import RowReader
from models.training_set import TrainingSet


@dataclass(frozen=True, slots=True)
class FitRows:
    """The rows of a fit, without their features; each of shape (n_rows,).

    ``label``: 1 or 0; both occur.
    ``groups``: hash of the unit.
    ``facts``: positions in the matrix, ascending, and decision times.
    """

    label: Ints
    weight: Floats
    groups: Hashes
    facts: FitFacts

    @classmethod
    def of(cls, chosen: TrainingSet, ties: Hashes) -> FitRows:
        """Take the rows of a training set; ``ties`` are those of all rows of the matrix."""
        return cls(chosen.label, chosen.weight, ties[chosen.rows], chosen.facts)

    @property
    def positions(self) -> Ints:
        """Where the rows stand in the matrix."""
        assert self.facts.rows is not None
        return self.facts.rows


Told = Callable[[str], None]
"""Called with the name of each learner when it is fitted, from any thread."""


class RowFits(Protocol):
    """Fits on one set of rows."""

    def learners(self, unfitted: Mapping[str, Any], told: Told | None = None) -> dict[str, Any]:
        """Fit learners, each on all rows; they come in the same order, of the same types as from one process."""

    def cascade(
        self,
        unfitted: CascadeEnsemble,
        *,
        first: Any,
        held: Ints | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> CascadeEnsemble:
        """Fit a cascade on all rows.

        ``first`` is its first stage, fitted; ``held`` are positions of later positives, on which its thresholds are
        set (no other row is looked at for that). See :meth:`CascadeEnsemble.fit`.
        """


class Fits(Protocol):
    """Gives what fits on a set of rows."""

    def on(self, rows: FitRows) -> AbstractContextManager[RowFits]:
        """Open fits on rows; what is held for them goes at the end."""


class LocalFits:
    """Fits in this process."""

    def __init__(self, read: RowReader) -> None:
        self._read = read

    @contextmanager
    def on(self, rows: FitRows) -> Iterator[RowFits]:
        """Read rows; see :meth:`Fits.on`."""
        yield _LocalRowFits(rows, self._read)


class _LocalRowFits:
    def __init__(self, rows: FitRows, read: RowReader) -> None:
        self._rows, self._read = rows, read

    @cached_property
    def _values(self) -> np.ndarray:
        return self._read(self._rows.positions)

    def learners(self, unfitted: Mapping[str, Any], told: Told | None = None) -> dict[str, Any]:
        rows = self._rows
        wanted = any(wants_features(each, rows.positions) for each in unfitted.values())
        return fit_learners(unfitted, self._values if wanted else None, rows.label, rows.weight, rows.facts, told)

    def cascade(
        self,
        unfitted: CascadeEnsemble,
        *,
        first: Any,
        held: Ints | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> CascadeEnsemble:
        positives = None if held is None else self._read(held)
        return fit_cascade(unfitted, self._values, self._rows, first=first, positives=positives, thresholds=thresholds)


def fit_cascade(
    unfitted: CascadeEnsemble,
    values: np.ndarray,
    rows: FitRows,
    *,
    first: Any,
    positives: np.ndarray | None,
    thresholds: Sequence[float] | None,
) -> CascadeEnsemble:
    """Fit a cascade on rows.

    ``values``: shape (n_rows, n_features).
    ``positives``: features of later positives that thresholds are set on; shape (n_positives, n_features).
    ``first``, ``thresholds``: see :meth:`CascadeEnsemble.fit`.
    """
    return unfitted.fit(
        values,
        rows.label,
        rows.weight,
        times=rows.facts.times,
        groups=rows.groups,
        validation=None if positives is None else (positives, np.ones(len(positives), dtype=np.int64)),
        fitted_first=first,
        thresholds=thresholds,
        positions=rows.positions,
    )
