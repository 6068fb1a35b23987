"""Scenarios of ``predrain simulate``, and fleets with random parameters, for priors that transfer to other fleets.

The random ranges are deliberately wide: they contain the values of ``base``, and no drawn fleet models a real one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from simulator.parameters import Mechanism, Parameters
from simulator.samples import channels

Drift = Literal["counters", "workload", "epidemic", "health_check"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Parameters of a fleet, with the drifts that occur in it."""

    explanation: str
    parameters: Parameters
    drifts: frozenset[Drift] = frozenset()


def _without_precursors() -> Parameters:
    """All failures are direct and memoryless; degradations still occur and always heal."""
    base = Parameters()
    hazards = replace(base.hazards, weak_fails=0.0, advanced_fails=0.0, structural_fails=0.0, recurs=0.0)
    flat = replace(
        base.heterogeneity,
        lemon_share=0.0,
        bad_share=0.0,
        infant_factor=1.0,
        stressed_share=0.0,
        position_factors=(1.0, 1.0, 1.0),
    )
    return replace(base, hazards=hazards, heterogeneity=flat)


def _announced() -> Parameters:
    """Most failures follow a long, regular, nearly irreversible advanced phase."""
    base = Parameters()
    mechanisms = tuple(
        replace(mechanism, weak=0.08, strong=0.85, structural=0.0)
        for mechanism in base.hazards.mechanisms
        if mechanism.name != "sdc"
    )
    hazards = replace(
        base.hazards,
        mechanisms=mechanisms,
        advanced_mean_h=18.0,
        advanced_phases=6,
        advanced_fails=0.995,
        recurs=0.15,
    )
    return replace(base, hazards=hazards)


def _epidemic() -> Parameters:
    base = Parameters()
    return replace(base, heterogeneity=replace(base.heterogeneity, bad_share=base.drift.epidemic_share))


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "base": Scenario(
            "A steady fleet based on published studies. Half of the failures have no precursor, 30 % a weak and 20 % a "
            "strong one. Most degradations heal, and some healthy GPUs permanently look degraded. A few lemon nodes, "
            "a bad batch and hot rack positions fail far more often than the rest.",
            Parameters(),
        ),
        "drift": Scenario(
            "As base, with changes: a driver upgrade inflates the PCIe replay counter without changing any hazard, the "
            "workload shifts from training to serving, the bad batch becomes an epidemic, and a new health check "
            "detects bus faults that were missed before.",
            Parameters(),
            frozenset({"counters", "workload", "epidemic", "health_check"}),
        ),
        "epidemic": Scenario(
            "As base, but 10 % of the GPUs are from the bad batch, and its hazard rises forty-fold over time.",
            _epidemic(),
            frozenset({"epidemic"}),
        ),
        "noprecursor": Scenario(
            "Failures have no precursor and one rate for all GPUs of a model, and every degradation heals. A model "
            "that is better than chance here has a leak.",
            _without_precursors(),
        ),
        "announced": Scenario(
            "Most failures have a precursor a day ahead. An oracle that ranks by true risk reaches a precision of 0.90 "
            "at a recall of 30 %. For tests and demos; easier than any real fleet.",
            _announced(),
        ),
    }
)
"""Scenarios by the name that ``--scenario`` takes."""


FACTORS: dict[str, tuple[tuple[float, float], tuple[str, ...]]] = {
    "hazards": ((0.3, 3.0), ("weak_mean_h", "mild_mean_h", "advanced_mean_h", "recurrence_median_h")),
    "heterogeneity": ((0.25, 2.0), ("lemon_share", "lemon_factor", "bad_share", "bad_factor")),
    "noise": (
        (0.3, 3.0),
        (
            *("app_xid_rate", "nvlink_episodes_per_day", "burst_xid_per_day", "masked_ue_per_day"),
            *("sample_loss", "node_gap_rate_per_month", "flaky_share"),
            *("chronic_hot", "chronic_replay", "chronic_sbe", "chronic_crc", "chronic_swing"),
        ),
    ),
    "signatures": (
        (0.25, 2.5),
        (
            *("heat_c", "weak_heat_c", "replay_per_min", "crc_per_s", "swing_w", "sbe_per_hour", "clock_loss"),
            *("healthy_replay_per_min", "healthy_crc_per_s", "healthy_sbe_per_day", "weak_crc_level"),
        ),
    ),
    "workload": ((0.4, 2.5), ("training_hours", "serving_hours", "idle_hours")),
}
"""By section of :class:`Parameters`: range of a log-uniform factor, and the parameters that each get their own."""

