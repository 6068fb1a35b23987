"""Outcomes of risks and alerts: failure rates, precision and calibration, with exact intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, chi2, fisher_exact

from models.training.reference import Outcomes

ALPHA = 0.005
"""Significance level of each test on the failures."""


@dataclass(frozen=True, slots=True)
class RateChange:
    """Change of the failure rate.

    ``ratio``, ``low``, ``high``: rate now over rate before, with its exact 95 % interval; NaN or infinite if a side has
    no failures.
    ``p``: p-value of the exact conditional test of equal rates.
    """

    failure_class: str
    before: int
    now: int
    ratio: float
    low: float
    high: float
    p: float


def rate_change(n_before: int, exposure_before: float, n_now: int, exposure_now: float, name: str = "") -> RateChange:
    """Compare two Poisson rates by the exact conditional test (Przyborowski and Wilenski 1940).

    The interval of the ratio is the transformed Clopper-Pearson interval.
    """
    total = n_before + n_now
    share = exposure_now / (exposure_now + exposure_before)
    odds = exposure_before / exposure_now
    if total == 0:
        return RateChange(name, 0, 0, float("nan"), 0.0, float("inf"), 1.0)
    low, high = exact_interval(n_now, total)
    return RateChange(
        failure_class=name,
        before=n_before,
        now=n_now,
        ratio=n_now / n_before * odds if n_before else float("inf"),
        low=low / (1 - low) * odds,
        high=high / (1 - high) * odds if high < 1 else float("inf"),
        p=float(binomtest(n_now, total, share).pvalue),
    )


def rate_changes(before: Outcomes, now: Outcomes) -> list[RateChange]:
    """Compare the failure rates of two spans: all classes together first, then each class by ascending p-value."""
    if not before.rows or not now.rows:
        return []
    overall = rate_change(before.total, before.rows, now.total, now.rows)
    classes = sorted({*before.incidents, *now.incidents})
    class_changes = [
        rate_change(before.incidents.get(name, 0), before.rows, now.incidents.get(name, 0), now.rows, name)
        for name in classes
    ]
    return [overall, *sorted(class_changes, key=lambda change: (change.p, change.failure_class))]


def exact_interval(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % Clopper-Pearson interval of a share; (0, 1) if ``n`` is 0."""
    if n == 0:
        return 0.0, 1.0
    low, high = binomtest(hits, n).proportion_ci(0.95, method="exact")
    return float(low), float(high)


def poisson_interval(count: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a Poisson mean (Garwood 1936)."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else float(chi2.ppf(tail, 2 * count) / 2)
    return low, float(chi2.ppf(1 - tail, 2 * count + 2) / 2)


@dataclass(frozen=True, slots=True)
class RiskCounts:
    """Observed and predicted failures of the rows with a known label.

    ``positives``, ``incidents``: positive rows, and incidents behind them.
    ``expected``: sum of the risks.
    ``rows_each``: rows that one incident makes positive: the horizon over the decision interval.
    """

    positives: int
    incidents: int
    expected: float
    rows_each: float = 1.0

    @property
    def ratio(self) -> float:
        """Observed positives over expected positives; NaN if none are expected."""
        return self.positives / self.expected if self.expected else float("nan")

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the interval of the ratio, exact for independent incidents of equal row counts; NaN as above.

        The upper bound assumes at least ``rows_each`` positive rows per incident.
        """
        if not self.expected:
            return float("nan"), float("nan")
        low, high = poisson_interval(self.incidents, level)
        rows_per_incident = self.positives / self.incidents if self.incidents else 0.0
        return low * rows_per_incident / self.expected, high * max(rows_per_incident, self.rows_each) / self.expected


class AlertCounts(NamedTuple):
    """Outcomes of alerted nodes, each node counted once per window.

    ``right``: nodes with at least one true positive.
    ``wrong``: nodes with false positives only.
    ``open``: nodes without a true positive and with at least one unknown outcome.
    """

    right: int
    wrong: int
    open: int

    @property
    def precision(self) -> float:
        """Share of right nodes among those with a known outcome; NaN if there are none."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else float("nan")


def count_alerts(node: np.ndarray, label: np.ndarray) -> AlertCounts:
    """Count alerted nodes by outcome.

    ``node``, ``label``: node of each alert, and its outcome: 1, 0, or -1 if unknown; shape (n_alerts,).
    """
    if not len(node):
        return AlertCounts(0, 0, 0)
    _, number = np.unique(node, return_inverse=True)
    nodes = int(number.max()) + 1
    right = np.bincount(number, weights=label == 1, minlength=nodes) > 0
    undecided = (np.bincount(number, weights=label < 0, minlength=nodes) > 0) & ~right
    return AlertCounts(int(right.sum()), int((~right & ~undecided).sum()), int(undecided.sum()))


def count_in_windows(folds: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> AlertCounts:
    """Count alerted nodes in each window of ``length`` folds, and sum the counts over windows.

    Only windows of equal length are comparable: a node with constant false alerts is wrong once per window, however
    long the window, while each failure counts.

    ``folds``: node and label of each alert, as :func:`count_alerts` takes them, per fold.
    ``length``: folds per window. Windows are cut from the newest fold backward; a remainder at the start is ignored.
    """
    window_counts = [
        count_alerts(*(np.concatenate(part) for part in zip(*folds[until - length : until], strict=True)))
        for until in range(len(folds), length - 1, -length)
    ]
    return AlertCounts(*np.sum([AlertCounts(0, 0, 0), *window_counts], axis=0).tolist())


def precision_fell(before: AlertCounts, now: AlertCounts) -> float:
    """Return the one-sided p-value of a decrease in precision (Fisher's exact test)."""
    table = [[now.right, now.wrong], [before.right, before.wrong]]
    if not (now.right + now.wrong and before.right + before.wrong):
        return 1.0
    return float(fisher_exact(table, alternative="less").pvalue)
