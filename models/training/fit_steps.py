"""How far a fit is, in training rows gone through."""

from __future__ import annotations

import threading
from collections.abc import Callable

from models.config import CASCADE
from models.ensembles.cascade import CascadeEnsemble

Progress = Callable[[int, int, str], None]
"""Called with the work done, all work, and what was done."""


class FitSteps:
    """Counts rows, each once for each learner and for each stage of the cascade; may be told from any thread.

    ``rows``: rows of each training set that is fitted on.
    ``passes``: how often each is gone through.
    """

    def __init__(self, progress: Progress | None, rows: list[int], passes: int) -> None:
        self._progress, self._rows = progress, rows
        self._total, self._done = sum(rows) * passes, 0
        self._guard = threading.Lock()
        if progress is not None:
            progress(0, self._total, "rows chosen")

    def of(self, which: int) -> Callable[[str], None]:
        """Give what a fit on one of the training sets calls for each learner."""
        return lambda name: self._add(self._rows[which], name)

    def cascade(self, which: int, fitted: CascadeEnsemble | None) -> None:
        """Count a cascade that was fitted on one of the training sets."""
        if fitted is not None:
            self._add(self._rows[which] * len(fitted.stages), CASCADE)

    def _add(self, rows: int, what: str) -> None:
        if self._progress is None:
            return
        with self._guard:
            self._done += rows
            self._progress(self._done, self._total, what)