VALUES: dict[str, dict[str, tuple[float, float]]] = {
    "hazards": {
        "weak_fails": (0.05, 0.5),
        "mild_advances": (0.3, 0.9),
        "advanced_fails": (0.3, 0.95),
        "structural_fails": (0.2, 0.8),
        "recurs": (0.05, 0.5),
    },
    "signatures": {"mild_level": (0.15, 0.7), "weak_duty": (0.2, 0.9)},
    "workload": {"diurnal": (0.0, 0.5)},
    # shares of failures without a precursor, of strong precursors among the rest, of training jobs, of unreported
    # channels, and of drifts; factors on all rates, and on each mechanism's rate
    "fleet": {
        "silent": (0.15, 0.8),
        "strong": (0.1, 0.9),
        "training": (0.1, 0.95),
        "hidden": (0.0, 0.35),
        "drift": (0.0, 0.5),
        "acceleration": (3.0, 10.0),
        "mechanism": (0.4, 2.5),
    },
}
"""By section: ranges of uniformly drawn values."""

STEPS = tuple(timedelta(minutes=minutes) for minutes in (10, 15, 30))
"""Sample intervals; each divides an hour, as windows require."""

_DRIFTS: tuple[Drift, ...] = ("counters", "workload", "epidemic", "health_check")


@dataclass(frozen=True, slots=True)
class DrawnFleet:
    """A fleet with random parameters.

    ``silent``: share of failures without a precursor.
    ``hidden``: channels that the fleet does not report.
    """

    scenario: Scenario
    silent: float
    acceleration: float
    step: timedelta
    seed: int
    hidden: frozenset[str]


def draw_fleet(seed: int, number: int) -> DrawnFleet:
    """Draw one fleet, which depends only on the seed and its number, not on how many fleets are drawn."""
    dice = np.random.Generator(np.random.Philox(key=[seed, number]))
    base = Parameters()
    fleet = {name: float(dice.uniform(*bounds)) for name, bounds in VALUES["fleet"].items()}
    changed: dict[str, Any] = {}
    for section, ((low, high), names) in FACTORS.items():
        values = getattr(base, section)
        factors = np.exp(dice.uniform(np.log(low), np.log(high), size=len(names))).tolist()
        values_drawn = {name: getattr(values, name) * factor for name, factor in zip(names, factors, strict=True)}
        values_drawn |= {name: float(dice.uniform(*bounds)) for name, bounds in VALUES.get(section, {}).items()}
        changed[section] = replace(values, **values_drawn)
    low, high = VALUES["fleet"]["mechanism"]
    mechanisms = tuple(
        _mechanism(mechanism, float(dice.uniform(low, high)), fleet["silent"], fleet["strong"])
        for mechanism in base.hazards.mechanisms
    )
    phases = int(dice.integers(1, 6))
    changed["hazards"] = replace(changed["hazards"], mechanisms=mechanisms, advanced_phases=phases)
    models = tuple(replace(model, training_share=fleet["training"]) for model in base.fleet.models)
    parameters = replace(base, **changed, fleet=replace(base.fleet, models=models))
    drifts = frozenset(drift for drift in _DRIFTS if dice.random() < fleet["drift"])
    return DrawnFleet(
        scenario=Scenario(f"Drawn at random: fleet {number} of seed {seed}.", parameters, drifts),
        silent=fleet["silent"],
        acceleration=fleet["acceleration"],
        step=STEPS[int(dice.integers(len(STEPS)))],
        seed=int(dice.integers(2**62)),
        hidden=frozenset(name for name in channels() if dice.random() < fleet["hidden"]),
    )


def _mechanism(mechanism: Mechanism, rate: float, silent: float, strong: float) -> Mechanism:
    """Rescale the precursor shares to sum to ``1 - silent``, and scale the rate; zero shares stay zero."""
    shares = np.array([mechanism.weak * (1 - strong), mechanism.strong * strong, mechanism.structural / 2])
    if shares.sum() == 0:
        return replace(mechanism, rate=mechanism.rate * rate)
    weak, loud, structural = (shares / shares.sum() * (1 - silent)).tolist()
    return replace(mechanism, rate=mechanism.rate * rate, weak=weak, strong=loud, structural=structural)
