"""Baselines, which learn nothing: chance, the count of past faults, and the vendor's own thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import numpy as np

from features.vocabulary import FeatureColumn
from models.rows.ranking import Floats, Hashes, mix, uniform

HISTORY_WINDOW = timedelta(days=30)
"""The history that ``history_count`` counts over (the window that re-runs of the paper found telling)."""

HARDWARE_HISTORY = frozenset(
    {"incident", "failure", "xid_memory", "xid_bus", "xid_firmware", "xid_interconnect", "xid_precursor"}
)
"""Hardware causes of :data:`features.groups.history.WHATS`; ``xid_hardware`` would count these twice."""


class Baseline:
    """What gives points to rows.

    ``seed``: seed of ``random``; the others ignore it.
    """

    def __init__(self, columns: Sequence[FeatureColumn] = (), seed: int = 0) -> None:
        self.columns = columns
        self.seed = seed

    def points(self, X: np.ndarray, identity: Hashes) -> Floats:
        """Score rows, zero or more, riskiest highest.

        ``X``: features in the order of ``columns``; NaN: unknown; shape (n_rows, n_features).
        ``identity``: hash of each row's unit and decision time, for ``random``; shape (n_rows,).
        """
        raise NotImplementedError

    def unavailable(self) -> str:
        """Return why the matrix has no data for this baseline, so that all rows get the same points; empty: it has."""
        return ""

    def _find(self, **wanted: object) -> list[int]:
        """Positions of the columns whose attributes equal the wanted values; shortest window first."""
        positions = [
            (column.window or timedelta(0), i)
            for i, column in enumerate(self.columns)
            if all(getattr(column, name) == value for name, value in wanted.items())
        ]
        return [i for _, i in sorted(positions)]


class RandomScore(Baseline):
    """Chance: a number drawn from who the row is, the same in every run."""

    def points(self, X: np.ndarray, identity: Hashes) -> Floats:
        """Draw one number in (0, 1) for each row; see :meth:`Baseline.points`."""
        return uniform(mix(identity, self.seed))


class HistoryCount(Baseline):
    """The number of hardware faults known of the GPU in the last 30 days; among equals, of its node.

    Counts the columns of group ``history`` with statistic ``count`` over 30 days (over the longest window there is, if
    not that one) of :data:`HARDWARE_HISTORY`: incidents, and XIDs that NVIDIA lays on the hardware. Application XIDs do
    not count. A dataset of nodes has the node's count only.
    """

    def points(self, X: np.ndarray, identity: Hashes) -> Floats:
        """Give the GPU's count plus the node's squeezed into [0, 1); see :meth:`Baseline.points`."""
        of_gpu = self._count(X, "gpu")
        node = np.maximum(self._count(X, "node"), 0)  # a caller's rows may hold anything, and -1 would divide by zero
        return of_gpu + node / (1 + node)

    def unavailable(self) -> str:
        """See :meth:`Baseline.unavailable`."""
        counted = self._counted("gpu") or self._counted("node")
        return "" if counted else "the matrix has no counts of past hardware faults (feature group history)"

    def _counted(self, scope: str) -> list[int]:
        return [i for i in self._find(group="history", statistic="count", scope=scope) if self._hardware(i)]

    def _count(self, X: np.ndarray, scope: str) -> Floats:
        total = np.zeros(len(X))
        counted = self._counted(scope)
        windows = {self._window(i) for i in counted}
        if not windows:
            return total
        window = HISTORY_WINDOW if HISTORY_WINDOW in windows else max(windows)
        for i in counted:
            if self._window(i) == window:
                total += np.nan_to_num(X[:, i], nan=0.0)
        return total

    def _hardware(self, i: int) -> bool:
        channel = str(self.columns[i].channel)
        return channel in HARDWARE_HISTORY

    def _window(self, i: int) -> timedelta:
        return self.columns[i].window or timedelta(0)


@dataclass(frozen=True, slots=True)
class VendorRule:
    """One threshold of NVIDIA's: a column's value over ``per`` seconds (if given) at or above ``threshold``.

    ``channels``: channels whose values are added up.
    ``statistic``: ``last`` or ``rise``.
    ``threshold``: lowest value that is a hit; for a rate in events a second.
    ``severity``: points of a hit: 3 means replace or reset immediately, 2 drain soon, 1 look.
    ``rate``: whether the value is divided by the window's length.
    ``above``: whether the threshold itself is no hit yet.
    """

    channels: tuple[str, ...]
    statistic: str
    threshold: float
    severity: int
    rate: bool = False
    above: bool = False


class VendorRules(Baseline):
    """NVIDIA's own health thresholds, as points by severity for each rule that is hit.

    The rates of the sources are per minute or second; here a counter's rise over the shortest window there is (1 h
    unless params say otherwise) is divided by the window's length, so a burst shorter than the window must be as much
    stronger to be seen. Rules whose channels the dataset does not have are never hit.

    Thresholds: NVIDIA DCGM, ``DcgmGPUHardwareLimits.h`` and ``DcgmHealthWatch.cpp`` (PCIe replays above 16 a minute at
    generation 4 and 16 lanes; an NVLink replay or recovery; NVLink CRC errors at 100 a second; 512 uncorrectable
    remapped rows; a failed remap) and NVIDIA's page-retirement policy (63 pages, or more than 15 for double-bit
    errors). A pending remap and a new double-bit error need a reset before the next job; predrain chose their severity.
    """

    RULES: ClassVar[tuple[VendorRule, ...]] = (
        VendorRule(("row_remap_failure",), "last", 1, 3),
        VendorRule(("row_remap_uncorrectable_total",), "last", 512, 3),
        VendorRule(("retired_pages_sbe_total", "retired_pages_dbe_total"), "last", 63, 3),
        VendorRule(("retired_pages_dbe_total",), "last", 15, 3, above=True),
        VendorRule(("ecc_dbe_volatile_total",), "rise", 1, 2),
        VendorRule(("ecc_dbe_aggregate_total",), "rise", 1, 2),
        VendorRule(("row_remap_pending",), "last", 1, 2),
        VendorRule(("nvlink_crc_flit_total", "nvlink_crc_data_total"), "rise", 100, 2, rate=True),
        VendorRule(("pcie_replay_total",), "rise", 16 / 60, 1, rate=True, above=True),
        VendorRule(("nvlink_replay_total",), "rise", 1, 1),
        VendorRule(("nvlink_recovery_total",), "rise", 1, 1),
    )

    def points(self, X: np.ndarray, identity: Hashes) -> Floats:
        """Add up the severities of the rules hit; see :meth:`Baseline.points`."""
        total = np.zeros(len(X))
        for rule in self.RULES:
            total += rule.severity * self._hit(rule, X)
        return total

    def unavailable(self) -> str:
        """See :meth:`Baseline.unavailable`."""
        has_counter = any(
            self._find(group="telemetry", channel=channel, statistic=rule.statistic)
            for rule in self.RULES
            for channel in rule.channels
        )
        return "" if has_counter else "the matrix has none of the error counters of the vendor's rules"

    def _hit(self, rule: VendorRule, X: np.ndarray) -> np.ndarray:
        value = np.zeros(len(X))
        for channel in rule.channels:
            positions = self._find(group="telemetry", channel=channel, statistic=rule.statistic)
            if not positions:
                continue
            # A rate wants the shortest window; an event that must not happen at all, the longest.
            i = positions[0] if rule.rate or rule.statistic == "last" else positions[-1]
            window = self.columns[i].window
            seconds = window.total_seconds() if rule.rate and window else 1.0
            value += np.nan_to_num(X[:, i].astype(np.float64), nan=0.0) / seconds
        # Stored features are float32: a rate that is exactly at its threshold may come out a hair above it.
        return value > rule.threshold * (1 + 1e-6) if rule.above else value >= rule.threshold * (1 - 1e-6)


_CLASSES: dict[str, type[Baseline]] = {
    "random": RandomScore,
    "history_count": HistoryCount,
    "vendor_rules": VendorRules,
}


def make_baseline(name: str, *, columns: Sequence[FeatureColumn], seed: int) -> Baseline:
    """Make a baseline.

    Returns: ready to score: baselines need no fit.
    """
    return _CLASSES[name](columns, seed)
