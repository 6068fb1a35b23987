"""Schedule of a backtest: first and last decision time, refits, and the alert budget K."""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from foundation.errors import InputError
from foundation.instants import from_ms
from foundation.times import duration_ms, instant_ms
from models.config import BacktestSection, TrainingSection
from models.rows.ranking import Ints
from models.rows.training_set import Labels, Matrix, TrainingRows
from models.training.spans import EXPANDING, candidates


@dataclass(frozen=True, slots=True)
class Schedule:
    """The folds of a backtest.

    ``refits_ms``: refits in milliseconds since the epoch, ascending; each fold tests from its refit to the next.
    ``end_ms``: last scored decision time (included).
    ``never_fit``: candidate spans that exceed the history at every refit.
    """

    refits_ms: tuple[int, ...]
    end_ms: int
    never_fit: tuple[timedelta, ...]

    def fold_rows(self, rows: TrainingRows, fold: int) -> Ints:
        """Return the positions of the grid rows that a fold scores."""
        start = self.refits_ms[fold]
        until = self.refits_ms[fold + 1] if fold + 1 < len(self.refits_ms) else self.end_ms + 1
        in_fold = (rows.time >= start) & (rows.time < until) & (rows.time <= self.end_ms)
        return np.flatnonzero(in_fold & ~rows.augmented)


def plan_schedule(
    matrix: Matrix, rows: TrainingRows, *, training: TrainingSection, backtest: BacktestSection, reach_ms: int
) -> Schedule:
    """Plan the folds.

    ``first_test: auto`` is the first decision time at or after both a third of the range of decision times and the
    start of the data + shortest span + gap + horizon; ``last_test: auto`` is the last decision time.

    Raises ``InputError`` if no span fits, the first test precedes the first span that fits, or the test period has no
    decision time.
    """
    grid = rows.grid_times
    first_ms, shortest = instant_ms(matrix.span[0]), min(candidates(training))
    possible = first_ms + duration_ms(shortest) + reach_ms
    end_ms = int(grid[-1]) if backtest.last_test == "auto" else instant_ms(backtest.last_test)
    available = timedelta(milliseconds=int(min(grid[-1], end_ms)) - first_ms)
    if possible > grid[-1]:
        listed = ", ".join(format_days(span) for span in candidates(training))
        raise InputError(
            f"no training window fits: the shortest of {listed} with gap and horizon ({format_days(reach_ms)}) "
            f"needs {format_days(possible - first_ms)}, but the data before the last decision time span "
            f"{format_days(available)}",
            f"parameter training.{'window' if isinstance(training.window, timedelta) else 'candidate_windows'}",
            "Give a shorter window, or a dataset with more history.",
        )
    if backtest.first_test == "auto":
        start = max(int(grid[0]) + (int(grid[-1]) - int(grid[0])) // 3, possible)
        start = int(grid[np.searchsorted(grid, start)])
    else:
        start = instant_ms(backtest.first_test)
        if start < possible:
            raise InputError(
                f"first_test {format_instant(start)} is too early: the shortest training window "
                f"({format_days(shortest)}) with gap and horizon fits from {format_instant(possible)} on",
                "parameter backtest.first_test",
                "Give that time or a later one, a shorter window in training.candidate_windows, or 'auto'.",
            )
    tested = grid[(grid >= start) & (grid <= end_ms)]
    if len(tested) == 0:
        raise InputError(
            f"no decision time from {format_instant(start)} to {format_instant(end_ms)}: the test period is empty "
            f"(decision times run from {format_instant(int(grid[0]))} to {format_instant(int(grid[-1]))})",
            "parameters backtest.first_test and backtest.last_test",
            "Give a period with decision times, or 'auto'.",
        )
    refits = np.arange(tested[0], tested[-1] + 1, duration_ms(training.refit_every))
    # Skip refits without a decision before the next one.
    next_test = tested[np.searchsorted(tested, refits)]
    is_used = np.r_[next_test[:-1] < refits[1:], True]
    used_refits = tuple(int(refit) for refit in refits[is_used])
    unusable = tuple(span for span in candidates(training) if used_refits[-1] - reach_ms - duration_ms(span) < first_ms)
    return Schedule(used_refits, int(tested[-1]), unusable)


def alert_budget(rows: TrainingRows, labels: Labels, backtest: BacktestSection, *, as_of_ms: int) -> int:
    """Return K, in nodes: as configured, or the mean number of positive nodes per decision time, at least 1.

    Raises ``InputError`` if a configured K is below 1, or exceeds the number of nodes.
    """
    if backtest.k != "auto":
        nodes = len(np.unique(rows.node))
        if not 1 <= backtest.k <= nodes:
            advice = f"Give a number from 1 to {nodes}, the nodes of the matrix, or 'auto'."
            raise InputError(f"k is {backtest.k}", "parameter backtest.k", advice)
        return backtest.k
    known = ~rows.augmented & (labels.label >= 0) & (labels.complete <= as_of_ms)
    times = len(np.unique(rows.time[known]))
    positive = known & (labels.label == 1)
    nodes = np.unique(np.stack([rows.time[positive], rows.node[positive]]), axis=1).shape[1]
    return max(1, round(nodes / max(times, 1)))


def format_candidates(training: TrainingSection) -> str:
    """Format the training windows for an error: ``candidates 7 d, 14 d``, or ``expanding, at least 7 d``."""
    spans = [format_days(span) for span in candidates(training)]
    return f"expanding, at least {spans[0]}" if training.window == EXPANDING else f"candidates {', '.join(spans)}"


def format_days(span: timedelta | int) -> str:
    """Format a duration (or milliseconds) in days: ``14 d``."""
    days = (span if isinstance(span, timedelta) else timedelta(milliseconds=span)) / timedelta(days=1)
    return f"{round(days, 2):g} d"


def format_instant(ms: int) -> str:
    """Format milliseconds since the epoch as ``2026-01-01 06:00 UTC``."""
    return from_ms(ms).strftime("%Y-%m-%d %H:%M UTC")
