"""What may be claimed: each statement computed from the pooled fleets and worded by its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from benchmarks.scoreboard.pooled import Hits, Measured
from evaluation.metrics.assessment import kind_of
from evaluation.metrics.comparison import SLIDING, TRAIN_ONCE, difference_interval, most_precise
from evaluation.metrics.oracle import ORACLE
from pipeline.report.wording import join, percent, points

SINGLE_GAIN, VENDOR_GAIN = 0.15, 0.20
"""What the recommended profile must gain in precision over a single model trained once, and over vendor rules."""

RATIO_LOW, RATIO_HIGH = 0.7, 1.4
"""Mean risk over base rate that counts as calibrated."""

SHOWN, SHORT, UNPROVEN, WORSE = "shown", "better, but by less", "not proven", "worse"


@dataclass(frozen=True, slots=True)
class Gain:
    """A relative gain in precision at equal numbers of alerts.

    ``where``: scenarios it was taken on.
    ``mine``, ``theirs``, ``oracle``: precision of the recommended profile, of the other, and of the oracle at as many
    alerts.
    ``alerts``: the profile's alerts with a known outcome; the other gives as many, of which a few more or less have
    one.
    ``gain``, ``low``, ``high``: relative gain and its interval.
    ``difference_low``, ``difference_high``: interval of the difference in precision: that it leaves out zero is what
    proves.
    ``needed``: the gain that is asked for; None: none.
    """

    where: str
    other: str
    mine: float
    theirs: float
    oracle: float
    alerts: int
    gain: float
    low: float
    high: float
    difference_low: float
    difference_high: float
    needed: float | None

    @property
    def verdict(self) -> str:
        """One of ``shown``, ``better, but by less``, ``not proven``, ``worse``."""
        if not math.isfinite(self.difference_low) or self.difference_low <= 0 <= self.difference_high:
            return UNPROVEN
        if self.difference_high < 0:
            return WORSE
        return SHOWN if self.needed is None or self.gain >= self.needed else SHORT

    @property
    def sentence(self) -> str:
        """The claim in words, with what the oracle leaves to be gained where it is not shown."""
        asked = "" if self.needed is None else f", where {percent(self.needed)} is asked for"
        text = (
            f"On {self.where}, at as many alerts ({self.alerts:,} of known outcome), the recommended profile's "
            f"precision is {percent(self.mine)} and that of {self.other} {percent(self.theirs)}: {relative(self.gain)} "
            f"{bracket(self.low, self.high)}{asked}: **{self.verdict}**."
        )
        if self.verdict == SHOWN:
            return text
        share = self.mine / self.oracle if self.oracle else math.nan
        return text + (
            f" The oracle, which knows the true risk, reaches {percent(self.oracle)} at as many alerts; the profile is "
            f"at {percent(share)} of that, so {points(self.oracle - self.mine)} points are there to be gained at all."
        )


def relative(value: float) -> str:
    """Write a relative gain, signed."""
    if not math.isfinite(value):
        return "undefined" if math.isnan(value) else "without bound"
    return f"{100 * value:+.0f} %".replace("-", "−")


def bracket(low: float, high: float) -> str:
    """Write the interval of a relative gain."""
    if math.isnan(low) or math.isnan(high):
        return "(no interval)"
    ends = [f"{100 * end:+.0f}" if math.isfinite(end) else "without bound" for end in (low, high)]
    return f"[{ends[0]}, {ends[1]} %]".replace("-", "−")


def gain(where: str, other: str, mine: Hits, theirs: Hits, oracle: Hits, needed: float | None) -> Gain:
    """Compare two sets of alerts of equal number on the same resamples.

    Returns: with intervals; a resample in which the other hits nothing counts as an unbounded gain.
    """
    one, two = mine.precision, theirs.precision
    bounds = difference_interval(one, two)
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = np.where(two > 0, one / np.where(two > 0, two, 1.0) - 1, np.where(one > 0, np.inf, np.nan))
    drawn = np.sort(gains[1:][~np.isnan(gains[1:])])
    ends = [int(0.025 * (drawn.size - 1)), int(np.ceil(0.975 * (drawn.size - 1)))]
    low, high = drawn[ends] if drawn.size else (math.nan, math.nan)
    return Gain(
        where=where,
        other=other,
        mine=float(one[0]),
        theirs=float(two[0]),
        oracle=float(oracle.precision[0]),
        alerts=int(mine.alerts[0]),
        gain=float(gains[0]),
        low=float(low),
        high=float(high),
        difference_low=bounds.low,
        difference_high=bounds.high,
        needed=needed,
    )


def profile_gains(by_scenario: Mapping[str, Measured]) -> list[Gain]:
    """Compare the recommended profile with the best single model trained once and with the vendor rules.

    Returns: for each scenario, and for all of them together where there are several. The best single model is chosen
    after the fact, on the decisions that it is compared on, which favours it.
    """
    scopes = [(f"`{scenario}`", [measured]) for scenario, measured in by_scenario.items()]
    if len(scopes) > 1:
        scopes.append((join([f"`{scenario}`" for scenario in by_scenario]) + " together", list(by_scenario.values())))
    out = []
    for where, pools in scopes:
        mine = total(pools, None, SLIDING)
        best_possible = total(pools, ORACLE, ORACLE)
        singles = {
            model: total(pools, model, TRAIN_ONCE)
            for model, variant in pools[0].at_profile
            if variant == TRAIN_ONCE and kind_of(model) == "learner"
        }
        best = most_precise({model: float(hits.precision[0]) for model, hits in singles.items()})
        if best is not None:
            name = f"the best single model trained once ({best})"
            out.append(gain(where, name, mine, singles[best], best_possible, SINGLE_GAIN))
        vendor = total(pools, "vendor_rules", SLIDING)
        out.append(gain(where, "the vendor's threshold rules", mine, vendor, best_possible, VENDOR_GAIN))
    return out


def total(pools: Sequence[Measured], model: str | None, variant: str) -> Hits:
    """Add up a model's hits at the profile's alerts over pools; ``None`` is the profile itself."""
    parts = [pool.at_profile[model or pool.profile, variant] for pool in pools]
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


def calibration_rows(by_scenario: Mapping[str, Measured]) -> pd.DataFrame:
    """Calibration of the profile out of time, by scenario.

    Returns: ``scenario``, ``risk_ratio``, ``brier_skill``, ``calibration_error``, ``holds``.
    """
    rows = []
    for scenario, measured in by_scenario.items():
        row = measured.row(measured.profile, SLIDING)
        assert row is not None
        rows.append(
            {
                "scenario": scenario,
                "risk_ratio": float(row["risk_ratio"]),
                "brier_skill": float(row["brier_skill"]),
                "calibration_error": float(row["calibration_error"]),
                "holds": bool(RATIO_LOW <= row["risk_ratio"] <= RATIO_HIGH and row["brier_skill"] > 0),
            }
        )
    return pd.DataFrame(rows)
