"""Baselines without training: random, the count of past faults, and vendor thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import numpy as np

from features.vocabulary import FeatureColumn
from models.rows.ranking import Floats, Hashes, mix, uniform

HISTORY_WINDOW = timedelta(days=30)
"""Window of ``history_count`` (predictive in reproductions of the paper)."""

HARDWARE_HISTORY = frozenset(
    {"incident", "failure", "xid_memory", "xid_bus", "xid_firmware", "xid_interconnect", "xid_precursor"}
)
"""Hardware events among :data:`features.groups.history.EVENT_KINDS`; ``xid_hardware`` would count them twice."""


class Baseline:
    """Scores rows without a fit.

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
        """Return why the matrix lacks the data of this baseline, so that all rows tie; empty: available."""
        return ""

    def _find(self, **attributes: object) -> list[int]:
        """Return the columns whose attributes equal the given values; shortest window first."""
        positions = [
            (column.window or timedelta(0), i)
            for i, column in enumerate(self.columns)
            if all(getattr(column, name) == value for name, value in attributes.items())
        ]
        return [i for _, i in sorted(positions)]


class RandomScore(Baseline):
    """Random scores, reproducible for a unit and decision time."""

    def points(self, X: np.ndarray, identity: Hashes) -> Floats:
        """Draw one number in (0, 1) for each row; see :meth:`Baseline.points`."""
        return uniform(mix(identity, self.seed))


class HistoryCount(Baseline):
    """Number of known hardware faults of the GPU in the last 30 days; ties are broken by that of its node.

    Sums the ``count`` columns of group ``history`` for :data:`HARDWARE_HISTORY` over 30 days (or else the longest
    window): incidents, and XIDs that NVIDIA attributes to hardware. Application XIDs do not count. A dataset of nodes
    has the node's count only.
    """

    def points(self, X: np.ndarray, identity: Hashes) -> Floats:
        """Return the GPU's count plus the node's squashed into [0, 1); see :meth:`Baseline.points`."""
        of_gpu = self._count(X, "gpu")
        node = np.maximum(self._count(X, "node"), 0)  # rows are unchecked, and -1 would divide by zero
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
    """A threshold of NVIDIA.

    ``channels``: channels whose values are summed.
    ``statistic``: ``last`` or ``rise``.
    ``threshold``: lowest value that is a hit; for a rate in events per second.
    ``severity``: points of a hit: 3: replace or reset immediately; 2: drain soon; 1: investigate.
    ``rate``: whether the value is divided by the window's length.
    ``above``: whether the value must exceed the threshold.
    """

    channels: tuple[str, ...]
    statistic: str
    threshold: float
    severity: int
    rate: bool = False
    above: bool = False


class VendorRules(Baseline):
    """NVIDIA's own health thresholds: the summed severity of all rules that are hit.

    The source's rates are per minute or second; here, a counter's rise over the shortest window (1 h by default) is
    divided by the window's length, so a burst shorter than the window must be proportionally stronger to be detected.
    Rules whose channels are missing are never hit.

    Thresholds: NVIDIA DCGM, ``DcgmGPUHardwareLimits.h`` and ``DcgmHealthWatch.cpp`` (PCIe replays above 16 per minute
    at generation 4 and 16 lanes; an NVLink replay or recovery; NVLink CRC errors at 100 per second; 512 uncorrectable
    remapped rows; a failed remap) and NVIDIA's page-retirement policy (63 pages, or more than 15 for double-bit
    errors). A pending remap and a new double-bit error need a reset before the next job; their severity is predrain's
    choice.
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
        """Sum the severities of the rules that are hit; see :meth:`Baseline.points`."""
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
            # Rates need the shortest window; events that must never happen need the longest.
            i = positions[0] if rule.rate or rule.statistic == "last" else positions[-1]
            window = self.columns[i].window
            seconds = window.total_seconds() if rule.rate and window else 1.0
            value += np.nan_to_num(X[:, i].astype(np.float64), nan=0.0) / seconds
        # Features are float32: a rate exactly at its threshold may be rounded above it.
        return value > rule.threshold * (1 + 1e-6) if rule.above else value >= rule.threshold * (1 - 1e-6)


_CLASSES: dict[str, type[Baseline]] = {
    "random": RandomScore,
    "history_count": HistoryCount,
    "vendor_rules": VendorRules,
}


def make_baseline(name: str, *, columns: Sequence[FeatureColumn], seed: int) -> Baseline:
    """Make a baseline, ready to score."""
    return _CLASSES[name](columns, seed)
