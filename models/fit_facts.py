"""What some learners want to know of training rows beside features, label and weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils.validation import has_fit_parameter

from models.ranking import Ints


@dataclass(frozen=True, slots=True)
class FitFacts:
    """Facts of training rows, handed to those learners whose ``fit`` has a parameter of that name.

    They say when a row was, never anything that a score may use: a learner gets them in ``fit`` only.

    ``times``: decision times in milliseconds since the epoch (UTC); shape (n_rows,).
    ``rows``: positions in the matrix that the rows come from; shape (n_rows,).
    """

    times: Ints | None = None
    rows: Ints | None = None

    @classmethod
    def of(cls, times: Any = None, rows: Any = None) -> FitFacts:
        """Make facts of array-likes."""
        return cls(
            None if times is None else np.asarray(times, dtype=np.int64),
            None if rows is None else np.asarray(rows, dtype=np.int64),
        )

    def take(self, rows: Ints) -> FitFacts:
        """Give the facts of some rows, by their positions or a mask."""
        return FitFacts(
            None if self.times is None else self.times[rows],
            None if self.rows is None else self.rows[rows],
        )

    def wanted_by(self, learner: Any) -> dict[str, Any]:
        """Give the keyword arguments that a learner's ``fit`` takes of these facts; none for most learners.

        ``learner``: fitted or not.
        Returns: ``times`` and ``rows``, each only if ``fit`` has a parameter of that name and it is known.
        """
        known = {"times": self.times, "rows": self.rows}
        return {name: value for name, value in known.items() if value is not None and has_fit_parameter(learner, name)}


NO_FACTS = FitFacts()
"""Nothing is known beside features, label and weight."""
