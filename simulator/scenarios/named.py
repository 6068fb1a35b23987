"""The scenarios: which parameters each changes, in plain words for ``predrain simulate --help``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from simulator.scenarios.parameters import Parameters

Drift = Literal["counters", "workload", "epidemic", "health_check"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of fleet."""

    explanation: str
    parameters: Parameters
    drifts: frozenset[Drift] = frozenset()


def _without_precursors() -> Parameters:
    """All failures direct and memoryless; degradations still come and always heal."""
    base = Parameters()
    hazards = replace(base.hazards, weak_fails=0.0, advanced_fails=0.0, structural_fails=0.0, recurs=0.0)
    even = replace(
        base.heterogeneity,
        lemon_share=0.0,
        bad_share=0.0,
        infant_factor=1.0,
        stressed_share=0.0,
        position_factors=(1.0, 1.0, 1.0),
    )
    return replace(base, hazards=hazards, heterogeneity=even)


def _announced() -> Parameters:
    """Most failures come through a long, regular, nearly irreversible advanced phase."""
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
            "A fleet as the published studies describe it, and steady: half of the failures come without a precursor, "
            "30 % with a weak and 20 % with a strong one; most degradations heal; some sound GPUs look bad for ever; "
            "a few lemon nodes, a bad batch and hot rack positions fail far more often than the rest.",
            Parameters(),
        ),
        "drift": Scenario(
            "As base, and the world changes: a driver upgrade inflates the PCIe replay counter without changing any "
            "hazard, training gives way to serving, the bad batch becomes an epidemic, and a new health check starts "
            "to find bus faults that were not detected before.",
            Parameters(),
            frozenset({"counters", "workload", "epidemic", "health_check"}),
        ),
        "epidemic": Scenario(
            "As base, but 10 % of the GPUs are from the bad batch, and its hazard rises forty-fold over the time.",
            _epidemic(),
            frozenset({"epidemic"}),
        ),
        "noprecursor": Scenario(
            "Failures come without a precursor and at one rate for all GPUs of a model; what looks like a degradation "
            "always heals. No model can do better than chance here; one that seems to has a leak.",
            _without_precursors(),
        ),
        "announced": Scenario(
            "Most failures announce themselves a day ahead: built so that an oracle that ranks by true risk reaches "
            "a precision of 0.90 at a recall of 30 %. A fleet for tests and demos, kinder than any real one.",
            _announced(),
        ),
    }
)
"""Every scenario by the name that ``--scenario`` takes."""
